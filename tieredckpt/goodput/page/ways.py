"""Recoveries and other ways into a world, as bars of their stages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from tieredckpt.goodput.model import Analysis, Category, Recovery
from tieredckpt.goodput.page import chart
from tieredckpt.goodput.page.kinds import KINDS, legend, stage_kind
from tieredckpt.goodput.page.markup import Markup, Part, number, rows, section, tag
from tieredckpt.goodput.page.scales import Scale, above, landmarks, quantile, times_of
from tieredckpt.goodput.page.timeline import describe
from tieredckpt.goodput.page.words import count, lasting, since

_LEFT, _RIGHT = 240.0, 870.0
_ROW = 25.0
_EACH = 24
_SLOWEST = 10
_COLUMNS = 48
_FAR = 5.0
_APART = 60.0


def recoveries(one: Analysis) -> Markup:
    ways = [way for way in one.recoveries if way.category is Category.RECOVERY]
    title = "Recoveries"
    if not ways:
        return section("recoveries", title, note="There was nothing to recover from.")
    resumed = [way for way in ways if way.resumed]
    note = f"{count(len(ways), 'recovery').replace('recoverys', 'recoveries')}, from the fault to the next step"
    if len(resumed) < len(ways):
        note += f"; {len(ways) - len(resumed):,} did not get there{' yet' if one.live else ''}"
    parts: list[Part] = []
    if len(ways) <= _EACH:
        parts.append(_bars(one, [(_label(way, one), way) for way in ways], _quantiles(resumed)))
    else:
        if resumed:
            parts += [tag("h3", "how long they took"), _histogram(resumed)]
            parts += [tag("h3", "one of each kind, by stages"), _bars(one, _typical(resumed), [])]
        slowest = sorted(ways, key=lambda way: -way.seconds)[:_SLOWEST]
        parts += [tag("h3", "the slowest"), _bars(one, [(_label(way, one), way) for way in slowest], [])]
    parts.append(legend({stage_kind(name) for way in ways for name in way.stages}))
    parts.append(stage_table(one, Category.RECOVERY))
    return section("recoveries", title, parts, note=f"{note}. Each bar is one, by what its slowest ranks were at.")


def others(one: Analysis) -> Markup:
    """Starts and resizes: nothing was wrong."""
    ways = [way for way in one.recoveries if way.category is not Category.RECOVERY]
    if not ways:
        return section("resizes", "Starts and resizes", note="Neither a start nor a resize was written down.")
    shown = ways if len(ways) <= _EACH else sorted(ways, key=lambda way: -way.seconds)[:_EACH]
    note = "From the last step of a world to the first of the next, where nothing was wrong"
    note += f"; the {_EACH} slowest of {len(ways):,}." if len(ways) > _EACH else "."
    bars = _bars(one, [(_label(way, one), way) for way in shown], [])
    keys = legend({stage_kind(name) for way in shown for name in way.stages})
    return section("resizes", "Starts and resizes", bars, keys, note=note)


def _label(way: Recovery, one: Analysis) -> str:
    at = since((way.start_us - one.start_us) / 1e6)
    if way.faults:
        first = way.faults[0]
        more = f" +{len(way.faults) - 1}" if len(way.faults) > 1 else ""
        return f"{at}  {_short(f'{first.node} {first.kind}'.strip() or 'a fault')}{more}"
    if way.category is Category.STARTUP:
        return f"{at}  start of {way.next_ranks}"
    return f"{at}  {way.how or way.category.value} {way.ranks} → {way.next_ranks}"


def _short(words: str, most: int = 22) -> str:
    return words if len(words) <= most else f"{words[: most - 1]}…"


def _typical(ways: Sequence[Recovery]) -> list[tuple[str, Recovery]]:
    """The very recoveries that stand at these places."""
    ordered = sorted(ways, key=lambda way: way.seconds)

    def at(share: float) -> Recovery:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    return [("median", at(0.5)), ("p90", at(0.9)), ("p99", at(0.99))]


def _quantiles(ways: Sequence[Recovery]) -> list[tuple[str, float]]:
    """No more than the number of recoveries can tell apart."""
    if len(ways) < 3:
        return []
    took = [way.seconds for way in ways]
    return [("p50", quantile(took, 0.5)), ("p99", quantile(took, 0.99))]


def _bars(one: Analysis, ways: Sequence[tuple[str, Recovery]], marks: Sequence[tuple[str, float]]) -> Markup:
    longest = max(way.seconds for _, way in ways)
    middle = quantile([way.seconds for _, way in ways], 0.5)
    cut = above(_FAR * middle) if len(ways) > 2 and longest > 2 * _FAR * middle > 0 else longest
    scale = Scale(0.0, cut or 1.0, _LEFT, _RIGHT)
    top = 22.0
    bottom = top + _ROW * len(ways)
    parts: list[Part] = []
    for value in times_of(scale.high, 6):
        x = scale(value)
        parts.append(tag("path", d=f"M{number(x)} {number(top)}V{number(bottom)}", class_="grid"))
        parts.append(tag("text", lasting(value), x=x, y=12, text_anchor="middle"))
    for place, (name, value) in enumerate(mark for mark in marks if mark[1] <= scale.high):
        x = scale(value)
        parts.append(tag("path", d=f"M{number(x)} {number(top)}V{number(bottom + 2)}", class_="mean"))
        parts.append(tag("text", f"{name} {lasting(value)}", x=x, y=bottom + 14 + 13 * place, text_anchor="middle"))
    for place, (label, way) in enumerate(ways):
        parts.append(_bar(one, label, way, scale, top + place * _ROW))
    box = f"0 0 {number(chart.WIDTH)} {number(bottom + 6 + 13 * len(marks))}"
    picture = tag("svg", tag("title", "recoveries by stages"), parts, viewBox=box, class_="chart", role="img")
    return tag("div", picture, class_="wide")


def _bar(one: Analysis, label: str, way: Recovery, scale: Scale, y: float) -> list[Markup]:
    parts = [tag("text", label, x=_LEFT - 10, y=y + 16, text_anchor="end")]
    at = 0.0
    for name, seconds in _in_order(way):
        first, last = scale(min(at, scale.high)), scale(min(at + seconds, scale.high))
        at += seconds
        if last > first:
            said = tag("title", f"{name.replace('_', ' ')}: {lasting(seconds)}")
            kind = f"bar f-{stage_kind(name)}"
            parts.append(tag("rect", said, x=first, y=y + 3, width=last - first, height=_ROW - 7, class_=kind))
    end = scale(min(way.seconds, scale.high))
    if way.seconds > scale.high:
        edges = f"M{number(end - 9)} {number(y + 1)}l5 {number(_ROW - 3)}m4 0l-5 -{number(_ROW - 3)}"
        parts.append(tag("path", d=edges, stroke="var(--card)", stroke_width=2.5, fill="none"))
    lost = f" · {count(way.steps_lost, 'step')}" if way.steps_lost else ""
    ended = "" if way.resumed else " so far" if one.live else " · not resumed"
    words = tag("title", describe(way, one))
    parts.append(tag("text", words, f"{lasting(way.seconds)}{lost}{ended}", x=end + 7, y=y + 16, class_="strong"))
    return parts


def _in_order(way: Recovery) -> list[tuple[str, float]]:
    order = list(KINDS)
    return sorted(way.stages.items(), key=lambda item: (order.index(stage_kind(item[0])), item[0]))


def _histogram(ways: Sequence[Recovery]) -> Markup:
    """Over the logarithm of the time: some take a hundred times as long as others."""
    took = [max(way.seconds, 1e-3) for way in ways]
    low, high = math.log10(min(took)), math.log10(max(took))
    low, high = math.floor(low * 5) / 5, max(math.ceil(high * 5) / 5, math.floor(low * 5) / 5 + 0.2)
    counts = Counter(min(_COLUMNS - 1, int((math.log10(value) - low) / (high - low) * _COLUMNS)) for value in took)
    box = chart.frame(above(max(counts.values())), across=(low, high), tall=110)
    parts: list[Part] = [chart.grid(box, lambda value: f"{value:,.0f}" if value == int(value) else "", 3)]
    for place, there in sorted(counts.items()):
        first, last = (box.x(low + (high - low) * at / _COLUMNS) for at in (place, place + 1))
        y = box.y(there)
        parts.append(
            tag(
                "rect",
                tag("title", f"{there:,}"),
                x=first,
                y=y,
                width=last - first - 1,
                height=box.bottom - y,
                class_="hist",
            )
        )
    free = chart.LEFT
    for value in landmarks(10**low, 10**high):
        x = box.x(math.log10(value))
        if x >= free:
            free = x + _APART
            parts.append(tag("text", lasting(value), x=x, y=box.bottom + 17, text_anchor="middle"))
    for place, (name, value) in enumerate(_quantiles(ways)):
        x = box.x(math.log10(max(value, 1e-3)))
        parts.append(tag("path", d=f"M{number(x)} {number(box.top)}V{number(box.bottom)}", class_="mean"))
        side = "start" if x < chart.RIGHT - 90 else "end"
        shift = 5 if side == "start" else -5
        parts.append(
            tag(
                "text",
                f"{name} {lasting(value)}",
                x=x + shift,
                y=box.top + 10 + 13 * place,
                text_anchor=side,
                class_="strong",
            )
        )
    return chart.drawn(box, "how long recoveries took", parts)


def stage_table(one: Analysis, category: Category) -> Markup | None:
    stats = [stats for stats in one.stages if stats.category is category]
    if not stats:
        return None
    longest = max(stats.p99_s for stats in stats) or 1.0
    body = [
        (
            tag("span", tag("i", class_=f"k f-{stage_kind(each.name)}"), each.name.replace("_", " ")),
            f"{each.count:,}",
            lasting(each.p50_s),
            lasting(each.p99_s),
            lasting(each.most_s),
            _meter(each.name, each.p50_s / longest, each.p99_s / longest),
        )
        for each in stats
    ]
    head = ("stage", "ranks", "p50", "p99", "most", "p50 to p99")
    table = rows(head, body, right=("ranks", "p50", "p99", "most"))
    return tag("details", tag("summary", "stages, over all ranks"), table, open="")


def _meter(name: str, usual: float, most: float) -> Markup:
    style = f"width:{160 * usual:.0f}px"
    more = f"width:{160 * max(0.0, most - usual):.0f}px;opacity:.35"
    kind = f"meter f-{stage_kind(name)}"
    return tag("span", tag("i", class_=kind, style=style), tag("i", class_=kind, style=more))
