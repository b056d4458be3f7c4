"""A supervisor's local ranks and spares: processes to start or end, messages to ranks and coordinator. Pure.

A node has ``nproc`` seats, one for each rank, and warm spares beside them. What ranks say and the coordinator orders
goes in; which processes are to be started and ended comes out, and :mod:`~elastic.supervisor.node_state` says who hears
what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from elastic.control.control_messages import (
    CommandKind,
    ExitReason,
    NodeCommand,
    NodeDesired,
    NodeStatus,
    PauseOrder,
    RankDesired,
    RankFailure,
    RankPhase,
    RankRequest,
    RankStatus,
    SizeRequest,
    WorldSpec,
)
from elastic.control.control_plane import ControlNotice, NoticeKind, RankAssignment
from elastic.fault_injection.fault_spec import SUPERVISOR_KINDS, FaultInjection

_SPARE_TRIES = 3
"""Spares that end before they are warm are started again so often."""
_SPARE_WAIT_S = 30.0
"""A spare that was used is replaced after so long at the latest."""
_MUTE_S = 10.0
"""A process that has said nothing for so long is stopped, or something in it keeps the interpreter's lock: it says
something every second from a thread of its own."""
_INJECTIONS = 100
"""So many are told to ranks, the newest ones."""


class StartProcess(NamedTuple):
    """A process is to be started."""

    token: str
    attempt: int
    seat: int | None


class EndProcess(NamedTuple):
    """A process is to be ended at once."""

    token: str
    why: str = ""
    """The reason to log; empty for none."""


class PartitionNode(NamedTuple):
    """This node is to be cut off for a while, on purpose."""

    seconds: float


class InjectFault(NamedTuple):
    """A fault is to happen that a supervisor can bring about."""

    injection: FaultInjection


SupervisorEffect = StartProcess | EndProcess | PartitionNode | InjectFault


@dataclass
class RankProcess:
    token: str
    attempt: int
    seat: int | None
    placed: int = -1
    """The newest world that was formed while it was in its seat."""
    given: int = -1
    """The newest world it was given a place in: that one, once the store is there."""
    says: RankStatus | None = None
    heard_at: float | None = None
    ended: str | None = None
    """Why it is no more."""
    ended_at: float | None = None
    """When, by the clock on the wall, where that is known."""
    requested: int = 0
    least: tuple[int, int] | None = None
    """The newest world it stepped in, and the least number of steps it said there."""
    went_on: int = -1
    """The newest world in which it completed a step."""

    @property
    def is_ready(self) -> bool:
        says = self.says
        return self.ended is None and says is not None and says.stand is RankPhase.READY and says.epoch == self.placed

    def quiet_s(self, now: float) -> float:
        """Since when nothing was heard of it, where it was to say something."""
        return 0.0 if self.heard_at is None or self.ended is not None else max(0.0, now - self.heard_at)

    def is_mute(self, now: float) -> bool:
        return self.quiet_s(now) > _MUTE_S

    def said_in(self, epoch: int) -> RankStatus | None:
        """What it says, where that is about this world."""
        return self.says if self.says is not None and self.says.epoch == epoch == self.given else None

    def note_steps(self, says: RankStatus) -> None:
        if says.progress is None or says.epoch != self.given:
            return
        step = says.progress.step
        if self.least is None or self.least[0] != says.epoch or step < self.least[1]:
            self.least = says.epoch, step
        elif step > self.least[1]:
            self.went_on = says.epoch

    def is_excused(self, *, broken: bool, stopping: bool) -> bool:
        """Whether it has nothing more to do, so that it may end."""
        says = self.says
        if says is None or broken:
            return False
        if says.stand is RankPhase.FINISHED and says.epoch == self.given:
            return True
        return stopping and says.sealed is not None


@dataclass
class NodeState:
    node: str
    nproc: int
    new_token: Callable[[], str]
    new_life: Callable[[], int]
    wanted_spares: int = 0
    life: int = 0
    effects: list[SupervisorEffect] = field(default_factory=list)
    processes: dict[str, RankProcess] = field(default_factory=dict)
    """Those in seats and the spares; who is to end is not among them any more."""
    births: int = 0
    attempts: int = 0
    wasted_spares: int = 0
    refill_by: float | None = None
    """By when the spares that were used are to be replaced."""
    formed: WorldSpec | None = None
    broken: str | None = None
    leave_world_by: float | None = None
    """When the ranks must have left the broken world."""
    pausing: PauseOrder | None = None
    pause_until: float | None = None
    target: int | None = None
    wish: SizeRequest | None = None
    over: ExitReason | None = None
    reason: str = ""
    goodbye: str = ""
    leave_by: float | None = None
    leaving: str = ""
    coordinator: str = ""
    leader: tuple[int, str] = (0, "")
    """The latest term in which a coordinator was obeyed, and which one: in a term there is no other."""
    done: int = 0
    heard: int = 0
    number: int = 0
    requests: list[tuple[int, RankRequest]] = field(default_factory=list)
    """What ranks asked for, with the number of the message that first said it."""
    requested: int = 0
    cut_off: bool = False
    store: str = ""
    keep_store: bool = False
    injections: tuple[FaultInjection, ...] = ()
    """Faults that are to happen in ranks."""
    cuts: int = 0
    """How often this node was cut off on purpose."""

    # -- from the machine ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Processes for every seat, and the spares."""
        self.life = self.new_life()
        for seat in range(self.nproc):
            self._seat(seat)
        self._refill()

    def ended(self, token: str, reason: str, at: float | None = None) -> None:
        """A process is no more, whether or not it was to."""
        process = self.processes.get(token)
        if process is None or process.ended is not None:
            return
        was_warm = process.is_ready
        process.ended, process.ended_at = reason, at
        if process.seat is None:
            del self.processes[token]
            self.wasted_spares += not was_warm
            self._refill()

    def hung_up(self, token: str, at: float | None = None) -> None:
        """A rank closed its connection, and its process may still be there."""
        process = self.processes.get(token)
        if process is None or process.ended is not None or self.over is not None:
            return
        if not self.excuses(process):
            self.effects.append(EndProcess(token))
            self.ended(token, "it closed its connection before it had finished", at)

    def excuses(self, process: RankProcess) -> bool:
        stopping = self.pausing is not None and self.pausing.stop
        return process.is_excused(broken=self.broken is not None, stopping=stopping)

    def asked_back(self, until: float, reason: str) -> None:
        """This machine goes away; of two deadlines the earlier one holds."""
        self.leave_by = until if self.leave_by is None else min(until, self.leave_by)
        self.leaving = self.leaving or reason

    def was_away(self, seconds: float) -> None:
        """Time that the clock here does not count: this machine goes when it was to all the same."""
        if self.leave_by is not None:
            self.leave_by -= seconds

    # -- from ranks ---------------------------------------------------------------------------------------------------

    def said(self, token: str, says: RankStatus, now: float) -> None:
        process = self.processes.get(token)
        if process is None or process.ended is not None:
            return
        process.says, process.heard_at = says, now
        process.note_steps(says)
        for request in says.requests:
            if request.number > process.requested:
                process.requested = request.number
                self._request(request, now)

    def _request(self, request: RankRequest, now: float) -> None:
        if request.cut_s is not None:
            self.cut(request.cut_s)
        elif request.want is NoticeKind.RESIZE and request.nodes is None and request.deadline_s is not None:
            self.asked_back(now + request.deadline_s, request.reason)
        else:
            self.requested += 1
            numbered = msgspec.structs.replace(request, number=self.requested)
            self.requests.append((self.number + 1, numbered))

    # -- from the coordinator -----------------------------------------------------------------------------------------

    def obeys(self, orders: NodeDesired) -> bool:
        """Whether who says this leads the job, as far as is known here. Else nothing of it counts."""
        leader = (orders.term, orders.coordinator)
        if orders.term < self.leader[0] or (orders.term == self.leader[0] > 0 and leader != self.leader):
            return False
        self.leader = leader
        return True

    def ordered(self, orders: NodeDesired, now: float) -> None:
        """What a coordinator says that is obeyed."""
        if orders.life != self.life:
            return
        if orders.coordinator != self.coordinator:
            self.coordinator, self.done = orders.coordinator, 0
        self.heard = orders.heard
        self.requests = [(number, one) for number, one in self.requests if number > orders.heard]
        self.wish = orders.wish or self.wish
        self.keep_store = orders.keep_store
        if orders.leave_s is not None and self.leave_by is None:
            self.asked_back(now + orders.leave_s, orders.reason)
        self._form(orders, now)
        for command in orders.commands:
            if command.number > self.done:
                self.done = command.number
                self._carry_out(command, now)
        if self.refill_by is None and self._lacking_spares() > 0:
            self.refill_by = now + _SPARE_WAIT_S
        if orders.over is not None:
            self.end(orders.over, orders.reason)
        elif orders.release is not None and self.over is None:
            self._release(orders.release, cut=orders.cut)

    def reborn(self) -> None:
        """It was given up for lost: its ranks leave the world they are in, and come back with it as a new node."""
        self.life = self.new_life()
        self.births = sum(process.seat is not None for process in self.processes.values())
        if self.formed is not None and self.broken is None:
            self.broken = "this node was given up for lost"
        self.pausing = self.pause_until = self.target = None
        self.coordinator, self.done = "", 0

    def _form(self, orders: NodeDesired, now: float) -> None:
        formed = orders.formed
        if formed is not None and self.node in formed.places:
            known = self.formed.epoch if self.formed is not None else -1
            if formed.epoch > known:
                self.broken = self.pausing = self.pause_until = self.target = self.leave_world_by = None
                for process in self.seated():
                    process.placed = formed.epoch
            if formed.epoch >= known:
                self.formed = formed
                self._give(formed)
        if self.formed is None:
            return
        if orders.broken is not None and formed is not None and formed.epoch == self.formed.epoch:
            if self.broken is None and orders.broken_s is not None:
                self.leave_world_by = now + orders.broken_s
            self.broken = orders.broken
            for process in self.seated():
                process.placed = process.given  # who still waited for the store was never in it
        if orders.pausing is not None and orders.pausing.epoch == self.formed.epoch:
            self.pausing, self.pause_until = orders.pausing, now + orders.pausing.within_s
        if formed is not None and formed.epoch == self.formed.epoch and orders.target is not None:
            self.target = orders.target

    def _give(self, formed: WorldSpec) -> None:
        if formed.store and self.broken is None:
            for process in self.seated():
                process.given = process.placed

    def _carry_out(self, command: NodeCommand, now: float) -> None:
        if self.over is not None:
            return
        if command.injection is not None:
            self._inject(command.injection)
            return
        if command.do is CommandKind.STRAGGLERS:
            for process in self.seated():
                if not process.is_ready and process.seat is not None:
                    if process.ended is None:
                        why = f"local rank {process.seat} is not ready in time: its process is killed and replaced"
                        self.effects.append(EndProcess(process.token, why))
                        process.ended = why
                    self._seat(process.seat)
        for seat in command.local_ranks:
            self._seat(seat, self.warm_spares(now) if command.do is CommandKind.PROMOTE else ())

    def _inject(self, injection: FaultInjection) -> None:
        if injection.is_at_once and injection.kind in SUPERVISOR_KINDS:
            self.effects.append(InjectFault(injection))
        else:
            self.injections = (*self.injections, injection)[-_INJECTIONS:]

    def cut(self, seconds: float) -> None:
        """Have this node cut off for a while."""
        self.cuts += 1
        self.effects.append(PartitionNode(seconds))

    def rank_of(self, seat: int) -> int:
        """Its place in the newest world that this node was told of, or -1."""
        return -1 if self.formed is None else self.formed.places.index(self.node) * self.nproc + seat

    def _release(self, reason: str, *, cut: bool) -> None:
        if cut:
            for token in list(self.processes):
                self._drop(token)
        self.goodbye = reason
        self.end(ExitReason.DISMISSED, reason)

    def end(self, over: ExitReason, reason: str) -> None:
        """Nothing further happens on this node."""
        if self.over is None:
            self.over, self.reason = over, reason

    # -- processes ----------------------------------------------------------------------------------------------------

    def seated(self) -> list[RankProcess]:
        return [process for process in self.processes.values() if process.seat is not None]

    def spares(self) -> list[RankProcess]:
        return [process for process in self.processes.values() if process.seat is None]

    def warm_spares(self, now: float) -> list[RankProcess]:
        """Those that could take a seat at once: one that is stopped could not."""
        return [process for process in self.spares() if process.is_ready and not process.is_mute(now)]

    def _seat(self, seat: int, warm_spares: Sequence[RankProcess] = ()) -> None:
        for process in [one for one in self.seated() if one.seat == seat]:
            self._drop(process.token)
        self.births += 1
        if warm_spares:
            warm_spares[0].seat = seat
        else:
            self._start(seat)

    def _start(self, seat: int | None) -> None:
        self.attempts += 1
        token = self.new_token()
        self.processes[token] = RankProcess(token, self.attempts, seat)
        self.effects.append(StartProcess(token, self.attempts, seat))

    def _drop(self, token: str) -> None:
        if self.processes.pop(token).ended is None:
            self.effects.append(EndProcess(token))

    def _refill(self) -> None:
        for _ in range(self._lacking_spares()):
            self._start(None)

    def _lacking_spares(self) -> int:
        given_up = self.over is not None or self.wasted_spares >= _SPARE_TRIES
        return 0 if given_up else self.wanted_spares - len(self.spares())

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._end_mute(now)
        self.refill_due(now)

    def _end_mute(self, now: float) -> None:
        """Who has not left a broken world yet has time for that as long as its process runs."""
        if self.broken is None or self.over is not None:
            return
        for process in self.seated():
            if process.is_mute(now):
                self.effects.append(EndProcess(process.token))
                self.ended(
                    process.token, f"it was in a broken world, and said nothing for {process.quiet_s(now):.0f} s"
                )

    def refill_due(self, now: float) -> None:
        """A spare that was used is replaced once the ranks have gone on: until then they want the cores that starting
        and importing takes, and nobody could be warm before they are through.
        """
        if self.refill_by is not None and (now >= self.refill_by or self._are_under_way()):
            self.refill_by = None
            self._refill()

    def _are_under_way(self) -> bool:
        return self.formed is not None and all(one.went_on == self.formed.epoch for one in self.seated())

    def effects_due(self) -> list[SupervisorEffect]:
        """What is to be done with processes, since this was last asked."""
        due, self.effects = self.effects, []
        return due


