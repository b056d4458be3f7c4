"""From a ledger's events to an :class:`~tieredckpt.goodput.model.Analysis`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tieredckpt.goodput import stages as staging
from tieredckpt.goodput.counting import Done, settle, usual_us
from tieredckpt.goodput.faults import views_of
from tieredckpt.goodput.findings import Findings, Told
from tieredckpt.goodput.model import UNSTATED, Analysis, Category, Interval
from tieredckpt.goodput.painting import Claim, Label, paint
from tieredckpt.goodput.runs import Run, Way, runs_of
from tieredckpt.goodput.summing import summed
from tieredckpt.ledger.events import DETECT, FIRST_STEP, Event, Injected

_SAVE, _SLOW_START, _STEP, _INTERRUPTED = range(4)
"""What holds where several things are said of a moment."""
_REST = 1000


def analyse(events: Iterable[Event], *, job: str = "", complaints: Sequence[str] = ()) -> Analysis:
    """What became of the time of the job that these events are of. Their order does not matter."""
    runs = runs_of(events)
    found = Findings(job, runs, settle(runs), tuple(complaints))
    usual = usual_us(found.done)
    ended = runs[0].start if runs else 0
    for run in runs:
        injections = [one for one in run.events if isinstance(one, Injected)]
        ways = [_told(run, way, injections) for way in run.ways]
        done = [one for one in found.done if one.run == run.number]
        firsts = {step.epoch: step for step in done if step.first and step.counts}
        for one in ways:
            first = firsts.get(one.way.next_epoch) if one.way.next_epoch is not None else None
            if first is not None:
                slow = max(0, first.net_us - usual.get((run.number, first.epoch), first.net_us))
                one.slow_us = run.inside(one.way.end + slow) - one.way.end
            for key, time_us in staging.times_by_rank(one.began, one.faults, one.stages).items():
                found.spent.setdefault((one.way.category, key[2]), []).append(time_us)
        if ended < run.start:
            found.timeline.append(Interval(ended, run.start, Category.DOWN, run=run.number))
        ended = run.end
        for start, end, label in paint(_claims(ways, done), run.start, run.end, Label(Category.UNKNOWN)):
            found.timeline.append(
                Interval(start, end, label.category, label.stage, label.epoch, label.ranks, run.number)
            )
        found.told += ways
    _blame(found.told, found.done)
    return summed(found)


def _told(run: Run, way: Way, injections: Sequence[Injected]) -> Told:
    stages = staging.of_way(way, run.stages_about(way))
    faults = views_of(way, injections, [stage for stage in stages if stage.name == DETECT])
    return Told(way, faults, stages, staging.began_at(way, faults, stages))


def _claims(ways: Sequence[Told], done: Sequence[Done]) -> Iterator[Claim]:
    for one in ways:
        way = one.way
        yield from staging.claims_of(way, one.began, one.faults, one.stages)
        if one.slow_us:
            yield Claim(way.end, way.end + one.slow_us, _SLOW_START, staging.label(way, FIRST_STEP))
        if way.category is Category.RECOVERY:
            yield Claim(way.start, one.began, _INTERRUPTED, Label(Category.LOST, "interrupted", way.epoch, way.ranks))
        if way.category is not Category.UNKNOWN:
            stage = "" if way.category is Category.ENDING else UNSTATED
            yield Claim(one.began, way.end, _REST, staging.label(way, stage))
    for step in done:
        yield Claim(
            step.start,
            step.end,
            _STEP,
            Label(Category.PRODUCTIVE if step.counts else Category.LOST, "", step.epoch, step.ranks),
        )
        if step.counts:
            yield Claim(*step.saving, _SAVE, Label(Category.SAVE, "", step.epoch, step.ranks))


def _blame(told: Sequence[Told], done: Sequence[Done]) -> None:
    """What was lost is put down to the way after which training went back."""
    ways = {(one.way.run, one.way.next_epoch): one for one in told}
    last = told[-1] if told else None
    for step in done:
        if not step.counts:
            one = ways.get(step.undone_by) if step.undone_by is not None else last
            if one is not None:
                one.steps_lost += 1
                one.lost_us += step.end - step.start
    for one in told:
        if one.way.category is Category.RECOVERY:
            one.lost_us += one.began - one.way.start
