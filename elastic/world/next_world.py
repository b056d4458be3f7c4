"""The state and actions that follow from one event. Pure.

After a loss, the decision tries these in order:

1. promote a spare process of the node, or use a standby node
2. start a new process on the same node
3. wait for a replacement node
4. form a smaller world
5. stop the job

Before a planned change (more nodes, preempted nodes), all ranks pause at a common step and seal it.

Nodes of an earlier world hold the job's state in memory. The next world has at least one of them, and waits while its
ranks restart even if other nodes are ready. The exception: all of them are repeat offenders.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from elastic.world import world_transition
from elastic.world.scaling_policy import ScalingPolicy
from elastic.world.world_state import (
    EventBatch,
    FinishJob,
    HangDetected,
    JobStopRequested,
    NodeFinished,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeMember,
    NodeReady,
    NodeSealed,
    NodesPreempted,
    PauseWorld,
    RankFault,
    RankLost,
    ReleaseNode,
    RepeatedError,
    RequestedStep,
    RequestNodes,
    ResizeRequested,
    RespawnStragglers,
    StepSealed,
    Tick,
    WorldAction,
    WorldEvent,
    WorldPhase,
    WorldState,
)
from elastic.world.world_transition import WorldTransition
from peerstore.sizes_and_durations import show_count

__all__ = ["apply_event", "initial_world", "next_world", "reconcile_world"]


def initial_world(
    policy: ScalingPolicy, *, nproc: int, now_s: float, requested_step: RequestedStep | None = None
) -> WorldState:
    """Return a job without members.

    Its worlds restore ``requested_step`` until one of them has sealed a step.
    """
    return WorldState(nproc=nproc, formed_s=now_s, target_nodes=policy.initial_nodes, requested_step=requested_step)


def next_world(
    world: WorldState, event: WorldEvent, policy: ScalingPolicy, now_s: float
) -> tuple[WorldState, tuple[WorldAction, ...]]:
    """Return the world and the actions that follow from ``event`` and from the time since the last event.

    ``now_s`` is on any monotonic clock. All times in events, actions and the world are on the same clock. ``world`` is
    not changed.
    """
    transition = WorldTransition(world, policy, now_s)
    apply_event(transition, event)
    if not world.phase.is_over:
        reconcile_world(transition)
    return transition.world, tuple(transition.actions)


_MAX_STANDBY_STARTS = 3
"""Starts of one local rank before the node is ready, after which a node outside the world is released."""


def apply_event(transition: WorldTransition, event: WorldEvent) -> None:
    """Apply an event to the world of a transition, unless the job is over."""
    if not transition.world.phase.is_over:
        _HANDLERS[type(event)](transition, event)


def _apply_batch(transition: WorldTransition, event: EventBatch) -> None:
    for inner in event.events:
        apply_event(transition, inner)


def _joined(transition: WorldTransition, event: NodeJoined) -> None:
    world = transition.world
    if event.generation <= world.departed.get(event.node, -1):
        return
    before = world.members.get(event.node)
    if before is not None:
        if event.generation <= before.generation:
            return
        transition.lose_node(before, "its supervisor began again")
        if transition.world.phase.is_over:
            return
    if event.local_ranks != world.nproc:
        transition.mark_departed(event.node, event.generation)
        reason = f"it runs {event.local_ranks} ranks, all others run {world.nproc}"
        transition.emit(ReleaseNode(event.node, event.generation, reason, force=True))
        return
    transition.update_member(
        NodeMember(
            node=event.node,
            generation=event.generation,
            join_order=world.join_count,
            joined_s=transition.now_s,
            spawn_count=max(event.spawn_count, world.nproc),
            spares=event.spares,
            ready_deadline_s=transition.now_s + transition.policy.restart_timeout_s,
        )
    )
    transition.update(join_count=world.join_count + 1, requested_nodes=max(0, world.requested_nodes - 1))


def _ready(transition: WorldTransition, event: NodeReady) -> None:
    member = transition.member_of_generation(event.node, event.generation)
    if member is None or event.spawn_count < member.spawn_count + len(member.pending_replacements):
        return
    if event.epoch < member.epoch:
        if member.has_ranks and event.spawn_count > member.spawn_count:
            transition.break_world(f"processes of {member.node} were replaced without a notice", member.node)
        return
    if member.has_ranks and transition.world.phase is WorldPhase.RUNNING:
        transition.break_world(f"the ranks of {member.node} have left the world without a reported fault", member.node)
        if transition.world.phase.is_over:
            return
        member = transition.world.members[member.node]
        if event.spawn_count < member.spawn_count + len(member.pending_replacements):
            return
    transition.update_member(
        member,
        ready=True,
        spawn_count=event.spawn_count,
        pending_replacements=(),
        spares=event.spares,
        ready_deadline_s=None,
        respawn_requested=False,
    )


def _sealed(transition: WorldTransition, event: NodeSealed) -> None:
    member = transition.member_of_generation(event.node, event.generation)
    if member is None or not member.has_ranks or event.epoch != transition.world.epoch:
        return
    if transition.world.phase is WorldPhase.PAUSING:
        if not member.sealed:
            first, known = not transition.world.sealed_nodes, transition.world.sealed_step
            same = event.checkpoint if first or event.checkpoint == known else None
            transition.update(sealed_nodes=transition.world.sealed_nodes + 1, sealed_step=same)
        transition.update_member(member, sealed=True)
    elif transition.world.phase is WorldPhase.RUNNING:
        # The node has stopped for an earlier coordinator. Break the world, so that the change is requested again.
        transition.break_world(f"{event.node} stopped for a change that the last coordinator wanted", counted=False)


def _step_sealed(transition: WorldTransition, event: StepSealed) -> None:
    if event.epoch == transition.world.epoch:
        transition.update(requested_step=None)


def _finished(transition: WorldTransition, event: NodeFinished) -> None:
    member = transition.member_of_generation(event.node, event.generation)
    if (
        member is not None
        and member.has_ranks
        and event.epoch == transition.world.epoch
        and transition.world.phase.is_running
    ):
        transition.update(finished_nodes=transition.world.finished_nodes | {event.node})


def _lost(transition: WorldTransition, event: NodeLost | NodeLeft) -> None:
    member = transition.world.members.get(event.node)
    if member is None or event.generation < member.generation:
        transition.mark_departed(event.node, event.generation)
        return
    transition.lose_node(member, event.reason, blame=isinstance(event, NodeLost), generation=event.generation)
    if isinstance(event, NodeLeft) and transition.world.epoch < 0 and not member.is_draining:
        replaced_by_s = transition.now_s + transition.policy.faulty_scale_down_timeout_s
        transition.update(reason=f"{member.node} left: {event.reason}", replacement_deadline_s=replaced_by_s)


def _rank_lost(transition: WorldTransition, event: RankLost) -> None:
    member = transition.member_of_generation(event.node, event.generation)
    if (
        member is None
        or event.spawn_count < member.spawn_count
        or _is_replaced(member, event.local_rank, event.spawn_count)
    ):
        return
    if event.never_joined and transition.world.epoch < 0:
        transition.fail_job(event.reason, "not retried", never_joined=True)
        return
    world, description = transition.world, f"rank {event.local_rank} of {event.node} was lost: {event.reason}"
    if world.phase.is_running and member.has_ranks:
        if member.node in world.finished_nodes or (member.sealed and (world.stopping or member.is_draining)):
            return  # the node has finished its work in this world
        transition.break_world(description, member.node, event.spawn_count)
    else:
        _count_failed_start(transition, member, event, description)
    _replace(transition, event.node, event.local_rank, event.spawn_count)


def _is_replaced(member: NodeMember, local_rank: int, spawn_count: int) -> bool:
    """Whether a pending replacement covers the process that was lost at ``spawn_count``."""
    return any(
        replacement.local_rank == local_rank and replacement.spawn_count >= spawn_count
        for replacement in member.pending_replacements
    )


def _count_failed_start(transition: WorldTransition, member: NodeMember, event: RankLost, description: str) -> None:
    """Count a process that ended before its node was ready, or release the standby node.

    Such a loss breaks no world, but without a limit it could repeat forever.
    """
    tries = 1 + sum(
        replacement.local_rank == event.local_rank and not replacement.full_restart
        for replacement in member.pending_replacements
    )
    if not transition.world.phase.is_running and (member.has_ranks or transition.world.epoch < 0):
        if tries > transition.world.spawn_attempts:
            transition.update(spawn_attempts=tries)
            transition.count_restart(description, member.node, event.spawn_count)
    elif tries >= _MAX_STANDBY_STARTS:
        transition.release_node(member, f"{description}, {tries} times before it was ready", force=True)


def _replace(transition: WorldTransition, node: str, local_rank: int, spawn_count: int) -> None:
    """Replace a lost process, unless its replacement is pending or the job has ended."""
    member = transition.world.members.get(node)
    if member is not None and not transition.world.phase.is_over and not _is_replaced(member, local_rank, spawn_count):
        transition.replace_ranks(member, (local_rank,), spawn_count)


def _rank_fault(transition: WorldTransition, event: RankFault) -> None:
    member = transition.member_of_generation(event.node, event.generation)
    if member is None or not member.has_ranks or event.epoch != transition.world.epoch:
        return
    if member.sealed and (transition.world.stopping or member.is_draining):
        return
    description = f"rank {event.local_rank} of {event.node} reported a fault: {event.reason}"
    breaks = transition.world.phase.is_running
    repeated = _repeated_error(transition.world, event) if breaks else None
    permanent = repeated is not None and repeated.is_permanent
    transition.break_world(description, "" if event.final or permanent else event.node)
    if transition.world.phase.is_over:
        return
    if event.final:
        transition.fail_job(description, "not retried: another attempt would fail the same way")
    elif repeated is not None and permanent:
        transition.fail_job(description, f"{repeated.count} in a row failed in the same way {repeated.position}")
    elif breaks:
        transition.update(repeated_error=repeated)


def _repeated_error(world: WorldState, event: RankFault) -> RepeatedError | None:
    """Return the error with its number of consecutive worlds; ``None`` if a lost rank may have caused it."""
    if event.position is None:
        return None
    if world.repeated_error is None:
        return RepeatedError(event.reason, event.position)
    return world.repeated_error.next(event.reason, event.position)


def _hang(transition: WorldTransition, event: HangDetected) -> None:
    if event.epoch != transition.world.epoch or not transition.world.phase.is_running:
        return
    member = transition.world.members.get(event.node)
    known = member is not None and member.has_ranks
    subject = f"rank {event.local_rank} of {event.node}" if known else "the job"
    leave_s = transition.policy.leave_hang_s
    transition.break_world(f"{subject} hangs: {event.reason}", event.node if known else "", leave_s=leave_s)
    if member is not None and known and 0 <= event.local_rank < transition.world.nproc:
        _replace(transition, event.node, event.local_rank, member.spawn_count)


def _nodes_preempted(transition: WorldTransition, event: NodesPreempted) -> None:
    for node in event.nodes:
        member = transition.world.members.get(node)
        if member is None or event.deadline_s < member.joined_s:
            continue  # not a member, or joined after this preemption
        if member.has_ranks and not member.is_draining:
            transition.update(target_nodes=transition.world.target_nodes - 1)
        leave_by_s = (
            event.deadline_s if member.drain_deadline_s is None else min(event.deadline_s, member.drain_deadline_s)
        )
        transition.update_member(member, drain_deadline_s=leave_by_s)


def _resize_requested(transition: WorldTransition, event: ResizeRequested) -> None:
    if event.nodes is None or transition.policy.largest_size_within(event.nodes):
        # A resize uses the nodes that are ready now and does not wait for more.
        transition.update(
            max_nodes=event.nodes, growth_possible_since_s=transition.now_s - transition.policy.scaling_timeout_s
        )


def _stop_requested(transition: WorldTransition, event: JobStopRequested) -> None:
    known_s = transition.world.pause_deadline_s
    until_s = known_s if event.deadline_s is None else max(event.deadline_s, transition.now_s)
    if until_s is not None and known_s is not None:
        until_s = min(until_s, known_s)
    if transition.world.stopping and until_s == known_s:
        return
    transition.update(stopping=True, reason=event.reason, pause_deadline_s=until_s)
    if transition.world.phase is WorldPhase.PAUSING and until_s is not None:
        transition.emit(PauseWorld(transition.world.epoch, event.reason, until_s, stop=True))


def _tick(transition: WorldTransition, event: Tick) -> None:
    pass


_HANDLERS: dict[type, Callable[[WorldTransition, Any], None]] = {
    NodeJoined: _joined,
    NodeReady: _ready,
    NodeSealed: _sealed,
    StepSealed: _step_sealed,
    NodeFinished: _finished,
    NodeLost: _lost,
    NodeLeft: _lost,
    RankLost: _rank_lost,
    RankFault: _rank_fault,
    HangDetected: _hang,
    NodesPreempted: _nodes_preempted,
    ResizeRequested: _resize_requested,
    JobStopRequested: _stop_requested,
    Tick: _tick,
    EventBatch: _apply_batch,
}


def reconcile_world(transition: WorldTransition) -> None:
    """Decide on deadlines, and follow the phases until none leads to another."""
    _handle_deadlines(transition)
    before = None
    while before is not transition.world.phase and not transition.world.phase.is_over:
        before = transition.world.phase
        _STEPS[before](transition)
    transition.update(next_tick_s=None if transition.world.phase.is_over else min(_timers(transition), default=None))


def _handle_deadlines(transition: WorldTransition) -> None:
    for node in list(transition.world.members):
        member = transition.world.members.get(node)
        if member is None or transition.world.phase.is_over:
            continue
        if member.is_draining and not member.has_ranks:
            transition.release_node(member, "preempted")
        elif transition.world.phase is not WorldPhase.PAUSING and _is_past(member.drain_deadline_s, transition):
            transition.lose_node(member, "preempted, and its deadline has passed", force=True)
        elif _is_past(member.ready_deadline_s, transition):
            if member.respawn_requested:
                limit_s = transition.policy.restart_timeout_s
                transition.lose_node(
                    member, f"its ranks did not come, nor others in their place within {limit_s:g} s", force=True
                )
            else:
                _respawn_stragglers(transition, member)


def _is_past(time_s: float | None, transition: WorldTransition) -> bool:
    return time_s is not None and time_s <= transition.now_s


def _respawn_stragglers(transition: WorldTransition, member: NodeMember) -> None:
    transition.emit(RespawnStragglers(member.node, member.generation))
    transition.update_member(
        member, respawn_requested=True, ready_deadline_s=transition.now_s + transition.policy.restart_timeout_s
    )
    transition.update(has_respawned=True)


def _finish_if_done(transition: WorldTransition) -> bool:
    """Finish the job if all ranks have finished, even during a pause. Return whether it finished."""
    if not transition.world.finished_nodes.issuperset(transition.world.ranked_nodes):
        return False
    transition.update(phase=WorldPhase.FINISHED, reason="finished", growth_possible_since_s=None, pause_deadline_s=None)
    transition.emit(FinishJob())
    return True


def _run(transition: WorldTransition) -> None:
    if _finish_if_done(transition):
        return
    world = transition.world
    if world.stopping:
        _pause(transition, world.reason, stop=True)
        return
    ready = [
        member for member in world_transition.available_members(transition.world) if member.has_ranks or member.ready
    ]
    leaving = sorted(
        (member for member in transition.members_with_ranks if member.is_draining), key=lambda member: member.join_order
    )
    possible = _possible_size(transition, ready)
    if leaving:
        _leave_preempted(transition, leaving, possible)
    elif len(transition.members_with_ranks) > transition.max_nodes:
        _pause(transition, f"at most {transition.max_nodes} nodes are wanted")
    elif possible > world.size or _can_replace_offender(transition, ready):
        transition.update(
            growth_possible_since_s=transition.now_s
            if world.growth_possible_since_s is None
            else world.growth_possible_since_s
        )
        if transition.growth_allowed_s <= transition.now_s:
            _pause(
                transition,
                f"{show_count(possible, 'node is', 'nodes are')} available"
                if possible > world.size
                else "an offender is replaced",
            )
    else:
        transition.update(growth_possible_since_s=None)


def _possible_size(transition: WorldTransition, ready: list[NodeMember]) -> int:
    """Return the size that these members allow. Repeat offenders count only up to the current size."""
    avoid = transition.avoided()
    preferred = [member for member in ready if member.node not in avoid]
    kept = min(transition.world.size, transition.max_nodes, len(ready))
    return max(
        transition.policy.largest_size_within(min(transition.max_nodes, len(preferred))),
        transition.policy.largest_size_within(kept),
    )


def _can_replace_offender(transition: WorldTransition, ready: list[NodeMember]) -> bool:
    avoid = transition.avoided()
    bad = any(member.has_ranks and member.node in avoid for member in ready)
    return bad and any(not member.has_ranks and member.node not in avoid for member in ready)


def _leave_preempted(transition: WorldTransition, leaving: list[NodeMember], possible: int) -> None:
    first_s = min(member.drain_deadline_s for member in leaving if member.drain_deadline_s is not None)
    names = ", ".join(member.node for member in leaving)
    if possible:
        _pause(transition, f"{names} preempted")
        return
    least = transition.policy.smallest_size
    _request_nodes(transition, least, f"{names} preempted, too few are left")
    if first_s - transition.policy.graceful_shutdown_timeout_s <= transition.now_s:
        rest = len(transition.members_with_ranks) - len(leaving)
        transition.update(stopping=True)
        _pause(transition, f"{names} preempted: {_nodes_left(rest, least)}", stop=True)


def _request_nodes(transition: WorldTransition, size: int, reason: str) -> None:
    short = size - len(world_transition.available_members(transition.world))
    if short > transition.world.requested_nodes:
        transition.emit(RequestNodes(short - transition.world.requested_nodes, reason))
        transition.update(requested_nodes=short)


def _pause(transition: WorldTransition, reason: str, *, stop: bool = False) -> None:
    """Pause the ranks at a common step, or break the world if the policy allows no time for a pause."""
    grace_s = transition.policy.graceful_shutdown_timeout_s
    transition.update(reason=reason)
    if grace_s <= 0:
        transition.break_world(reason, counted=False)
        return
    until_s = min(
        transition.now_s + grace_s, transition.world.pause_deadline_s or math.inf, _first_to_leave_s(transition)
    )
    transition.update(phase=WorldPhase.PAUSING, pause_deadline_s=until_s)
    transition.emit(PauseWorld(transition.world.epoch, reason, until_s, stop))


def _first_to_leave_s(transition: WorldTransition) -> float:
    return min(
        (member.drain_deadline_s for member in transition.members_with_ranks if member.drain_deadline_s is not None),
        default=math.inf,
    )


def _continue_pause(transition: WorldTransition) -> None:
    if _finish_if_done(transition):
        return
    world = transition.world
    if world.stopping:
        late = [
            member
            for member in transition.members_with_ranks
            if not member.has_stopped and member.node not in world.finished_nodes
        ]
    else:
        late = [
            member
            for member in transition.members_with_ranks
            if not (member.has_stopped if member.is_draining else member.ready)
        ]
    until_s = math.inf if world.pause_deadline_s is None else world.pause_deadline_s
    sooner_s = min(until_s, _first_to_leave_s(transition))
    if not late:
        _complete_pause(transition)
    elif sooner_s <= transition.now_s:
        _fail_pause(transition, late)
    elif sooner_s < until_s:
        transition.update(pause_deadline_s=sooner_s)
        transition.emit(PauseWorld(world.epoch, world.reason, sooner_s, world.stopping))


def _complete_pause(transition: WorldTransition) -> None:
    sealed = transition.world.sealed_step if transition.world.sealed_nodes == transition.world.size else None
    if transition.world.stopping:
        transition.stop_job(transition.world.reason, sealed)
        return
    transition.update(phase=WorldPhase.FORMING, pause_deadline_s=None, finished_nodes=frozenset(), failed_pauses=0)
    if sealed is not None:
        transition.update(resume_from=sealed, requested_step=None)
    for member in transition.members_with_ranks:
        if member.is_draining:  # only now, because its supervisor records the step that all ranks have sealed
            transition.release_node(member, "preempted", sealed_step=sealed)
    transition.update(replacement_deadline_s=transition.now_s + transition.policy.faulty_scale_down_timeout_s)


def _fail_pause(transition: WorldTransition, late: list[NodeMember]) -> None:
    transition.update(failed_pauses=transition.world.failed_pauses + 1)
    slow = {member.node for member in late}
    names = ", ".join(sorted(slow))
    for member in transition.members_with_ranks:
        if member.is_draining and member in late:
            transition.release_node(member, "preempted, and its deadline has passed", force=True)
        elif member.is_draining:
            transition.release_node(member, "preempted")
    blamed = late[0].node if len(late) == 1 and not late[0].is_draining else ""
    transition.break_world(f"{transition.world.reason}, and the ranks of {names} did not stop in time", blamed)
    for member in transition.members_with_ranks:
        if (
            member.node in slow
            and not member.ready
            and not member.pending_replacements
            and not transition.world.phase.is_over
        ):
            _respawn_stragglers(transition, member)


def _form_or_wait(transition: WorldTransition) -> None:
    world = transition.world
    here = world_transition.available_members(world)
    ready = [member for member in here if member.ready]
    unready = [member for member in here if member.has_ranks and not member.ready]
    if world.epoch >= 0 and not world.stopping:
        _request_nodes(transition, _goal_size(transition), world.reason)
    if world.stopping:
        transition.stop_job(world.reason, world.resume_from)
    elif any(not member.is_respawning for member in unready):
        transition.update(phase=WorldPhase.FORMING)  # these ranks are leaving the broken world
    elif not _form(transition, ready, at_least=_goal_size(transition)):
        if world.epoch < 0:
            _form_first_world(transition, ready)
        else:
            _wait(transition, ready, unready)


def _goal_size(transition: WorldTransition) -> int:
    """Return the size that is worth waiting for."""
    return (
        transition.policy.largest_size_within(min(transition.max_nodes, transition.world.target_nodes))
        or transition.policy.smallest_size
    )


def _largest_size(transition: WorldTransition) -> int:
    """Return the largest size allowed now. Before the growth delay has passed, a new world does not grow."""
    grows = transition.world.epoch < 0 or transition.growth_allowed_s <= transition.now_s
    return (
        transition.max_nodes if grows else min(transition.max_nodes, max(transition.world.size, _goal_size(transition)))
    )


def _form(transition: WorldTransition, ready: list[NodeMember], *, at_least: int) -> bool:
    """Form the largest world of ready members that is allowed; return whether it was formed.

    Repeat offenders have no rank if the goal size is reached without them.
    """
    avoid, goal = transition.avoided(), _goal_size(transition)
    preferred = [member for member in ready if member.node not in avoid]
    size = transition.policy.largest_size_within(min(_largest_size(transition), len(preferred)))
    if size < goal:
        size = transition.policy.largest_size_within(min(goal, len(ready)))
    if size == 0 or size < at_least:
        return False
    chosen = world_transition.members_by_preference(ready, transition.world, avoid)[:size]
    holders = [member for member in world_transition.state_holders(transition.world) if member.node not in avoid]
    if not any(member in chosen for member in holders):
        if any(member.has_ranks and not member.ready for member in holders):
            return False  # wait until its ranks have restarted, or until it counts as lost
        chosen[-1:] = [member for member in holders if member in ready][:1] or chosen[-1:]
    transition.form_world(chosen)
    return True


def _form_first_world(transition: WorldTransition, ready: list[NodeMember]) -> None:
    policy, world = transition.policy, transition.world
    if not policy.largest_size_within(min(transition.max_nodes, len(ready))):
        here = len(world_transition.available_members(world))
        waits = world.reason != "" and here < policy.smallest_size  # for a replacement of a node that left
        if waits and _is_past(world.replacement_deadline_s, transition):
            transition.fail_job(world.reason, _nodes_left(here, policy.smallest_size))
            return
        transition.update(
            phase=WorldPhase.FORMING, replacement_deadline_s=world.replacement_deadline_s if waits else None
        )
        if policy.startup_timeout_s is not None and world.formed_s + policy.startup_timeout_s <= transition.now_s:
            came = f"{len(ready)} of the {policy.smallest_size} nodes needed were ready"
            limit_s = policy.startup_timeout_s
            transition.fail_job(f"within {limit_s:g} s, {came}", f"startup_timeout_s is {limit_s:g} s")
        return
    if world.replacement_deadline_s is None:
        transition.update(replacement_deadline_s=transition.now_s + policy.scaling_timeout_s)
    if _is_past(transition.world.replacement_deadline_s, transition):
        _form(transition, ready, at_least=1)


def _wait(transition: WorldTransition, ready: list[NodeMember], unready: list[NodeMember]) -> None:
    """Wait for new processes, then for new nodes. After the deadline, form any allowed world.

    If too few nodes are ready, wait longer if enough are members; otherwise stop the job.
    """
    policy, here = transition.policy, world_transition.available_members(transition.world)
    ready_size = policy.largest_size_within(min(_largest_size(transition), len(ready)))
    if policy.largest_size_within(min(_largest_size(transition), len(ready) + len(unready))) > ready_size:
        transition.update(phase=WorldPhase.FORMING)
    elif not _is_past(transition.world.replacement_deadline_s, transition):
        transition.update(phase=WorldPhase.WAITING)
    elif not _form(transition, ready, at_least=1):
        least = policy.smallest_size
        if len(here) >= least:
            transition.update(phase=WorldPhase.WAITING)
        else:
            why = f"{transition.world.reason}; {_nodes_left(len(here), least)}"
            transition.stop_job(why, transition.world.resume_from)


_STEPS = {
    WorldPhase.FORMING: _form_or_wait,
    WorldPhase.WAITING: _form_or_wait,
    WorldPhase.RUNNING: _run,
    WorldPhase.PAUSING: _continue_pause,
}


def _timers(transition: WorldTransition) -> list[float]:
    """Return the future times at which a decision is due without any event."""
    world, policy = transition.world, transition.policy
    times_s = [world.replacement_deadline_s, world.pause_deadline_s]
    times_s += [
        time_s for member in world.members.values() for time_s in (member.drain_deadline_s, member.ready_deadline_s)
    ]
    if world.phase is WorldPhase.RUNNING:
        times_s += [fault.at_s + policy.eval_period_s for fault in world.node_faults if world.standby]
        times_s += [transition.growth_allowed_s, _first_to_leave_s(transition) - policy.graceful_shutdown_timeout_s]
    if world.epoch < 0 and policy.startup_timeout_s is not None:
        times_s.append(world.formed_s + policy.startup_timeout_s)
    return [time_s for time_s in times_s if time_s is not None and transition.now_s < time_s < math.inf]


def _nodes_left(count: int, least: int) -> str:
    return f"{show_count(count, 'node is', 'nodes are')} left, at least {show_count(least, 'is', 'are')} needed"
