"""Earlier worlds name the step that the next world restores, even after a coordinator restart."""

from __future__ import annotations

import pytest

from elastic.control.control_messages import RankPhase
from elastic.world.world_state import ReachedStep, RequestedStep, SealedStep
from tests.support.control_simulation import ControlSimulation

WANTED = RequestedStep(7, 17)


def first_world() -> ControlSimulation:
    table = ControlSimulation(3, requested_step=WANTED)
    table.run_without_faults(15)
    assert table.desk.snapshot().world_spec.requested_step == WANTED
    return table


def restored(table: ControlSimulation) -> set[tuple[SealedStep | None, RequestedStep | None]]:
    """Return the steps that the ranks of the newest world restored when they entered it."""
    newest = table.desk.snapshot().world.epoch
    return {(one.resume_from, one.requested_step) for one in table.assignments if one.epoch == newest}


@pytest.mark.parametrize("restarted", [False, True], ids=["the same coordinator", "another coordinator"])
@pytest.mark.parametrize("loss", ["lose_rank", "lose_node", "fault"])
def test_first_world_lost_before_a_sealed_step_is_formed_again(loss, restarted):
    table = first_world()
    getattr(table, loss)(1)
    if restarted:
        table.restart_coordinator()
    table.run_without_faults(40)
    assert table.desk.snapshot().world.epoch > 0
    assert restored(table) == {(None, WANTED)}


@pytest.mark.parametrize("restarted", [False, True], ids=["the same coordinator", "another coordinator"])
@pytest.mark.parametrize("loss", ["lose_rank", "lose_node", "fault"])
def test_world_after_the_first_sealed_step_restores_the_newest_one(loss, restarted):
    table = first_world()
    table.seal()
    table.run_without_faults(3)
    getattr(table, loss)(1)
    if restarted:
        table.restart_coordinator()
    table.run_without_faults(40)
    assert table.desk.snapshot().world.epoch > 0
    assert restored(table) == {(None, None)}


@pytest.mark.parametrize("restarted", [False, True], ids=["the same coordinator", "another coordinator"])
def test_ranks_learn_the_newest_step_of_earlier_worlds(restarted):
    table = first_world()
    table.seal(9)
    table.run_without_faults(3)
    for restarts in range(2):  # the second world seals no step
        table.lose_node(restarts)
        if restarted and restarts:
            table.restart_coordinator()
        table.run_without_faults(40)
        newest = table.desk.snapshot().world.epoch
        assert {one.reached for one in table.assignments if one.epoch == newest} == {ReachedStep("job", 9)}


@pytest.mark.parametrize("restarted", [False, True], ids=["the same coordinator", "another coordinator"])
def test_steps_of_a_node_that_was_silent_are_reported_when_it_returns(restarted, caplog):
    table = first_world()
    table.seal(9)
    table.run_without_faults(3)
    table.disconnect_node(2)
    for rank in table.nodes["n2"].ranks.values():  # trains on alone
        rank.newest_sealed = 12
    while table.desk.snapshot().world.epoch == 0 or not all(
        rank.epoch and rank.stand is RankPhase.IN_WORLD
        for node in ("n0", "n1")
        for rank in table.nodes[node].ranks.values()
    ):
        for node in ("n0", "n1"):
            table._exchange(table.nodes[node])
        table.advance(1.0)
    table.seal(10, base_step=9)
    if restarted:
        table.restart_coordinator()
    assert "was silent" not in caplog.text
    table.run_without_faults(40)
    lines = [record.getMessage() for record in caplog.records if "was silent" in record.getMessage()]
    assert len(lines) == 1
    assert "node n2 was silent and has sealed step 12 in world 0" in lines[0]
    assert "resumed from step 9 without it; 3 steps are done again" in lines[0]


