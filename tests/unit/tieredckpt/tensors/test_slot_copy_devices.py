"""Slots filled by asynchronous devices, and mutants without each required step."""

from __future__ import annotations

import contextlib
import os
import threading

import pytest
import torch

from tests.support import async_staging
from tests.support.async_device import AsyncDevice, AsyncStream
from tests.support.async_staging import Trainer, WrongBytesError, lay_out, mapped_slot, stage_and_check
from tieredckpt.tensors.device import use_device_backend
from tieredckpt.tensors.slot_copy import Copier, MappedSlot, SlotWrite

SEEDS = range(60)
MANY = range(1000)


def faults(seeds) -> list[str]:
    """Return the errors of the runs with these seeds."""
    found = []
    for seed in seeds:
        try:
            device = async_staging.run_seed(seed)
        except WrongBytesError as error:
            found.append(f"wrong bytes: {error}")
        else:
            found += device.violations + device.races
    return found


def test_staged_state_is_unaffected_by_later_device_work():
    assert faults(SEEDS) == []


@pytest.mark.nightly
def test_thousand_seeds_have_no_race():
    assert faults(MANY) == []


# -- what must not be left out -----------------------------------------------------------------------------------


def test_mutant_without_the_wait_on_the_compute_stream(monkeypatch):
    monkeypatch.setattr(AsyncStream, "wait_stream", lambda self, other: None)
    found = faults(SEEDS)
    assert any("wrong bytes" in one for one in found)
    assert any("Access by stream" in one for one in found)  # the sanitizer's own finding


def test_mutant_without_the_final_synchronize(monkeypatch):
    monkeypatch.setattr(AsyncStream, "synchronize", lambda self: None)
    found = faults(SEEDS)
    assert any("wrong bytes" in one for one in found)


def test_mutant_that_reuses_a_slot_before_its_event(monkeypatch):
    """The next save of a slot begins while the devices still fill it for the previous save."""
    waited = AsyncStream.synchronize
    with use_device_backend(AsyncDevice()) as device, contextlib.closing(Copier(1)) as copier:
        trainer = Trainer(device, seed=3)
        assert any(trainer.where)
        with mapped_slot(lay_out(trainer.state)[1]) as memory:
            monkeypatch.setattr(AsyncStream, "synchronize", lambda self: None)
            memory.copy_in(lay_out(trainer.state)[0], copier)
            monkeypatch.setattr(AsyncStream, "synchronize", waited)
            trainer.step()
            stage_and_check(device, memory, trainer, copier)
            device.close()
    assert "memory is changed that a device is not done with" in device.violations


def test_mutant_that_unregisters_under_a_copy(monkeypatch):
    assert closed_under_a_copy() == []
    for name in ("hold", "unhold"):
        monkeypatch.setattr(MappedSlot, name, lambda self: None)
    assert "memory was unregistered while a device copies it" in closed_under_a_copy()


def closed_under_a_copy() -> list[str]:
    """Release a slot while a save fills it: its agent evicts it and another thread closes it."""
    with use_device_backend(AsyncDevice(seed=5)) as device, contextlib.closing(Copier(1)) as copier:
        source = device.to_device(torch.randn(20_000))
        with contextlib.ExitStack() as left:
            memory = left.enter_context(mapped_slot(source.nbytes))
            started, closed = threading.Event(), threading.Event()
            given = device.copy

            def copy(copies, stream) -> None:
                given(copies, stream)
                started.set()
                closed.wait()

            device.copy = copy
            view = memory.tensor(512, source.dtype, source.shape)
            saves = threading.Thread(target=memory.copy_in, args=([SlotWrite(source, 512)], copier))
            saves.start()
            started.wait()
            left.close()
            closed.set()
            saves.join()
        assert torch.equal(view, source)
        assert not device.registered, "a slot that is closed stays registered"
        return device.violations


@pytest.mark.parametrize("grows_again", [False, True])
def test_mutant_that_cuts_a_registered_file(grows_again):
    with use_device_backend(AsyncDevice()) as device, contextlib.closing(Copier(1)) as copier:
        source = device.to_device(torch.randn(20_000))
        with mapped_slot(source.nbytes) as memory:
            memory.copy_in([SlotWrite(source, 512)], copier)
            size = os.fstat(memory._fd).st_size
            os.ftruncate(memory._fd, 0)
            if grows_again:
                os.ftruncate(memory._fd, size)
                memory.copy_in([SlotWrite(source, 512)], copier)
        said = "other pages" if grows_again else "its file was cut"
        assert any(said in one for one in device.violations)


# -- registration ------------------------------------------------------------------------------------------------


def test_failed_registration_warns_once_and_is_remembered(caplog):
    with use_device_backend(AsyncDevice()) as device, contextlib.closing(Copier(1)) as copier:
        device.refuses = "out of locked memory"
        source = device.to_device(torch.randn(5000))
        with mapped_slot(source.nbytes) as memory:
            for _ in range(3):
                device.launch(lambda it: it.add_(1), [source])
                memory.copy_in([SlotWrite(source, 512)], copier)
            assert torch.equal(memory.tensor(512, source.dtype, source.shape), device.copy_after_all_work(source))
    assert len([one for one in caplog.records if "out of locked memory" in one.message]) == 1
    assert device.violations == []


def test_copy_thread_registers_for_the_device_of_the_source():
    """A new thread starts with the first device, where this rank would hold memory for no purpose."""
    with use_device_backend(AsyncDevice()) as device, contextlib.closing(Copier(1)) as copier:
        source = device.to_device(torch.randn(100), index=1)
        with mapped_slot(source.nbytes) as memory:
            saves = threading.Thread(target=memory.copy_in, args=([SlotWrite(source, 512)], copier))
            saves.start()
            saves.join()
        assert device.asked == {torch.device(device.type, 1)}
        assert device.registered == set()


def test_state_on_the_cpu_registers_nothing():
    with (
        use_device_backend(AsyncDevice()) as device,
        contextlib.closing(Copier(1)) as copier,
        mapped_slot(4096) as memory,
    ):
        memory.copy_in([SlotWrite(torch.randn(100), 512), SlotWrite(torch.randn(9, 5).t(), 1024)], copier)
        assert not device.registered
