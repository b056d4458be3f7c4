"""What ranks were at on the way into a world: claims on the timeline, and a rank's own times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tieredckpt.goodput.model import Category, Distribution, FaultView, StageStats
from tieredckpt.goodput.painting import Claim, Label
from tieredckpt.goodput.runs import Way, us
from tieredckpt.ledger.events import (
    ABORT,
    DETECT,
    FIRST_STEP,
    LAUNCH,
    LEAVE,
    RENDEZVOUS,
    SEAL,
    STAGES,
    Stage,
)

_AWAY = (DETECT, SEAL, ABORT, LEAVE)
_ORDER = {name: 10 + number for number, name in enumerate(STAGES)}
_LAST = 90
_FALLBACK = 100


def of_way(way: Way, stages: Iterable[Stage]) -> list[Stage]:
    return [
        stage for stage in stages if (way.leads_from(stage.epoch) if stage.name in _AWAY else way.leads_to(stage.epoch))
    ]


def began_at(way: Way, faults: Sequence[FaultView], stages: Sequence[Stage]) -> int:
    """When what had been begun ended: at the fault, where there was one."""
    if way.category is not Category.RECOVERY:
        return way.start
    known = [us(stage.began) for stage in stages if stage.name == DETECT]
    at = min([fault.at_us for fault in faults] or known or [way.start])
    return min(max(at, way.start), way.end)


def claims_of(way: Way, began: int, faults: Sequence[FaultView], stages: Sequence[Stage]) -> Iterator[Claim]:
    """The earliest stage that some rank is still in is what all of them wait for."""
    for stage in stages:
        first, last = span(stage, began, faults)
        if stage.name != FIRST_STEP:
            yield Claim(first, min(last, way.end), _ORDER.get(stage.name, _LAST), label(way, stage.name))
    formed = min((us(world.at) for world in way.worlds), default=way.end if faults else began)
    if way.category is Category.STARTUP:
        first = min((us(stage.began) for stage in stages if stage.name != DETECT), default=formed)
        yield Claim(way.start, min(max(first, way.start), way.end), _FALLBACK, label(way, LAUNCH))
    for fault in faults:
        yield Claim(fault.at_us, min(fault.noticed_us, way.end), _FALLBACK, label(way, DETECT))
    yield Claim(began, min(formed, way.end), _FALLBACK + 1, label(way, RENDEZVOUS))


def span(stage: Stage, began: int, faults: Sequence[FaultView]) -> tuple[int, int]:
    """Of a stage, in microseconds, from ``began`` on. A rank detects from when the fault happened."""
    first = us(stage.began)
    last = us(stage.began + stage.seconds)
    if stage.name == DETECT:
        first = max(
            (fault.at_us for fault in faults if fault.epoch == stage.epoch and fault.at_us <= last), default=last
        )
    first = max(first, began)
    return first, max(first, last)


def label(way: Way, stage: str) -> Label:
    return Label(way.category, stage, -1 if way.next_epoch is None else way.next_epoch, way.next_ranks or way.ranks)


def times_by_rank(began: int, faults: Sequence[FaultView], stages: Sequence[Stage]) -> dict[tuple[int, int, str], int]:
    """What each rank spent in each stage, by (epoch, rank, stage), in microseconds."""
    spent: dict[tuple[int, int, str], int] = {}
    for stage in stages:
        first, last = span(stage, began, faults)
        if first == last and us(stage.began) < began:
            continue  # it was over before: a process that was warm, and waited
        key = (stage.epoch, stage.rank, stage.name)
        spent[key] = spent.get(key, 0) + last - first
    return spent


def distribution(values_us: Iterable[int]) -> Distribution:
    values = sorted(values_us)
    if not values:
        return Distribution()
    p50, p99 = (values[math.ceil(len(values) * share) - 1] / 1e6 for share in (0.5, 0.99))
    return Distribution(len(values), sum(values) / 1e6, p50, p99, values[-1] / 1e6)


def stats_of(spent: Mapping[tuple[Category, str], Sequence[int]]) -> tuple[StageStats, ...]:
    """By category, in the order of stages."""
    categories = list(Category)
    found = []
    for (category, name), values in sorted(
        spent.items(), key=lambda item: (categories.index(item[0][0]), _ORDER.get(item[0][1], _LAST), item[0][1])
    ):
        one = distribution(values)
        found.append(StageStats(category, name, one.count, one.p50_s, one.p99_s, one.most_s))
    return tuple(found)