def test_ranks_that_sealed_a_step_in_an_older_world_do_not_count():
    table = first_world()
    for node in ("n0", "n1"):
        for rank in table.nodes[node].ranks.values():
            rank.has_sealed = True
    table.lose_node(2)
    table.run_without_faults(40)
    table.lose_rank(0)
    table.run_without_faults(40)
    assert restored(table) == {(None, WANTED)}


def test_nodes_outside_the_world_remember_the_requested_step():
    table = first_world()
    table.resize(1)
    table.run_without_faults(30)
    (inside,) = table.desk.snapshot().world.ranked_nodes
    assert table.desk.snapshot().world_spec.resume_from is not None
    assert {node.seats.newest_world.requested_step for node in table.nodes.values() if node.name != inside} == {None}


def paused(table: ControlSimulation) -> SealedStep:
    """Pause all ranks for a resize and return the step they sealed, before a new world forms."""
    table.resize(2)
    while any(rank.stand is RankPhase.IN_WORLD for node in table.nodes.values() for rank in node.ranks.values()):
        for node in list(table.nodes.values()):
            node.run_turn()
            if table.desk.snapshot().epoch_state.target is None:
                node.report()
            table._apply_desired(node)
    (step,) = set(table.targets.values())
    return SealedStep("job", step, table.desk.snapshot().world.epoch + 1)


def recorded(table: ControlSimulation) -> set[SealedStep]:
    """Return the steps that the supervisors record for the next run at the end of the job."""
    table.run_without_faults(30)
    assert not table.nodes
    return table.stopped_at


def test_stopped_job_names_the_step_that_its_ranks_sealed():
    table = ControlSimulation(3)
    table.run_without_faults(15)
    table.stop()
    sealed = recorded(table)
    assert sealed == {SealedStep("job", table.targets[0], 1)}


def test_drain_of_all_nodes_names_the_sealed_step():
    table = ControlSimulation(3)
    table.run_without_faults(15)
    for node in table.nodes.values():
        node.seats.drain(table.now + 60.0, "preempted")
    sealed = recorded(table)
    assert sealed == {SealedStep("job", table.targets[0], 1)}


def test_stop_between_two_worlds_names_the_last_sealed_step():
    table = ControlSimulation(3)
    table.run_without_faults(15)
    sealed = paused(table)
    table.stop()
    assert recorded(table) == {sealed}


def test_stop_that_a_lost_rank_interrupts_names_no_step():
    table = ControlSimulation(3)
    table.run_without_faults(15)
    table.stop()
    table.lose_rank(0)
    assert recorded(table) == set()


@pytest.mark.parametrize("missing", [None, 2], ids=["all nodes there", "a node is missing"])
def test_coordinator_restarted_between_two_worlds_names_the_sealed_step(missing):
    table = ControlSimulation(3)
    table.run_without_faults(15)
    sealed = paused(table)
    table.restart_coordinator()
    if missing is not None:
        table.lose_node(missing)
    table.run_without_faults(40)
    assert table.desk.snapshot().world.epoch == 1
    assert restored(table) == {(sealed, None)}


def test_world_known_to_few_nodes_is_formed_again_with_its_restore_step():
    table = ControlSimulation(3)
    table.run_without_faults(15)
    sealed = paused(table)
    while table.desk.snapshot().world.epoch == 0:
        for node in list(table.nodes.values()):
            node.run_turn()
            node.report()
    table._apply_desired(table.nodes[table.desk.snapshot().world.ranked_nodes[0]])
    table.restart_coordinator()
    table.run_without_faults(40)
    assert table.desk.snapshot().world.epoch == 2
    assert restored(table) == {(sealed, None)}


def test_world_that_ran_is_not_formed_again_with_its_restored_step():
    table = ControlSimulation(3)
    table.run_without_faults(15)
    paused(table)
    table.run_without_faults(30)
    assert table.desk.snapshot().world_spec.resume_from is not None
    table.lose_node(0)
    table.restart_coordinator()
    table.run_without_faults(40)
    assert restored(table) == {(None, None)}
