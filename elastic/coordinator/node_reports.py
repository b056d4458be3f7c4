"""Events derived from successive node reports, and a world's sealed step and pause step. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from elastic.control.control_messages import NodeStatus, RankRequest, WorldSpec
from elastic.control.control_plane import NoticeKind
from elastic.control.epoch_state import common_checkpoint, common_step
from elastic.world.world_state import (
    JobStopRequested,
    NodeFinished,
    NodeJoined,
    NodeLeft,
    NodeReady,
    NodeSealed,
    NodesPreempted,
    RankFault,
    RankLost,
    ReachedStep,
    RejoinReport,
    ResizeRequested,
    SealedStep,
    WorldEvent,
    WorldState,
)
from peerstore.membership.topology import PeerNode

MAX_STANDBY_PEERS = 16
"""Maximum number of agents outside the world that its nodes receive; replicas need at most two."""


def events_between(before: NodeStatus | None, status: NodeStatus, now: float) -> Iterator[WorldEvent]:
    """Yield the events since the report ``before``, in an order in which they can have happened.

    ``before`` is of the same generation of the supervisor, or ``None`` for its first report.
    """
    node, generation, epoch = status.node, status.generation, _epoch(status.world)
    if before is None:
        yield NodeJoined(node, generation, status.local_ranks, status.spawn_count, status.spares)
    new = before is None or _epoch(before.world) != epoch
    if status.sealed is not None and (new or before is None or before.sealed != status.sealed):
        yield NodeSealed(node, generation, epoch, status.sealed, status.checkpoint)
    if status.finished and (new or before is None or not before.finished):
        yield NodeFinished(node, generation, epoch)
    if status.drain_within_s is not None and (before is None or before.drain_within_s is None):
        yield NodesPreempted((node,), now + status.drain_within_s, status.drain_reason)
    if before is None or (before.spawn_count, before.exited_ranks) != (status.spawn_count, status.exited_ranks):
        for lost in status.exited_ranks:
            yield RankLost(node, generation, status.spawn_count, lost.local_rank, lost.reason, lost.never_joined)
    if new or before is None or before.faulty_ranks != status.faulty_ranks:
        for fault in status.faulty_ranks:
            yield RankFault(node, generation, epoch, fault.local_rank, fault.reason, fault.final, fault.position)
    if status.ready and (
        new or before is None or not before.ready or _process_counts(before) != _process_counts(status)
    ):
        yield NodeReady(node, generation, status.spawn_count, epoch, status.spares)
    if status.leave_reason:
        yield NodeLeft(node, generation, status.leave_reason)


def requested_event(request: RankRequest, status: NodeStatus, now: float) -> WorldEvent:
    """Return the world event of a rank's request."""
    if request.kind is NoticeKind.STOP:
        return JobStopRequested(request.reason, None if request.deadline_s is None else now + request.deadline_s)
    if request.kind is NoticeKind.RESTART:
        return RankFault(status.node, status.generation, _epoch(status.world), 0, request.reason)
    return ResizeRequested(request.nodes, request.reason)


def rejoin_report(status: NodeStatus) -> RejoinReport:
    """Return what a restarted coordinator learns from a node before it decides anything."""
    spec = status.world
    return RejoinReport(
        node=status.node,
        generation=status.generation,
        local_ranks=status.local_ranks,
        spawn_count=status.spawn_count,
        spares=status.spares,
        epoch=_epoch(spec),
        ranked_nodes=() if spec is None else spec.ranked_nodes,
        restarts=0 if spec is None else spec.restarts,
    )


def newest_known_epoch(status: NodeStatus) -> int:
    """Return the greatest epoch of an incarnation that a node knows of; 0 for none."""
    known = (
        0 if status.world is None else status.world.incarnation_epoch,
        0 if status.newest_world is None else status.newest_world.incarnation_epoch,
        0 if status.checkpoint is None else status.checkpoint.epoch,
    )
    return max(known)


def named_step(newest: WorldSpec, reports: Iterable[NodeStatus]) -> SealedStep | None:
    """Return the step to restore if nodes of the newest world are missing; ``None``: the newest step.

    That is the step that all present nodes sealed before they left that world. If no rank has finished a step there, it
    is the step that the world had to restore.
    """
    inside = [one for one in reports if one.node in newest.ranked_nodes and _epoch(one.world) == newest.epoch]
    sealed = common_checkpoint(None if one.sealed is None else one.checkpoint for one in inside)
    if sealed is not None:
        return sealed
    return None if any(_may_have_sealed(one) for one in inside) else newest.resume_from


