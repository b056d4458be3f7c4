"""``WorldReconciler`` and supervisors: the ranks reach one world despite message loss or delay."""

from __future__ import annotations

import itertools
import logging

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.control.control_messages import DrainRequest, ResizeRequest, SupervisorExited
from elastic.coordinator.desired_state import node_desired, why_refused
from elastic.supervisor.node_messages import node_status
from elastic.world.world_state import StepHolders
from tests.support.control_simulation import ControlSimulation, SimulatedNode

HAPPENINGS = (
    "add", "restart_coordinator", "lose_node", "lose_rank", "disconnect_node", "heal_all", "ignore_orders",
    "preempt_node", "resize", "fault", "exchange_node", "exchange_node", "exchange_node", "exchange_node",
    "exchange_all", "exchange_all", "advance",
)  # fmt: skip
steps = st.lists(st.tuples(st.sampled_from(HAPPENINGS), st.integers(0, 11)), max_size=50)


@pytest.fixture(autouse=True, scope="module")
def _no_log():
    logger = logging.getLogger("elastic.coordinator")
    before = logger.level
    logger.setLevel(logging.WARNING)
    yield
    logger.setLevel(before)


def play(table: ControlSimulation, script: list[tuple[str, int]]) -> None:
    for name, number in script:
        if name in ("add", "restart_coordinator", "heal_all", "exchange_all"):
            if name != "add" or len(table.nodes) < 6:
                getattr(table, name)()
        elif name == "resize":
            table.resize(1 + number % 6)
        else:
            getattr(table, name)(number)
    table.run_without_faults()
    table.check_one_world()


@settings(max_examples=25)
@given(steps, st.integers(1, 4), st.integers(0, 1))
def test_random_events_end_with_all_ranks_in_one_world(script, nodes, spares):
    table = ControlSimulation(nodes, spares=spares)
    table.run_without_faults(15)
    play(table, script)


@pytest.mark.nightly
@settings(max_examples=4000)
@given(steps, st.integers(1, 4), st.integers(0, 1))
def test_long_random_events_end_with_all_ranks_in_one_world(script, nodes, spares):
    table = ControlSimulation(nodes, spares=spares)
    table.run_without_faults(15)
    play(table, script)


def test_a_coordinator_that_starts_again_changes_nothing():
    table = ControlSimulation(3)
    table.run_without_faults(15)
    worlds = dict(table.places)
    table.restart_coordinator()
    table.run_without_faults(15)
    assert table.places == worlds
    assert table.desk.snapshot().world.restarts == 0


def run_without(table, silent, seconds):
    for _ in range(seconds):
        for number in range(len(table.nodes)):
            if number != silent:
                table.exchange_node(number)
        table.advance(1.0)


def alone(table):
    """Return the one node with ranks after the job was resized to one node."""
    table.run_without_faults(15)
    table.resize(1)
    table.run_without_faults(30)
    (node,) = table.desk.snapshot().world.ranked_nodes
    return int(node.removeprefix("n"))


def test_new_coordinator_keeps_a_world_smaller_than_the_previous_one():
    """Nodes outside it still name the older world that they were in; they answer first."""
    table = ControlSimulation(3)
    inside = alone(table)
    world, places = table.desk.snapshot().world, dict(table.places)
    table.restart_coordinator()
    run_without(table, inside, 1)
    table.run_without_faults(15)
    assert (table.desk.snapshot().world.epoch, table.desk.snapshot().world.restarts) == (world.epoch, world.restarts)
    assert table.places == places


def test_new_coordinator_waits_for_nodes_of_the_newest_world(caplog):
    """Two nodes outside the world answer at once; the node with the newest steps is silent at first."""
    table = ControlSimulation(3)
    inside = alone(table)
    world, places = table.desk.snapshot().world, dict(table.places)
    table.disconnect_node(inside)
    table.restart_coordinator()
    run_without(table, inside, 30)
    assert table.desk.snapshot().is_rejoining
    assert f"({world.epoch}: n{inside}) has reported: waiting" in caplog.text
    table.heal_all()
    table.run_without_faults(15)
    assert (table.desk.snapshot().world.epoch, table.desk.snapshot().world.restarts) == (world.epoch, world.restarts)
    assert table.places == places


