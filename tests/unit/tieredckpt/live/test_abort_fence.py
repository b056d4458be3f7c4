"""Trust in the state of an aborted world: only work completed before the abort counts."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.unit.tieredckpt.live.test_boundary_recorder import Trained, assert_equal
from tieredckpt import Checkpointer
from tieredckpt.live.abort_fence import AbortFence, current_fence, use_fence
from tieredckpt.live.survivor_state import track_step_boundaries
from tieredckpt.tensors.device import CpuBackend, use_device_backend
from tieredckpt.testing import memory_node


class Broken(BaseException):
    """The error of a broken world."""


class World:
    """A world that may be broken."""

    def __init__(self):
        self.is_broken = False

    def refuse(self):
        if self.is_broken:
            raise Broken


class Late(CpuBackend):
    """A device whose work completes only when the test completes it."""

    def __init__(self):
        self.given, self.done = 0, 0

    def is_initialized(self):
        return True

    def device_of(self, tensor):
        return torch.device("cpu")

    def current_stream(self, place):
        return self

    def record_event(self):
        self.given += 1
        return Event(self, self.given)

    def complete(self):
        self.done = self.given


class Event:
    def __init__(self, device, number):
        self._device, self._number = device, number

    def query(self):
        return self._device.done >= self._number


@pytest.fixture
def device():
    with use_device_backend(Late()) as one:
        yield one


@pytest.fixture
def world():
    one = World()
    with use_fence(AbortFence(one.refuse)):
        yield one


def test_only_work_completed_before_the_abort_is_trusted(device, world):
    here = current_fence()
    early = here.record([torch.ones(1)])
    device.complete()
    late = here.record([torch.ones(1)])
    here.close()
    device.complete()  # by the abort
    after = here.record([torch.ones(1)])
    device.complete()
    assert [here.trusts(work) for work in (early, late, after)] == [True, False, False]
    here.close()
    assert [here.trusts(work) for work in (early, late, after)] == [True, False, False]


def test_completed_work_is_trusted_without_an_abort(device, world):
    work = current_fence().record([torch.ones(1)])
    assert not current_fence().trusts(work)
    device.complete()
    assert current_fence().trusts(work)


def test_work_of_released_boundaries_is_dropped(device, world):
    for _ in range(3):
        current_fence().record([torch.ones(1)])
    gc.collect()
    assert len(current_fence()._recorded) == 0


@pytest.mark.parametrize("is_done", [True, False])
def test_a_boundary_is_kept_only_where_its_work_had_completed(device, world, is_done, caplog):
    with track_step_boundaries() as held, caplog.at_level("INFO"):
        trained = Trained()
        trained.step(0)
        trained.step(1)
        expected = trained.now()
        if is_done:
            device.complete()
        current_fence().close()
        device.complete()
        held.retain_after_fault()
        if is_done:
            assert_equal(held.retained["job"].values, expected)
            assert held.trusted_steps == {"job": 1}
        else:
            assert held.retained == held.trusted_steps == {}
            assert "its device work had not completed when the world was aborted" in caplog.text


def test_a_step_of_a_broken_world_is_not_noted(world):
    with track_step_boundaries() as held:
        trained = Trained()
        trained.step(0)
        trained.forward()
        trained.optimizer.step()
        world.is_broken = True
        with pytest.raises(Broken):
            trained.noter.record(trained.state, 1)
        assert held.reached_steps == {"job": 0}
        held.retain_after_fault()
        assert held.retained == {}


def test_an_optimizer_does_not_begin_a_step_of_a_broken_world(world):
    with track_step_boundaries() as held:
        trained = Trained()
        trained.step(0)
        expected = trained.now()
        trained.forward()
        world.is_broken = True
        with pytest.raises(Broken):
            trained.optimizer.step()
        held.retain_after_fault()
        assert_equal(held.retained["job"].values, expected)


def test_a_broken_world_saves_and_seals_nothing(world):
    with memory_node(), Checkpointer("tiered://job", every=1) as ckpt:
        state = {"w": torch.ones(4)}
        for step in range(2):
            ckpt.save(state, step).wait()
        world.is_broken = True
        for call in (ckpt.save, ckpt.seal, ckpt.record_boundary):
            with pytest.raises(Broken):
                call(state, 2)
        world.is_broken = False
        assert max(one.step for one in ckpt.steps()) == 1


@pytest.mark.parametrize("is_planned", [True, False])
def test_state_staged_while_the_world_broke_is_discarded(world, monkeypatch, is_planned):
    from tieredckpt.tensors.slot_copy import MappedSlot

    fill = MappedSlot.copy_in

    def breaks(self, *args):
        fill(self, *args)
        world.is_broken = True  # a collective that the copy had to wait for was aborted

    with memory_node(), Checkpointer("tiered://job", every=1) as ckpt:
        state = {"w": torch.ones(4)}
        if is_planned:
            ckpt.save(state, 0).wait()
        with monkeypatch.context() as broken:
            broken.setattr(MappedSlot, "copy_in", breaks)
            with pytest.raises(Broken):
                ckpt.save(state, 1)
        world.is_broken = False
        assert [one.step for one in ckpt.steps() if one.is_complete] == [0] * is_planned
        ckpt.save(state, 2).wait()
        assert ckpt.restore(state) == 2
