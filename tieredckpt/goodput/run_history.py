"""Runs, worlds and transitions of an event log, and the executed steps that count."""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from tieredckpt.event_log.event_types import (
    FaultEvent,
    FileOpened,
    LogEvent,
    ProcessBegan,
    ProcessEnded,
    RestoreEvent,
    SaveEvent,
    StageEvent,
    StepEvent,
    StopRequested,
    WorldFormed,
    event_time,
)
from tieredckpt.goodput.analysis_result import RunRecord, StepRecord, TimeCategory

COORDINATOR_ROLE = "coordinator"
_AFTER_A_FAULT = ("restart", "respawn", "replace")


def to_us(seconds: float) -> int:
    return round(seconds * 1e6)


@dataclass
class WorldSteps:
    """The steps of one world."""

    epoch: int
    ranks: int
    start: int
    end: int
    steps: list[StepEvent]


@dataclass
class Transition:
    """A transition between the steps of two worlds, or from the start or to the end of a run.

    Times are in microseconds.
    """

    run: int
    epoch: int
    """Last world with steps. -1: none."""
    next_epoch: int | None
    start: int
    end: int
    category: TimeCategory = TimeCategory.UNKNOWN
    faults: list[FaultEvent] = field(default_factory=list)
    worlds: list[WorldFormed] = field(default_factory=list)
    """Worlds that were formed during the transition. The last one runs the next steps."""
    ranks: int = 0
    next_ranks: int = 0

    def leaves(self, epoch: int) -> bool:
        """Return whether the job left world ``epoch`` in this transition."""
        return self.epoch <= epoch and (self.next_epoch is None or epoch < self.next_epoch)

    def enters(self, epoch: int) -> bool:
        return self.epoch < epoch and (self.next_epoch is None or epoch <= self.next_epoch)


@dataclass
class JobRun:
    """One run of the job, with its events by kind. Times are in microseconds."""

    number: int
    start: int
    end: int
    outcome: str = ""
    message: str = ""
    job: str = ""
    worlds: dict[int, WorldFormed] = field(default_factory=dict)
    steps: list[StepEvent] = field(default_factory=list)
    stages: list[StageEvent] = field(default_factory=list)
    saves: list[SaveEvent] = field(default_factory=list)
    restores: list[RestoreEvent] = field(default_factory=list)
    events: list[LogEvent] = field(default_factory=list)
    worlds_in_order: list[WorldSteps] = field(default_factory=list)
    transitions: list[Transition] = field(default_factory=list)

    @property
    def view(self) -> RunRecord:
        return RunRecord(self.start, self.end, self.outcome, self.message)

    def clamp(self, at: int) -> int:
        return min(max(at, self.start), self.end)

    def stages_of(self, transition: Transition) -> list[StageEvent]:
        """Return the stages of the worlds from which, through which or to which ``transition`` leads."""
        epochs, by_epoch = self._stages_by_epoch
        first = bisect.bisect_left(epochs, transition.epoch)
        last = len(epochs) if transition.next_epoch is None else bisect.bisect_right(epochs, transition.next_epoch)
        return [stage for epoch in epochs[first:last] for stage in by_epoch[epoch]]

    @cached_property
    def _stages_by_epoch(self) -> tuple[list[int], dict[int, list[StageEvent]]]:
        by_epoch: dict[int, list[StageEvent]] = {}
        for stage in self.stages:
            by_epoch.setdefault(stage.epoch, []).append(stage)
        return sorted(by_epoch), by_epoch


def sorted_events(events: Iterable[LogEvent]) -> list[LogEvent]:
    """Return the distinct events in order of time. The order of ``events`` does not matter."""
    distinct = {msgspec.json.encode(event): event for event in events}
    return [event for _, event in sorted(distinct.items(), key=lambda item: (event_time(item[1]), item[0]))]


def split_into_runs(events: Iterable[LogEvent]) -> list[JobRun]:
    """Split events into runs. A run begins with its coordinator; earlier events belong to the first run."""
    ordered = sorted_events(event for event in events if not isinstance(event, FileOpened))
    firsts = [
        one.at for one in ordered if isinstance(one, ProcessBegan) and one.who == COORDINATOR_ROLE and not one.again
    ]
    groups: list[list[LogEvent]] = [[]] if not firsts else [[] for _ in firsts]
    for event in ordered:
        groups[max(0, bisect.bisect_right(firsts, event_time(event)) - 1)].append(event)
    runs = [
        _build_run(number, group, firsts[number] if firsts else None) for number, group in enumerate(groups) if group
    ]
    for run, later in itertools.pairwise(runs):
        run.end = min(run.end, later.start)
    for run in runs:
        run.worlds_in_order = _with_unwritten_steps(_worlds_with_steps(run), run)
        run.transitions = _transitions(run)
    return runs