def test_new_coordinator_waits_no_longer_than_lost_state_timeout(caplog):
    table = ControlSimulation(3)
    inside = alone(table)
    epoch = table.desk.snapshot().world.epoch
    table.disconnect_node(inside)
    table.restart_coordinator()
    run_without(table, inside, 90)
    assert table.desk.snapshot().world.phase.is_running
    assert f"n{inside}" not in table.desk.snapshot().world.ranked_nodes
    assert table.desk.snapshot().world.epoch > epoch
    assert "the job continues from the newest step" in caplog.text


def test_first_world_starts_on_the_node_with_the_newest_step():
    """One node is enough, and the others join first."""
    table = ControlSimulation(3, most=1, holders=StepHolders(newest=("n2",)))
    run_without(table, 2, 30)
    assert table.desk.snapshot().world.epoch == -1
    table.run_without_faults(15)
    assert table.desk.snapshot().world.phase.is_running
    assert table.desk.snapshot().world.ranked_nodes == ("n2",)
    assert set(table.desk.snapshot().world.members) == {"n0", "n1", "n2"}


def test_one_holder_of_the_newest_step_is_enough():
    table = ControlSimulation(3, most=2, holders=StepHolders(newest=("n1", "n2")))
    run_without(table, 2, 30)
    assert set(table.desk.snapshot().world.ranked_nodes) == {"n0", "n1"}


def test_first_world_waits_for_a_holder_no_longer_than_lost_state_timeout(caplog):
    table = ControlSimulation(3, most=1, holders=StepHolders(newest=("n2",)))
    run_without(table, 2, 90)
    assert table.desk.snapshot().world.phase.is_running
    assert table.desk.snapshot().world.ranked_nodes in (("n0",), ("n1",))
    waits = [one.getMessage() for one in caplog.records if "the newest step" in one.getMessage()]
    assert waits == [
        "the first world waits up to 60 s for n2, which may have the newest step",
        "n2, which may have the newest step, was not ready in 60 s: the job starts without it and may repeat steps",
    ]


def test_first_world_waits_for_each_node_whose_steps_are_unknown():
    table = ControlSimulation(3, most=1, holders=StepHolders(newest=("n1",), unknown=("n2",)))
    run_without(table, 2, 30)
    assert table.desk.snapshot().world.epoch == -1
    table.run_without_faults(15)
    assert table.desk.snapshot().world.phase.is_running
    assert table.desk.snapshot().world.ranked_nodes == ("n1",)
    assert set(table.desk.snapshot().world.members) == {"n0", "n1", "n2"}


def test_request_outlives_the_coordinator():
    table = ControlSimulation(3)
    table.run_without_faults(15)
    table.resize(2)
    table.exchange_node(0)
    table.restart_coordinator()
    table.run_without_faults(30)
    assert table.desk.snapshot().world.max_nodes == 2
    assert table.desk.snapshot().world.size == 2
    assert table.desk.snapshot().world.restarts == 0


def test_partitioned_node_rejoins_with_its_processes():
    table = ControlSimulation(2)
    table.run_without_faults(15)
    ranks = {token for node in table.nodes.values() for token in node.ranks}
    table.disconnect_node(1)
    for _ in range(20):
        table.exchange_node(0)
        table.advance(1.0)
    assert table.desk.snapshot().world.size == 1
    table.run_without_faults(30)
    assert table.desk.snapshot().world.size == 2
    assert {token for node in table.nodes.values() for token in node.ranks} == ranks


def test_every_lost_rank_is_replaced_by_a_warm_spare():
    table = ControlSimulation(1, nproc=2, spares=1)
    table.run_without_faults(15)
    for _ in range(3):
        (spare,) = table.nodes["n0"].seats.spares()
        table.lose_rank(0)
        table.run_without_faults(8)
        assert spare.local_rank is not None
        assert spare.formed_epoch == table.desk.snapshot().world.epoch


