"""What each event changes in what is known; what follows from that is :mod:`elastic.world.settling`'s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic.world import choosing
from elastic.world.actions import Ask, Pause, Release
from elastic.world.events import (
    CapacityAskedBack,
    CapacityOffered,
    Event,
    Hang,
    NodeFinished,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeReady,
    NodeSealed,
    Offender,
    RankFault,
    RankLost,
    ResizeAsked,
    Several,
    StopAsked,
    Tick,
)
from elastic.world.members import Member, Phase
from elastic.world.turn import Turn

_TRIES_OF_A_STANDBY = 3
"""A node outside the world whose processes end so often before they are ready is sent away."""


def happen(turn: Turn, event: Event) -> None:
    if not turn.world.phase.over:
        _HANDLERS[type(event)](turn, event)


def _several(turn: Turn, event: Several) -> None:
    for one in event.events:
        happen(turn, one)


def _joined(turn: Turn, event: NodeJoined) -> None:
    world = turn.world
    if event.life <= world.gone.get(event.node, -1):
        return
    before = world.members.get(event.node)
    if before is not None:
        if event.life <= before.life:
            return
        turn.lose(before, "its supervisor began again")
        if turn.world.phase.over:
            return
    if event.seats != world.nproc:
        turn.world.gone[event.node] = event.life
        reason = f"it runs {event.seats} ranks, all others run {world.nproc}"
        turn.do(Release(event.node, event.life, reason, cut=True))
        return
    turn.put(
        Member(
            node=event.node,
            life=event.life,
            joined=world.joins,
            joined_s=turn.now_s,
            births=max(event.births, world.nproc),
            spares=event.spares,
            due_s=turn.now_s + turn.policy.restart_timeout_s,
        )
    )
    turn.set(joins=world.joins + 1, asked=max(0, world.asked - 1))


def _ready(turn: Turn, event: NodeReady) -> None:
    member = turn.known(event.node, event.life)
    if member is None or event.births < member.births + len(member.owed):
        return
    if event.epoch < member.epoch:
        if member.placed and event.births > member.births:
            turn.fault(f"processes of {member.node} were replaced, and nobody was told", member.node)
        return
    if member.placed and turn.world.phase is Phase.RUNNING:
        turn.fault(f"the ranks of {member.node} have left the world without being asked", member.node)
        if turn.world.phase.over:
            return
        member = turn.world.members[member.node]
        if event.births < member.births + len(member.owed):
            return
    turn.put(member, ready=True, births=event.births, owed=(), spares=event.spares, due_s=None, prodded=False)


def _sealed(turn: Turn, event: NodeSealed) -> None:
    member = turn.known(event.node, event.life)
    if member is None or not member.placed or event.epoch != turn.world.epoch:
        return
    if turn.world.phase is Phase.CHANGING:
        turn.put(member, sealed=True)
    elif turn.world.phase is Phase.RUNNING:
        # It goes no further, and who has asked it to stop is no more: what was wanted is to be asked for again.
        turn.fault(f"{event.node} stopped for a change that the last coordinator wanted", counted=False)


def _finished(turn: Turn, event: NodeFinished) -> None:
    member = turn.known(event.node, event.life)
    if member is not None and member.placed and event.epoch == turn.world.epoch and turn.world.phase.alive:
        turn.set(done=turn.world.done | {event.node})


def _lost(turn: Turn, event: NodeLost | NodeLeft) -> None:
    member = turn.world.members.get(event.node)
    if member is None or event.life < member.life:
        turn.world.gone[event.node] = max(event.life, turn.world.gone.get(event.node, -1))
        if member is None:
            return
        return
    turn.lose(member, event.reason, blame=isinstance(event, NodeLost), life=event.life)


def _rank_lost(turn: Turn, event: RankLost) -> None:
    member = turn.known(event.node, event.life)
    if member is None or event.births < member.births or _is_replaced(member, event.local_rank, event.births):
        return
    world, what = turn.world, f"rank {event.local_rank} of {event.node} was lost: {event.reason}"
    if world.phase.alive and member.placed:
        if member.node in world.done or (member.sealed and (world.stopping or member.leaving)):
            return  # it had nothing left to do here
        turn.fault(what, member.node, event.births)
    else:
        _lost_again(turn, member, event, what)
    _replace(turn, event.node, event.local_rank, event.births)


def _is_replaced(member: Member, local_rank: int, births: int) -> bool:
    """Whether the process that was lost when there had been so many is one that is known to be."""
    return any(owed.local_rank == local_rank and owed.births >= births for owed in member.owed)


def _lost_again(turn: Turn, member: Member, event: RankLost, what: str) -> None:
    """A process ended before its node was ready: nothing was broken by that, but it may go on for ever."""
    tries = 1 + sum(owed.local_rank == event.local_rank and not owed.whole for owed in member.owed)
    if not turn.world.phase.alive and (member.placed or turn.world.epoch < 0):
        if tries > turn.world.tries:
            turn.set(tries=tries)
            turn.count(what, member.node, event.births)
    elif tries >= _TRIES_OF_A_STANDBY:
        turn.release(member, f"{what}, {tries} times before it was ready", cut=True)


def _replace(turn: Turn, node: str, local_rank: int, births: int) -> None:
    """Unless it has been decided by now to replace it, or not to go on."""
    member = turn.world.members.get(node)
    if member is not None and not turn.world.phase.over and not _is_replaced(member, local_rank, births):
        turn.replace_ranks(member, (local_rank,), births)


def _rank_fault(turn: Turn, event: RankFault) -> None:
    member = turn.known(event.node, event.life)
    if member is None or not member.placed or event.epoch != turn.world.epoch:
        return
    if member.sealed and (turn.world.stopping or member.leaving):
        return
    what = f"rank {event.local_rank} of {event.node} reported a fault: {event.reason}"
    turn.fault(what, "" if event.final else event.node)
    if event.final and not turn.world.phase.over:
        turn.give_up(f"gave up, as another attempt would end the same way: {what}")


def _hang(turn: Turn, event: Hang) -> None:
    if event.epoch != turn.world.epoch or not turn.world.phase.alive:
        return
    member = turn.world.members.get(event.node)
    known = member is not None and member.placed
    who = f"rank {event.local_rank} of {event.node}" if known else "the job"
    leave_s = turn.policy.leave_hang_s
    turn.fault(f"{who} hangs: {event.reason}", event.node if known else "", leave_s=leave_s)
    if member is not None and known and 0 <= event.local_rank < turn.world.nproc:
        _replace(turn, event.node, event.local_rank, member.births)


def _offender(turn: Turn, event: Offender) -> None:
    turn.set(marked=turn.world.marked | {event.node})


def _offered(turn: Turn, event: CapacityOffered) -> None:
    taken = min(event.nodes, turn.limit - len(choosing.usable(turn.world)))
    if taken > 0:
        turn.do(Ask(taken, "offered"))
        turn.set(asked=max(turn.world.asked, taken))


def _asked_back(turn: Turn, event: CapacityAskedBack) -> None:
    for node in event.nodes:
        member = turn.world.members.get(node)
        if member is None or event.deadline_s < member.joined_s:
            continue  # it is not here, or it is again and this is old
        if member.placed and not member.leaving:
            turn.set(goal=turn.world.goal - 1)
        leave_by_s = event.deadline_s if member.leave_by_s is None else min(event.deadline_s, member.leave_by_s)
        turn.put(member, leave_by_s=leave_by_s)


def _resize_asked(turn: Turn, event: ResizeAsked) -> None:
    if event.nodes is None or turn.policy.at_most(event.nodes):
        # Who asks takes the nodes that are ready now: further ones are not waited for.
        turn.set(cap=event.nodes, more_since_s=turn.now_s - turn.policy.scaling_timeout_s)


def _stop_asked(turn: Turn, event: StopAsked) -> None:
    known_s = turn.world.pause_until_s
    until_s = known_s if event.deadline_s is None else max(event.deadline_s, turn.now_s)
    if until_s is not None and known_s is not None:
        until_s = min(until_s, known_s)
    if turn.world.stopping and until_s == known_s:
        return
    turn.set(stopping=True, reason=event.reason, pause_until_s=until_s)
    if turn.world.phase is Phase.CHANGING and until_s is not None:
        turn.do(Pause(turn.world.epoch, event.reason, until_s, stop=True))


def _tick(turn: Turn, event: Tick) -> None:
    pass


_HANDLERS: dict[type, Callable[[Turn, Any], None]] = {
    NodeJoined: _joined,
    NodeReady: _ready,
    NodeSealed: _sealed,
    NodeFinished: _finished,
    NodeLost: _lost,
    NodeLeft: _lost,
    RankLost: _rank_lost,
    RankFault: _rank_fault,
    Hang: _hang,
    Offender: _offender,
    CapacityOffered: _offered,
    CapacityAskedBack: _asked_back,
    ResizeAsked: _resize_asked,
    StopAsked: _stop_asked,
    Tick: _tick,
    Several: _several,
}
