"""Restores to asynchronous devices through registered buffers, and mutants of that code."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from tests.support.async_device import AsyncDevice, AsyncEvent, AsyncStream
from tieredckpt import Checkpointer, TieredReader, TierUnavailableError
from tieredckpt.errors import RestoreProofError
from tieredckpt.format.slice_boxes import Box, split_box
from tieredckpt.restore import read_executor
from tieredckpt.session.session import close_sessions
from tieredckpt.tensors import slot_copy
from tieredckpt.tensors.device import use_device_backend
from tieredckpt.testing import memory_node

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
JOB = "tiered://on-devices"
SEEDS = range(4)


def content(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(70, 90, generator=made),
        "row": torch.randn(1, 1, 6000, generator=made),
        "turned": torch.randn(40, 50, generator=made).t(),
        "half": torch.randn(1001, generator=made).to(torch.bfloat16),
        "none": torch.zeros(0, 3),
        "one": torch.randn((), generator=made),
        "host": torch.randn(50, generator=made),
        "bytes": torch.randint(0, 255, (777,), dtype=torch.uint8, generator=made),
    }


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    monkeypatch.setattr(read_executor, "StagingBuffers", functools.partial(slot_copy.StagingBuffers, size_bytes=4096))


@pytest.fixture(params=["memory", "durable"])
def saved(request, tmp_path):
    """A step of seed 7, in this node's memory or in the durable tier alone."""
    durable = f"file://{tmp_path}" if request.param == "durable" else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(memory_node())
        with Checkpointer(JOB, durable=durable, on_sigterm="ignore") as ckpt:
            assert ckpt.save(content(7), 1).wait("durable" if durable else "sealed")
        if durable:
            stack.close()
            stack.enter_context(memory_node())
        yield functools.partial(Checkpointer, JOB, durable=durable, on_sigterm="ignore"), request.param


def on(device: AsyncDevice, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: tensor if name == "host" else device.to_device(tensor, number % device.device_count())
        for number, (name, tensor) in enumerate(state.items())
    }


def restored(open_checkpointer, seed: int = 0, **how) -> tuple[AsyncDevice, dict[str, torch.Tensor], str]:
    """Return the devices, their tensors after a restore during computation, and the tier read."""
    with use_device_backend(AsyncDevice(seed, chunk_bytes=512)) as device:
        for name, value in how.items():
            setattr(device, name, value)
        state = on(device, {name: torch.zeros_like(tensor) for name, tensor in content(7).items()})
        for tensor in state.values():
            if tensor.numel() and device.device_of(tensor):
                device.launch(lambda it: it.add_(1), [tensor])  # the restore starts before this has completed
        with open_checkpointer() as ckpt:
            assert ckpt.restore(state) == 1
            (tier,) = ckpt.last_restore.bytes_by_tier
        close_sessions()  # with the slots that were prepared for the next saves
        left = device.registered
        found = {
            name: device.copy_after_all_work(tensor) if device.device_of(tensor) else tensor
            for name, tensor in state.items()
        }
        device.close()
        assert left == set()
        return device, found, tier


def is_right(found: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in content(7).items())


def test_restored_state_is_on_the_devices(saved):
    open_checkpointer, wanted = saved
    for seed in SEEDS:
        device, found, tier = restored(open_checkpointer, seed)
        assert tier == wanted
        assert is_right(found)
        assert (device.violations, device.races) == ([], [])


def test_restore_reads_back_fingerprints_instead_of_tensors(saved):
    device, found, _ = restored(saved[0])
    assert is_right(found)
    assert 0 < device.read_back_bytes < sum(one.nbytes for one in found.values()) // 100


def test_restore_without_registered_buffers_warns_once(saved, caplog):
    device, found, _ = restored(saved[0], refuses="out of locked memory")
    assert is_right(found)
    assert device.violations == []
    warnings = [one.message for one in caplog.records if "out of locked memory" in one.message]
    assert len([one for one in warnings if one.startswith("a buffer")]) == 1


