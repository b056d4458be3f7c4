"""Messages that follow from a node's state: orders to its processes, and its report. Pure."""

from __future__ import annotations

import msgspec

from elastic.control.control_messages import (
    ExitReason,
    NodeStatus,
    RankDesired,
    RankFailure,
    RankPhase,
    RankStatus,
    WorldRecord,
    WorldSpec,
)
from elastic.control.control_plane import RankAssignment, RankProgress
from elastic.control.epoch_state import EpochMessage, common_checkpoint, common_step
from elastic.supervisor.node_state import NodeState

replace = msgspec.structs.replace


def rank_desired(state: NodeState, token: str, now: float) -> RankDesired:
    """Return the message for the process with this token."""
    desired = _desired_without_faults(state, token, now)
    if not state.injections and not state.partitions:
        return desired
    return replace(desired, injections=state.injections, partitions=state.partitions)


def _desired_without_faults(state: NodeState, token: str, now: float) -> RankDesired:
    process = state.processes.get(token)
    if process is None:
        return RankDesired(exit=ExitReason.REFUSED, reason="another process has this rank's seat")
    acknowledged = process.status.number if process.status is not None else 0
    if state.exit is not None:
        return RankDesired(
            acknowledged, exit=state.exit, reason=state.reason, coordinator_unreachable=state.coordinator_unreachable
        )
    world, local_rank = state.world, process.local_rank
    if world is None or local_rank is None or process.assigned_epoch < world.epoch:
        return RankDesired(acknowledged, coordinator_unreachable=state.coordinator_unreachable)
    node_rank = world.ranked_nodes.index(state.node)
    assignment = RankAssignment(
        epoch=world.epoch,
        rank=node_rank * state.nproc + local_rank,
        world_size=len(world.ranked_nodes) * state.nproc,
        local_rank=local_rank,
        local_world_size=state.nproc,
        node_rank=node_rank,
        node_count=len(world.ranked_nodes),
        store=world.store,
        restarts=world.restarts,
        reason=world.reason,
        stores=world.stores,
        hang_s=world.hang_s,
        resume_from=world.resume_from,
        requested_step=world.requested_step,
        incarnation_epoch=world.incarnation_epoch,
        reached=world.reached,
    )
    return RankDesired(
        acknowledged,
        assignment,
        EpochMessage.of(state.epoch_state, now),
        coordinator_unreachable=state.coordinator_unreachable,
        standby=state.standby,
    )


def node_status(state: NodeState, now: float) -> NodeStatus:
    """Return the full report of this node.

    The caller sets :attr:`NodeState.number` to its number when it sends it.
    """
    ordered = sorted(state.rank_processes(), key=lambda process: process.local_rank or 0)
    assigned = ordered if state.exit is None else []
    current = state.epoch_state
    epoch = current.epoch
    statuses = [process.status_in(epoch) for process in assigned]
    known = [status for status in statuses if status is not None]
    inside = [status for status in known if status.phase is not RankPhase.FINISHED]
    is_complete = bool(assigned) and len(known) == len(assigned)
    return NodeStatus(
        number=state.number + 1,
        node=state.node,
        generation=state.generation,
        local_ranks=state.nproc,
        spawn_count=state.spawn_count,
        spares=len(state.warm_spares(now)),
        world=state.world,
        newest_world=_newer_world(state.newest_world, state.world),
        epoch_state=EpochMessage.of(current, now),
        size_request=state.size_request,
        ready=bool(assigned) and all(process.is_ready for process in assigned),
        paused=common_step(status.paused for status in inside) if is_complete else None,
        sealed=common_step(status.sealed for status in inside) if is_complete else None,
        checkpoint=common_checkpoint(status.checkpoint for status in inside) if is_complete else None,
        finished=is_complete and not inside,
        lagging_ranks=tuple(
            process.local_rank or 0
            for process, status in zip(assigned, statuses, strict=True)
            if current.pause is not None and (status is None or _is_behind(status, agreed=current.target is not None))
        ),
        exited_ranks=tuple(
            RankFailure(
                process.local_rank or 0,
                process.exit_description,
                never_joined=process.never_joined,
                ended_at=process.ended_at,
            )
            for process in assigned
            if process.exit_description is not None and not state.may_exit(process)
        ),
        faulty_ranks=tuple(
            RankFailure(process.local_rank or 0, fault, final=status.final, position=status.position)
            for process, status in zip(assigned, statuses, strict=True)
            if status is not None and (fault := _reported_fault(status, broken=current.is_broken)) is not None
        ),
        rank_progress=tuple(_progress_in(epoch, process.status) for process in ordered),
        silent_s=tuple(process.silent_s(now) for process in assigned),
        requests=tuple(request for _, request in state.requests),
        drain_within_s=None if state.drain_deadline is None else max(0.0, state.drain_deadline - now),
        drain_reason=state.drain_reason,
        leave_reason=state.leave_reason,
        coordinator=state.coordinator,
        last_command=state.last_command,
        store=state.store,
        term=state.leader[0],
        leader=state.leader[1],
        peer=state.peer,
    )


def _progress_in(epoch: int, status: RankStatus | None) -> RankProgress | None:
    """Return a rank's progress, without what it has sealed in another world than ``epoch``."""
    progress = None if status is None else status.progress
    if status is None or progress is None or status.epoch == epoch:
        return progress
    return replace(progress, has_sealed=False, base_step=None)


def _newer_world(record: WorldRecord | None, own: WorldSpec | None) -> WorldRecord | None:
    return None if record is None or (own is not None and record.epoch <= own.epoch) else record


def _is_behind(status: RankStatus, *, agreed: bool) -> bool:
    if status.phase is RankPhase.FINISHED:
        return False
    return (status.sealed if agreed else status.paused) is None


def _reported_fault(status: RankStatus, *, broken: bool) -> str | None:
    if status.fault is None and not broken and status.phase is RankPhase.READY and status.sealed is None:
        return "it left its world without a reported fault"
    return status.fault


def comparable_rank_desired(desired: RankDesired) -> RankDesired:
    """Return the message without values that change with time, for comparison."""
    return replace(desired, epoch_state=desired.epoch_state.without_times())


def comparable_node_status(status: NodeStatus) -> NodeStatus:
    """Return the report without values that change with time, for comparison."""
    return replace(
        status,
        number=0,
        rank_progress=tuple(
            RankProgress(-1, has_sealed=one is not None and one.has_sealed) for one in status.rank_progress
        ),
        silent_s=(),
        drain_within_s=None if status.drain_within_s is None else 0.0,
        epoch_state=status.epoch_state.without_times(),
    )
