"""Analysis of a run history: timeline, faults, stages of transitions, lost work, totals. Pure."""

from __future__ import annotations

import bisect
import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import msgspec

from tieredckpt.event_log.event_types import (
    STAGE_ABORT,
    STAGE_DETECT,
    STAGE_FIRST_STEP,
    STAGE_LAUNCH,
    STAGE_LEAVE,
    STAGE_RENDEZVOUS,
    STAGE_SEAL,
    STAGES,
    FaultEvent,
    FaultInjected,
    LogEvent,
    Protection,
    StageEvent,
)
from tieredckpt.goodput.analysis_result import (
    STAGE_UNSTATED,
    Analysis,
    DurationStats,
    FaultRecord,
    StageStats,
    TimeCategory,
    TimeInterval,
    TimeTotals,
    TransitionRecord,
    UnnoticedInjection,
    Unprotected,
)
from tieredckpt.goodput.run_history import (
    ExecutedStep,
    JobRun,
    Transition,
    executed_steps,
    split_into_runs,
    to_us,
    typical_step_us,
)

_SAVE, _SLOW_START, _STEP, _INTERRUPTED = range(4)
"""Weights of claims: the lowest one wins where several claims overlap."""
_REST = 1000


def analyse(events: Iterable[LogEvent], *, job: str = "", warnings: Sequence[str] = ()) -> Analysis:
    """Return the analysis of one job's events. Their order does not matter."""
    runs = split_into_runs(events)
    found = PartialAnalysis(job, runs, executed_steps(runs), tuple(warnings))
    usual = typical_step_us(found.steps)
    ended = runs[0].start if runs else 0
    for run in runs:
        injections = [one for one in run.events if isinstance(one, FaultInjected)]
        analysed = [analyse_transition(run, transition, injections) for transition in run.transitions]
        done = [one for one in found.steps if one.run == run.number]
        firsts = {step.epoch: step for step in done if step.first and step.counts}
        for one in analysed:
            first = firsts.get(one.transition.next_epoch) if one.transition.next_epoch is not None else None
            if first is not None:
                slow = max(0, first.training_us - usual.get((run.number, first.epoch), first.training_us))
                one.slow_first_step_us = run.clamp(one.transition.end + slow) - one.transition.end
            for key, time_us in stage_times_by_rank(one.began_us, one.faults, one.stages).items():
                found.stage_times.setdefault((one.transition.category, key[2]), []).append(time_us)
        if ended < run.start:
            found.timeline.append(TimeInterval(ended, run.start, TimeCategory.DOWN, run=run.number))
        ended = run.end
        for start, end, label in resolve_claims(
            _claims(analysed, done), run.start, run.end, TimeLabel(TimeCategory.UNKNOWN)
        ):
            found.timeline.append(
                TimeInterval(start, end, label.category, label.stage, label.epoch, label.ranks, run.number)
            )
        found.transitions += analysed
    _attribute_lost_work(found.transitions, found.steps)
    return finish_analysis(found)


def analyse_transition(run: JobRun, transition: Transition, injections: Sequence[FaultInjected]) -> AnalysedTransition:
    stages = stages_of_transition(transition, run.stages_of(transition))
    faults = fault_records(transition, injections, [stage for stage in stages if stage.name == STAGE_DETECT])
    return AnalysedTransition(transition, faults, stages, transition_began_at(transition, faults, stages))


def _claims(analysed: Sequence[AnalysedTransition], done: Sequence[ExecutedStep]) -> Iterator[TimeClaim]:
    for one in analysed:
        transition = one.transition
        yield from stage_claims(transition, one.began_us, one.faults, one.stages)
        if one.slow_first_step_us:
            yield TimeClaim(
                transition.end,
                transition.end + one.slow_first_step_us,
                _SLOW_START,
                stage_label(transition, STAGE_FIRST_STEP),
            )
        if transition.category is TimeCategory.RECOVERY:
            yield TimeClaim(
                transition.start,
                one.began_us,
                _INTERRUPTED,
                TimeLabel(TimeCategory.LOST, "interrupted", transition.epoch, transition.ranks),
            )
        if transition.category is not TimeCategory.UNKNOWN:
            stage = "" if transition.category is TimeCategory.ENDING else STAGE_UNSTATED
            yield TimeClaim(one.began_us, transition.end, _REST, stage_label(transition, stage))
    for step in done:
        yield TimeClaim(
            step.start,
            step.end,
            _STEP,
            TimeLabel(TimeCategory.PRODUCTIVE if step.counts else TimeCategory.LOST, "", step.epoch, step.ranks),
        )
        if step.counts:
            yield TimeClaim(*step.save_span, _SAVE, TimeLabel(TimeCategory.SAVE, "", step.epoch, step.ranks))