replace = msgspec.structs.replace


def rank_desired(seats: NodeState, token: str, now: float) -> RankDesired:
    """What the process with this token is to know."""
    hears = _for_rank(seats, token, now)
    if not seats.injections and not seats.cuts:
        return hears
    return replace(hears, injections=seats.injections, cuts=seats.cuts)


def _for_rank(seats: NodeState, token: str, now: float) -> RankDesired:
    process = seats.processes.get(token)
    if process is None:
        return RankDesired(over=ExitReason.REFUSED, reason="another process has this rank's seat")
    heard = process.says.number if process.says is not None else 0
    if seats.over is not None:
        return RankDesired(heard, over=seats.over, reason=seats.reason, cut_off=seats.cut_off)
    formed, seat = seats.formed, process.seat
    if formed is None or seat is None or process.given < formed.epoch:
        return RankDesired(heard, cut_off=seats.cut_off)
    place = formed.places.index(seats.node)
    assignment = RankAssignment(
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
    return RankDesired(heard, assignment, _notice(seats, formed.epoch, now), seats.target, cut_off=seats.cut_off)


def _notice(seats: NodeState, epoch: int, now: float) -> ControlNotice | None:
    if seats.broken is not None:
        by = seats.leave_world_by
        return ControlNotice(epoch, NoticeKind.RESTART, seats.broken, None if by is None else max(0.0, by - now))
    pausing = _pausing(seats, now)
    if pausing is None:
        return None
    return ControlNotice(
        epoch, NoticeKind.STOP if pausing.stop else NoticeKind.RESIZE, pausing.reason, pausing.within_s
    )


def _pausing(seats: NodeState, now: float) -> PauseOrder | None:
    if seats.pausing is None or seats.pause_until is None:
        return None
    return replace(seats.pausing, within_s=max(0.0, seats.pause_until - now))


def node_status(seats: NodeState, now: float) -> NodeStatus:
    """All there is to say of this node; who sends it counts :attr:`NodeState.number` up."""
    ordered = sorted(seats.seated(), key=lambda process: process.seat or 0)
    seated = ordered if seats.over is None else []
    epoch = seats.formed.epoch if seats.formed is not None else -1
    said = [process.said_in(epoch) for process in seated]
    here = [one for one in said if one is not None]
    inside = [one for one in here if one.stand is not RankPhase.FINISHED]
    whole = bool(seated) and len(here) == len(seated)
    return NodeStatus(
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
            RankFailure(process.seat or 0, process.ended, at=process.ended_at)
            for process in seated
            if process.ended is not None and not seats.excuses(process)
        ),
        faults=tuple(
            RankFailure(process.seat or 0, fault, final=one.final)
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


def _is_behind(says: RankStatus, *, agreed: bool) -> bool:
    if says.stand is RankPhase.FINISHED:
        return False
    return (says.sealed if agreed else says.paused) is None


def _fault(says: RankStatus, *, broken: bool) -> str | None:
    if says.fault is None and not broken and says.stand is RankPhase.READY and says.sealed is None:
        return "it came back without being asked"
    return says.fault


def comparable_rank_desired(hears: RankDesired) -> RankDesired:
    """Without what changes by itself: two that are equal say the same."""
    if hears.notice is None or hears.notice.deadline_s is None:
        return hears
    return replace(hears, notice=replace(hears.notice, deadline_s=0.0))


def comparable_node_status(says: NodeStatus) -> NodeStatus:
    """The same of what the coordinator is told."""
    return replace(
        says,
        number=0,
        steps=(),
        quiet_s=(),
        leaving_s=None if says.leaving_s is None else 0.0,
        pausing=None if says.pausing is None else replace(says.pausing, within_s=0.0),
    )
