"""What follows from what is known by now: who has had time enough, whether to pause, whether a world can be formed."""

from __future__ import annotations

import math

from elastic.world import choosing
from elastic.world.actions import Ask, Finish, Pause, RespawnStragglers
from elastic.world.members import Member, Phase
from elastic.world.turn import Turn


def settle(turn: Turn) -> None:
    _expire(turn)
    before = None
    while before is not turn.world.phase and not turn.world.phase.over:
        before = turn.world.phase
        _STEPS[before](turn)
    turn.set(tick_s=None if turn.world.phase.over else min(_timers(turn), default=None))


# -- time is up -------------------------------------------------------------------------------------------------------


def _expire(turn: Turn) -> None:
    for node in list(turn.world.members):
        member = turn.world.members.get(node)
        if member is None or turn.world.phase.over:
            continue
        if member.leaving and not member.placed:
            turn.release(member, "asked back")
        elif turn.world.phase is not Phase.CHANGING and _is_past(member.leave_by_s, turn):
            turn.lose(member, "asked back, and its time is up", cut=True)
        elif _is_past(member.due_s, turn):
            if member.prodded:
                limit_s = turn.policy.restart_timeout_s
                turn.lose(member, f"its ranks did not come, nor others in their place within {limit_s:g} s", cut=True)
            else:
                _prod(turn, member)


def _is_past(time_s: float | None, turn: Turn) -> bool:
    return time_s is not None and time_s <= turn.now_s


def _prod(turn: Turn, member: Member) -> None:
    turn.do(RespawnStragglers(member.node, member.life))
    turn.put(member, prodded=True, due_s=turn.now_s + turn.policy.restart_timeout_s)
    turn.set(respawned=True)


def _finish(turn: Turn) -> bool:
    """Whether all ranks have finished. Also while they are to stop for another world: there is nothing left for it."""
    if not turn.world.done.issuperset(turn.world.places):
        return False
    turn.set(phase=Phase.FINISHED, reason="finished", more_since_s=None, pause_until_s=None)
    turn.do(Finish())
    return True


# -- running ----------------------------------------------------------------------------------------------------------


def _run(turn: Turn) -> None:
    if _finish(turn):
        return
    world = turn.world
    if world.stopping:
        _pause(turn, world.reason, stop=True)
        return
    ready = [member for member in choosing.usable(turn.world) if member.placed or member.ready]
    leaving = sorted((member for member in turn.placed if member.leaving), key=lambda member: member.joined)
    possible = _possible(turn, ready)
    if leaving:
        _give_back(turn, leaving, possible)
    elif len(turn.placed) > turn.limit:
        _pause(turn, f"at most {turn.limit} nodes are wanted")
    elif possible > world.size or _could_be_better(turn, ready):
        turn.set(more_since_s=turn.now_s if world.more_since_s is None else world.more_since_s)
        if turn.may_grow_s <= turn.now_s:
            _pause(turn, f"{possible} nodes can be had" if possible > world.size else "an offender is replaced")
    else:
        turn.set(more_since_s=None)


def _possible(turn: Turn, ready: list[Member]) -> int:
    """The size that those who are ready allow. Offenders are of use only to keep the size it has."""
    avoid = turn.avoided()
    good = [member for member in ready if member.node not in avoid]
    kept = min(turn.world.size, turn.limit, len(ready))
    return max(turn.policy.at_most(min(turn.limit, len(good))), turn.policy.at_most(kept))


def _could_be_better(turn: Turn, ready: list[Member]) -> bool:
    avoid = turn.avoided()
    bad = any(member.placed and member.node in avoid for member in ready)
    return bad and any(not member.placed and member.node not in avoid for member in ready)