@pytest.mark.parametrize("saved", ["memory"], indirect=True)
def test_other_dtypes_are_converted_during_a_restore(saved):
    assert torch.equal(load_converted(), content(7)["large"].double())


def load_converted() -> torch.Tensor:
    with use_device_backend(AsyncDevice()) as device:
        state = {"large": device.to_device(torch.zeros(70, 90, dtype=torch.float64))}
        dcp.load(state, storage_reader=TieredReader(JOB, on_dtype_mismatch="cast"), no_dist=True)
        return device.copy_after_all_work(state["large"])


def test_box_is_split_into_ordered_blocks_without_gaps():
    for sizes in ((), (7,), (5, 6, 7), (1, 1, 50), (3, 100)):
        box = Box(tuple(range(2, 2 + len(sizes))), sizes)
        there = torch.zeros([a + n for a, n in zip(box.offsets, box.sizes, strict=True)])
        for block in split_box(box, 9):
            assert block.volume <= 9
            there[tuple(slice(a, a + n) for a, n in zip(block.offsets, block.sizes, strict=True))] += 1
        assert int(there.sum()) == box.volume
        assert int(there.max()) == 1


# -- what must not be left out -----------------------------------------------------------------------------------


def is_wrong(open_checkpointer) -> bool:
    for seed in SEEDS:
        try:
            device, found, _ = restored(open_checkpointer, seed)
        except RestoreProofError:
            return True
        if not is_right(found) or device.violations or device.races:
            return True
    return False


@pytest.mark.parametrize("saved", ["memory"], indirect=True)
def test_mutant_without_the_wait_on_the_compute_stream(saved, monkeypatch):
    monkeypatch.setattr(AsyncStream, "wait_stream", lambda self, other: None)
    assert is_wrong(saved[0])


@pytest.mark.parametrize("saved", ["memory"], indirect=True)
def test_mutant_without_the_final_synchronize(saved, monkeypatch):
    """The fingerprint of a converted tensor is computed before its elements arrive."""
    monkeypatch.setattr(slot_copy.StagingBuffers, "synchronize", lambda self: None)
    with pytest.raises(CheckpointException, match="from the saved state: large"):
        load_converted()


@pytest.mark.parametrize("saved", ["memory"], indirect=True)
def test_mutant_that_fills_a_buffer_before_its_event(saved, monkeypatch):
    monkeypatch.setattr(AsyncEvent, "synchronize", lambda self: None)
    monkeypatch.setattr(AsyncStream, "synchronize", lambda self: self.device.synchronize(self.place))
    monkeypatch.setattr(AsyncDevice, "synchronize", drain)
    assert is_wrong(saved[0])


def drain(device: AsyncDevice, place: torch.device) -> None:
    for stream in [one for one in device._streams if one.place == place]:
        event = stream.record_event()
        while not event.is_done:
            device.advance(event)


@pytest.mark.parametrize("saved", ["memory"], indirect=True)
def test_mutant_that_unregisters_buffers_of_a_load_that_has_failed(saved, monkeypatch):
    """The tier fails midway, while the devices still read from a released buffer."""
    given, calls = read_executor.copy_verified, []

    def read(copier, fd, *arguments, **options):
        calls.append(fd)
        if len(calls) == 4:  # the first three fill the tensor in memory and the two buffers
            raise TierUnavailableError("the tier went away")
        return given(copier, fd, *arguments, **options)

    def fails() -> list[str]:
        calls.clear()
        with use_device_backend(AsyncDevice(1, chunk_bytes=512)) as device:
            with saved[0]() as ckpt, pytest.raises(TierUnavailableError, match="went away"):
                ckpt.restore(on(device, {name: torch.zeros_like(one) for name, one in content(7).items()}))
            assert device.registered == set()
            return device.violations

    monkeypatch.setattr(read_executor, "copy_verified", read)
    assert fails() == []
    monkeypatch.setattr(AsyncStream, "synchronize", lambda self: None)
    assert fails() == ["memory was unregistered while a device copies it"]