def _attribute_lost_work(transitions: Sequence[AnalysedTransition], done: Sequence[ExecutedStep]) -> None:
    """Attribute lost steps to the transition after which training repeated them."""
    analysed = {(one.transition.run, one.transition.next_epoch): one for one in transitions}
    last = transitions[-1] if transitions else None
    for step in done:
        if not step.counts:
            one = analysed.get(step.undone_by) if step.undone_by is not None else last
            if one is not None:
                one.steps_lost += 1
                one.lost_us += step.end - step.start
    for one in transitions:
        if one.transition.category is TimeCategory.RECOVERY:
            one.lost_us += one.began_us - one.transition.start


class TimeLabel(NamedTuple):
    """Category of one moment of the job's time."""

    category: TimeCategory
    stage: str = ""
    epoch: int = -1
    ranks: int = 0


class TimeClaim(NamedTuple):
    """A time span, in microseconds, that one event labels."""

    start: int
    end: int
    weight: int
    """The claim with the lowest weight wins."""
    label: TimeLabel


class LabelledSpan(NamedTuple):
    start: int
    end: int
    label: TimeLabel


def resolve_claims(claims: Iterable[TimeClaim], start: int, end: int, rest: TimeLabel) -> list[LabelledSpan]:
    """Return labelled spans that cover ``[start, end)`` without gaps. Equal neighbours are merged.

    Unclaimed time has the label ``rest``. The order of the claims does not matter: of claims with equal weight the
    earliest one wins.
    """
    clipped = sorted(
        one._replace(start=max(one.start, start), end=min(one.end, end))
        for one in claims
        if max(one.start, start) < min(one.end, end)
    )
    points = sorted({start, end, *(one.start for one in clipped), *(one.end for one in clipped)})
    painted: list[LabelledSpan] = []
    active: list[tuple[int, TimeClaim]] = []
    following = 0
    for left, right in pairwise(points):
        while following < len(clipped) and clipped[following].start <= left:
            heapq.heappush(active, (clipped[following].weight, clipped[following]))
            following += 1
        while active and active[0][1].end <= left:
            heapq.heappop(active)
        label = active[0][1].label if active else rest
        if painted and painted[-1].label == label:
            painted[-1] = painted[-1]._replace(end=right)
        else:
            painted.append(LabelledSpan(left, right, label))
    return painted


def fault_records(
    transition: Transition, injections: Sequence[FaultInjected], known: Sequence[StageEvent]
) -> tuple[FaultRecord, ...]:
    """Return the faults of a transition in order of time, each with the injection that caused it.

    An injection causes at most one fault, the first that matches. ``known`` are the ranks' detect stages: the first
    fault of a world happened no later than the first of them.
    """
    left = sorted(injections, key=lambda one: one.at)
    firsts: dict[int, float] = {}
    for stage in known:
        firsts[stage.epoch] = min(stage.began, firsts.get(stage.epoch, stage.began))
    found = []
    for fault in sorted(transition.faults, key=lambda one: (one.at, one.node, one.local_rank)):
        fitting = [one for one in left if _fits(one, fault)]
        cause = fitting[-1] if fitting else None
        if cause is not None:
            left.remove(cause)
        since = fault.at if fault.since is None else fault.since
        at = min(since, fault.at, firsts.pop(fault.epoch, fault.at))
        found.append(
            FaultRecord(
                to_us(at if cause is None else cause.at),
                to_us(fault.at),
                fault.epoch,
                fault.node,
                fault.local_rank,
                fault.kind,
                fault.reason,
                "" if cause is None else cause.kind,
            )
        )
    return tuple(sorted(found, key=lambda one: (one.at_us, one.noticed_us)))