def _give_back(turn: Turn, leaving: list[Member], possible: int) -> None:
    first_s = min(member.leave_by_s for member in leaving if member.leave_by_s is not None)
    names = ", ".join(member.node for member in leaving)
    if possible:
        _pause(turn, f"{names} asked back")
        return
    least = turn.policy.least
    _ask(turn, least, f"{names} asked back, too few are left")
    if first_s - turn.policy.graceful_shutdown_timeout_s <= turn.now_s:
        rest = len(turn.placed) - len(leaving)
        turn.set(stopping=True)
        _pause(turn, f"{names} asked back: {rest} nodes are left, at least {least} are needed", stop=True)


def _ask(turn: Turn, size: int, reason: str) -> None:
    short = size - len(choosing.usable(turn.world))
    if short > turn.world.asked:
        turn.do(Ask(short - turn.world.asked, reason))
        turn.set(asked=short)


# -- changing ---------------------------------------------------------------------------------------------------------


def _pause(turn: Turn, reason: str, *, stop: bool = False) -> None:
    """Ranks are to agree on a step; where no time is given for that, the world just ends."""
    grace_s = turn.policy.graceful_shutdown_timeout_s
    turn.set(reason=reason)
    if grace_s <= 0:
        turn.fault(reason, counted=False)
        return
    until_s = min(turn.now_s + grace_s, turn.world.pause_until_s or math.inf, _first_to_leave_s(turn))
    turn.set(phase=Phase.CHANGING, pause_until_s=until_s)
    turn.do(Pause(turn.world.epoch, reason, until_s, stop))


def _first_to_leave_s(turn: Turn) -> float:
    return min((member.leave_by_s for member in turn.placed if member.leave_by_s is not None), default=math.inf)


def _change(turn: Turn) -> None:
    if _finish(turn):
        return
    for member in turn.placed:
        if member.leaving and member.is_in:
            turn.release(member, "asked back")
    world = turn.world
    if world.stopping:
        late = [member for member in turn.placed if not member.is_in and member.node not in world.done]
    else:
        late = [member for member in turn.placed if not member.ready]
    until_s = math.inf if world.pause_until_s is None else world.pause_until_s
    sooner_s = min(until_s, _first_to_leave_s(turn))
    if not late:
        _paused(turn)
    elif sooner_s <= turn.now_s:
        _too_late(turn, late)
    elif sooner_s < until_s:
        turn.set(pause_until_s=sooner_s)
        turn.do(Pause(world.epoch, world.reason, sooner_s, world.stopping))


def _paused(turn: Turn) -> None:
    if turn.world.stopping:
        turn.stop(turn.world.reason)
        return
    turn.set(phase=Phase.FORMING, pause_until_s=None, done=frozenset(), failed=0)
    turn.set(wait_until_s=turn.now_s + turn.policy.faulty_scale_down_timeout_s)


def _too_late(turn: Turn, late: list[Member]) -> None:
    turn.set(failed=turn.world.failed + 1)
    slow = {member.node for member in late}
    names = ", ".join(sorted(slow))
    for member in late:
        if member.leaving:
            turn.release(member, "asked back, and its time is up", cut=True)
    alone = late[0].node if len(late) == 1 and not late[0].leaving else ""
    turn.fault(f"{turn.world.reason}, and the ranks of {names} did not stop in time", alone)
    for member in turn.placed:
        if member.node in slow and not member.ready and not member.owed and not turn.world.phase.over:
            _prod(turn, member)


# -- forming ----------------------------------------------------------------------------------------------------------


def _gather(turn: Turn) -> None:
    world = turn.world
    here = choosing.usable(world)
    ready = [member for member in here if member.ready]
    missed = [member for member in here if member.placed and not member.ready]
    if world.epoch >= 0 and not world.stopping:
        _ask(turn, _goal(turn), world.reason)
    if world.stopping:
        turn.stop(world.reason)
    elif any(not member.mending for member in missed):
        turn.set(phase=Phase.FORMING)  # they are on their way
    elif not _form(turn, ready, at_least=_goal(turn)):
        if world.epoch < 0:
            _begin(turn, ready)
        else:
            _wait(turn, ready, missed)


