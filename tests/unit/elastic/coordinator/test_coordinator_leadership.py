"""Supervisors obey the newest leader when any machine may lead; an older leader steps down."""

from __future__ import annotations

import contextlib
import threading

import msgspec
import pytest

from elastic.control.control_messages import ExitReason, NodeCodec, NodeDesired, NodeStatus
from elastic.control.coordinator_client import connect_to_coordinator
from elastic.control.leader_election import LeaderRecord
from elastic.coordinator.coordinator import Coordinator
from elastic.coordinator.job_snapshot import CoordinatorSettings
from elastic.supervisor.node_state import NodeState
from elastic.testing import MemoryLeadership
from elastic.world.scaling_policy import ScalingPolicy
from peerstore.membership.topology import NodeId
from tests.support.local_nodes import wait_until

SECRET = b"a secret of the tests, long enough"
replace = msgspec.structs.replace


def seats() -> NodeState:
    return NodeState("n0", 1, iter("abcdef").__next__, iter(range(1, 9)).__next__)


def test_message_of_an_older_term_is_refused() -> None:
    one = seats()
    assert one.obeys(NodeDesired("first", 1, term=4))
    assert one.obeys(NodeDesired("second", 1, term=5))
    assert not one.obeys(NodeDesired("first", 1, term=4))
    assert one.obeys(NodeDesired("second", 1, term=5))
    assert one.leader == (5, "second")


def test_second_coordinator_in_a_term_is_ignored_even_in_a_new_generation() -> None:
    one = seats()
    one.start()
    assert one.obeys(NodeDesired("first", 1, term=4))
    one.begin_generation()
    assert not one.obeys(NodeDesired("second", 1, term=4))
    assert one.obeys(NodeDesired("first", 1, term=4))


def test_coordinator_without_a_term_is_always_obeyed() -> None:
    one = seats()
    assert one.obeys(NodeDesired("first", 1))
    assert one.obeys(NodeDesired("second", 1))


@contextlib.contextmanager
def leading(leadership: MemoryLeadership, name: str):
    """A coordinator that competes for the lead, and the result of its run."""
    policy = ScalingPolicy(min_replicas=1, max_replicas=2)
    coordinator = Coordinator(
        CoordinatorSettings("job", policy, 1), SECRET, fresh=False, leadership=leadership, candidate=name
    )
    ends: list[tuple[ExitReason, str]] = []
    thread = threading.Thread(target=lambda: ends.append(coordinator.run()))
    thread.start()
    try:
        yield coordinator, ends
    finally:
        coordinator.request_stop()
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("of_its_own_term", [True, False])
def test_leader_of_a_job_that_obeyed_a_higher_term_steps_down(of_its_own_term) -> None:
    """A newcomer with a late clock created the deleted record again."""
    leadership = MemoryLeadership()
    leadership.write(LeaderRecord("", 8, epoch=3), None)
    with leading(leadership, "b") as (coordinator, ends):
        wait_until(lambda: coordinator.snapshot.term)
        term = coordinator.snapshot.term if of_its_own_term else 70
        says = NodeStatus(1, "n0", 1, 1, spawn_count=1, ready=True, term=term, leader="another one")
        channel = connect_to_coordinator(coordinator.address, job="job", me=NodeId("n0"), secret=SECRET)
        channel.send(NodeCodec().encode(says))
        ((over, why),) = wait_until(lambda: ends)
        channel.close()
    assert over is ExitReason.DISMISSED
    assert "another one has led" in why
    assert coordinator.snapshot.nodes == {}
    record = leadership.read()
    assert (record.holder, record.term, record.epoch) == ("", term, 3)
    with leading(leadership, "c") as (coordinator, _):
        wait_until(lambda: coordinator.snapshot.term)
        assert (coordinator.snapshot.term, coordinator.reconciler._min_epoch) == (term + 1, 3)
    assert leadership.read().holder == ""  # released at its end


def test_world_is_announced_only_after_its_number_is_recorded() -> None:
    class Slow(MemoryLeadership):
        """A record whose writes wait until the test allows them."""

        may = threading.Event()

        def write(self, record, over):
            if record.epoch >= 0:
                self.may.wait(60)
            return super().write(record, over)

    leadership = Slow()
    leadership.write(LeaderRecord("", 1), None)
    with leading(leadership, "b") as (coordinator, _):
        wait_until(lambda: coordinator.snapshot.term)
        channel = connect_to_coordinator(coordinator.address, job="job", me=NodeId("n0"), secret=SECRET)
        end = NodeCodec()
        says = NodeStatus(1, "n0", 1, 1, spawn_count=1, ready=True, store="n0:1")
        channel.send(end.encode(says))
        wait_until(lambda: "n0" in coordinator.snapshot.nodes)
        desk, world = coordinator.reconciler, replace(coordinator.snapshot.world, epoch=5)

        def raise_world_number() -> None:  # both at once, so that no node receives world -1
            desk._rejoin.is_active, desk._world = False, world

        coordinator._post(raise_world_number)
        wait_until(lambda: coordinator._elector._election.epoch == 5)
        assert leadership.read().epoch == -1
        channel.send(end.encode(replace(says, number=2)))
        leadership.may.set()
        hears = end.decode(channel.receive(within_s=60).header)
        assert leadership.read().epoch == 5
        assert hears.term == coordinator.snapshot.term
        channel.close()