def _fits(injected: FaultInjected, fault: FaultEvent) -> bool:
    """Return whether ``injected`` can have caused ``fault``.

    It can if it is not later and no known location differs.
    """
    return (
        injected.at <= fault.at
        and injected.epoch in (-1, fault.epoch)
        and (not injected.node or not fault.node or injected.node == fault.node)
        and (injected.local_rank < 0 or fault.local_rank < 0 or injected.local_rank == fault.local_rank)
    )


_AWAY = (STAGE_DETECT, STAGE_SEAL, STAGE_ABORT, STAGE_LEAVE)
_ORDER = {name: 10 + number for number, name in enumerate(STAGES)}
_LAST = 90
_FALLBACK = 100


def stages_of_transition(transition: Transition, stages: Iterable[StageEvent]) -> list[StageEvent]:
    return [
        stage
        for stage in stages
        if (transition.leaves(stage.epoch) if stage.name in _AWAY else transition.enters(stage.epoch))
    ]


def transition_began_at(transition: Transition, faults: Sequence[FaultRecord], stages: Sequence[StageEvent]) -> int:
    """Return when the transition began, in microseconds. A recovery begins with its first fault."""
    if transition.category is not TimeCategory.RECOVERY:
        return transition.start
    known = [to_us(stage.began) for stage in stages if stage.name == STAGE_DETECT]
    at = min([fault.at_us for fault in faults] or known or [transition.start])
    return min(max(at, transition.start), transition.end)


def stage_claims(
    transition: Transition, began: int, faults: Sequence[FaultRecord], stages: Sequence[StageEvent]
) -> Iterator[TimeClaim]:
    """Yield the claims of a transition's stages.

    The earliest stage with a rank in it wins: all ranks wait for it.
    """
    for stage in stages:
        first, last = stage_span(stage, began, faults)
        if stage.name != STAGE_FIRST_STEP:
            yield TimeClaim(
                first, min(last, transition.end), _ORDER.get(stage.name, _LAST), stage_label(transition, stage.name)
            )
    formed = min((to_us(world.at) for world in transition.worlds), default=transition.end if faults else began)
    if transition.category is TimeCategory.STARTUP:
        first = min((to_us(stage.began) for stage in stages if stage.name != STAGE_DETECT), default=formed)
        yield TimeClaim(
            transition.start,
            min(max(first, transition.start), transition.end),
            _FALLBACK,
            stage_label(transition, STAGE_LAUNCH),
        )
    for fault in faults:
        yield TimeClaim(
            fault.at_us, min(fault.noticed_us, transition.end), _FALLBACK, stage_label(transition, STAGE_DETECT)
        )
    yield TimeClaim(began, min(formed, transition.end), _FALLBACK + 1, stage_label(transition, STAGE_RENDEZVOUS))


def stage_span(stage: StageEvent, began: int, faults: Sequence[FaultRecord]) -> tuple[int, int]:
    """Return start and end of a stage in microseconds, not before ``began``.

    ``detect`` starts at the fault.
    """
    first = to_us(stage.began)
    last = to_us(stage.began + stage.seconds)
    if stage.name == STAGE_DETECT:
        first = max(
            (fault.at_us for fault in faults if fault.epoch == stage.epoch and fault.at_us <= last), default=last
        )
    first = max(first, began)
    return first, max(first, last)


def stage_label(transition: Transition, stage: str) -> TimeLabel:
    return TimeLabel(
        transition.category,
        stage,
        -1 if transition.next_epoch is None else transition.next_epoch,
        transition.next_ranks or transition.ranks,
    )


def stage_times_by_rank(
    began: int, faults: Sequence[FaultRecord], stages: Sequence[StageEvent]
) -> dict[tuple[int, int, str], int]:
    """Return the microseconds of each rank in each stage, by (epoch, rank, stage)."""
    spent: dict[tuple[int, int, str], int] = {}
    for stage in stages:
        first, last = stage_span(stage, began, faults)
        if first == last and to_us(stage.began) < began:
            continue  # ended before the transition: a warm process that waited
        key = (stage.epoch, stage.rank, stage.name)
        spent[key] = spent.get(key, 0) + last - first
    return spent