def _goal(turn: Turn) -> int:
    """What is worth waiting for."""
    return turn.policy.at_most(min(turn.limit, turn.world.goal)) or turn.policy.least


def _ceiling(turn: Turn) -> int:
    """Whatever ends a world is no occasion to grow, before it is time to."""
    grows = turn.world.epoch < 0 or turn.may_grow_s <= turn.now_s
    return turn.limit if grows else min(turn.limit, max(turn.world.size, _goal(turn)))


def _form(turn: Turn, ready: list[Member], *, at_least: int) -> bool:
    """A world of those who are ready, as large as it may be; without offenders where that makes the goal."""
    avoid, goal = turn.avoided(), _goal(turn)
    good = [member for member in ready if member.node not in avoid]
    size = turn.policy.at_most(min(_ceiling(turn), len(good)))
    if size < goal:
        size = turn.policy.at_most(min(goal, len(ready)))
    if size == 0 or size < at_least:
        return False
    chosen = choosing.best(ready, turn.world, avoid)[:size]
    witnesses = [member for member in choosing.witnesses(turn.world) if member.node not in avoid]
    if not any(member in chosen for member in witnesses):
        if any(member.placed and not member.ready for member in witnesses):
            return False  # its ranks are started anew; it is lost when they do not come
        chosen[-1:] = [member for member in witnesses if member in ready][:1] or chosen[-1:]
    turn.form(chosen)
    return True


def _begin(turn: Turn, ready: list[Member]) -> None:
    policy, world = turn.policy, turn.world
    if not policy.at_most(min(turn.limit, len(ready))):
        turn.set(phase=Phase.FORMING, wait_until_s=None)
        if policy.startup_timeout_s is not None and world.began_s + policy.startup_timeout_s <= turn.now_s:
            came = f"{len(ready)} of the {policy.least} nodes needed were ready"
            turn.give_up(f"gave up before the first world: within {policy.startup_timeout_s:g} s, {came}")
        return
    if world.wait_until_s is None:
        turn.set(wait_until_s=turn.now_s + policy.scaling_timeout_s)
    if _is_past(turn.world.wait_until_s, turn):
        _form(turn, ready, at_least=1)


def _wait(turn: Turn, ready: list[Member], missed: list[Member]) -> None:
    """For new processes, then for new nodes, and in the end for anybody who makes the least size."""
    policy, here = turn.policy, choosing.usable(turn.world)
    have = policy.at_most(min(_ceiling(turn), len(ready)))
    if policy.at_most(min(_ceiling(turn), len(ready) + len(missed))) > have:
        turn.set(phase=Phase.FORMING)
    elif not _is_past(turn.world.wait_until_s, turn):
        turn.set(phase=Phase.WAITING)
    elif not _form(turn, ready, at_least=1):
        least = policy.least
        if len(here) >= least:
            turn.set(phase=Phase.WAITING)
        else:
            turn.stop(f"{turn.world.reason}; {len(here)} nodes are left, at least {least} are needed")


_STEPS = {
    Phase.FORMING: _gather,
    Phase.WAITING: _gather,
    Phase.RUNNING: _run,
    Phase.CHANGING: _change,
}


# -- the next tick ----------------------------------------------------------------------------------------------------


def _timers(turn: Turn) -> list[float]:
    """All times ahead at which something follows from nothing having happened."""
    world, policy = turn.world, turn.policy
    times_s = [world.wait_until_s, world.pause_until_s]
    times_s += [time_s for member in world.members.values() for time_s in (member.leave_by_s, member.due_s)]
    if world.phase is Phase.RUNNING:
        times_s += [offence.at_s + policy.eval_period_s for offence in world.offences if world.standby]
        times_s += [turn.may_grow_s, _first_to_leave_s(turn) - policy.graceful_shutdown_timeout_s]
    if world.epoch < 0 and policy.startup_timeout_s is not None:
        times_s.append(world.began_s + policy.startup_timeout_s)
    return [time_s for time_s in times_s if time_s is not None and turn.now_s < time_s < math.inf]
