"""What a supervisor tells its ranks and the coordinator: everything, as it is by now."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from elastic.control.messages import Lost, NodeSays, Over, Pausing, RankHears, RankSays, Stand
from elastic.control.plane import Assignment, Notice, Want
from elastic.control.seats import Seats

replace = msgspec.structs.replace


def for_rank(seats: Seats, token: str, now: float) -> RankHears:
    """What the process with this token is to know."""
    hears = _for_rank(seats, token, now)
    if not seats.injections and not seats.cuts:
        return hears
    return replace(hears, injections=seats.injections, cuts=seats.cuts)


def _for_rank(seats: Seats, token: str, now: float) -> RankHears:
    process = seats.processes.get(token)
    if process is None:
        return RankHears(over=Over.REFUSED, reason="another process has this rank's seat")
    heard = process.says.number if process.says is not None else 0
    if seats.over is not None:
        return RankHears(heard, over=seats.over, reason=seats.reason, cut_off=seats.cut_off)
    formed, seat = seats.formed, process.seat
    if formed is None or seat is None or process.given < formed.epoch:
        return RankHears(heard, cut_off=seats.cut_off)
    place = formed.places.index(seats.node)
    assignment = Assignment(
        epoch=formed.epoch,
        rank=place * seats.nproc + seat,
        world_size=len(formed.places) * seats.nproc,
        local_rank=seat,
        local_world_size=seats.nproc,
        node_rank=place,
        node_count=len(formed.places),
        store=formed.store,
        restarts=formed.restarts,
        reason=formed.reason,
        stores=formed.stores,
        hang_s=formed.hang_s,
    )
    return RankHears(heard, assignment, _notice(seats, formed.epoch, now), seats.target, cut_off=seats.cut_off)


def _notice(seats: Seats, epoch: int, now: float) -> Notice | None:
    if seats.broken is not None:
        by = seats.leave_world_by
        return Notice(epoch, Want.RESTART, seats.broken, None if by is None else max(0.0, by - now))
    pausing = _pausing(seats, now)
    if pausing is None:
        return None
    return Notice(epoch, Want.STOP if pausing.stop else Want.RESIZE, pausing.reason, pausing.within_s)


def _pausing(seats: Seats, now: float) -> Pausing | None:
    if seats.pausing is None or seats.pause_until is None:
        return None
    return replace(seats.pausing, within_s=max(0.0, seats.pause_until - now))


def for_coordinator(seats: Seats, now: float) -> NodeSays:
    """All there is to say of this node; who sends it counts :attr:`Seats.number` up."""
    ordered = sorted(seats.seated(), key=lambda process: process.seat or 0)
    seated = ordered if seats.over is None else []
    epoch = seats.formed.epoch if seats.formed is not None else -1
    said = [process.said_in(epoch) for process in seated]
    here = [one for one in said if one is not None]
    inside = [one for one in here if one.stand is not Stand.FINISHED]
    whole = bool(seated) and len(here) == len(seated)
    return NodeSays(
        number=seats.number + 1,
        node=seats.node,
        life=seats.life,
        seats=seats.nproc,
        births=seats.births,
        spares=len(seats.warm_spares(now)),
        formed=seats.formed,
        broken=seats.broken,
        pausing=_pausing(seats, now),
        wish=seats.wish,
        ready=bool(seated) and all(process.is_ready for process in seated),
        paused=_greatest(one.paused for one in inside) if whole else None,
        sealed=_greatest(one.sealed for one in inside) if whole else None,
        finished=whole and not inside,
        behind=tuple(
            process.seat or 0
            for process, one in zip(seated, said, strict=True)
            if seats.pausing is not None and (one is None or _is_behind(one, agreed=seats.target is not None))
        ),
        lost=tuple(
            Lost(process.seat or 0, process.ended, at=process.ended_at)
            for process in seated
            if process.ended is not None and not seats.excuses(process)
        ),
        faults=tuple(
            Lost(process.seat or 0, fault, final=one.final)
            for process, one in zip(seated, said, strict=True)
            if one is not None and (fault := _fault(one, broken=seats.broken is not None)) is not None
        ),
        steps=tuple(process.says.progress if process.says is not None else None for process in ordered),
        quiet_s=tuple(process.quiet_s(now) for process in seated),
        requests=tuple(request for _, request in seats.requests),
        leaving_s=None if seats.leave_by is None else max(0.0, seats.leave_by - now),
        leaving=seats.leaving,
        goodbye=seats.goodbye,
        coordinator=seats.coordinator,
        done=seats.done,
        store=seats.store,
        term=seats.leader[0],
        leader=seats.leader[1],
    )


def _greatest(steps: Iterable[int | None]) -> int | None:
    """The greatest step, once all have said one."""
    said = list(steps)
    known = [step for step in said if step is not None]
    return max(known) if said and len(known) == len(said) else None


def _is_behind(says: RankSays, *, agreed: bool) -> bool:
    if says.stand is Stand.FINISHED:
        return False
    return (says.sealed if agreed else says.paused) is None


def _fault(says: RankSays, *, broken: bool) -> str | None:
    if says.fault is None and not broken and says.stand is Stand.READY and says.sealed is None:
        return "it came back without being asked"
    return says.fault


def lasting_for_rank(hears: RankHears) -> RankHears:
    """Without what changes by itself: two that are equal say the same."""
    if hears.notice is None or hears.notice.deadline_s is None:
        return hears
    return replace(hears, notice=replace(hears.notice, deadline_s=0.0))


def lasting_for_coordinator(says: NodeSays) -> NodeSays:
    """The same of what the coordinator is told."""
    return replace(
        says,
        number=0,
        steps=(),
        quiet_s=(),
        leaving_s=None if says.leaving_s is None else 0.0,
        pausing=None if says.pausing is None else replace(says.pausing, within_s=0.0),
    )
