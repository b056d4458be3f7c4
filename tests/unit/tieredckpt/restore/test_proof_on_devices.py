"""Proof of restores on asynchronous devices: every fault is named, usually without a read-back."""

from __future__ import annotations

import contextlib
import functools
import itertools

import pytest
import torch

from tests.support.async_device import AsyncDevice
from tieredckpt import Checkpointer
from tieredckpt.errors import RestoreProofError
from tieredckpt.restore import read_executor
from tieredckpt.restore.tensor_bytes import tensor_bytes
from tieredckpt.tensors import slot_copy
from tieredckpt.tensors.device import use_device_backend
from tieredckpt.testing import memory_node

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
JOB = "tiered://proof-on-devices"


def content(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(70, 90, generator=made),
        "moment": torch.randn(70, 90, generator=made),
        "turned": torch.randn(40, 50, generator=made).t(),
        "half": torch.randn(3001, generator=made).to(torch.bfloat16),
        "bytes": torch.randint(0, 255, (5001,), dtype=torch.uint8, generator=made),
        "flags": torch.randint(0, 2, (33,), generator=made).bool(),
        "small": torch.randn(100, generator=made).to(torch.float8_e4m3fn),
        "wide": torch.randn(60, dtype=torch.complex128, generator=made),
        "none": torch.zeros(0, 3),
        "one": torch.randn((), generator=made),
    }


class Trainer:
    """A state on a device whose ``load_state_dict`` calls ``fault`` after it has loaded the bytes."""

    def __init__(self, device, fault=lambda device, tensors: None):
        self.device, self.fault = device, fault
        self.tensors = {name: device.to_device(torch.zeros_like(one)) for name, one in content(7).items()}

    def state_dict(self):
        return self.tensors

    def load_state_dict(self, state):
        self.fault(self.device, self.tensors)

    def is_right(self):
        return all(
            tensor_bytes(self.device.copy_after_all_work(self.tensors[name])) == tensor_bytes(one)
            for name, one in content(7).items()
        )


class Saved:
    def __init__(self, tensors):
        self.tensors = tensors

    def state_dict(self):
        return self.tensors

    def load_state_dict(self, state):
        raise AssertionError("nothing is restored into it")


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    monkeypatch.setattr(read_executor, "StagingBuffers", functools.partial(slot_copy.StagingBuffers, size_bytes=4096))


@pytest.fixture(params=["memory", "durable"])
def open_checkpointer(request, tmp_path):
    """A step of seed 7, in this node's memory or in the durable tier alone."""
    durable = f"file://{tmp_path}" if request.param == "durable" else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(memory_node())
        with Checkpointer(JOB, durable=durable, on_sigterm="ignore") as ckpt:
            assert ckpt.save({"trainer": Saved(content(7))}, 1).wait("durable" if durable else "sealed")
        if durable:
            stack.close()
            stack.enter_context(memory_node())
        yield functools.partial(Checkpointer, JOB, durable=durable, on_sigterm="ignore")


def restore(open_checkpointer, fault=lambda device, tensors: None):
    """Restore into a trainer; return its proof."""
    with use_device_backend(AsyncDevice(3, chunk_bytes=512)) as device:
        trainer = Trainer(device, fault)
        try:
            with open_checkpointer() as ckpt:
                assert ckpt.restore({"trainer": trainer}) == 1
                proof = ckpt.last_restore.proof
            assert trainer.is_right()
            return device, proof
        finally:
            device.close()
            assert (device.violations, device.races) == ([], [])


def test_every_tensor_is_proven_without_being_read_back(open_checkpointer):
    device, proof = restore(open_checkpointer)
    size = sum(one.nbytes for one in content(7).values())
    assert proof.size_bytes == size
    assert (proof.not_compared, proof.mismatched) == ({}, {})
    assert 0 < device.read_back_bytes < size // 100


def flip_bit(name, at, bit):
    def fault(device, tensors):
        tensors[name].reshape(-1).view(torch.uint8)[at] ^= 1 << bit

    return fault


def swap(name, i, j):
    def fault(device, tensors):
        flat = tensors[name].view(-1)
        flat[i], flat[j] = flat[j].clone(), flat[i].clone()

    return fault


