"""What a supervisor knows of its node and does about it. Pure but for its own memory: no process, socket or clock.

A node has ``nproc`` seats, one for each rank, and warm spares beside them. What ranks say and the coordinator orders
goes in; which processes are to be started and ended comes out, and :mod:`~elastic.control.tidings` says who hears what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from elastic.control.messages import (
    Command,
    Do,
    Formed,
    NodeHears,
    Over,
    Pausing,
    RankSays,
    Request,
    Stand,
    Wish,
)
from elastic.control.plane import Want
from elastic.inject.plan import OUTSIDE, Injection

_SPARE_TRIES = 3
"""Spares that end before they are warm are started again so often."""
_SPARE_WAIT_S = 30.0
"""A spare that was used is replaced after so long at the latest."""
_MUTE_S = 10.0
"""A process that has said nothing for so long is stopped, or something in it keeps the interpreter's lock: it says
something every second from a thread of its own."""
_INJECTIONS = 100
"""So many are told to ranks, the newest ones."""


class Start(NamedTuple):
    """A process is to be started."""

    token: str
    attempt: int
    seat: int | None


class End(NamedTuple):
    """A process is to be ended at once."""

    token: str
    why: str = ""
    """The reason to log; empty for none."""


class Cut(NamedTuple):
    """This node is to be cut off for a while, on purpose."""

    seconds: float


class Inject(NamedTuple):
    """A fault is to happen that a supervisor can bring about."""

    injection: Injection


Effect = Start | End | Cut | Inject


@dataclass
class Process:
    token: str
    attempt: int
    seat: int | None
    placed: int = -1
    """The newest world that was formed while it was in its seat."""
    given: int = -1
    """The newest world it was given a place in: that one, once the store is there."""
    says: RankSays | None = None
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
        return self.ended is None and says is not None and says.stand is Stand.READY and says.epoch == self.placed

    def quiet_s(self, now: float) -> float:
        """Since when nothing was heard of it, where it was to say something."""
        return 0.0 if self.heard_at is None or self.ended is not None else max(0.0, now - self.heard_at)

    def is_mute(self, now: float) -> bool:
        return self.quiet_s(now) > _MUTE_S

    def said_in(self, epoch: int) -> RankSays | None:
        """What it says, where that is about this world."""
        return self.says if self.says is not None and self.says.epoch == epoch == self.given else None

    def note_steps(self, says: RankSays) -> None:
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
        if says.stand is Stand.FINISHED and says.epoch == self.given:
            return True
        return stopping and says.sealed is not None


@dataclass
class Seats:
    node: str
    nproc: int
    new_token: Callable[[], str]
    new_life: Callable[[], int]
    wanted_spares: int = 0
    life: int = 0
    effects: list[Effect] = field(default_factory=list)
    processes: dict[str, Process] = field(default_factory=dict)
    """Those in seats and the spares; who is to end is not among them any more."""
    births: int = 0
    attempts: int = 0
    wasted_spares: int = 0
    refill_by: float | None = None
    """By when the spares that were used are to be replaced."""
    formed: Formed | None = None
    broken: str | None = None
    leave_world_by: float | None = None
    """When the ranks must have left the broken world."""
    pausing: Pausing | None = None
    pause_until: float | None = None
    target: int | None = None
    wish: Wish | None = None
    over: Over | None = None
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
    requests: list[tuple[int, Request]] = field(default_factory=list)
    """What ranks asked for, with the number of the message that first said it."""
    requested: int = 0
    cut_off: bool = False
    store: str = ""
    keep_store: bool = False
    injections: tuple[Injection, ...] = ()
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
            self.effects.append(End(token))
            self.ended(token, "it closed its connection before it had finished", at)

    def excuses(self, process: Process) -> bool:
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

    def said(self, token: str, says: RankSays, now: float) -> None:
        process = self.processes.get(token)
        if process is None or process.ended is not None:
            return
        process.says, process.heard_at = says, now
        process.note_steps(says)
        for request in says.requests:
            if request.number > process.requested:
                process.requested = request.number
                self._request(request, now)

    def _request(self, request: Request, now: float) -> None:
        if request.cut_s is not None:
            self.cut(request.cut_s)
        elif request.want is Want.RESIZE and request.nodes is None and request.deadline_s is not None:
            self.asked_back(now + request.deadline_s, request.reason)
        else:
            self.requested += 1
            numbered = msgspec.structs.replace(request, number=self.requested)
            self.requests.append((self.number + 1, numbered))

    # -- from the coordinator -----------------------------------------------------------------------------------------

    def obeys(self, orders: NodeHears) -> bool:
        """Whether who says this leads the job, as far as is known here. Else nothing of it counts."""
        leader = (orders.term, orders.coordinator)
        if orders.term < self.leader[0] or (orders.term == self.leader[0] > 0 and leader != self.leader):
            return False
        self.leader = leader
        return True

    def ordered(self, orders: NodeHears, now: float) -> None:
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

    def _form(self, orders: NodeHears, now: float) -> None:
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

    def _give(self, formed: Formed) -> None:
        if formed.store and self.broken is None:
            for process in self.seated():
                process.given = process.placed

    def _carry_out(self, command: Command, now: float) -> None:
        if self.over is not None:
            return
        if command.injection is not None:
            self._inject(command.injection)
            return
        if command.do is Do.STRAGGLERS:
            for process in self.seated():
                if not process.is_ready and process.seat is not None:
                    if process.ended is None:
                        why = f"local rank {process.seat} is not ready in time: its process is killed and replaced"
                        self.effects.append(End(process.token, why))
                        process.ended = why
                    self._seat(process.seat)
        for seat in command.local_ranks:
            self._seat(seat, self.warm_spares(now) if command.do is Do.PROMOTE else ())

    def _inject(self, injection: Injection) -> None:
        if injection.is_at_once and injection.kind in OUTSIDE:
            self.effects.append(Inject(injection))
        else:
            self.injections = (*self.injections, injection)[-_INJECTIONS:]

    def cut(self, seconds: float) -> None:
        """Have this node cut off for a while."""
        self.cuts += 1
        self.effects.append(Cut(seconds))

    def rank_of(self, seat: int) -> int:
        """Its place in the newest world that this node was told of, or -1."""
        return -1 if self.formed is None else self.formed.places.index(self.node) * self.nproc + seat

    def _release(self, reason: str, *, cut: bool) -> None:
        if cut:
            for token in list(self.processes):
                self._drop(token)
        self.goodbye = reason
        self.end(Over.DISMISSED, reason)

    def end(self, over: Over, reason: str) -> None:
        """Nothing further happens on this node."""
        if self.over is None:
            self.over, self.reason = over, reason

    # -- processes ----------------------------------------------------------------------------------------------------

    def seated(self) -> list[Process]:
        return [process for process in self.processes.values() if process.seat is not None]

    def spares(self) -> list[Process]:
        return [process for process in self.processes.values() if process.seat is None]

    def warm_spares(self, now: float) -> list[Process]:
        """Those that could take a seat at once: one that is stopped could not."""
        return [process for process in self.spares() if process.is_ready and not process.is_mute(now)]

    def _seat(self, seat: int, warm_spares: Sequence[Process] = ()) -> None:
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
        self.processes[token] = Process(token, self.attempts, seat)
        self.effects.append(Start(token, self.attempts, seat))

    def _drop(self, token: str) -> None:
        if self.processes.pop(token).ended is None:
            self.effects.append(End(token))

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
                self.effects.append(End(process.token))
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

    def effects_due(self) -> list[Effect]:
        """What is to be done with processes, since this was last asked."""
        due, self.effects = self.effects, []
        return due