def duration_stats(values_us: Iterable[int]) -> DurationStats:
    values = sorted(values_us)
    if not values:
        return DurationStats()
    p50, p99 = (values[math.ceil(len(values) * share) - 1] / 1e6 for share in (0.5, 0.99))
    return DurationStats(len(values), sum(values) / 1e6, p50, p99, values[-1] / 1e6)


def stage_stats(spent: Mapping[tuple[TimeCategory, str], Sequence[int]]) -> tuple[StageStats, ...]:
    """Return the statistics of stages, by category and in the order of stages."""
    categories = list(TimeCategory)
    found = []
    for (category, name), values in sorted(
        spent.items(), key=lambda item: (categories.index(item[0][0]), _ORDER.get(item[0][1], _LAST), item[0][1])
    ):
        one = duration_stats(values)
        found.append(StageStats(category, name, one.count, one.p50_s, one.p99_s, one.most_s))
    return tuple(found)


@dataclass
class AnalysedTransition:
    """A transition with its faults, stages and losses."""

    transition: Transition
    faults: tuple[FaultRecord, ...]
    stages: list[StageEvent]
    began_us: int
    slow_first_step_us: int = 0
    """Microseconds by which the first step of the new world exceeded a typical step."""
    steps_lost: int = 0
    lost_us: int = 0


@dataclass
class PartialAnalysis:
    """Intermediate results of an analysis."""

    job: str
    runs: list[JobRun]
    steps: list[ExecutedStep]
    warnings: tuple[str, ...]
    transitions: list[AnalysedTransition] = field(default_factory=list)
    timeline: list[TimeInterval] = field(default_factory=list)
    stage_times: dict[tuple[TimeCategory, str], list[int]] = field(default_factory=dict)
    """Microseconds in a stage, one value for each rank of each world."""


_INTERRUPTIONS = (TimeCategory.STARTUP, TimeCategory.RECOVERY, TimeCategory.RESIZE)


def finish_analysis(found: PartialAnalysis) -> Analysis:
    ranks = max((world.ranks for run in found.runs for world in run.worlds.values()), default=0)
    ranks = max([ranks, 1, *(step.ranks for step in found.steps)])
    wall, capacity = _totals(found.timeline, ranks)
    counted = [step for step in found.steps if step.counts]
    recoveries = tuple(
        _recovery(one, found.timeline)
        for one in found.transitions
        if one.transition.category in _INTERRUPTIONS or one.faults
    )
    resumed = [one for one in recoveries if one.category is TimeCategory.RECOVERY and one.resumed]
    broken = [one for one in recoveries if one.category is TimeCategory.RECOVERY or one.faults]
    up_us = sum(stretch.end - stretch.start for run in found.runs for stretch in run.worlds_in_order)
    restores = [one for run in found.runs for one in run.restores]
    tiers: Counter[str] = Counter()
    for restore in restores:
        tiers.update(restore.bytes_by_tier)
    protection = [one for run in found.runs for one in run.events if isinstance(one, Protection)]
    return Analysis(
        job=found.job or next((run.job for run in found.runs if run.job), ""),
        start_us=found.runs[0].start if found.runs else 0,
        end_us=found.runs[-1].end if found.runs else 0,
        runs=tuple(run.view for run in found.runs),
        wall=wall,
        capacity=capacity,
        ranks=ranks,
        worlds=sum(len(run.worlds) for run in found.runs),
        faults=sum(len(one.faults) for one in found.transitions),
        steps=len(found.steps),
        steps_counted=len(counted),
        steps_lost=len(found.steps) - len(counted),
        tokens=_sum(step.event.tokens for step in counted),
        samples=_sum(step.event.samples for step in counted),
        ettr=wall.share(TimeCategory.PRODUCTIVE.value),
        goodput=capacity.share(TimeCategory.PRODUCTIVE.value),
        mttr_s=sum(one.seconds for one in resumed) / len(resumed) if resumed else None,
        mtbf_s=up_us / 1e6 / len(broken) if broken else None,
        step_s=duration_stats(step.end - step.start for step in found.steps),
        save_s=duration_stats(to_us(save.seconds) for run in found.runs for save in run.saves),
        restores=dict(sorted(Counter(one.mode for one in restores).items())),
        restored_bytes=dict(sorted(tiers.items())),
        stages=stage_stats(found.stage_times),
        recoveries=recoveries,
        warnings=found.warnings,
        injections=_unnoticed(found),
        timeline=tuple(found.timeline),
        step_views=tuple(step.view for step in found.steps),
        protected_step=protection[-1].step if protection else None,
        unprotected=tuple(_unprotected(protection, found.runs[-1].end if found.runs else 0)),
    )


