"""The status of a job, for people and programs, and the world events that the coordinator records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from elastic.control.control_messages import ElasticJobStatus, ExitReason, NodeSummary, ReplacementWait
from elastic.control.control_plane import RankProgress
from elastic.control.epoch_state import ChangeMessage
from elastic.coordinator.job_snapshot import JobSnapshot
from elastic.coordinator.node_liveness import NodeRecord
from elastic.rendezvous.store_servers import ROOTLESS
from elastic.world import world_state
from elastic.world.world_state import WorldPhase, WorldState
from elastic.world.world_transition import available_members, max_world_nodes
from tieredckpt.event_log import EventLog, event_types


def elastic_job_status(snapshot: JobSnapshot, now: float, *, refused: str = "") -> ElasticJobStatus:
    """Return the status of the job."""
    world = snapshot.world
    places = {node: place for place, node in enumerate(world.ranked_nodes)} if world.phase.is_running else {}
    nodes = tuple(_node(snapshot, record, places.get(node), now) for node, record in sorted(snapshot.nodes.items()))
    placed = [node for node in nodes if node.node_rank is not None]
    return ElasticJobStatus(
        job=snapshot.settings.job,
        phase=world.phase,
        epoch=world.epoch,
        nodes=nodes,
        nproc=world.nproc,
        target_nodes=world.target_nodes,
        max_nodes=world.max_nodes,
        restarts=world.restarts,
        reason=snapshot.outcome.reason or world.reason,
        step=min((node.step for node in placed), default=-1),
        sealed=min((node.sealed for node in placed), default=-1),
        store=_store(snapshot),
        requested_nodes=snapshot.requested_nodes,
        pause=ChangeMessage.of(snapshot.epoch_state.pause, now),
        refused=refused,
        replacement_wait=_replacement_wait(snapshot, now),
    )


def missing_nodes(snapshot: JobSnapshot) -> str:
    """Return a message about the nodes that the first world waits for and how to start them, or ""."""
    world, settings = snapshot.world, snapshot.settings
    here, wanted = len(world.members), settings.policy.initial_nodes
    if world.epoch >= 0 or world.phase.is_over or not 0 < settings.local_nodes <= here < wanted:
        return ""
    least = settings.policy.smallest_size
    start = (
        f"The job starts with {least}"
        if here < least
        else f"It starts without them in {settings.policy.scaling_timeout_s:g} s"
    )
    verb = "is" if here == 1 else "are"
    return (
        f"{here} of {wanted} nodes {verb} here, waiting for {wanted - here} more. {start}. "
        f"For each of the others run: {settings.join_command}"
    )


def _replacement_wait(snapshot: JobSnapshot, now: float) -> ReplacementWait | None:
    world, policy = snapshot.world, snapshot.settings.policy
    if world.phase is not WorldPhase.WAITING or world.replacement_deadline_s is None:
        return None
    lost = tuple(node for node in world.ranked_nodes if node not in world.members)
    remaining = min(max_world_nodes(world, policy), len(available_members(world)))
    within_s = max(0.0, world.replacement_deadline_s - now)
    return ReplacementWait(lost, within_s, policy.largest_size_within(remaining))


def _store(snapshot: JobSnapshot) -> str:
    if snapshot.world_spec is None:
        return ""
    return (
        f"{ROOTLESS}, on {len(snapshot.world_spec.stores)} nodes"
        if snapshot.world_spec.stores
        else snapshot.world_spec.store
    )


def _node(snapshot: JobSnapshot, record: NodeRecord, place: int | None, now: float) -> NodeSummary:
    status = record.status
    ranks = [progress if progress is not None else RankProgress(-1) for progress in status.rank_progress]
    return NodeSummary(
        node=status.node,
        node_rank=place,
        state=_state(snapshot, record, inside=place is not None),
        local_ranks=status.local_ranks,
        spares=status.spares,
        spawn_count=status.spawn_count,
        step=min((progress.step for progress in ranks), default=-1),
        sealed=min((progress.sealed for progress in ranks), default=-1),
        last_heartbeat_s=max(0.0, now - record.last_heartbeat),
    )


def _state(snapshot: JobSnapshot, record: NodeRecord, *, inside: bool) -> str:
    status = record.status
    if not record.connected:
        return "disconnected"
    if status.node not in snapshot.world.members:
        return "leaving"
    if status.finished:
        return "finished"
    if status.drain_within_s is not None:
        return "draining"
    if not inside:
        return "standby" if status.ready else "starting"
    if status.sealed is not None:
        return "sealed"
    return "training" if snapshot.epoch_state.pause is None else "pausing"


EVENT_LOG_NAME = "coordinator"
_LATE = "it did not stop in time"


class WorldEventRecorder:
    """Observer of the coordinator's decisions that writes them to the event log."""

    def __init__(self, event_log: EventLog, job: str, *, again: bool, wall: Callable[[], float] = time.time) -> None:
        self._event_log, self._job, self._wall = event_log, job, wall
        self._seen: set[tuple[str, int, int, float | None]] = set()
        event_log.write(event_types.ProcessBegan(wall(), job, EVENT_LOG_NAME, again=again))

    def record_decision(
        self,
        snapshot: JobSnapshot,
        before: WorldState,
        event: world_state.WorldEvent,
        actions: Sequence[world_state.WorldAction],
        now: float,
    ) -> None:
        at = self._wall()
        breaking = next((action for action in actions if isinstance(action, world_state.BreakWorld)), None)
        causes = _causes([one for one in _flatten(event) if _is_fault(before, one, breaks=breaking is not None)])
        for one in causes:
            self._fault(snapshot, before.epoch, one, at, now)
        if breaking is not None and not causes and snapshot.world.restarts > before.restarts:
            self._event_log.write(event_types.FaultEvent(at, before.epoch, reason=breaking.reason))
        for action in actions:
            if isinstance(action, world_state.FormWorld):
                self._formed(action, at)
            elif isinstance(action, world_state.PauseWorld):
                want = "stop" if action.stop else "resize"
                notice = event_types.StopRequested(
                    at, action.epoch, want, action.reason, _requester(event), action.deadline_s - now
                )
                self._event_log.write(notice)

    def record_end(self, over: ExitReason, reason: str) -> None:
        self._event_log.write(event_types.ProcessEnded(self._wall(), self._job, EVENT_LOG_NAME, over.value, reason))
        self._event_log.close()

    def _formed(self, form: world_state.FormWorld, at: float) -> None:
        self._event_log.write(
            event_types.WorldFormed(
                at,
                form.epoch,
                len(form.nodes) * form.nproc,
                nodes=form.nodes,
                nproc=form.nproc,
                how=form.kind.value,
                reason=form.reason,
                restarts=form.restarts,
            )
        )

    def _fault(self, snapshot: JobSnapshot, epoch: int, event: world_state.WorldEvent, at: float, now: float) -> None:
        if isinstance(event, world_state.RankLost):
            record = snapshot.nodes.get(event.node)
            exited = () if record is None else record.status.exited_ranks
            since = next((lost.ended_at for lost in exited if lost.local_rank == event.local_rank), None)
            key = (event.node, event.generation, event.local_rank, since)
            if key not in self._seen:  # every later report of the node repeats it
                self._seen.add(key)
                kind = "late" if event.reason == _LATE else "process"
                self._event_log.write(
                    event_types.FaultEvent(at, epoch, event.node, event.local_rank, kind, event.reason, since)
                )
        elif isinstance(event, world_state.NodeLost | world_state.NodeLeft):
            record = snapshot.nodes.get(event.node)
            since = None if record is None else at - max(0.0, now - record.last_heartbeat)
            self._event_log.write(event_types.FaultEvent(at, epoch, event.node, -1, "node", event.reason, since))
        elif isinstance(event, world_state.RankFault):
            self._event_log.write(
                event_types.FaultEvent(at, epoch, event.node, event.local_rank, "error", event.reason)
            )
        elif isinstance(event, world_state.HangDetected):
            self._event_log.write(event_types.FaultEvent(at, epoch, event.node, event.local_rank, "hang", event.reason))


