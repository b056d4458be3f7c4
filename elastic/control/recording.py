"""What the coordinator writes into the run's ledger: worlds, faults, what was asked of the ranks, and the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from elastic.control.desk import Desk
from elastic.control.messages import Over
from elastic.world import actions as act
from elastic.world import events as happen
from elastic.world.members import World
from tieredckpt.ledger import Ledger
from tieredckpt.ledger import events as ev

WHO = "coordinator"
_LATE = "it did not stop in time"


class Recorder:
    """``saw`` is called with every decision; it decides nothing."""

    def __init__(self, ledger: Ledger, job: str, *, again: bool, wall: Callable[[], float] = time.time) -> None:
        self._ledger, self._job, self._wall = ledger, job, wall
        self._seen: set[tuple[str, int, int, float | None]] = set()
        ledger.write(ev.Began(wall(), job, WHO, again=again))

    def saw(self, desk: Desk, before: World, event: happen.Event, actions: Sequence[act.Action], now: float) -> None:
        at = self._wall()
        breaking = next((action for action in actions if isinstance(action, act.Break)), None)
        blamed = _to_blame([one for one in _single(event) if _matters(before, one, breaks=breaking is not None)])
        for one in blamed:
            self._fault(desk, before.epoch, one, at, now)
        if breaking is not None and not blamed and desk.world.restarts > before.restarts:
            self._ledger.write(ev.Fault(at, before.epoch, reason=breaking.reason))
        for action in actions:
            if isinstance(action, act.Form):
                self._formed(action, at)
            elif isinstance(action, act.Pause):
                want = "stop" if action.stop else "resize"
                notice = ev.Notice(at, action.epoch, want, action.reason, _asker(event), action.deadline_s - now)
                self._ledger.write(notice)

    def ended(self, over: Over, reason: str) -> None:
        self._ledger.write(ev.Ended(self._wall(), self._job, WHO, over.value, reason))
        self._ledger.close()

    def _formed(self, form: act.Form, at: float) -> None:
        self._ledger.write(
            ev.WorldFormed(
                at,
                form.epoch,
                len(form.nodes) * form.nproc,
                nodes=form.nodes,
                nproc=form.nproc,
                how=form.how.value,
                reason=form.reason,
                restarts=form.restarts,
            )
        )

    def _fault(self, desk: Desk, epoch: int, event: happen.Event, at: float, now: float) -> None:
        if isinstance(event, happen.RankLost):
            seen = desk.nodes.get(event.node)
            said = () if seen is None else seen.says.lost
            since = next((lost.at for lost in said if lost.local_rank == event.local_rank), None)
            key = (event.node, event.life, event.local_rank, since)
            if key not in self._seen:  # it is said again with everything else that happens there
                self._seen.add(key)
                kind = "late" if event.reason == _LATE else "process"
                self._ledger.write(ev.Fault(at, epoch, event.node, event.local_rank, kind, event.reason, since))
        elif isinstance(event, happen.NodeLost | happen.NodeLeft):
            seen = desk.nodes.get(event.node)
            since = None if seen is None else at - max(0.0, now - seen.heard_at)
            self._ledger.write(ev.Fault(at, epoch, event.node, -1, "node", event.reason, since))
        elif isinstance(event, happen.RankFault):
            self._ledger.write(ev.Fault(at, epoch, event.node, event.local_rank, "error", event.reason))
        elif isinstance(event, happen.Hang):
            self._ledger.write(ev.Fault(at, epoch, event.node, event.local_rank, "hang", event.reason))


def _single(event: happen.Event) -> Iterator[happen.Event]:
    if isinstance(event, happen.Several):
        for one in event.events:
            yield from _single(one)
    else:
        yield event


def _to_blame(events: Sequence[happen.Event]) -> Sequence[happen.Event]:
    """What ranks report beside a loss, and after the first of them, is what they see of it."""
    lost = [one for one in events if not isinstance(one, happen.RankFault | happen.Hang)]
    return lost or events[:1]


def _matters(before: World, event: happen.Event, *, breaks: bool) -> bool:
    """Whether this broke a world, or lost something that was on its way into one."""
    if isinstance(event, happen.RankFault | happen.Hang):
        return breaks and event.epoch == before.epoch
    if breaks:
        return isinstance(event, happen.RankLost | happen.NodeLost | happen.NodeLeft)
    if not isinstance(event, happen.RankLost | happen.NodeLost) or before.phase.over or before.phase.alive:
        return False
    member = before.members.get(event.node)
    return member is not None and event.life == member.life and (member.placed or before.epoch < 0)


def _asker(event: happen.Event) -> str:
    kinds = {type(one) for one in _single(event)}
    if kinds & {happen.CapacityAskedBack, happen.CapacityOffered}:
        return "cluster"
    if kinds & {happen.ResizeAsked, happen.StopAsked}:
        return "person"
    return "policy"
