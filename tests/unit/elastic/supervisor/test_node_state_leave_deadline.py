"""A supervisor ends processes that do not leave a broken world in time, and names their stage."""

from __future__ import annotations

import msgspec
import pytest

from elastic.control.control_messages import RankPhase, RankStatus
from elastic.control.control_plane import LeaveStage
from elastic.supervisor import node_messages, node_state
from elastic.supervisor.node_state import EndProcess
from tests.support.control_simulation import ControlSimulation


@pytest.fixture
def table():
    made = ControlSimulation(2, nproc=2, spares=1)
    made.run_without_faults(15)
    return made


def broken(table):
    """Break the world with one rank of the second node still in it; return its node and process."""
    node = table.nodes["n1"]
    late = next(one for one in node.seats.rank_processes() if one.local_rank == 1)
    node.ranks[late.token].ignores = True
    table.nodes["n0"].ranks[next(iter(table.nodes["n0"].ranks))].stand = RankPhase.READY
    for one in table.nodes.values():
        table._exchange(one)
        table._exchange(one)
    assert node.seats.epoch_state.broken.until is not None
    return node, late


def overdue(node, stage=None):
    """Advance the time and return the effects that follow."""
    late = [one for one in node.seats.rank_processes() if one.is_inside]
    now = node.seats.epoch_state.broken.until
    for one in late:
        status = RankStatus(900, one.status.phase, one.status.epoch, leave_stage=stage)
        node.seats.handle_rank_status(one.token, status, now)
    node.seats.tick(now)
    return [one for one in node.seats.take_effects() if isinstance(one, EndProcess)], now


def test_late_process_is_ended_with_its_stacks(table):
    node, late = broken(table)
    ended, _ = overdue(node)
    assert [(one.token, one.stacks) for one in ended] == [(late.token, True)]
    assert f"did not leave world {late.assigned_epoch} within" in ended[0].why
    node.seats.tick(node.seats.epoch_state.broken.until)
    assert node.seats.take_effects() == []


def test_reason_of_the_loss_names_stage_and_location(table):
    node, late = broken(table)
    _, now = overdue(node, LeaveStage.CLEANUP)
    node.seats.process_exited(late.token, "it was killed", location="trainer.py:9 in stuck")
    (lost,) = node_messages.node_status(node.seats, now).exited_ranks
    assert "(stage: the callbacks of world.add_cleanup; trainer.py:9 in stuck): it was killed" in lost.reason


def test_process_that_ends_by_its_own_deadline_is_described_the_same(table):
    node, late = broken(table)
    status = RankStatus(900, late.status.phase, late.status.epoch, leave_stage=LeaveStage.TRAIN)
    node.seats.handle_rank_status(late.token, status, table.now)
    assert node.seats.is_leaving(late.token)
    node.seats.process_exited(late.token, "it ended with status 1", location="trainer.py:9 in stuck")
    (lost,) = node_messages.node_status(node.seats, table.now).exited_ranks
    assert lost.reason.endswith("s (stage: the train function; trainer.py:9 in stuck): it ended with status 1")


def test_process_that_does_not_end_counts_as_lost(table):
    node, _ = broken(table)
    _, now = overdue(node)
    assert node.seats.next_due() == now + node_state.EXIT_S
    node.seats.tick(now + node_state.EXIT_S)
    (lost,) = node_messages.node_status(node.seats, now).exited_ranks
    assert "(no stage reported): it did not end by itself and was killed" in lost.reason


def test_late_rank_is_replaced_by_a_spare(table):
    node, late = broken(table)
    spare = node.seats.spares()[0]
    for _ in range(40):
        for one in table.nodes.values():
            table._exchange(one)
        table.advance(1.0)
    table.check_one_world()
    assert late.token not in node.ranks
    assert spare.local_rank == 1
    assert spare.assigned_epoch > late.assigned_epoch


def test_silent_process_in_a_broken_world_is_named(table):
    node, late = broken(table)
    seats = node.seats
    fault = msgspec.structs.replace(seats.epoch_state.broken, until=seats.epoch_state.broken.until + 60.0)
    seats.epoch_state = msgspec.structs.replace(seats.epoch_state, broken=fault)
    node.seats.tick(table.now + 11.0)
    named = f"rank 3 has not left broken world {late.assigned_epoch} and sent nothing for"
    assert any(named in one.why and one.stacks for one in node.seats.take_effects())