def _flatten(event: world_state.WorldEvent) -> Iterator[world_state.WorldEvent]:
    if isinstance(event, world_state.EventBatch):
        for one in event.events:
            yield from _flatten(one)
    else:
        yield event


def _causes(events: Sequence[world_state.WorldEvent]) -> Sequence[world_state.WorldEvent]:
    """Return the events that caused the fault: the losses, or else the first report of a rank.

    Errors and hangs reported together with a loss are its consequences, and so are those after the first report.
    """
    lost = [one for one in events if not isinstance(one, world_state.RankFault | world_state.HangDetected)]
    return lost or events[:1]


def _is_fault(before: WorldState, event: world_state.WorldEvent, *, breaks: bool) -> bool:
    """Whether the event broke a world, or lost a rank or node of a world that was forming."""
    if isinstance(event, world_state.RankFault | world_state.HangDetected):
        return breaks and event.epoch == before.epoch
    if breaks:
        return isinstance(event, world_state.RankLost | world_state.NodeLost | world_state.NodeLeft)
    if (
        not isinstance(event, world_state.RankLost | world_state.NodeLost)
        or before.phase.is_over
        or before.phase.is_running
    ):
        return False
    member = before.members.get(event.node)
    return member is not None and event.generation == member.generation and (member.has_ranks or before.epoch < 0)


def _requester(event: world_state.WorldEvent) -> str:
    kinds = {type(one) for one in _flatten(event)}
    if world_state.NodesPreempted in kinds:
        return "cluster"
    if kinds & {world_state.ResizeRequested, world_state.JobStopRequested}:
        return "person"
    return "policy"