def _build_run(number: int, events: Sequence[LogEvent], first: float | None) -> JobRun:
    began = min(_event_start(event) for event in events) if first is None else first
    run = JobRun(
        number, to_us(began), max([to_us(began), *(to_us(event_time(event)) for event in events)]), events=list(events)
    )
    for event in events:
        if isinstance(event, WorldFormed):
            run.worlds.setdefault(event.epoch, event)
        elif isinstance(event, StepEvent):
            run.steps.append(event)
        elif isinstance(event, StageEvent):
            run.stages.append(event)
        elif isinstance(event, SaveEvent):
            run.saves.append(event)
        elif isinstance(event, RestoreEvent):
            run.restores.append(event)
        elif isinstance(event, ProcessBegan | ProcessEnded):
            run.job = run.job or event.job
            if event.who == COORDINATOR_ROLE:  # a restarted coordinator revokes the end of the run
                run.outcome, run.message = (event.how, event.words) if isinstance(event, ProcessEnded) else ("", "")
    return run


def _event_start(event: LogEvent) -> float:
    return event.began if isinstance(event, StageEvent | StepEvent | SaveEvent | RestoreEvent) else event.at


def world_size_of(run: JobRun, epoch: int) -> int:
    """Return the ranks of a world. If its formation is not recorded: 1 + the highest rank with an event."""
    if epoch in run.worlds:
        return run.worlds[epoch].ranks
    reported = [one.rank for one in run.stages if one.epoch == epoch] + [
        one.rank for one in run.steps if one.epoch == epoch
    ]
    return 1 + max(reported, default=0)


def _worlds_with_steps(run: JobRun) -> list[WorldSteps]:
    """Return the steps of each world, as reported by its lowest rank."""
    epochs: dict[int, list[StepEvent]] = {}
    for step in run.steps:
        epochs.setdefault(step.epoch, []).append(step)
    found = []
    for epoch, steps in sorted(epochs.items()):
        first_rank = min(step.rank for step in steps)
        reported = sorted((step for step in steps if step.rank == first_rank), key=lambda step: (step.began, step.step))
        end = max(to_us(event_time(step)) for step in reported)
        found.append(WorldSteps(epoch, world_size_of(run, epoch), to_us(reported[0].began), end, reported))
    return found


def _with_unwritten_steps(worlds: list[WorldSteps], run: JobRun) -> list[WorldSteps]:
    """Add the last steps of worlds whose first rank was killed before it wrote them.

    Other ranks had completed them: the next world restored such a step, or reports that it is done again. Their losses
    are unknown.
    """
    reached: dict[tuple[int, int], int] = {}
    for one in run.restores:
        key = one.epoch, one.step + 1
        reached[key] = max(one.step + max(0, one.steps_redone), reached.get(key, -1))
    for before, after in itertools.pairwise(worlds):
        last = before.steps[-1]
        missing = range(last.step + 1, reached.get((after.epoch, after.steps[0].step), -1) + 1)
        if not missing:
            continue
        known = [one for one in run.events if isinstance(one, FaultEvent) and one.epoch == before.epoch]
        fault = min((one.at if one.since is None else one.since for one in known), default=after.steps[0].began)
        until = max(event_time(last), min(fault, after.steps[0].began))
        typical_s = statistics.median(one.seconds for one in before.steps)
        seconds = min(typical_s, (until - event_time(last)) / len(missing))
        for number, step in enumerate(missing):
            began = event_time(last) + number * seconds
            before.steps.append(StepEvent(before.epoch, last.rank, step, began, seconds))
        before.end = to_us(event_time(before.steps[-1]))
    return worlds


def _transitions(run: JobRun) -> list[Transition]:
    transitions = []
    faults = [one for one in run.events if isinstance(one, FaultEvent)]
    notices = [one for one in run.events if isinstance(one, StopRequested)]
    before: WorldSteps | None = None
    for after in [*run.worlds_in_order, None]:
        start = run.start if before is None else before.end
        end = run.end if after is None else after.start
        transition = Transition(
            run.number,
            -1 if before is None else before.epoch,
            None if after is None else after.epoch,
            run.clamp(start),
            run.clamp(max(start, end)),
            ranks=0 if before is None else before.ranks,
        )
        transition.worlds = [world for epoch, world in sorted(run.worlds.items()) if transition.enters(epoch)]
        transition.next_ranks = (
            after.ranks if after is not None else transition.worlds[-1].ranks if transition.worlds else transition.ranks
        )
        transition.faults = [one for one in faults if transition.leaves(one.epoch)]
        transition.category = _transition_category(run, transition, notices, first=before is None)
        transitions.append(transition)
        before = after
    return transitions


