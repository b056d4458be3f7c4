"""A ledger's events as runs of a job, and a run as stretches of steps with the ways between them."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from tieredckpt.goodput.model import Category, RunView
from tieredckpt.ledger.events import Began, Ended, Event, Fault, Notice, Opened, Restored, Save, Stage, Step, when
from tieredckpt.ledger.events import WorldFormed as World

COORDINATOR = "coordinator"
_AFTER_A_FAULT = ("restart", "respawn", "replace")


def us(seconds: float) -> int:
    return round(seconds * 1e6)


@dataclass
class Stretch:
    """The steps of one world."""

    epoch: int
    ranks: int
    start: int
    end: int
    steps: list[Step]


@dataclass
class Way:
    """From one stretch of steps to the next, or from the start, or to the end. Times are microseconds."""

    run: int
    epoch: int
    """The last world with steps; -1 before the first."""
    next_epoch: int | None
    start: int
    end: int
    category: Category = Category.UNKNOWN
    faults: list[Fault] = field(default_factory=list)
    worlds: list[World] = field(default_factory=list)
    """That were formed on this way; in the end the one that does steps."""
    ranks: int = 0
    next_ranks: int = 0

    def leads_from(self, epoch: int) -> bool:
        """Whether this is about a world that was left on this way."""
        return self.epoch <= epoch and (self.next_epoch is None or epoch < self.next_epoch)

    def leads_to(self, epoch: int) -> bool:
        return self.epoch < epoch and (self.next_epoch is None or epoch <= self.next_epoch)


@dataclass
class Run:
    """One start of the job, by kinds of what was written down."""

    number: int
    start: int
    end: int
    how: str = ""
    words: str = ""
    job: str = ""
    worlds: dict[int, World] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    restores: list[Restored] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    ways: list[Way] = field(default_factory=list)

    @property
    def view(self) -> RunView:
        return RunView(self.start, self.end, self.how, self.words)

    def inside(self, at: int) -> int:
        return min(max(at, self.start), self.end)

    def stages_about(self, way: Way) -> list[Stage]:
        """Of the worlds that a way leads from, through or to: few of all there are."""
        epochs, by_epoch = self._staged
        first = bisect.bisect_left(epochs, way.epoch)
        last = len(epochs) if way.next_epoch is None else bisect.bisect_right(epochs, way.next_epoch)
        return [stage for epoch in epochs[first:last] for stage in by_epoch[epoch]]

    @cached_property
    def _staged(self) -> tuple[list[int], dict[int, list[Stage]]]:
        by_epoch: dict[int, list[Stage]] = {}
        for stage in self.stages:
            by_epoch.setdefault(stage.epoch, []).append(stage)
        return sorted(by_epoch), by_epoch


def in_order(events: Iterable[Event]) -> list[Event]:
    """The same for any order they are given in, each one once."""
    distinct = {msgspec.json.encode(event): event for event in events}
    return [event for _, event in sorted(distinct.items(), key=lambda item: (when(item[1]), item[0]))]


def runs_of(events: Iterable[Event]) -> list[Run]:
    """A run begins with its coordinator; what was over before the first one began belongs to that."""
    ordered = in_order(event for event in events if not isinstance(event, Opened))
    firsts = [one.at for one in ordered if isinstance(one, Began) and one.who == COORDINATOR and not one.again]
    groups: list[list[Event]] = [[]] if not firsts else [[] for _ in firsts]
    for event in ordered:
        groups[max(0, bisect.bisect_right(firsts, when(event)) - 1)].append(event)
    runs = [_run(number, group, firsts[number] if firsts else None) for number, group in enumerate(groups) if group]
    for run, later in itertools.pairwise(runs):
        run.end = min(run.end, later.start)
    for run in runs:
        run.stretches = _stretches(run)
        run.ways = _ways(run)
    return runs


def _run(number: int, events: Sequence[Event], first: float | None) -> Run:
    began = min(_begin(event) for event in events) if first is None else first
    run = Run(number, us(began), max([us(began), *(us(when(event)) for event in events)]), events=list(events))
    for event in events:
        if isinstance(event, World):
            run.worlds.setdefault(event.epoch, event)
        elif isinstance(event, Step):
            run.steps.append(event)
        elif isinstance(event, Stage):
            run.stages.append(event)
        elif isinstance(event, Save):
            run.saves.append(event)
        elif isinstance(event, Restored):
            run.restores.append(event)
        elif isinstance(event, Began | Ended):
            run.job = run.job or event.job
            if event.who == COORDINATOR:  # one that begins again takes back that it had ended
                run.how, run.words = (event.how, event.words) if isinstance(event, Ended) else ("", "")
    return run


def _begin(event: Event) -> float:
    return event.began if isinstance(event, Stage | Step | Save | Restored) else event.at


def ranks_of(run: Run, epoch: int) -> int:
    """A world that nobody wrote down has as many ranks as are known of."""
    if epoch in run.worlds:
        return run.worlds[epoch].ranks
    told = [one.rank for one in run.stages if one.epoch == epoch] + [
        one.rank for one in run.steps if one.epoch == epoch
    ]
    return 1 + max(told, default=0)


def _stretches(run: Run) -> list[Stretch]:
    """Of every world what its first rank says."""
    epochs: dict[int, list[Step]] = {}
    for step in run.steps:
        epochs.setdefault(step.epoch, []).append(step)
    found = []
    for epoch, steps in sorted(epochs.items()):
        teller = min(step.rank for step in steps)
        told = sorted((step for step in steps if step.rank == teller), key=lambda step: (step.began, step.step))
        end = max(us(when(step)) for step in told)
        found.append(Stretch(epoch, ranks_of(run, epoch), us(told[0].began), end, told))
    return found


def _ways(run: Run) -> list[Way]:
    ways = []
    faults = [one for one in run.events if isinstance(one, Fault)]
    notices = [one for one in run.events if isinstance(one, Notice)]
    before: Stretch | None = None
    for after in [*run.stretches, None]:
        start = run.start if before is None else before.end
        end = run.end if after is None else after.start
        way = Way(
            run.number,
            -1 if before is None else before.epoch,
            None if after is None else after.epoch,
            run.inside(start),
            run.inside(max(start, end)),
            ranks=0 if before is None else before.ranks,
        )
        way.worlds = [world for epoch, world in sorted(run.worlds.items()) if way.leads_to(epoch)]
        way.next_ranks = after.ranks if after is not None else way.worlds[-1].ranks if way.worlds else way.ranks
        way.faults = [one for one in faults if way.leads_from(one.epoch)]
        way.category = _category(run, way, notices, first=before is None)
        ways.append(way)
        before = after
    return ways


def _category(run: Run, way: Way, notices: Sequence[Notice], *, first: bool) -> Category:
    if first:
        return Category.STARTUP
    if way.faults or any(world.how in _AFTER_A_FAULT for world in way.worlds):
        return Category.RECOVERY
    asked = [one for one in notices if way.leads_from(one.epoch)]
    if way.next_epoch is not None or way.worlds or (any(one.want == "resize" for one in asked) and not run.how):
        return Category.RESIZE
    return Category.ENDING if run.how or asked else Category.UNKNOWN
