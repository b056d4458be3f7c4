"""Retained step boundaries, and errors when the state of a survivor cannot be used."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from elastic.control.control_plane import ControlNotice, NoticeKind, RankAssignment
from elastic.errors import WorldChanged
from elastic.testing import InMemoryCoordinator
from elastic.workers.in_process_restart import SurvivorRecovery
from elastic.workers.step_barrier import StepBarrier
from elastic.workers.store_control_plane import StoreControlPlane
from elastic.workers.world_handle import World
from tieredckpt.live.survivor_state import Hydration, current_survivor_state


def one_rank():
    return StoreControlPlane(dist.HashStore, RankAssignment(0, 0, 1, 0, 1, 0, 1, "localhost:1"))


@pytest.mark.parametrize(
    ("plane", "own_groups", "why"),
    [
        (one_rank, False, "after a fault all processes are started anew"),
        (lambda: InMemoryCoordinator(1).planes[0], True, "the train function makes its own groups"),
    ],
)
def test_missing_survivor_state_is_reported(plane, own_groups, why, caplog):
    with SurvivorRecovery(plane(), own_groups=own_groups, settle_s=0) as hydrating:
        assert current_survivor_state() is None
        hydrating.restore_into(None, silent=False)
        hydrating.keep_state(sealed=False)
    assert caplog.messages == [f"ranks recover from saved checkpoints only: {why}"]


@pytest.fixture
def entering(monkeypatch):
    """A process that is about to enter a world, and the survivor state it receives there."""
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: None)
    plane = InMemoryCoordinator(1).planes[0]
    world = World(RankAssignment(3, 0, 1, 0, 1, 0, 1, "localhost:1"), plane, StepBarrier(plane, 3))

    def enter(hydration):
        monkeypatch.setattr(
            "tieredckpt.checkpointer.hydrate_from_survivors.hydrate_from_survivors",
            lambda *_args, **_named: [hydration] if hydration else [],
        )
        with SurvivorRecovery(plane, own_groups=False, settle_s=0) as hydrating:
            current_survivor_state().retained["job"] = object()
            try:
                hydrating.restore_into(world, silent=False)
            finally:
                world.held = dict(current_survivor_state().retained)
        return world

    return enter


@pytest.mark.parametrize("hydration", [None, Hydration("job", "live", 7, 7), Hydration("job", "snapshot", -1, 7, "no")])
def test_world_reports_its_hydration_and_retains_no_state(entering, hydration):
    world = entering(hydration)
    assert world.hydration is hydration
    assert world.held == {}


FAILED = Hydration("job", "snapshot", -1, 7, "it could not be given", failed=True)


def test_state_that_failed_to_load_is_released(entering):
    assert entering(FAILED).held == {}


def test_state_is_retained_when_loading_failed_by_a_lost_rank(entering, monkeypatch):
    broken = ControlNotice(3, NoticeKind.RESTART, "rank 1 was lost")
    world = entering(None)
    world._gate.mark_broken(broken)
    with pytest.raises(WorldChanged, match="lost before it had"):
        entering(FAILED)
    assert world.held.keys() == {"job"}