def _may_have_sealed(status: NodeStatus) -> bool:
    """Whether ranks of a node may have sealed a step in their world."""
    stepped = any(rank is not None and rank.step >= 0 for rank in status.rank_progress)
    change = status.epoch_state
    left = change.broken is not None or change.pause is not None or status.sealed is not None
    return stepped or left or bool(status.exited_ranks)


def standby_peers(world: WorldState, peer_of: Callable[[str], PeerNode | None]) -> tuple[PeerNode, ...]:
    """Return at most :data:`MAX_STANDBY_PEERS` agents of nodes outside the world that stay in the job.

    ``peer_of`` returns a node's agent, or ``None`` if the agent accepts no replicas.
    """
    ranked = set(world.ranked_nodes)
    staying = sorted(name for name, node in world.members.items() if name not in ranked and not node.is_draining)
    return tuple(peer for name in staying if (peer := peer_of(name)) is not None)[:MAX_STANDBY_PEERS]


def _epoch(spec: WorldSpec | None) -> int:
    return -1 if spec is None else spec.epoch


def _process_counts(status: NodeStatus) -> tuple[int, int]:
    return status.spawn_count, status.spares


class _NodeProgress(NamedTuple):
    """The part of a node's newest report that the totals count."""

    sealed: int | None
    """Lowest sealed step of the node's ranks, ``None`` if the report has no ranks."""
    paused: int | None
    finished: bool
    has_sealed: bool
    """Whether each rank of the node has sealed a step in this world."""

    @property
    def is_unpaused(self) -> bool:
        return self.paused is None and not self.finished


class WorldProgress:
    """Totals over the newest reports of a world's nodes."""

    def __init__(self, world: WorldSpec) -> None:
        self.epoch = world.epoch
        self.places = {node: place for place, node in enumerate(world.ranked_nodes)}
        """Node rank of each node of the world."""
        self._reports: dict[str, _NodeProgress] = {}
        """Progress of the nodes that have reported this world."""
        self.newest_sealed: ReachedStep | None = None
        """Newest step that any rank has sealed in this world. It remains if the rank's node is lost."""
        self._sealed: Counter[int] = Counter()
        self._least: int | None = None
        self._unpaused = 0
        """Number of unfinished nodes that have not reported a step to pause at."""

    @property
    def is_complete(self) -> bool:
        """Whether all nodes have reported this world."""
        return len(self._reports) == len(self.places)

    @property
    def sealed_by_all(self) -> int:
        """Newest step that all ranks have sealed, or -1 if no such step exists or a node has not reported."""
        return -1 if not self.is_complete or self._least is None else self._least

    @property
    def has_sealed_step(self) -> bool:
        """Whether every rank has sealed a step in this world."""
        return self.is_complete and all(one.has_sealed for one in self._reports.values())

    @property
    def pause_target(self) -> int | None:
        """The greatest step that any rank reported, once all unfinished nodes have reported one."""
        if not self.is_complete or self._unpaused:
            return None
        return common_step(one.paused for one in self._reports.values() if not one.finished)

    def update(self, status: NodeStatus) -> None:
        """Count a node's newest report. A report of another world removes the node's earlier one."""
        if status.node not in self.places:
            return
        self.forget(status.node)
        if status.world is None or status.world.epoch != self.epoch:
            return
        sealed = min((-1 if one is None else one.sealed for one in status.rank_progress), default=None)
        for one in status.rank_progress:
            newest = -1 if self.newest_sealed is None else self.newest_sealed.step
            if one is not None and one.has_sealed and one.sealed > newest:
                self.newest_sealed = ReachedStep(one.job, one.sealed)
        has_sealed = bool(status.rank_progress) and all(one and one.has_sealed for one in status.rank_progress)
        self._reports[status.node] = progress = _NodeProgress(sealed, status.paused, status.finished, has_sealed)
        self._unpaused += progress.is_unpaused
        if sealed is not None:
            self._sealed[sealed] += 1
            self._least = sealed if self._least is None else min(sealed, self._least)

    def forget(self, node: str) -> None:
        progress = self._reports.pop(node, None)
        if progress is None:
            return
        self._unpaused -= progress.is_unpaused
        if progress.sealed is not None:
            self._sealed[progress.sealed] -= 1
            if not self._sealed[progress.sealed]:
                del self._sealed[progress.sealed]
                if progress.sealed == self._least:
                    self._least = min(self._sealed, default=None)


class LastCommittedStep:
    """The newest step that all ranks of any world had sealed, or -1."""

    def __init__(self) -> None:
        self.step = -1

    def observe(self, state: WorldProgress) -> None:
        """Count the reports of a world's nodes."""
        self.step = max(self.step, state.sealed_by_all)

    def __str__(self) -> str:
        """Return a phrase for messages, "" while no step is known."""
        return "" if self.step < 0 else f"the last complete step is {self.step}"
