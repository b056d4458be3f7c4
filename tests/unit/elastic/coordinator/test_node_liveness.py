"""Silent, disconnected and draining nodes, from their reports alone."""

from __future__ import annotations

from elastic.control.control_messages import CommandKind, NodeCommand, NodeStatus, WorldSpec
from elastic.coordinator.node_liveness import NodeLiveness, is_superseded_generation
from elastic.world.world_state import NodeMember, WorldState


def status(node="n0", generation=1, **fields):
    return NodeStatus(1, node, generation, 1, **fields)


def liveness(*nodes, now=0.0):
    found = NodeLiveness(heartbeat_timeout_s=10.0, reconnect_timeout_s=2.0)
    for node in nodes:
        found.record(status(node), now)
    return found


def test_only_members_that_are_silent_longer_than_the_timeout_are_lost():
    nodes = liveness("n0", "n1", "n2")
    nodes.record(status("n1"), 5.0)
    assert nodes.lost_nodes({"n0", "n1"}, 10.0) == []
    (lost,) = nodes.lost_nodes({"n0", "n1"}, 10.5)
    assert (lost.node, lost.reason) == ("n0", "has been silent for 10.5 s")


def test_disconnected_node_is_lost_after_the_reconnect_timeout():
    nodes = liveness("n0")
    nodes.disconnect("n0", 2, 1.0)  # another generation
    assert nodes.records["n0"].connected
    nodes.disconnect("n0", 1, 1.0)
    assert nodes.lost_nodes({"n0"}, 3.0) == []
    assert nodes.lost_nodes({"n0"}, 3.5)[0].reason == "has been cut off for 2.5 s"
    nodes.record(status(), 3.5)
    assert nodes.lost_nodes({"n0"}, 3.5) == []


def test_disconnected_node_whose_supervisor_ended_is_lost_at_once():
    nodes = liveness("n0")
    nodes.records["n0"].ended = True
    assert nodes.lost_nodes({"n0"}, 0.0) == []
    nodes.disconnect("n0", 1, 0.0)
    assert nodes.lost_nodes({"n0"}, 0.0)[0].reason == "its supervisor has ended"


def test_drain_stays_in_force_in_the_next_generation_until_its_deadline():
    nodes = liveness("n0")
    nodes.drain(["n0"], 20.0, "preempted")
    nodes.advance_drains(5.0)
    record, before = nodes.record(status(generation=2), 1.0)
    assert (record.drain_deadline, record.drain_reason, before) == (15.0, "preempted", None)
    record, before = nodes.record(status(generation=3), 15.0)
    assert (record.drain_deadline, before) == (None, None)


def test_departed_node_is_forgotten_unless_it_drains():
    nodes = liveness("n0", "n1", "n2")
    nodes.drain(["n1"], 20.0, "preempted")
    for node in ("n0", "n1", "n2"):
        nodes.disconnect(node, 1, 1.0)
    assert nodes.forget_departed({"n2"}, 10.0) == ["n0"]
    assert nodes.forget_departed({"n2"}, 20.0) == ["n1"]
    assert set(nodes.records) == {"n2"}


def test_later_generation_is_returned_only_for_an_absent_supervisor():
    nodes = liveness()
    nodes.record(status(generation=7), 0.0)
    assert nodes.later_generation(status(generation=3), 1.0) == 0
    assert nodes.later_generation(status(generation=3), 2.5) == 7
    assert nodes.later_generation(status(generation=8), 2.5) == 0


def test_acknowledged_commands_are_removed():
    record = liveness("n0").records["n0"]
    record.commands = [NodeCommand(number, CommandKind.STRAGGLERS) for number in (1, 2, 3)]
    record.acknowledge(2)
    assert [command.number for command in record.commands] == [3]


def test_supervisor_is_superseded_if_it_departed_or_its_world_is_foreign():
    foreign = status(world=WorldSpec(4, ("n0",), 0, ""))
    world = WorldState(nproc=1, departed={"n0": 1})
    assert is_superseded_generation(world, status())
    assert not is_superseded_generation(world, status(generation=2))
    world = WorldState(nproc=1)
    assert is_superseded_generation(world, foreign)
    assert not is_superseded_generation(world, foreign, is_rejoining=True)
    world = WorldState(nproc=1, members={"n0": NodeMember("n0", 1, 0)})
    assert not is_superseded_generation(world, foreign)