def _transition_category(
    run: JobRun, transition: Transition, notices: Sequence[StopRequested], *, first: bool
) -> TimeCategory:
    if first:
        return TimeCategory.STARTUP
    if transition.faults or any(world.how in _AFTER_A_FAULT for world in transition.worlds):
        return TimeCategory.RECOVERY
    requests = [one for one in notices if transition.leaves(one.epoch)]
    if (
        transition.next_epoch is not None
        or transition.worlds
        or (any(one.want == "resize" for one in requests) and not run.outcome)
    ):
        return TimeCategory.RESIZE
    return TimeCategory.ENDING if run.outcome or requests else TimeCategory.UNKNOWN


@dataclass
class ExecutedStep:
    """An executed step. Times are in microseconds."""

    event: StepEvent
    run: int
    ranks: int
    first: bool
    """Whether it is the first step of its world."""
    start: int
    end: int
    save_span: tuple[int, int]
    """Start and end of its wait for the staging of a save. Equal: it did not wait."""
    counts: bool = True
    undone_by: tuple[int, int] | None = None
    """Run and epoch of the world that repeated it. ``None``: it counts, or no step ran after its loss."""

    @property
    def step(self) -> int:
        return self.event.step

    @property
    def epoch(self) -> int:
        return self.event.epoch

    @property
    def rank(self) -> int:
        return self.event.rank

    @property
    def training_us(self) -> int:
        return self.end - self.start - (self.save_span[1] - self.save_span[0])

    @property
    def view(self) -> StepRecord:
        one = self.event
        return StepRecord(
            one.step,
            self.start,
            self.end,
            one.epoch,
            self.ranks,
            self.counts,
            one.loss,
            one.tokens,
            one.samples,
            self.run,
            one.not_finite,
        )


def executed_steps(runs: Sequence[JobRun]) -> list[ExecutedStep]:
    """Return the steps of all runs in order of time, marked as counting or not.

    A step counts unless training later executed it or an earlier step, or restored a state from before it.
    """
    done: list[ExecutedStep] = []
    for run in runs:
        saves = {(save.epoch, save.step, save.rank): save for save in run.saves}
        for stretch in run.worlds_in_order:
            for index, step in enumerate(stretch.steps):
                start, end = to_us(step.began), to_us(event_time(step))
                saving = _save_span(saves.get((step.epoch, step.step, step.rank)), start, end)
                done.append(ExecutedStep(step, run.number, stretch.ranks, index == 0, start, end, saving))
    restores = [(to_us(event_time(one)), one) for run in runs for one in run.restores]
    _mark_undone(done, sorted(restores, key=lambda item: (item[0], item[1].step)))
    return done


def _save_span(save: SaveEvent | None, start: int, end: int) -> tuple[int, int]:
    if save is None:
        return start, start
    first, last = max(to_us(save.began), start), min(to_us(event_time(save)), end)
    return (first, last) if first < last else (start, start)


def _mark_undone(done: Sequence[ExecutedStep], restores: Sequence[tuple[int, RestoreEvent]]) -> None:
    """Mark steps that do not count: training later executed or resumed a step at or below them."""
    least: float = math.inf
    waiting = list(restores)
    for one in reversed(done):
        while waiting and waiting[-1][0] >= one.end:
            least = min(least, waiting.pop()[1].step + 1)
        one.counts = one.step < least
        least = min(least, one.step)
    _set_undone_by(done)


def _set_undone_by(done: Sequence[ExecutedStep]) -> None:
    """Set ``undone_by`` to the first later world that began at the step or before it."""
    firsts = [((one.run, one.epoch), one.step) for one in done if one.first]
    order = {key: place for place, (key, _) in enumerate(firsts)}
    for one in done:
        if not one.counts:
            later = firsts[order[one.run, one.epoch] + 1 :]
            one.undone_by = next((key for key, step in later if step <= one.step), None)


def typical_step_us(done: Iterable[ExecutedStep]) -> dict[tuple[int, int], int]:
    """Return the median microseconds of a step without its save, by run and epoch.

    The first step of a world is ignored. A world with only that step has the median of all worlds.
    """
    worlds: dict[tuple[int, int], list[int]] = {}
    for one in done:
        times = worlds.setdefault((one.run, one.epoch), [])
        if not one.first:
            times.append(one.training_us)
    anywhere = [time for times in worlds.values() for time in times]
    return {key: round(statistics.median(times or anywhere)) for key, times in worlds.items() if times or anywhere}
