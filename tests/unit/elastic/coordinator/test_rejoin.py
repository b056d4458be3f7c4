"""Timeouts and log messages of a restarted coordinator and of a first world."""

from __future__ import annotations

from elastic.control.control_messages import NodeStatus, RankFailure, WorldRecord, WorldSpec
from elastic.control.control_plane import NoticeKind
from elastic.control.epoch_state import ChangeMessage, EpochMessage
from elastic.coordinator.node_liveness import NodeRecord
from elastic.coordinator.rejoin import CollectedReports, HolderWait, Rejoin
from elastic.world.scaling_policy import ScalingPolicy
from elastic.world.world_state import NodeReady, RankFault, RankLost, StepHolders

WORLD = WorldSpec(3, ("n0", "n1"), 0, "")


def status(node, **fields):
    return NodeStatus(1, node, 1, 1, **fields)


def waiting():
    return Rejoin(ScalingPolicy(max_replicas=3, lost_state_timeout_s=60.0), 5.0, is_active=True)


def test_reports_of_all_nodes_of_the_newest_world_end_the_wait():
    rejoin = waiting()
    old = status("n2", world=WorldSpec(2, ("n2",), 0, ""))
    assert rejoin.collect([old, status("n0", world=WORLD)], 0.0) is None
    assert rejoin.is_active
    reports = [old, status("n0", world=WORLD), status("n1", world=WORLD)]
    collected = rejoin.collect(reports, 1.0)
    assert not rejoin.is_active
    assert (collected.newest, collected.lost_world) == (WORLD, None)
    assert collected.inside() == reports[1:]


def test_first_report_starts_the_timeout():
    rejoin = waiting()
    assert rejoin.collect([], 100.0) is None
    assert rejoin.collect([status("n0")], 200.0) is None
    assert rejoin.collect([status("n0")], 204.9) is None
    assert rejoin.collect([status("n0")], 205.0) is not None


def test_newer_world_without_its_nodes_is_waited_for_longer(caplog):
    rejoin, record = waiting(), WorldRecord(4, ("n5",))
    reports = [status(node, world=WORLD, newest_world=record) for node in WORLD.ranked_nodes]
    for now in (0.0, 5.0, 59.0):
        assert rejoin.collect(reports, now) is None
    assert caplog.text.count("(4: n5) has reported: waiting 60 s for one") == 1
    collected = rejoin.collect(reports, 60.0)
    assert (collected.newest, collected.lost_world) == (WORLD, record)
    assert "no node of the newest world (4: n5) has reported in 60 s" in caplog.text


def test_collected_reports_become_events_without_a_second_join():
    lost = EpochMessage(3, broken=ChangeMessage(NoticeKind.RESTART, "lost"))
    broken = status("n0", world=WORLD, ready=True, epoch_state=lost, exited_ranks=(RankFailure(0, "killed"),))
    collected = CollectedReports([broken, status("n1", world=WORLD)], WORLD, None)
    assert collected.faults() == [RankFault("n0", 1, 3, 0, "lost")]
    assert [type(event) for event in collected.events(0.0)] == [RankLost, NodeReady]


def test_nodes_are_held_back_until_a_holder_is_ready():
    wait, nodes = HolderWait(StepHolders(newest=("n9",)), 30.0), {"n0": NodeRecord(status("n0"), 0.0)}
    assert wait.holds_back("n0", nodes, -1, 0.0)
    assert wait.holds_back("n9", nodes, -1, 0.0)
    assert wait.admitted(nodes, -1, 1.0) == []
    nodes["n9"] = NodeRecord(status("n9", ready=True), 1.0)
    assert wait.admitted(nodes, -1, 1.0) == [nodes["n9"].status, nodes["n0"].status]
    assert wait.admitted(nodes, -1, 1.0) == []


def test_one_holder_and_all_nodes_with_unknown_steps_have_to_be_ready():
    holders = StepHolders(newest=("n1", "n2"), unknown=("n3", "n4"))
    assert holders.missing(()) == ("n1", "n2", "n3", "n4")
    assert holders.missing({"n2", "n4"}) == ("n3",)
    assert holders.missing({"n1", "n3", "n4"}) == ()
    assert StepHolders().missing(()) == ()


def test_wait_for_a_holder_ends_with_an_error_after_its_timeout(caplog):
    wait, nodes = HolderWait(StepHolders(newest=("n9",)), 30.0), {"n0": NodeRecord(status("n0"), 0.0)}
    assert wait.holds_back("n0", nodes, -1, 0.0)
    assert wait.admitted(nodes, -1, 30.0) == [nodes["n0"].status]
    assert not wait.holds_back("n0", nodes, -1, 31.0)
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]


def test_later_worlds_wait_for_no_holder():
    assert not HolderWait(StepHolders(newest=("n9",)), 30.0).holds_back("n0", {}, 0, 0.0)
