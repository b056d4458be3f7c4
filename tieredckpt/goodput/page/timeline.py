"""The world over time: as high as it had ranks, in the colours of what they were at."""

from __future__ import annotations

from collections.abc import Sequence

from tieredckpt.goodput.model import Analysis, Category, Interval, Recovery
from tieredckpt.goodput.page import chart
from tieredckpt.goodput.page.kinds import KINDS, ORDER, kind_of, legend
from tieredckpt.goodput.page.markup import Markup, number, section, tag
from tieredckpt.goodput.page.scales import Bins
from tieredckpt.goodput.page.words import amount, count, lasting, since

_EXACT = 240
_COLUMNS = 486
_HOVERED = 300


def timeline(one: Analysis) -> Markup:
    seconds = (one.end_us - one.start_us) / 1e6
    box = chart.frame(one.ranks, across=(0.0, seconds), top=20, tall=170)
    merged = _merged(one.timeline)
    exact = len(merged) <= _EXACT
    shapes = _pieces(one, merged, box) if exact else _columns(one, box)
    top = tag("path", d=f"M{number(chart.LEFT)} {number(box.y(one.ranks))}H{number(chart.RIGHT)}", class_="full")
    picture = chart.drawn(
        box,
        "ranks over time",
        chart.grid(box, amount, most=min(4, max(1, one.ranks))),
        shapes,
        top,
        _hovered(one, box),
        chart.fault_marks(box, one),
        _unprotected(one, box),
        chart.time_axis(box, seconds),
    )
    there = {kind_of(interval) for interval in one.timeline}
    marks = tag("span", tag("i", class_="k f-detect"), "▼ fault") if one.faults else None
    note = "Ranks of the world, by what they were at; faults are marked above."
    if not exact:
        each = lasting(seconds / _COLUMNS)
        note += f" Each column is {each} of the job: it is divided as that time was."
    if one.unprotected:
        note += " The line along the bottom: newer saves were not protected."
    return section("timeline", "The world over time", picture, legend(there, [marks, _unprotected_key(one)]), note=note)


def _unprotected_key(one: Analysis) -> Markup | None:
    return tag("span", tag("i", class_="k unprotected-key"), "unprotected") if one.unprotected else None


def _unprotected(one: Analysis, box: chart.Frame) -> list[Markup]:
    """Along the bottom, when newer saves were not protected; the longest, where there are very many."""
    parts = []
    times = sorted(one.unprotected, key=lambda part: part.start_us - part.end_us)[:_HOVERED]
    for part in sorted(times, key=lambda part: part.start_us):
        start, end = (max(0.0, (at - one.start_us) / 1e6) for at in (part.start_us, part.end_us))
        first, last = box.x(start), box.x(end)
        newer = f"newer than step {part.step:,}" if part.step >= 0 else "at all"
        missed = f", {count(part.left_out, 'save')} skipped or failed" if part.left_out else ""
        words = f"{since(start)}  nothing {newer} was protected for {lasting(end - start)}{missed}"
        if part.lasts:
            words += "; nothing says that it ended"
        wide = max(last - first, 2.0)
        shape = tag(
            "rect", tag("title", words), x=first, y=box.bottom - 5, width=wide, height=5.0, class_="unprotected"
        )
        parts.append(shape)
    return parts


def _merged(intervals: Sequence[Interval]) -> list[tuple[int, int, str, int]]:
    """Neighbours that look the same are one."""
    found: list[tuple[int, int, str, int]] = []
    for one in intervals:
        kind = kind_of(one)
        if found and found[-1][1] == one.start_us and found[-1][2:] == (kind, one.ranks):
            found[-1] = (found[-1][0], one.end_us, kind, one.ranks)
        else:
            found.append((one.start_us, one.end_us, kind, one.ranks))
    return found


def _pieces(one: Analysis, merged: Sequence[tuple[int, int, str, int]], box: chart.Frame) -> list[Markup]:
    """What training is interrupted by is at least seen."""
    parts = []
    for start, end, kind, ranks in sorted(merged, key=lambda piece: piece[2] != "productive"):
        first, last = (box.x((at - one.start_us) / 1e6) for at in (start, end))
        top = box.y(ranks or one.ranks)
        wide = max(last - first, 0.0 if kind in ("productive", "save") else 1.0)
        words = f"{KINDS[kind].words}: {lasting((end - start) / 1e6)}, {count(ranks or one.ranks, 'rank')}"
        title = tag("title", f"{since((start - one.start_us) / 1e6)}  {words}")
        tall = box.bottom - top
        parts.append(tag("rect", title, x=first, y=top, width=wide, height=tall, class_=f"bar f-{kind}"))
    return parts


def _columns(one: Analysis, box: chart.Frame) -> list[Markup]:
    seconds = (one.end_us - one.start_us) / 1e6
    piled: dict[str, Bins] = {}
    for interval in one.timeline:
        bins = piled.setdefault(kind_of(interval), Bins(0.0, seconds, _COLUMNS))
        start, end = ((at - one.start_us) / 1e6 for at in (interval.start_us, interval.end_us))
        bins.add(start, end, (end - start) * (interval.ranks or one.ranks))
    floor = [0.0] * _COLUMNS
    parts = []
    wide = (chart.RIGHT - chart.LEFT) / _COLUMNS
    for kind in ORDER:
        if kind in piled:
            ceiling = [low + more / piled[kind].width for low, more in zip(floor, piled[kind].sums, strict=True)]
            shape = _stacked(floor, ceiling, wide, box)
            if shape:
                parts.append(tag("path", tag("title", KINDS[kind].words), d=shape, class_=f"f-{kind}"))
            floor = ceiling
    return parts


def _stacked(floor: Sequence[float], ceiling: Sequence[float], wide: float, box: chart.Frame) -> str:
    """Columns from one height to the other; neighbours of the same heights are one."""
    edges = [(number(box.y(high)), number(box.y(low))) for low, high in zip(floor, ceiling, strict=True)]
    said = []
    first = 0
    for place in range(1, len(edges) + 1):
        if place < len(edges) and edges[place] == edges[first]:
            continue
        top, bottom = edges[first]
        if top != bottom:
            left, right = number(chart.LEFT + first * wide), number(chart.LEFT + place * wide)
            said.append(f"M{left} {bottom}V{top}H{right}V{bottom}z")
        first = place
    return "".join(said)


def _hovered(one: Analysis, box: chart.Frame) -> list[Markup]:
    """Over each way into a world, what is to be known of it; the longest, where there are very many."""
    ways = sorted(one.recoveries, key=lambda way: -way.seconds)[:_HOVERED]
    parts = []
    for way in sorted(ways, key=lambda way: way.start_us):
        first, last = (box.x((at - one.start_us) / 1e6) for at in (way.start_us, way.end_us))
        wide = max(last - first, 5.0)
        left, tall = (first + last - wide) / 2, box.bottom - box.top
        title = tag("title", describe(way, one))
        parts.append(tag("rect", title, x=left, y=box.top, width=wide, height=tall, class_="hover"))
    return parts


def describe(way: Recovery, one: Analysis) -> str:
    said = [f"{since((way.start_us - one.start_us) / 1e6)}  {way.category.value}, {lasting(way.seconds)}"]
    said += [chart.describe(fault, one) for fault in way.faults[:3]]
    if way.category is not Category.STARTUP and way.ranks != way.next_ranks:
        said.append(f"{way.ranks} ranks become {way.next_ranks}")
    said += [f"{name.replace('_', ' ')} {lasting(seconds)}" for name, seconds in way.stages.items()]
    return "\n".join(said)
