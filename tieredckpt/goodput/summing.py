"""The numbers of an analysis, from what was found."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from tieredckpt.goodput import stages as staging
from tieredckpt.goodput.findings import Findings, Told
from tieredckpt.goodput.model import Analysis, Category, InjectionView, Interval, Recovery, Totals, Unprotected
from tieredckpt.goodput.runs import us
from tieredckpt.ledger.events import DETECT, Injected, Protection

_WAYS = (Category.STARTUP, Category.RECOVERY, Category.RESIZE)


def summed(found: Findings) -> Analysis:
    ranks = max((world.ranks for run in found.runs for world in run.worlds.values()), default=0)
    ranks = max([ranks, 1, *(step.ranks for step in found.done)])
    wall, capacity = _totals(found.timeline, ranks)
    counted = [step for step in found.done if step.counts]
    recoveries = tuple(_recovery(one, found.timeline) for one in found.told if one.way.category in _WAYS or one.faults)
    resumed = [one for one in recoveries if one.category is Category.RECOVERY and one.resumed]
    broken = [one for one in recoveries if one.category is Category.RECOVERY or one.faults]
    up_us = sum(stretch.end - stretch.start for run in found.runs for stretch in run.stretches)
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
        faults=sum(len(one.faults) for one in found.told),
        steps=len(found.done),
        steps_counted=len(counted),
        steps_lost=len(found.done) - len(counted),
        tokens=_sum(step.event.tokens for step in counted),
        samples=_sum(step.event.samples for step in counted),
        ettr=wall.share(Category.PRODUCTIVE.value),
        goodput=capacity.share(Category.PRODUCTIVE.value),
        mttr_s=sum(one.seconds for one in resumed) / len(resumed) if resumed else None,
        mtbf_s=up_us / 1e6 / len(broken) if broken else None,
        step_s=staging.distribution(step.end - step.start for step in found.done),
        save_s=staging.distribution(us(save.seconds) for run in found.runs for save in run.saves),
        restores=dict(sorted(Counter(one.mode for one in restores).items())),
        restored_bytes=dict(sorted(tiers.items())),
        stages=staging.stats_of(found.spent),
        recoveries=recoveries,
        complaints=found.complaints,
        injections=_unnoticed(found),
        timeline=tuple(found.timeline),
        step_views=tuple(step.view for step in found.done),
        protected_step=protection[-1].step if protection else None,
        unprotected=tuple(_unprotected(protection, found.runs[-1].end if found.runs else 0)),
    )


def _unprotected(said: Sequence[Protection], end: int) -> Iterator[Unprotected]:
    """In order of time; what lasts over several words of it is one."""
    now: Unprotected | None = None
    for one in said:
        if one.since is None:
            if now is not None:
                yield msgspec.structs.replace(now, end_us=max(now.start_us, us(one.at)), lasts=False)
            now = None
        else:
            start = us(one.since) if now is None else now.start_us
            now = Unprotected(start, max(start, end), one.step, one.left_out, lasts=True)
    if now is not None:
        yield now


def _unnoticed(found: Findings) -> tuple[InjectionView, ...]:
    """What was injected and is the cause of no fault."""
    causes = Counter((fault.at_us, fault.injected) for one in found.told for fault in one.faults if fault.injected)
    left = []
    for one in (event for run in found.runs for event in run.events if isinstance(event, Injected)):
        if causes[us(one.at), one.kind] > 0:
            causes[us(one.at), one.kind] -= 1
            continue
        left.append(InjectionView(us(one.at), one.kind, one.epoch, one.node, one.local_rank, one.step, one.words))
    return tuple(sorted(left, key=lambda view: view.at_us))


def _recovery(one: Told, timeline: Sequence[Interval]) -> Recovery:
    way, start, end = one.way, one.began, one.way.end + one.slow_us
    stages: Counter[str] = Counter()
    first = max(0, bisect.bisect_right(timeline, start, key=lambda interval: interval.start_us) - 1)
    last = bisect.bisect_left(timeline, end, key=lambda interval: interval.start_us)
    for interval in timeline[first:last]:
        inside = min(interval.end_us, end) - max(interval.start_us, start)
        if inside > 0:
            stages[interval.stage or interval.category.value] += inside
    known = [us(stage.began) for stage in one.stages if stage.name == DETECT]
    to = next(reversed(way.worlds), None)
    return Recovery(
        way.category,
        start,
        end,
        way.next_epoch is not None,
        way.epoch,
        -1 if way.next_epoch is None else way.next_epoch,
        "" if to is None else to.how,
        "" if to is None else to.reason,
        way.ranks,
        way.next_ranks,
        one.faults,
        max(known, default=None),
        {name: time_us / 1e6 for name, time_us in stages.items()},
        one.steps_lost,
        one.lost_us / 1e6,
        way.run,
    )


def _totals(timeline: Sequence[Interval], ranks: int) -> tuple[Totals, Totals]:
    wall: Counter[str] = Counter({one.value: 0 for one in Category})
    capacity: Counter[str] = Counter({**wall, "missing": 0})
    for one in timeline:
        have = min(one.ranks, ranks) or ranks
        wall[one.category.value] += one.us
        capacity[one.category.value] += one.us * have
        capacity["missing"] += one.us * (ranks - have)
    total = sum(one.us for one in timeline)
    return Totals(total, dict(wall)), Totals(total * ranks, dict(capacity))


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