def test_used_spare_is_replaced_after_the_ranks_resume():
    """Starting and importing use the cores that the ranks need to return."""
    table = ControlSimulation(1, nproc=2, spares=1)
    table.run_without_faults(15)
    seats, before = table.nodes["n0"].seats, table.desk.snapshot().world.epoch
    table.lose_rank(0)
    turns = 0
    while not (
        len(seats.rank_processes()) == 2 and all(process.stepped_epoch > before for process in seats.rank_processes())
    ):
        assert len(seats.spares()) == (turns == 0)
        table.run_without_faults(1)
        turns += 1
    table.run_without_faults(3)
    assert [spare.is_ready for spare in seats.spares()] == [True]


def test_used_spare_is_replaced_by_a_deadline_without_progress():
    table = ControlSimulation(1, nproc=2, spares=1)
    table.run_without_faults(15)
    seats = table.nodes["n0"].seats
    table.lose_rank(0)
    table.run_without_faults(1)
    by = seats.refill_by
    seats.refill_spares(by - 0.1)
    assert (seats.refill_by, seats.spares()) == (by, [])
    seats.refill_spares(by)
    assert len(seats.spares()) == 1
    assert seats.refill_by is None


def test_an_older_supervisor_of_a_node_is_refused():
    table = ControlSimulation(1)
    table.run_without_faults(5)
    old = node_status(table.nodes["n0"].seats, table.now)
    table.nodes["n0"].seats.generation = table.new_generation()
    table.exchange_node(0)
    assert "newer supervisor" in table.desk.record_status(old, table.now)


def test_repeated_report_has_no_effect():
    table = ControlSimulation(2)
    table.run_without_faults(15)
    world = table.desk.snapshot().world
    again = node_status(table.nodes["n0"].seats, table.now)
    for _ in range(3):
        table.desk.record_status(again, table.now)
        table.desk.reconcile(table.now)
    assert table.desk.snapshot().world == world


def test_impossible_request_is_refused_with_a_reason():
    table = ControlSimulation(2)
    table.policy = msgspec.structs.replace(table.policy, min_replicas=2)
    table.desk = table._new_reconciler(fresh=True)
    table.run_without_faults(15)
    assert "too few" in why_refused(table.desk.snapshot(), ResizeRequest(1, "less"))
    assert "no node n9" in why_refused(table.desk.snapshot(), DrainRequest(("n9",), 1.0, "gone"))
    assert why_refused(table.desk.snapshot(), ResizeRequest(3, "more")) == ""


def test_node_learns_its_world_ended_even_if_the_next_world_excludes_it():
    table = ControlSimulation(2)
    table.run_without_faults(60)
    table.resize(1)
    table.run_without_faults(60)
    (alone,) = table.desk.snapshot().world_spec.ranked_nodes
    table.lose_rank(sorted(table.nodes).index(alone))
    table.nodes[alone].report()  # it reports the loss; the next world forms before it receives a message
    table.advance(0.0)
    assert table.desk.snapshot().world_spec.ranked_nodes == tuple(table.nodes.keys() - {alone})
    table.run_without_faults(60)
    assert table.nodes[alone].seats.epoch_state.is_broken
    table.resize(2)
    table.run_without_faults(60)
    assert set(table.desk.snapshot().world_spec.ranked_nodes) == set(table.nodes)
    table.check_one_world()


@pytest.mark.parametrize("away", [0, 8])
def test_node_restarted_during_a_drain_is_still_drained(away):
    table = ControlSimulation(2)
    table.run_without_faults(60)
    table.desk.handle_request(DrainRequest(("n1",), 20.0, "its machine goes"), table.now)
    if away:
        table.lose_node(sorted(table.nodes).index("n1"))
        table.run_without_faults(away)
        assert table.desk.snapshot().world_spec.ranked_nodes == ("n0",)
    table.nodes["n1"] = SimulatedNode(
        table, "n1", table.nproc, table.spares
    )  # its processes were killed without a message
    table.run_without_faults(15)
    assert table.desk.snapshot().world_spec.ranked_nodes == ("n0",)
    assert "n1" not in table.nodes


