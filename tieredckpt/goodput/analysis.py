"""From a ledger's events to an :class:`~tieredckpt.goodput.model.Analysis`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tieredckpt.goodput import stages as staging
from tieredckpt.goodput.counting import Done, settle, usual_us
from tieredckpt.goodput.faults import views_of
from tieredckpt.goodput.findings import Findings, Told
from tieredckpt.goodput.model import UNSTATED, Analysis, Category, Interval
from tieredckpt.goodput.painting import Claim, Label, paint
from tieredckpt.goodput.runs import Run, Way, nothing_happened, runs_of, us
from tieredckpt.goodput.summing import summed
from tieredckpt.ledger.events import FIRST_STEP, Event, Injected, when

_SAVE, _SLOW_START, _STEP, _INTERRUPTED = range(4)
"""What holds where several things are said of a moment."""
_REST = 1000


def analyse(events: Iterable[Event], *, job: str = "", complaints: Sequence[str] = ()) -> Analysis:
    """What became of the time of the job that these events are of. Their order does not matter."""
    read = list(events)
    runs = [] if nothing_happened(read) else runs_of(read)
    found = Findings(job, runs, settle(runs), tuple(complaints))
    usual = usual_us(found.done)
    for run in runs:
        ways = [_told(run, way) for way in run.ways]
        done = [one for one in found.done if one.run == run.number]
        firsts = {step.epoch: step for step in done if step.first and step.counts}
        for one in ways:
            first = firsts.get(one.way.next_epoch) if one.way.next_epoch is not None else None
            if first is not None:
                took = first.end - first.start
                slow = max(0, took - usual.get((run.number, first.epoch), took))
                one.slow_us = run.inside(one.way.end + slow) - one.way.end
            for key, time_us in staging.times_by_rank(one.began, one.faults, one.stages).items():
                found.spent.setdefault((one.way.category, key[2]), []).append(time_us)
        if found.timeline and found.timeline[-1].end_us < run.start:
            found.timeline.append(Interval(found.timeline[-1].end_us, run.start, Category.DOWN, run=run.number))
        for start, end, label in paint(_claims(run, ways, done), run.start, run.end, Label(Category.UNKNOWN)):
            found.timeline.append(
                Interval(start, end, label.category, label.stage, label.epoch, label.ranks, run.number)
            )
        found.told += ways
    _blame(found.told, found.done)
    return summed(found)


def _told(run: Run, way: Way) -> Told:
    stages = staging.of_way(way, run.stages)
    faults = views_of(way, [one for one in run.events if isinstance(one, Injected)])
    return Told(way, faults, stages, staging.began_at(way, faults, stages))


def _claims(run: Run, ways: Sequence[Told], done: Sequence[Done]) -> Iterator[Claim]:
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
    saves = {(save.epoch, save.step, save.rank): save for save in run.saves}
    for step in done:
        yield Claim(
            step.start,
            step.end,
            _STEP,
            Label(Category.PRODUCTIVE if step.counts else Category.LOST, "", step.epoch, step.ranks),
        )
        save = saves.get((step.epoch, step.step, step.rank))
        if save is not None and step.counts:
            first, last = max(us(save.began), step.start), min(us(when(save)), step.end)
            yield Claim(first, last, _SAVE, Label(Category.SAVE, "", step.epoch, step.ranks))


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
