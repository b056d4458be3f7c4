"""Newest report of each node, and which nodes are connected, silent, draining or superseded. No I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from elastic.control.control_messages import NodeCommand, NodeStatus, WorldSpec
from elastic.world.world_state import NodeLost, WorldState


@dataclass
class NodeRecord:
    """Newest report of a node, with its connection, pending commands and drain deadline."""

    status: NodeStatus
    last_heartbeat: float
    connected: bool = True
    commands: list[NodeCommand] = field(default_factory=list)
    requested: int = 0
    """Greatest number of a rank's request that was carried out."""
    drain_deadline: float | None = None
    drain_reason: str = ""
    ended: bool = False
    """Whether the launcher reported the supervisor's exit. Such a node is lost once it disconnects."""

    def acknowledge(self, number: int) -> None:
        """Remove the commands up to the one that the node has received last."""
        if self.commands:
            self.commands = [command for command in self.commands if command.number > number]

    def is_draining(self, now: float) -> bool:
        """Whether the node is draining and has not left yet."""
        return self.drain_deadline is not None and now < self.drain_deadline and not self.status.leave_reason


def is_member(world: WorldState, status: NodeStatus) -> bool:
    """Whether this generation of a supervisor is a member of the job."""
    member = world.members.get(status.node)
    return member is not None and member.generation == status.generation


def is_superseded_generation(world: WorldState, status: NodeStatus, *, is_rejoining: bool = False) -> bool:
    """Whether this generation of a supervisor is over: it was lost, or its world is not one of this job."""
    if world.departed.get(status.node, -1) >= status.generation:
        return True
    inside = status.world is not None and status.epoch_state.broken is None
    return inside and not is_member(world, status) and not is_rejoining


class NodeLiveness:
    """Records of all nodes, with the timeouts after which a silent or disconnected node is lost."""

    def __init__(self, heartbeat_timeout_s: float, reconnect_timeout_s: float) -> None:
        self._heartbeat_timeout_s, self._reconnect_timeout_s = heartbeat_timeout_s, reconnect_timeout_s
        self.records: dict[str, NodeRecord] = {}
        self._connected: OrderedDict[str, None] = OrderedDict()
        """Connected nodes, the one with the oldest report first."""
        self._disconnected: set[str] = set()

    def record(self, status: NodeStatus, now: float) -> tuple[NodeRecord, NodeStatus | None]:
        """Store a report; return the node's record and the last report of the same generation.

        A pending drain of the node stays in force in a new generation.
        """
        record = self.records.get(status.node)
        before = record.status if record is not None and record.status.generation == status.generation else None
        if record is None or before is None:
            earlier, record = record, NodeRecord(status, now)
            self.records[status.node] = record
            if earlier is not None and earlier.is_draining(now):
                record.drain_deadline, record.drain_reason = earlier.drain_deadline, earlier.drain_reason
        record.status, record.last_heartbeat, record.connected = status, now, True
        self._connected[status.node] = None
        self._connected.move_to_end(status.node)
        self._disconnected.discard(status.node)
        return record, before

    def disconnect(self, node: str, generation: int, now: float) -> None:
        """Record that a node's connection has ended. The node may reconnect."""
        record = self.records.get(node)
        if record is not None and record.status.generation == generation:
            record.connected, record.last_heartbeat = False, now
            self._connected.pop(node, None)
            self._disconnected.add(node)

    def later_generation(self, status: NodeStatus, now: float) -> int:
        """Return the greater generation of a disconnected supervisor of this node, or 0.

        Generations carry the node's clock. If that clock went back, a new supervisor has a smaller one.
        """
        record = self.records.get(status.node)
        if record is None or record.status.generation <= status.generation:
            return 0
        is_there = record.connected and now - record.last_heartbeat <= self._reconnect_timeout_s
        return 0 if is_there else record.status.generation

    def lost_nodes(self, members: Collection[str], now: float) -> list[NodeLost]:
        """Return the loss of each silent member. Connected nodes are in report order, so the scan stops early."""
        return [self._loss(record, now) for record in self._suspects(now) if self.is_silent(record, members, now)]

    def is_silent(self, record: NodeRecord, members: Collection[str], now: float) -> bool:
        """Whether a member has sent no report within its timeout, or its supervisor has ended."""
        if record.status.node not in members:
            return False
        if record.ended and not record.connected:
            return True
        limit_s = self._heartbeat_timeout_s if record.connected else self._reconnect_timeout_s
        return now - record.last_heartbeat > limit_s

    def forget_departed(self, members: Collection[str], now: float) -> list[str]:
        """Remove and return the disconnected nodes that are neither members nor draining."""
        departed = [
            node for node in self._disconnected if node not in members and not self.records[node].is_draining(now)
        ]
        for node in departed:
            del self.records[node]
            self._disconnected.remove(node)
        return departed

    def drain(self, nodes: Iterable[str], deadline: float, reason: str) -> None:
        """Set the time by which the nodes have to leave."""
        for node in nodes:
            self.records[node].drain_deadline, self.records[node].drain_reason = deadline, reason

    def advance_drains(self, seconds: float) -> None:
        """Move all drain deadlines forward by ``seconds``."""
        for record in self.records.values():
            if record.drain_deadline is not None:
                record.drain_deadline -= seconds

    def reports(self) -> list[NodeStatus]:
        """Return the newest reports of the connected nodes."""
        return [record.status for record in self.records.values() if record.connected]

    def reports_of(self, spec: WorldSpec) -> list[NodeStatus]:
        """Return the newest reports of the world's nodes, in rank order."""
        return [self.records[node].status for node in spec.ranked_nodes if node in self.records]

    def _suspects(self, now: float) -> Iterator[NodeRecord]:
        for node in self._connected:
            record = self.records[node]
            if now - record.last_heartbeat <= self._heartbeat_timeout_s:
                break
            yield record
        for node in self._disconnected:
            yield self.records[node]

    @staticmethod
    def _loss(record: NodeRecord, now: float) -> NodeLost:
        if record.ended and not record.connected:
            return NodeLost(record.status.node, record.status.generation, "its supervisor has ended")
        how = "has been silent" if record.connected else "has been cut off"
        reason = f"{how} for {now - record.last_heartbeat:.1f} s"
        return NodeLost(record.status.node, record.status.generation, reason)