def lost_supervisor(told_before):
    """Lose node n1: its connection ends, and its starter reports that the supervisor exited."""
    table = ControlSimulation(2)
    table.run_without_faults(60)
    desk, life = table.desk, table.nodes["n1"].seats.generation
    if told_before:
        desk.handle_request(SupervisorExited("n1"), table.now)
        desk.tick(table.now)
        assert not desk.snapshot().epoch_state.is_broken
    del table.nodes["n1"]
    desk.connection_lost("n1", life, table.now)
    if not told_before:
        desk.tick(table.now)
        assert not desk.snapshot().epoch_state.is_broken  # it may return
        desk.handle_request(SupervisorExited("n1"), table.now)
    desk.tick(table.now)
    return table


@pytest.mark.parametrize("told_before", [True, False])
def test_exited_supervisor_breaks_the_world_at_once(told_before):
    table = lost_supervisor(told_before)
    assert table.desk.snapshot().epoch_state.reason == "n1 was lost: its supervisor has ended"


def test_exit_of_an_older_supervisor_does_not_break_the_world():
    table = lost_supervisor(told_before=True)
    table.nodes["n1"] = SimulatedNode(table, "n1", table.nproc, table.spares)
    table.run_without_faults(60)
    assert set(table.desk.snapshot().world_spec.ranked_nodes) == {"n0", "n1"}
    table.desk.connection_lost("n1", table.nodes["n1"].seats.generation, table.now)
    table.desk.tick(table.now)
    assert not table.desk.snapshot().epoch_state.is_broken


def test_exit_of_an_unknown_node_is_ignored():
    table = ControlSimulation(1)
    table.run_without_faults(15)
    table.desk.handle_request(SupervisorExited("n9"), table.now)
    table.desk.tick(table.now)
    assert not table.desk.snapshot().epoch_state.is_broken


def test_drained_node_may_rejoin():
    table = ControlSimulation(2)
    table.run_without_faults(60)
    table.desk.handle_request(DrainRequest(("n1",), 20.0, "its machine goes"), table.now)
    table.run_without_faults(5)
    assert "n1" not in table.nodes
    table.nodes["n1"] = SimulatedNode(table, "n1", table.nproc, table.spares)
    table.run_without_faults(60)
    assert set(table.desk.snapshot().world_spec.ranked_nodes) == {"n0", "n1"}


def test_drained_node_may_rejoin_after_its_clock_went_back():
    table = ControlSimulation(2)
    table.run_without_faults(60)
    table.desk.handle_request(DrainRequest(("n1",), 20.0, "its machine goes"), table.now)
    table.run_without_faults(5)
    assert "n1" not in table.nodes
    table._lives = itertools.chain([0], table._lives)  # an hour ago by its current clock
    table.nodes["n1"] = SimulatedNode(table, "n1", table.nproc, table.spares)
    table.run_without_faults(60)
    assert set(table.desk.snapshot().world_spec.ranked_nodes) == {"n0", "n1"}
    assert table.nodes["n1"].seats.exit is None


def test_dismissed_node_stays_dismissed_despite_new_reports():
    table = ControlSimulation(2)
    table.run_without_faults(60)
    table.desk.handle_request(DrainRequest(("n1",), 20.0, "its machine goes"), table.now)
    node = table.nodes["n1"]
    table.run_without_faults(5)
    node.report()
    assert node_desired(table.desk.snapshot(), "n1", table.now).release_reason is not None


def test_next_world_does_not_use_the_store_of_a_released_node():
    """That store ends with the node, and torch's client would wait minutes for it to answer."""
    table = ControlSimulation(3)
    table.run_without_faults(15)
    released = table.desk._store.node
    formed = []
    form = table.desk._formed.form

    def record_form(spec, reports):
        formed.append(spec)
        form(spec, reports)

    table.desk._formed.form = record_form
    table.preempt_node(int(released.removeprefix("n")))
    table.run_without_faults(60)
    assert table.desk.snapshot().world.phase.is_running
    assert released not in table.desk.snapshot().world.ranked_nodes
    assert [spec.store.partition(":")[0] for spec in formed] != [released]
    assert table.desk._formed.spec.store.partition(":")[0] in table.desk.snapshot().world.ranked_nodes
