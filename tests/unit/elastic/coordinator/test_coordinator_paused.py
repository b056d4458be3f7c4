"""A coordinator that was paused blames no node and loses none that was silent meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec
import pytest

from elastic.control.control_messages import DrainRequest, NodeCodec, NodeDesired, NodeStatus
from elastic.control.control_plane import RankProgress
from elastic.control.coordinator_client import connect_to_coordinator
from elastic.control.hang_detector import HangTimeouts
from elastic.coordinator.coordinator import Coordinator
from elastic.coordinator.job_snapshot import CoordinatorSettings
from elastic.world.scaling_policy import ScalingPolicy
from elastic.world.world_state import WorldPhase
from peerstore.membership.topology import NodeId
from peerstore.transport.base import MessageChannel
from tests.support.local_nodes import wait_until
from tests.unit.elastic.control.test_running_clock import Hand

SECRET = b"a secret of the tests, long enough"
replace = msgspec.structs.replace


class Node:
    """A node that sends a supervisor's reports and receives its desired state."""

    def __init__(self, coordinator: Coordinator, name: str) -> None:
        self.name, self._coordinator, self._end = name, coordinator, NodeCodec()
        self.channel: MessageChannel = connect_to_coordinator(
            coordinator.address, job="job", me=NodeId(name), secret=SECRET
        )
        self.says = NodeStatus(
            0, name, 1, 1, spawn_count=1, ready=True, store=f"{name}:1", rank_progress=(None,), silent_s=(0.0,)
        )
        self.hears: NodeDesired | None = None

    def say(self, **changes: object) -> None:
        """Send a changed report and wait until the coordinator has received it."""
        self.says = replace(self.says, number=self.says.number + 1, **changes)
        self.channel.send(self._end.encode(self.says))
        wait_until(self._is_heard)

    def _is_heard(self) -> bool:
        self._coordinator._run_once()
        seen = self._coordinator.snapshot.nodes.get(self.name)
        return seen is not None and seen.status.number == self.says.number

    def step(self, number: int) -> None:
        self.say(rank_progress=(RankProgress(number),), world=self._coordinator.snapshot.world_spec, ready=False)


@contextlib.contextmanager
def two_nodes(**limits: float) -> Iterator[tuple[Coordinator, Hand, list[Node]]]:
    hand = Hand()
    policy = ScalingPolicy(min_replicas=1, max_replicas=2, scaling_timeout_s=5.0, faulty_scale_down_timeout_s=0.0)
    settings = CoordinatorSettings("job", policy, 1, hang=HangTimeouts(**limits))
    with contextlib.closing(Coordinator(settings, SECRET, clock=hand)) as coordinator:
        nodes = [Node(coordinator, name) for name in ("n0", "n1")]
        try:
            for node in nodes:
                node.say()
            assert coordinator.snapshot.world_spec is not None
            for node in nodes:
                node.step(1)
            yield coordinator, hand, nodes
        finally:
            for node in nodes:
                node.channel.close()


def run(coordinator: Coordinator, hand: Hand, seconds: float) -> None:
    """Advance the time while the coordinator runs."""
    for _ in range(int(seconds / 0.5)):
        hand.now += 0.5
        coordinator._run_once()


def test_paused_coordinator_loses_no_node():
    with two_nodes() as (coordinator, hand, _nodes):
        before = coordinator.snapshot.world.epoch
        hand.now += 600.0
        coordinator._run_once()
        assert coordinator.snapshot.world.phase is WorldPhase.RUNNING
        assert (coordinator.snapshot.world.epoch, coordinator.snapshot.epoch_state.broken) == (before, None)


def test_node_silent_after_the_pause_is_lost():
    with two_nodes() as (coordinator, hand, nodes):
        hand.now += 600.0
        coordinator._run_once()
        for number in range(2, 14):
            run(coordinator, hand, 1.0)
            nodes[0].step(number)
        assert "silent" in coordinator.snapshot.epoch_state.reason


def test_paused_coordinator_detects_no_hang():
    with two_nodes(step_s=30.0, first_s=30.0) as (coordinator, hand, nodes):
        hand.now += 600.0
        for node in nodes:  # repeats its last report: its steps stood still as long as the coordinator
            node.say()
        run(coordinator, hand, 5.0)
        assert coordinator.snapshot.epoch_state.broken is None
        assert coordinator.reconciler._hang_detector._moved_at is not None


def test_preempted_node_leaves_on_time_despite_the_pause():
    with two_nodes() as (coordinator, hand, nodes):
        coordinator.reconciler.handle_request(
            DrainRequest(("n1",), 120.0, "the machine is preempted"), coordinator._clock()
        )
        hand.now += 60.0
        coordinator._run_once()
        nodes[1].say()
        assert coordinator.snapshot.nodes["n1"].drain_deadline == pytest.approx(coordinator._clock() + 60.0, abs=2.0)
        hand.now += 70.0
        nodes[0].say(paused=1)
        run(coordinator, hand, 1.0)
        assert coordinator.snapshot.epoch_state.is_broken
