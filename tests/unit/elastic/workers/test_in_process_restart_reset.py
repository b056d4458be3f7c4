"""A process that becomes another rank must not be taken for its earlier rank."""

from __future__ import annotations

import gc
import traceback
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic.workers.in_process_restart import drop_traceback_frames, freeze_startup_objects, reset_process_state
from tieredckpt.session.incarnation import decide_save
from tieredckpt.session.session import open_session
from tieredckpt.settings import Settings
from tieredckpt.testing import memory_node


def rows_of(rank, size=4):
    """Where this rank's rows of a tensor begin, as an operation's result says it; and of its gradient."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        mesh = init_device_mesh("cpu", (size,))
        weight = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)]).requires_grad_()
        (weight * 2.0).to_local().sum().backward()
        return [
            compute_local_shape_and_global_offset(one.shape, one.device_mesh, one.placements)[1][0]
            for one in (weight, weight.detach(), torch.zeros_like(weight), weight.grad)
        ]
    finally:
        dist.destroy_process_group()


def test_a_rank_saves_its_own_rows_in_every_world():
    assert rows_of(3) == [6] * 4
    reset_process_state()
    assert rows_of(1) == [2] * 4
    reset_process_state()
    assert rows_of(0, size=8) == [0] * 4


def test_dtensor_cache_is_stale_without_a_reset():
    """If this fails, torch clears the cache itself, and this project can drop its own code."""
    reset_process_state()
    assert rows_of(3) == [6] * 4
    assert rows_of(1) != [2] * 4
    reset_process_state()


def test_groups_of_a_left_world_are_collected():
    """One cached redistribution plan would hold the group's threads and descriptors until exit."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    mesh = init_device_mesh("cpu", (4,))
    group, gone = weakref.ref(dist.group.WORLD), weakref.ref(mesh)
    like_no_other = torch.ones(2, 17)
    DTensor.from_local(like_no_other, mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
    del mesh
    dist.destroy_process_group()
    reset_process_state()
    assert gone() is None
    assert group() is None


class Model:
    """As torch calls a module: by a function that closes over it."""

    def __call__(self, deep):
        def inner():
            return self.forward(deep)

        return inner()

    def forward(self, deep):
        try:
            raise ValueError("bad sample")
        except ValueError as error:
            if deep:
                raise KeyError("no such row") from error
            raise


@pytest.mark.parametrize("deep", [False, True])
def test_retained_error_references_no_objects(deep):
    model = Model()
    gone = weakref.ref(model)
    with pytest.raises((ValueError, KeyError)) as caught:
        model(deep)
    kept = caught.value
    del model, caught
    gc.collect()
    assert gone() is not None
    drop_traceback_frames(kept)
    gc.collect()
    assert gone() is None
    said = "".join(traceback.format_exception(kept))
    assert "bad sample" in said
    assert said.count("in forward") == 1 + deep
    assert ("no such row" in said) is deep


def test_error_with_a_circular_context_is_handled():
    first, second = ValueError("first"), ValueError("second")
    first.__context__, second.__context__ = second, first
    drop_traceback_frames(first)


def test_plans_of_dcp_are_forgotten():
    SavePlanner._cached_save_plan["planner"] = "a plan"
    reset_process_state()
    assert not SavePlanner._cached_save_plan


def test_next_save_has_a_new_incarnation():
    with memory_node():
        session = open_session("job-forget", Settings())
        first = agreed(session)
        session.incarnation.skip_attempts(7, 5)
        reset_process_state()
        assert session.incarnation.current is None
        second = agreed(session, known_epoch=first.incarnation.epoch)
        assert second.incarnation.epoch > first.incarnation.epoch
        assert second.attempt == 0


def agreed(session, known_epoch=0):
    """Return the decision of two ranks with the same history for a save of step 7."""
    point = session.incarnation.capture()
    decision = decide_save([session.incarnation.propose(7, point, known_epoch, None)] * 2, f"i{known_epoch}", 0)
    session.adopt(decision, point)
    return decision


class Cycle:
    def __init__(self):
        self.me = self


@pytest.fixture
def thawed():
    """Unfreeze all objects; a process forked from a template starts with frozen ones."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if frozen:
        gc.freeze()


def test_garbage_of_a_world_is_collected_without_scanning_older_objects(thawed):
    kept = Cycle()
    with freeze_startup_objects():
        assert gc.get_freeze_count() > 10_000
        old, seen = Cycle(), weakref.ref(kept)
        gone = weakref.ref(old)
        del old, kept
        reset_process_state()
        assert gone() is None
        assert seen() is not None
    assert not gc.get_freeze_count()
    gc.collect()
    assert seen() is None


def test_frozen_objects_stay_frozen():
    gc.freeze()
    try:
        with freeze_startup_objects():
            pass
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()


def test_garbage_from_before_freezing_is_collected():
    old = Cycle()
    gone = weakref.ref(old)
    del old
    with freeze_startup_objects():
        assert gone() is None
