"""``next_world``: the state and actions that follow from one event, and a world rebuilt from reports. Pure.

On a loss, in this order: a spare takes the place (a warm process of the node, a node that stands by), a process is
started anew where it was, a replacement is waited for, the world becomes smaller, the job stops. A change that was
wanted (more nodes, nodes preempted) first lets all ranks come to one step and seal.

The job's memory is found through the nodes that were in a world before. So one of them at least is in the next, and
is waited for while its ranks are started anew, also where others are ready; unless all of them are to be avoided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from elastic.world import world_transition
from elastic.world.scaling_policy import ScalingPolicy
from elastic.world.world_state import (
    BreakWorld,
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
    RejoinReport,
    ReleaseNode,
    RepeatedError,
    RequestedStep,
    RequestNodes,
    ResizeRequested,
    RespawnStragglers,
    SealedStep,
    StepSealed,
    Tick,
    WorldAction,
    WorldEvent,
    WorldPhase,
    WorldState,
)
from elastic.world.world_transition import WorldTransition, replace

__all__ = ["initial_world", "next_world", "rebuild_world"]


def initial_world(
    policy: ScalingPolicy, *, nproc: int, now_s: float, requested_step: RequestedStep | None = None
) -> WorldState:
    """A job nobody has joined yet. Its worlds restore ``requested_step`` until one of them has sealed a step."""
    return WorldState(nproc=nproc, formed_s=now_s, target_nodes=policy.initial_nodes, requested_step=requested_step)


def next_world(
    world: WorldState, event: WorldEvent, policy: ScalingPolicy, now_s: float
) -> tuple[WorldState, tuple[WorldAction, ...]]:
    """What follows from ``event``, and from time having passed since the last one.

    ``now_s`` is any clock that does not go back; all times in events, actions and the world are on it. The world that
    was given is as good as before.
    """
    turn = WorldTransition(world, policy, now_s)
    apply_event(turn, event)
    if not world.phase.is_over:
        reconcile_world(turn)
    return turn.world, tuple(turn.actions)


_TRIES_OF_A_STANDBY = 3
"""A node outside the world whose processes end so often before they are ready is sent away."""


def apply_event(turn: WorldTransition, event: WorldEvent) -> None:
    if not turn.world.phase.is_over:
        _HANDLERS[type(event)](turn, event)


def _several(turn: WorldTransition, event: EventBatch) -> None:
    for one in event.events:
        apply_event(turn, one)


def _joined(turn: WorldTransition, event: NodeJoined) -> None:
    world = turn.world
    if event.generation <= world.departed.get(event.node, -1):
        return
    before = world.members.get(event.node)
    if before is not None:
        if event.generation <= before.generation:
            return
        turn.lose_node(before, "its supervisor began again")
        if turn.world.phase.is_over:
            return
    if event.local_ranks != world.nproc:
        turn.world.departed[event.node] = event.generation
        reason = f"it runs {event.local_ranks} ranks, all others run {world.nproc}"
        turn.emit(ReleaseNode(event.node, event.generation, reason, force=True))
        return
    turn.update_member(
        NodeMember(
            node=event.node,
            generation=event.generation,
            join_order=world.join_count,
            joined_s=turn.now_s,
            spawn_count=max(event.spawn_count, world.nproc),
            spares=event.spares,
            ready_deadline_s=turn.now_s + turn.policy.restart_timeout_s,
        )
    )
    turn.update(join_count=world.join_count + 1, requested_nodes=max(0, world.requested_nodes - 1))


def _ready(turn: WorldTransition, event: NodeReady) -> None:
    member = turn.member_of_generation(event.node, event.generation)
    if member is None or event.spawn_count < member.spawn_count + len(member.pending_replacements):
        return
    if event.epoch < member.epoch:
        if member.has_ranks and event.spawn_count > member.spawn_count:
            turn.break_world(f"processes of {member.node} were replaced, and nobody was told", member.node)
        return
    if member.has_ranks and turn.world.phase is WorldPhase.RUNNING:
        turn.break_world(f"the ranks of {member.node} have left the world without being asked", member.node)
        if turn.world.phase.is_over:
            return
        member = turn.world.members[member.node]
        if event.spawn_count < member.spawn_count + len(member.pending_replacements):
            return
    turn.update_member(
        member,
        ready=True,
        spawn_count=event.spawn_count,
        pending_replacements=(),
        spares=event.spares,
        ready_deadline_s=None,
        respawn_requested=False,
    )


def _sealed(turn: WorldTransition, event: NodeSealed) -> None:
    member = turn.member_of_generation(event.node, event.generation)
    if member is None or not member.has_ranks or event.epoch != turn.world.epoch:
        return
    if turn.world.phase is WorldPhase.PAUSING:
        if not member.sealed:
            first, known = not turn.world.sealed_nodes, turn.world.sealed_step
            same = event.checkpoint if first or event.checkpoint == known else None
            turn.update(sealed_nodes=turn.world.sealed_nodes + 1, sealed_step=same)
        turn.update_member(member, sealed=True)
    elif turn.world.phase is WorldPhase.RUNNING:
        # It goes no further, and who has asked it to stop is no more: what was wanted is to be asked for again.
        turn.break_world(f"{event.node} stopped for a change that the last coordinator wanted", counted=False)


def _step_sealed(turn: WorldTransition, event: StepSealed) -> None:
    if event.epoch == turn.world.epoch:
        turn.update(requested_step=None)


def _finished(turn: WorldTransition, event: NodeFinished) -> None:
    member = turn.member_of_generation(event.node, event.generation)
    if member is not None and member.has_ranks and event.epoch == turn.world.epoch and turn.world.phase.is_running:
        turn.update(finished_nodes=turn.world.finished_nodes | {event.node})


def _lost(turn: WorldTransition, event: NodeLost | NodeLeft) -> None:
    member = turn.world.members.get(event.node)
    if member is None or event.generation < member.generation:
        turn.world.departed[event.node] = max(event.generation, turn.world.departed.get(event.node, -1))
        return
    turn.lose_node(member, event.reason, blame=isinstance(event, NodeLost), life=event.generation)
    if isinstance(event, NodeLeft) and turn.world.epoch < 0 and not member.is_draining:
        replaced_by_s = turn.now_s + turn.policy.faulty_scale_down_timeout_s
        turn.update(reason=f"{member.node} left: {event.reason}", replacement_deadline_s=replaced_by_s)


def _rank_lost(turn: WorldTransition, event: RankLost) -> None:
    member = turn.member_of_generation(event.node, event.generation)
    if (
        member is None
        or event.spawn_count < member.spawn_count
        or _is_replaced(member, event.local_rank, event.spawn_count)
    ):
        return
    if event.never_joined and turn.world.epoch < 0:
        turn.fail_job(event.reason, "not retried", never_joined=True)
        return
    world, what = turn.world, f"rank {event.local_rank} of {event.node} was lost: {event.reason}"
    if world.phase.is_running and member.has_ranks:
        if member.node in world.finished_nodes or (member.sealed and (world.stopping or member.is_draining)):
            return  # it had nothing left to do here
        turn.break_world(what, member.node, event.spawn_count)
    else:
        _lost_again(turn, member, event, what)
    _replace(turn, event.node, event.local_rank, event.spawn_count)


def _is_replaced(member: NodeMember, local_rank: int, births: int) -> bool:
    """Whether the process that was lost when there had been so many is one that is known to be."""
    return any(owed.local_rank == local_rank and owed.spawn_count >= births for owed in member.pending_replacements)


def _lost_again(turn: WorldTransition, member: NodeMember, event: RankLost, what: str) -> None:
    """A process ended before its node was ready: nothing was broken by that, but it may go on for ever."""
    tries = 1 + sum(
        owed.local_rank == event.local_rank and not owed.full_restart for owed in member.pending_replacements
    )
    if not turn.world.phase.is_running and (member.has_ranks or turn.world.epoch < 0):
        if tries > turn.world.spawn_attempts:
            turn.update(spawn_attempts=tries)
            turn.count_restart(what, member.node, event.spawn_count)
    elif tries >= _TRIES_OF_A_STANDBY:
        turn.release_node(member, f"{what}, {tries} times before it was ready", cut=True)


def _replace(turn: WorldTransition, node: str, local_rank: int, births: int) -> None:
    """Unless it has been decided by now to replace it, or not to go on."""
    member = turn.world.members.get(node)
    if member is not None and not turn.world.phase.is_over and not _is_replaced(member, local_rank, births):
        turn.replace_ranks(member, (local_rank,), births)


def _rank_fault(turn: WorldTransition, event: RankFault) -> None:
    member = turn.member_of_generation(event.node, event.generation)
    if member is None or not member.has_ranks or event.epoch != turn.world.epoch:
        return
    if member.sealed and (turn.world.stopping or member.is_draining):
        return
    what = f"rank {event.local_rank} of {event.node} reported a fault: {event.reason}"
    breaks = turn.world.phase.is_running
    repeated = _repeated_error(turn.world, event) if breaks else None
    permanent = repeated is not None and repeated.is_permanent
    turn.break_world(what, "" if event.final or permanent else event.node)
    if turn.world.phase.is_over:
        return
    if event.final:
        turn.fail_job(what, "not retried: another attempt would fail the same way")
    elif repeated is not None and permanent:
        turn.fail_job(what, f"{repeated.count} in a row failed in the same way {repeated.position}")
    elif breaks:
        turn.update(repeated_error=repeated)


def _repeated_error(world: WorldState, event: RankFault) -> RepeatedError | None:
    """Return the error with the number of worlds in a row that it broke; ``None`` if it may follow from a lost rank."""
    if event.position is None:
        return None
    if world.repeated_error is None:
        return RepeatedError(event.reason, event.position)
    return world.repeated_error.next(event.reason, event.position)


def _hang(turn: WorldTransition, event: HangDetected) -> None:
    if event.epoch != turn.world.epoch or not turn.world.phase.is_running:
        return
    member = turn.world.members.get(event.node)
    known = member is not None and member.has_ranks
    who = f"rank {event.local_rank} of {event.node}" if known else "the job"
    leave_s = turn.policy.leave_hang_s
    turn.break_world(f"{who} hangs: {event.reason}", event.node if known else "", leave_s=leave_s)
    if member is not None and known and 0 <= event.local_rank < turn.world.nproc:
        _replace(turn, event.node, event.local_rank, member.spawn_count)


def _asked_back(turn: WorldTransition, event: NodesPreempted) -> None:
    for node in event.nodes:
        member = turn.world.members.get(node)
        if member is None or event.deadline_s < member.joined_s:
            continue  # it is not here, or it is again and this is old
        if member.has_ranks and not member.is_draining:
            turn.update(target_nodes=turn.world.target_nodes - 1)
        leave_by_s = (
            event.deadline_s if member.drain_deadline_s is None else min(event.deadline_s, member.drain_deadline_s)
        )
        turn.update_member(member, drain_deadline_s=leave_by_s)


def _resize_asked(turn: WorldTransition, event: ResizeRequested) -> None:
    if event.nodes is None or turn.policy.largest_size_within(event.nodes):
        # Who asks takes the nodes that are ready now: further ones are not waited for.
        turn.update(max_nodes=event.nodes, growth_possible_since_s=turn.now_s - turn.policy.scaling_timeout_s)


def _stop_asked(turn: WorldTransition, event: JobStopRequested) -> None:
    known_s = turn.world.pause_deadline_s
    until_s = known_s if event.deadline_s is None else max(event.deadline_s, turn.now_s)
    if until_s is not None and known_s is not None:
        until_s = min(until_s, known_s)
    if turn.world.stopping and until_s == known_s:
        return
    turn.update(stopping=True, reason=event.reason, pause_deadline_s=until_s)
    if turn.world.phase is WorldPhase.PAUSING and until_s is not None:
        turn.emit(PauseWorld(turn.world.epoch, event.reason, until_s, stop=True))


def _tick(turn: WorldTransition, event: Tick) -> None:
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
    NodesPreempted: _asked_back,
    ResizeRequested: _resize_asked,
    JobStopRequested: _stop_asked,
    Tick: _tick,
    EventBatch: _several,
}


def reconcile_world(turn: WorldTransition) -> None:
    _expire(turn)
    before = None
    while before is not turn.world.phase and not turn.world.phase.is_over:
        before = turn.world.phase
        _STEPS[before](turn)
    turn.update(next_tick_s=None if turn.world.phase.is_over else min(_timers(turn), default=None))


# -- time is up -------------------------------------------------------------------------------------------------------


def _expire(turn: WorldTransition) -> None:
    for node in list(turn.world.members):
        member = turn.world.members.get(node)
        if member is None or turn.world.phase.is_over:
            continue
        if member.is_draining and not member.has_ranks:
            turn.release_node(member, "preempted")
        elif turn.world.phase is not WorldPhase.PAUSING and _is_past(member.drain_deadline_s, turn):
            turn.lose_node(member, "preempted, and its deadline has passed", cut=True)
        elif _is_past(member.ready_deadline_s, turn):
            if member.respawn_requested:
                limit_s = turn.policy.restart_timeout_s
                turn.lose_node(
                    member, f"its ranks did not come, nor others in their place within {limit_s:g} s", cut=True
                )
            else:
                _prod(turn, member)


def _is_past(time_s: float | None, turn: WorldTransition) -> bool:
    return time_s is not None and time_s <= turn.now_s


def _prod(turn: WorldTransition, member: NodeMember) -> None:
    turn.emit(RespawnStragglers(member.node, member.generation))
    turn.update_member(member, respawn_requested=True, ready_deadline_s=turn.now_s + turn.policy.restart_timeout_s)
    turn.update(has_respawned=True)


def _finish(turn: WorldTransition) -> bool:
    """Whether all ranks have finished. Also while they are to stop for another world: there is nothing left for it."""
    if not turn.world.finished_nodes.issuperset(turn.world.ranked_nodes):
        return False
    turn.update(phase=WorldPhase.FINISHED, reason="finished", growth_possible_since_s=None, pause_deadline_s=None)
    turn.emit(FinishJob())
    return True


# -- running ----------------------------------------------------------------------------------------------------------


def _run(turn: WorldTransition) -> None:
    if _finish(turn):
        return
    world = turn.world
    if world.stopping:
        _pause(turn, world.reason, stop=True)
        return
    ready = [member for member in world_transition.available_members(turn.world) if member.has_ranks or member.ready]
    leaving = sorted(
        (member for member in turn.members_with_ranks if member.is_draining), key=lambda member: member.join_order
    )
    possible = _possible(turn, ready)
    if leaving:
        _give_back(turn, leaving, possible)
    elif len(turn.members_with_ranks) > turn.max_nodes:
        _pause(turn, f"at most {turn.max_nodes} nodes are wanted")
    elif possible > world.size or _could_be_better(turn, ready):
        turn.update(
            growth_possible_since_s=turn.now_s
            if world.growth_possible_since_s is None
            else world.growth_possible_since_s
        )
        if turn.growth_allowed_s <= turn.now_s:
            _pause(turn, f"{possible} nodes can be had" if possible > world.size else "an offender is replaced")
    else:
        turn.update(growth_possible_since_s=None)


def _possible(turn: WorldTransition, ready: list[NodeMember]) -> int:
    """The size that those who are ready allow. Offenders are of use only to keep the size it has."""
    avoid = turn.avoided()
    good = [member for member in ready if member.node not in avoid]
    kept = min(turn.world.size, turn.max_nodes, len(ready))
    return max(turn.policy.largest_size_within(min(turn.max_nodes, len(good))), turn.policy.largest_size_within(kept))


def _could_be_better(turn: WorldTransition, ready: list[NodeMember]) -> bool:
    avoid = turn.avoided()
    bad = any(member.has_ranks and member.node in avoid for member in ready)
    return bad and any(not member.has_ranks and member.node not in avoid for member in ready)


def _give_back(turn: WorldTransition, leaving: list[NodeMember], possible: int) -> None:
    first_s = min(member.drain_deadline_s for member in leaving if member.drain_deadline_s is not None)
    names = ", ".join(member.node for member in leaving)
    if possible:
        _pause(turn, f"{names} preempted")
        return
    least = turn.policy.smallest_size
    _ask(turn, least, f"{names} preempted, too few are left")
    if first_s - turn.policy.graceful_shutdown_timeout_s <= turn.now_s:
        rest = len(turn.members_with_ranks) - len(leaving)
        turn.update(stopping=True)
        _pause(turn, f"{names} preempted: {rest} nodes are left, at least {least} are needed", stop=True)


def _ask(turn: WorldTransition, size: int, reason: str) -> None:
    short = size - len(world_transition.available_members(turn.world))
    if short > turn.world.requested_nodes:
        turn.emit(RequestNodes(short - turn.world.requested_nodes, reason))
        turn.update(requested_nodes=short)


# -- changing ---------------------------------------------------------------------------------------------------------


def _pause(turn: WorldTransition, reason: str, *, stop: bool = False) -> None:
    """Ranks are to agree on a step; where no time is given for that, the world just ends."""
    grace_s = turn.policy.graceful_shutdown_timeout_s
    turn.update(reason=reason)
    if grace_s <= 0:
        turn.break_world(reason, counted=False)
        return
    until_s = min(turn.now_s + grace_s, turn.world.pause_deadline_s or math.inf, _first_to_leave_s(turn))
    turn.update(phase=WorldPhase.PAUSING, pause_deadline_s=until_s)
    turn.emit(PauseWorld(turn.world.epoch, reason, until_s, stop))


def _first_to_leave_s(turn: WorldTransition) -> float:
    return min(
        (member.drain_deadline_s for member in turn.members_with_ranks if member.drain_deadline_s is not None),
        default=math.inf,
    )


def _change(turn: WorldTransition) -> None:
    if _finish(turn):
        return
    world = turn.world
    if world.stopping:
        late = [
            member
            for member in turn.members_with_ranks
            if not member.has_stopped and member.node not in world.finished_nodes
        ]
    else:
        late = [
            member
            for member in turn.members_with_ranks
            if not (member.has_stopped if member.is_draining else member.ready)
        ]
    until_s = math.inf if world.pause_deadline_s is None else world.pause_deadline_s
    sooner_s = min(until_s, _first_to_leave_s(turn))
    if not late:
        _paused(turn)
    elif sooner_s <= turn.now_s:
        _too_late(turn, late)
    elif sooner_s < until_s:
        turn.update(pause_deadline_s=sooner_s)
        turn.emit(PauseWorld(world.epoch, world.reason, sooner_s, world.stopping))


def _paused(turn: WorldTransition) -> None:
    sealed = turn.world.sealed_step if turn.world.sealed_nodes == turn.world.size else None
    if turn.world.stopping:
        turn.stop_job(turn.world.reason, sealed)
        return
    turn.update(phase=WorldPhase.FORMING, pause_deadline_s=None, finished_nodes=frozenset(), failed_pauses=0)
    if sealed is not None:
        turn.update(resume_from=sealed, requested_step=None)
    for member in turn.members_with_ranks:
        if member.is_draining:  # not before: it records the step that all ranks have sealed
            turn.release_node(member, "preempted", sealed_step=sealed)
    turn.update(replacement_deadline_s=turn.now_s + turn.policy.faulty_scale_down_timeout_s)


def _too_late(turn: WorldTransition, late: list[NodeMember]) -> None:
    turn.update(failed_pauses=turn.world.failed_pauses + 1)
    slow = {member.node for member in late}
    names = ", ".join(sorted(slow))
    for member in turn.members_with_ranks:
        if member.is_draining and member in late:
            turn.release_node(member, "preempted, and its deadline has passed", cut=True)
        elif member.is_draining:
            turn.release_node(member, "preempted")
    alone = late[0].node if len(late) == 1 and not late[0].is_draining else ""
    turn.break_world(f"{turn.world.reason}, and the ranks of {names} did not stop in time", alone)
    for member in turn.members_with_ranks:
        if (
            member.node in slow
            and not member.ready
            and not member.pending_replacements
            and not turn.world.phase.is_over
        ):
            _prod(turn, member)


# -- forming ----------------------------------------------------------------------------------------------------------


def _gather(turn: WorldTransition) -> None:
    world = turn.world
    here = world_transition.available_members(world)
    ready = [member for member in here if member.ready]
    missed = [member for member in here if member.has_ranks and not member.ready]
    if world.epoch >= 0 and not world.stopping:
        _ask(turn, _goal(turn), world.reason)
    if world.stopping:
        turn.stop_job(world.reason, world.resume_from)
    elif any(not member.is_respawning for member in missed):
        turn.update(phase=WorldPhase.FORMING)  # they are on their way
    elif not _form(turn, ready, at_least=_goal(turn)):
        if world.epoch < 0:
            _begin(turn, ready)
        else:
            _wait(turn, ready, missed)


def _goal(turn: WorldTransition) -> int:
    """What is worth waiting for."""
    return turn.policy.largest_size_within(min(turn.max_nodes, turn.world.target_nodes)) or turn.policy.smallest_size


def _ceiling(turn: WorldTransition) -> int:
    """Whatever ends a world is no occasion to grow, before it is time to."""
    grows = turn.world.epoch < 0 or turn.growth_allowed_s <= turn.now_s
    return turn.max_nodes if grows else min(turn.max_nodes, max(turn.world.size, _goal(turn)))


def _form(turn: WorldTransition, ready: list[NodeMember], *, at_least: int) -> bool:
    """A world of those who are ready, as large as it may be; without offenders where that makes the goal."""
    avoid, goal = turn.avoided(), _goal(turn)
    good = [member for member in ready if member.node not in avoid]
    size = turn.policy.largest_size_within(min(_ceiling(turn), len(good)))
    if size < goal:
        size = turn.policy.largest_size_within(min(goal, len(ready)))
    if size == 0 or size < at_least:
        return False
    chosen = world_transition.members_by_preference(ready, turn.world, avoid)[:size]
    witnesses = [member for member in world_transition.state_holders(turn.world) if member.node not in avoid]
    if not any(member in chosen for member in witnesses):
        if any(member.has_ranks and not member.ready for member in witnesses):
            return False  # its ranks are started anew; it is lost when they do not come
        chosen[-1:] = [member for member in witnesses if member in ready][:1] or chosen[-1:]
    turn.form_world(chosen)
    return True


def _begin(turn: WorldTransition, ready: list[NodeMember]) -> None:
    policy, world = turn.policy, turn.world
    if not policy.largest_size_within(min(turn.max_nodes, len(ready))):
        here = len(world_transition.available_members(world))
        waits = world.reason != "" and here < policy.smallest_size  # for a replacement of a node that left
        if waits and _is_past(world.replacement_deadline_s, turn):
            turn.fail_job(world.reason, f"{here} nodes are left, at least {policy.smallest_size} are needed")
            return
        turn.update(phase=WorldPhase.FORMING, replacement_deadline_s=world.replacement_deadline_s if waits else None)
        if policy.startup_timeout_s is not None and world.formed_s + policy.startup_timeout_s <= turn.now_s:
            came = f"{len(ready)} of the {policy.smallest_size} nodes needed were ready"
            limit_s = policy.startup_timeout_s
            turn.fail_job(f"within {limit_s:g} s, {came}", f"startup_timeout_s is {limit_s:g} s")
        return
    if world.replacement_deadline_s is None:
        turn.update(replacement_deadline_s=turn.now_s + policy.scaling_timeout_s)
    if _is_past(turn.world.replacement_deadline_s, turn):
        _form(turn, ready, at_least=1)


def _wait(turn: WorldTransition, ready: list[NodeMember], missed: list[NodeMember]) -> None:
    """For new processes, then for new nodes, and in the end for anybody who makes the least size."""
    policy, here = turn.policy, world_transition.available_members(turn.world)
    have = policy.largest_size_within(min(_ceiling(turn), len(ready)))
    if policy.largest_size_within(min(_ceiling(turn), len(ready) + len(missed))) > have:
        turn.update(phase=WorldPhase.FORMING)
    elif not _is_past(turn.world.replacement_deadline_s, turn):
        turn.update(phase=WorldPhase.WAITING)
    elif not _form(turn, ready, at_least=1):
        least = policy.smallest_size
        if len(here) >= least:
            turn.update(phase=WorldPhase.WAITING)
        else:
            why = f"{turn.world.reason}; {len(here)} nodes are left, at least {least} are needed"
            turn.stop_job(why, turn.world.resume_from)


_STEPS = {
    WorldPhase.FORMING: _gather,
    WorldPhase.WAITING: _gather,
    WorldPhase.RUNNING: _run,
    WorldPhase.PAUSING: _change,
}


# -- the next tick ----------------------------------------------------------------------------------------------------


def _timers(turn: WorldTransition) -> list[float]:
    """All times ahead at which something follows from nothing having happened."""
    world, policy = turn.world, turn.policy
    times_s = [world.replacement_deadline_s, world.pause_deadline_s]
    times_s += [
        time_s for member in world.members.values() for time_s in (member.drain_deadline_s, member.ready_deadline_s)
    ]
    if world.phase is WorldPhase.RUNNING:
        times_s += [offence.at_s + policy.eval_period_s for offence in world.node_faults if world.standby]
        times_s += [turn.growth_allowed_s, _first_to_leave_s(turn) - policy.graceful_shutdown_timeout_s]
    if world.epoch < 0 and policy.startup_timeout_s is not None:
        times_s.append(world.formed_s + policy.startup_timeout_s)
    return [time_s for time_s in times_s if time_s is not None and turn.now_s < time_s < math.inf]


def rebuild_world(
    reports: Iterable[RejoinReport],
    policy: ScalingPolicy,
    *,
    nproc: int,
    now_s: float,
    requested_step: RequestedStep | None = None,
    resume_from: SealedStep | None = None,
    min_next_epoch: int = 0,
) -> tuple[WorldState, tuple[WorldAction, ...]]:
    """Rebuild the world: nodes without a report count as lost and may join later; transitions restart.

    If all nodes of a world report it, the world continues unchanged. The next world has at least the number
    ``min_next_epoch``. Counts of offences, and of restarts within a period, begin again at 0. The next world
    restores ``requested_step`` or ``resume_from``, as the reports name them. ``resume_from`` is used only if the newest
    world is broken because some of its nodes have not reported.
    """
    latest: dict[str, RejoinReport] = {}
    for report in sorted(reports, key=lambda report: (report.generation, report.epoch, report.spawn_count)):
        latest[report.node] = report
    known = sorted(
        (report for report in latest.values() if report.local_ranks == nproc), key=lambda report: report.node
    )
    turn = WorldTransition(_as_reported(known, nproc, now_s, policy), policy, now_s)
    turn.update(requested_step=requested_step, min_next_epoch=min_next_epoch)
    missing = sorted(set(turn.world.ranked_nodes) - {member.node for member in turn.members_with_ranks})
    if missing:
        turn.break_world(f"the new coordinator found nobody of {', '.join(missing)} in the world")
        turn.update(resume_from=resume_from)
        if resume_from is not None:
            turn.update(requested_step=None)
    for epoch in sorted({report.epoch for report in known if not report.ready} - {-1, turn.world.epoch}):
        turn.emit(BreakWorld(epoch, "it was left behind", policy.abort_limit_s))
    for report in known:
        for local_rank in report.lost_ranks:
            apply_event(
                turn, RankLost(report.node, report.generation, report.spawn_count, local_rank, "reported to be lost")
            )
        if report.finished:
            apply_event(turn, NodeFinished(report.node, report.generation, report.epoch))
        if report.ready:
            apply_event(
                turn, NodeReady(report.node, report.generation, report.spawn_count, report.epoch, report.spares)
            )
    if not turn.world.phase.is_over:
        reconcile_world(turn)
    return turn.world, tuple(turn.actions)


def _as_reported(known: list[RejoinReport], nproc: int, now_s: float, policy: ScalingPolicy) -> WorldState:
    """The newest world any of them was told of, as if it was running."""
    newest = max((report.epoch for report in known), default=-1)
    places = next((report.ranked_nodes for report in known if report.epoch == newest >= 0 and report.ranked_nodes), ())
    inside = frozenset(places)
    members = {
        report.node: NodeMember(
            node=report.node,
            generation=report.generation,
            join_order=number,
            joined_s=now_s,
            epoch=report.epoch,
            has_ranks=report.epoch == newest and report.node in inside,
            spawn_count=max(report.spawn_count, nproc),
            spares=report.spares,
        )
        for number, report in enumerate(known)
    }
    due_s = now_s + policy.restart_timeout_s
    return WorldState(
        nproc=nproc,
        formed_s=now_s,
        phase=WorldPhase.RUNNING if places else WorldPhase.FORMING,
        epoch=newest,
        ranked_nodes=places,
        members={
            name: member if member.has_ranks else replace(member, ready_deadline_s=due_s)
            for name, member in members.items()
        },
        join_count=len(known),
        target_nodes=len(places) or policy.initial_nodes,
        restarts=max((report.restarts for report in known), default=0),
    )