def _unprotected(reports: Sequence[Protection], end: int) -> Iterator[Unprotected]:
    """Yield the unprotected periods in order of time. Consecutive reports of one period are merged."""
    now: Unprotected | None = None
    for one in reports:
        if one.since is None:
            if now is not None:
                yield msgspec.structs.replace(now, end_us=max(now.start_us, to_us(one.at)), lasts=False)
            now = None
        else:
            start = to_us(one.since) if now is None else now.start_us
            now = Unprotected(start, max(start, end), one.step, one.left_out, lasts=True)
    if now is not None:
        yield now


def _unnoticed(found: PartialAnalysis) -> tuple[UnnoticedInjection, ...]:
    """Return the injections that caused no recorded fault."""
    causes = Counter(
        (fault.at_us, fault.injected) for one in found.transitions for fault in one.faults if fault.injected
    )
    left = []
    for one in (event for run in found.runs for event in run.events if isinstance(event, FaultInjected)):
        if causes[to_us(one.at), one.kind] > 0:
            causes[to_us(one.at), one.kind] -= 1
            continue
        left.append(
            UnnoticedInjection(to_us(one.at), one.kind, one.epoch, one.node, one.local_rank, one.step, one.words)
        )
    return tuple(sorted(left, key=lambda view: view.at_us))


def _recovery(one: AnalysedTransition, timeline: Sequence[TimeInterval]) -> TransitionRecord:
    transition, start, end = one.transition, one.began_us, one.transition.end + one.slow_first_step_us
    stages: Counter[str] = Counter()
    first = max(0, bisect.bisect_right(timeline, start, key=lambda interval: interval.start_us) - 1)
    last = bisect.bisect_left(timeline, end, key=lambda interval: interval.start_us)
    for interval in timeline[first:last]:
        inside = min(interval.end_us, end) - max(interval.start_us, start)
        if inside > 0:
            stages[interval.stage or interval.category.value] += inside
    known = [to_us(stage.began) for stage in one.stages if stage.name == STAGE_DETECT]
    to = next(reversed(transition.worlds), None)
    return TransitionRecord(
        transition.category,
        start,
        end,
        transition.next_epoch is not None,
        transition.epoch,
        -1 if transition.next_epoch is None else transition.next_epoch,
        "" if to is None else to.how,
        "" if to is None else to.reason,
        transition.ranks,
        transition.next_ranks,
        one.faults,
        max(known, default=None),
        {name: time_us / 1e6 for name, time_us in stages.items()},
        one.steps_lost,
        one.lost_us / 1e6,
        transition.run,
    )


def _totals(timeline: Sequence[TimeInterval], ranks: int) -> tuple[TimeTotals, TimeTotals]:
    wall: Counter[str] = Counter({one.value: 0 for one in TimeCategory})
    capacity: Counter[str] = Counter({**wall, "missing": 0})
    for one in timeline:
        have = min(one.ranks, ranks) or ranks
        wall[one.category.value] += one.duration_us
        capacity[one.category.value] += one.duration_us * have
        capacity["missing"] += one.duration_us * (ranks - have)
    total = sum(one.duration_us for one in timeline)
    return TimeTotals(total, dict(wall)), TimeTotals(total * ranks, dict(capacity))


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