def flip_signs(name, *numbers):
    def fault(device, tensors):
        for number in numbers:
            tensors[name].view(-1)[number].neg_()

    return fault


def replace(name, wrong):
    def fault(device, tensors):
        tensors[name] = device.to_device(wrong(content(7)))

    return fault


FAULTS = {
    "a flipped bit": ("weight", flip_bit("weight", 12345, 3)),
    "a flipped bit of the last byte": ("bytes", flip_bit("bytes", 5000, 0)),
    "a flipped bit of an element of one byte": ("small", flip_bit("small", 99, 7)),
    "a flipped bit of an element of 16 bytes": ("wide", flip_bit("wide", 16 * 60 - 1, 7)),
    "a flipped flag": ("flags", flip_bit("flags", 32, 0)),
    "two swapped words": ("moment", swap("moment", 10, 6000)),
    "two swapped half words": ("half", swap("half", 10, 11)),
    "two flipped signs": ("weight", flip_signs("weight", 5, 6200)),
    "two flipped signs of 16 bits": ("half", flip_signs("half", 7, 9)),
    "another tensor": ("moment", replace("moment", lambda saved: saved["moment"] + 1)),
    "a changed element of a strided tensor": ("turned", replace("turned", lambda saved: saved["turned"].fliplr())),
}


@pytest.mark.parametrize(("name", "fault"), FAULTS.values(), ids=FAULTS)
def test_fault_behind_the_load_is_named(open_checkpointer, name, fault):
    with pytest.raises(RestoreProofError, match=rf"trainer\.{name}\b"):
        restore(open_checkpointer, fault)


def test_tensors_that_are_exchanged_are_explained(open_checkpointer):
    with pytest.raises(RestoreProofError, match=r"trainer\.moment \(has what was saved as trainer\.weight\)"):
        restore(open_checkpointer, replace("moment", lambda saved: saved["weight"]))


def test_zeros_are_explained(open_checkpointer):
    with pytest.raises(RestoreProofError, match=r"trainer\.weight \(is all zeros\)"):
        restore(open_checkpointer, lambda device, tensors: tensors["weight"].zero_())


def test_equal_tensor_elsewhere_is_accepted(open_checkpointer):
    """The state may move its tensors to other memory, even with other strides."""
    _, proof = restore(open_checkpointer, replace("turned", lambda saved: saved["turned"].contiguous()))
    assert (proof.not_compared, proof.mismatched) == ({}, {})


def test_hook_that_changes_one_element_is_found():
    saved, model = torch.nn.Linear(50, 60), torch.nn.Linear(50, 60)

    def change(module, keys):
        with torch.no_grad():
            module.weight[3, 4] += 1

    with memory_node(), use_device_backend(AsyncDevice()) as device:
        with Checkpointer(JOB, on_sigterm="ignore") as ckpt:
            assert ckpt.save({"model": saved}, 1).wait("sealed")
        for name, parameter in saved.named_parameters():
            setattr(model, name, torch.nn.Parameter(device.to_device(torch.zeros_like(parameter.detach()))))
        model.register_load_state_dict_post_hook(change)
        with Checkpointer(JOB, on_sigterm="ignore") as ckpt:
            with pytest.raises(RestoreProofError, match=r"model\.weight"):
                ckpt.restore({"model": model})
            model._load_state_dict_post_hooks.clear()
            assert ckpt.restore({"model": model}) == 1
        assert torch.equal(device.copy_after_all_work(model.weight), saved.weight)
        device.close()


@pytest.mark.parametrize("open_checkpointer", ["memory"], indirect=True)
def test_step_read_a_second_time_is_compared_with_the_seal(open_checkpointer, monkeypatch):
    given, calls = read_executor.copy_verified, itertools.count()

    def fails_once(*arguments, **options):
        return [0] if next(calls) == 0 else given(*arguments, **options)

    monkeypatch.setattr(read_executor, "copy_verified", fails_once)
    device, proof = restore(open_checkpointer)
    assert proof.size_bytes == sum(one.nbytes for one in content(7).values()) <= device.read_back_bytes
    calls = itertools.count()
    with pytest.raises(RestoreProofError, match=r"trainer\.weight"):
        restore(open_checkpointer, flip_bit("weight", 12345, 3))
