"""Charts over a job's time: frame with axes and fault marks, world timeline, loss and throughput."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tieredckpt.goodput.analysis_result import (
    Analysis,
    FaultRecord,
    StepRecord,
    TimeCategory,
    TimeInterval,
    TransitionRecord,
)
from tieredckpt.goodput.html_report.elements import (
    DISPLAY_KINDS,
    DISPLAY_ORDER,
    LinearScale,
    Markup,
    MarkupPart,
    TimeBins,
    axis_time_text,
    color_legend,
    count_text,
    display_kind,
    downsampled,
    duration_text,
    element,
    percent_text,
    report_section,
    round_ticks,
    round_up_tick,
    run_time_text,
    si_text,
    svg_number,
    time_ticks,
)

CHART_WIDTH = 1040.0
PLOT_LEFT, PLOT_RIGHT = 58.0, 1030.0
_BELOW = 24.0
MAX_FAULT_LINES = 60
_PLACES = 120


@dataclass(frozen=True)
class PlotFrame:
    """A chart's plot, from ``top`` to ``bottom``; ``height`` has room for the axis below."""

    x: LinearScale
    y: LinearScale
    top: float
    bottom: float

    @property
    def height(self) -> float:
        return self.bottom + _BELOW


def plot_frame(
    high: float, *, low: float = 0.0, across: tuple[float, float], top: float = 12, tall: float = 150
) -> PlotFrame:
    return PlotFrame(
        LinearScale(*across, PLOT_LEFT, PLOT_RIGHT), LinearScale(low, high, top + tall, top), top, top + tall
    )


def svg_chart(one: PlotFrame, title: str, *parts: MarkupPart) -> Markup:
    box = f"0 0 {svg_number(CHART_WIDTH)} {svg_number(one.height)}"
    picture = element("svg", element("title", title), parts, viewBox=box, class_="chart", role="img", aria_label=title)
    return element("div", picture, class_="wide")


def value_grid(one: PlotFrame, words: Callable[[float], str], most: int = 4) -> list[Markup]:
    """Lines and numbers of the values."""
    parts = []
    for value in round_ticks(one.y.low, one.y.high, most):
        y = one.y(value)
        parts.append(
            element("path", d=f"M{svg_number(PLOT_LEFT)} {svg_number(y)}H{svg_number(PLOT_RIGHT)}", class_="grid")
        )
        parts.append(element("text", words(value), x=PLOT_LEFT - 8, y=y + 4, text_anchor="end"))
    return parts


def time_axis(one: PlotFrame, seconds: float) -> list[Markup]:
    """Below, from the job's beginning on. ``x`` is in seconds."""
    parts = [
        element("path", d=f"M{svg_number(PLOT_LEFT)} {svg_number(one.bottom)}H{svg_number(PLOT_RIGHT)}", class_="axis")
    ]
    fine = seconds < 2
    for value in time_ticks(seconds):
        x = one.x(value)
        words = f"{value:g} s" if fine else axis_time_text(value)
        anchor = "start" if x < PLOT_LEFT + 20 else "end" if x > PLOT_RIGHT - 20 else "middle"
        parts.append(element("path", d=f"M{svg_number(x)} {svg_number(one.bottom)}v4", class_="axis"))
        parts.append(element("text", words, x=x, y=one.bottom + 17, text_anchor=anchor))
    return parts


def number_axis(one: PlotFrame, words: Callable[[float], str], most: int = 8) -> list[Markup]:
    parts = [
        element("path", d=f"M{svg_number(PLOT_LEFT)} {svg_number(one.bottom)}H{svg_number(PLOT_RIGHT)}", class_="axis")
    ]
    for value in round_ticks(one.x.low, one.x.high, most):
        x = one.x(value)
        anchor = "start" if x < PLOT_LEFT + 14 else "end" if x > PLOT_RIGHT - 14 else "middle"
        parts.append(element("text", words(value), x=x, y=one.bottom + 17, text_anchor=anchor))
    return parts


def fault_lines(one: PlotFrame, analysis: Analysis) -> list[Markup]:
    """One line a fault; where they are many, marks along the top say how dense they are."""
    faults = all_faults(analysis)
    if len(faults) > MAX_FAULT_LINES:
        return fault_marks(one, analysis)
    x_of = [one.x((fault.at_us - analysis.start_us) / 1e6) for fault in faults]
    span = f"{svg_number(one.top)}V{svg_number(one.bottom)}"
    return [element("path", d=f"M{svg_number(x)} {span}", class_="fault") for x in x_of]


def fault_marks(one: PlotFrame, analysis: Analysis) -> list[Markup]:
    """Above the plot, when faults happened: triangles, or columns as high as there were many."""
    faults = all_faults(analysis)
    if len(faults) <= MAX_FAULT_LINES:
        return [
            element(
                "path",
                element("title", describe_fault(fault, analysis)),
                d=f"M{svg_number(one.x((fault.at_us - analysis.start_us) / 1e6))} {svg_number(one.top - 2)}l-5 -9h10z",
                class_="mark",
            )
            for fault in faults
        ]
    places: Counter[int] = Counter()
    width = (PLOT_RIGHT - PLOT_LEFT) / _PLACES
    for fault in faults:
        x = one.x((fault.at_us - analysis.start_us) / 1e6)
        places[min(_PLACES - 1, int((x - PLOT_LEFT) / width))] += 1
    most = max(places.values())
    parts = []
    for place, there in sorted(places.items()):
        tall = max(1.5, 11 * there / most)
        x = PLOT_LEFT + place * width
        box = (
            f"M{svg_number(x)} "
            f"{svg_number(one.top - 1 - tall)}h{svg_number(width - 1)}v{svg_number(tall)}h-{svg_number(width - 1)}z"
        )
        parts.append(element("path", element("title", count_text(there, "fault")), d=box, class_="mark"))
    return parts


def all_faults(analysis: Analysis) -> list[FaultRecord]:
    found = [fault for recovery in analysis.recoveries for fault in recovery.faults]
    return sorted(found, key=lambda fault: (fault.at_us, fault.noticed_us))


def describe_fault(fault: FaultRecord, analysis: Analysis) -> str:
    said = f"{run_time_text((fault.at_us - analysis.start_us) / 1e6)}  {fault_location(fault)} {fault.kind}".rstrip()
    return f"{said}: {fault.reason}" if fault.reason else said


def fault_location(fault: FaultRecord) -> str:
    rank = f" local rank {fault.local_rank}" if fault.local_rank >= 0 else ""
    return f"{fault.node or 'unknown node'}{rank}"


def polyline_points(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{svg_number(x)} {svg_number(y)}" for x, y in points)


_EXACT = 240
_TIMELINE_COLUMNS = 486
_HOVERED = 300


def timeline_section(one: Analysis) -> Markup:
    seconds = (one.end_us - one.start_us) / 1e6
    box = plot_frame(one.ranks, across=(0.0, seconds), top=20, tall=170)
    merged = _merged(one.timeline)
    exact = len(merged) <= _EXACT
    shapes = _timeline_pieces(one, merged, box) if exact else _timeline_columns(one, box)
    top = element(
        "path", d=f"M{svg_number(PLOT_LEFT)} {svg_number(box.y(one.ranks))}H{svg_number(PLOT_RIGHT)}", class_="full"
    )
    picture = svg_chart(
        box,
        "ranks over time",
        value_grid(box, si_text, most=min(4, max(1, one.ranks))),
        shapes,
        top,
        _hovered(one, box),
        fault_marks(box, one),
        _unprotected(one, box),
        time_axis(box, seconds),
    )
    there = {display_kind(interval) for interval in one.timeline}
    marks = element("span", element("i", class_="k f-detect"), "▼ fault") if one.faults else None
    note = "Ranks of the world, by what they were at; faults are marked above."
    if not exact:
        each = duration_text(seconds / _TIMELINE_COLUMNS)
        note += f" Each column is {each} of the job: it is divided as that time was."
    if one.unprotected:
        note += " The line along the bottom: newer saves were not protected."
    return report_section(
        "timeline", "The world over time", picture, color_legend(there, [marks, _unprotected_key(one)]), note=note
    )


def _unprotected_key(one: Analysis) -> Markup | None:
    return element("span", element("i", class_="k unprotected-key"), "unprotected") if one.unprotected else None


def _unprotected(one: Analysis, box: PlotFrame) -> list[Markup]:
    """Along the bottom, when newer saves were not protected; the longest, where there are very many."""
    parts = []
    times = sorted(one.unprotected, key=lambda part: part.start_us - part.end_us)[:_HOVERED]
    for part in sorted(times, key=lambda part: part.start_us):
        start, end = (max(0.0, (at - one.start_us) / 1e6) for at in (part.start_us, part.end_us))
        first, last = box.x(start), box.x(end)
        newer = f"newer than step {part.step:,}" if part.step >= 0 else "at all"
        missed = f", {count_text(part.left_out, 'save')} skipped or failed" if part.left_out else ""
        words = f"{run_time_text(start)}  nothing {newer} was protected for {duration_text(end - start)}{missed}"
        if part.lasts:
            words += "; nothing says that it ended"
        wide = max(last - first, 2.0)
        shape = element(
            "rect", element("title", words), x=first, y=box.bottom - 5, width=wide, height=5.0, class_="unprotected"
        )
        parts.append(shape)
    return parts


def _merged(intervals: Sequence[TimeInterval]) -> list[tuple[int, int, str, int]]:
    """Neighbours that look the same are one."""
    found: list[tuple[int, int, str, int]] = []
    for one in intervals:
        kind = display_kind(one)
        if found and found[-1][1] == one.start_us and found[-1][2:] == (kind, one.ranks):
            found[-1] = (found[-1][0], one.end_us, kind, one.ranks)
        else:
            found.append((one.start_us, one.end_us, kind, one.ranks))
    return found


def _timeline_pieces(one: Analysis, merged: Sequence[tuple[int, int, str, int]], box: PlotFrame) -> list[Markup]:
    """What training is interrupted by is at least seen."""
    parts = []
    for start, end, kind, ranks in sorted(merged, key=lambda piece: piece[2] != "productive"):
        first, last = (box.x((at - one.start_us) / 1e6) for at in (start, end))
        top = box.y(ranks or one.ranks)
        wide = max(last - first, 0.0 if kind in ("productive", "save") else 1.0)
        words = (
            f"{DISPLAY_KINDS[kind].words}: {duration_text((end - start) / 1e6)}, "
            f"{count_text(ranks or one.ranks, 'rank')}"
        )
        title = element("title", f"{run_time_text((start - one.start_us) / 1e6)}  {words}")
        tall = box.bottom - top
        parts.append(element("rect", title, x=first, y=top, width=wide, height=tall, class_=f"bar f-{kind}"))
    return parts


def _timeline_columns(one: Analysis, box: PlotFrame) -> list[Markup]:
    seconds = (one.end_us - one.start_us) / 1e6
    piled: dict[str, TimeBins] = {}
    for interval in one.timeline:
        bins = piled.setdefault(display_kind(interval), TimeBins(0.0, seconds, _TIMELINE_COLUMNS))
        start, end = ((at - one.start_us) / 1e6 for at in (interval.start_us, interval.end_us))
        bins.add(start, end, (end - start) * (interval.ranks or one.ranks))
    floor = [0.0] * _TIMELINE_COLUMNS
    parts = []
    wide = (PLOT_RIGHT - PLOT_LEFT) / _TIMELINE_COLUMNS
    for kind in DISPLAY_ORDER:
        if kind in piled:
            ceiling = [low + more / piled[kind].width for low, more in zip(floor, piled[kind].sums, strict=True)]
            shape = _stacked(floor, ceiling, wide, box)
            if shape:
                parts.append(element("path", element("title", DISPLAY_KINDS[kind].words), d=shape, class_=f"f-{kind}"))
            floor = ceiling
    return parts


def _stacked(floor: Sequence[float], ceiling: Sequence[float], wide: float, box: PlotFrame) -> str:
    """Columns from one height to the other; neighbours of the same heights are one."""
    edges = [(svg_number(box.y(high)), svg_number(box.y(low))) for low, high in zip(floor, ceiling, strict=True)]
    said = []
    first = 0
    for place in range(1, len(edges) + 1):
        if place < len(edges) and edges[place] == edges[first]:
            continue
        top, bottom = edges[first]
        if top != bottom:
            left, right = svg_number(PLOT_LEFT + first * wide), svg_number(PLOT_LEFT + place * wide)
            said.append(f"M{left} {bottom}V{top}H{right}V{bottom}z")
        first = place
    return "".join(said)


def _hovered(one: Analysis, box: PlotFrame) -> list[Markup]:
    """Over each way into a world, what is to be known of it; the longest, where there are very many."""
    ways = sorted(one.recoveries, key=lambda way: -way.seconds)[:_HOVERED]
    parts = []
    for way in sorted(ways, key=lambda way: way.start_us):
        first, last = (box.x((at - one.start_us) / 1e6) for at in (way.start_us, way.end_us))
        wide = max(last - first, 5.0)
        left, tall = (first + last - wide) / 2, box.bottom - box.top
        title = element("title", describe_transition(way, one))
        parts.append(element("rect", title, x=left, y=box.top, width=wide, height=tall, class_="hover"))
    return parts


def describe_transition(way: TransitionRecord, one: Analysis) -> str:
    said = [f"{run_time_text((way.start_us - one.start_us) / 1e6)}  {way.category.value}, {duration_text(way.seconds)}"]
    said += [describe_fault(fault, one) for fault in way.faults[:3]]
    if way.category is not TimeCategory.STARTUP and way.ranks != way.next_ranks:
        said.append(f"{way.ranks} ranks become {way.next_ranks}")
    said += [f"{name.replace('_', ' ')} {duration_text(seconds)}" for name, seconds in way.stages.items()]
    return "\n".join(said)


_POINTS = 900
_DOTS = 400
_THROUGHPUT_COLUMNS = 324
Point = tuple[float, float]


def loss_section(one: Analysis) -> Markup:
    told = [step for step in one.step_views if step.loss is not None and math.isfinite(step.loss)]
    bad = [step for step in one.step_views if step.not_finite]
    if not told:
        words = _not_finite(bad) if bad else "The script said no loss: world.report(loss=...) does"
        return report_section("loss", "Loss", note=f"{words}.")
    undone = sum(not step.counts for step in told)
    note = f"{count_text(len(told), 'step')} said their loss"
    if undone:
        note += f"; {undone:,} of them {'was' if undone == 1 else 'were'} undone by a fault (in yellow)"
    if bad:
        note += f"; {_not_finite(bad)} (in red)"
    lines = ", and dashed lines are faults" if one.faults else ""
    parts = (
        element("h3", "over steps"),
        _over_steps(told, bad),
        element("h3", "over time", lines),
        _over_time(one, told, bad),
    )
    return report_section("loss", "Loss", parts, note=f"{note}.")


def _bounds(told: Sequence[StepRecord]) -> tuple[float, float]:
    values = [step.loss for step in told if step.loss is not None]
    low, high = min(values), max(values)
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return (0.0 if 0 <= low < high / 2 else low - room), high + room


def _not_finite(bad: Sequence[StepRecord]) -> str:
    kinds = ", ".join(sorted({step.not_finite for step in bad}))
    numbers = sorted({step.step for step in bad})
    which = f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]}"
    return f"{count_text(len(bad), 'step')} had a loss that is not finite ({kinds}; {which})"


def _over_steps(told: Sequence[StepRecord], bad: Sequence[StepRecord]) -> Markup:
    low, high = _bounds(told)
    numbers = [step.step for step in (*told, *bad)]
    box = plot_frame(high, low=low, across=(min(numbers), max(*numbers, min(numbers) + 1)), tall=170)
    counted = sorted((step for step in (*told, *bad) if step.counts), key=lambda step: step.step)
    curves = _curve_pieces(counted, lambda step: float(step.step), lambda _before, _after: False)
    undone = sorted((step.step, step.loss or 0.0) for step in told if not step.counts)
    marks = _marks(box, [float(step.step) for step in bad])
    axis = number_axis(box, lambda value: f"step {value:,.0f}" if value == int(value) else "")
    return svg_chart(box, "loss over steps", value_grid(box, si_text), marks, _drawn(box, curves, undone), axis)


def _over_time(one: Analysis, told: Sequence[StepRecord], bad: Sequence[StepRecord]) -> Markup:
    low, high = _bounds(told)
    seconds = (one.end_us - one.start_us) / 1e6
    box = plot_frame(high, low=low, across=(0.0, seconds), tall=170, top=14)

    def at(step: StepRecord) -> float:
        return (step.end_us - one.start_us) / 1e6

    counted = sorted((step for step in (*told, *bad) if step.counts), key=at)
    curves = _curve_pieces(counted, at, lambda before, after: (before.run, before.epoch) != (after.run, after.epoch))
    undone = sorted((at(step), step.loss or 0.0) for step in told if not step.counts)
    marks = (fault_lines(box, one), _marks(box, [at(step) for step in bad]))
    shapes = (marks, _drawn(box, curves, undone))
    return svg_chart(box, "loss over time", value_grid(box, si_text), shapes, time_axis(box, seconds))


def _curve_pieces(
    steps: Sequence[StepRecord], across: Callable[[StepRecord], float], apart: Callable[[StepRecord, StepRecord], bool]
) -> list[list[Point]]:
    """A curve has a gap where a loss was not finite, and where two steps are not of one stretch."""
    pieces: list[list[Point]] = [[]]
    for before, step in zip([*steps[:1], *steps], steps, strict=False):
        if apart(before, step) or before.not_finite:
            pieces.append([])
        if not step.not_finite:
            pieces[-1].append((across(step), step.loss or 0.0))
    return [piece for piece in pieces if piece]


def _marks(box: PlotFrame, places: Sequence[float]) -> list[Markup]:
    """Where the loss was not finite."""
    every = math.ceil(len(places) / _DOTS) or 1
    return [
        element("path", d=f"M{svg_number(box.x(x))} {svg_number(box.top)}v8", class_="bad") for x in places[::every]
    ]


def _drawn(box: PlotFrame, curves: Sequence[Sequence[Point]], undone: Sequence[Point]) -> list[Markup]:
    every = math.ceil(len(undone) / _DOTS) or 1
    parts = [element("circle", cx=box.x(x), cy=box.y(y), r=2.2, class_="dot") for x, y in undone[::every]]
    most = max(2, _POINTS // max(1, len(curves)))
    for curve in curves:
        if len(curve) == 1:
            parts.append(element("circle", cx=box.x(curve[0][0]), cy=box.y(curve[0][1]), r=3, class_="point"))
        else:
            points = [(box.x(x), box.y(y)) for x, y in downsampled(curve, most)]
            parts.append(element("path", d=polyline_points(points), class_="curve"))
    return parts


def throughput_section(one: Analysis) -> Markup:
    unit = "tokens" if one.tokens else "samples" if one.samples else "steps"
    seconds = (one.end_us - one.start_us) / 1e6
    counted = [step for step in one.step_views if step.counts]
    if not counted or not seconds:
        return report_section("throughput", "Throughput", note="No step was written down that counts.")
    bins = TimeBins(0.0, seconds, min(_THROUGHPUT_COLUMNS, max(12, 2 * len(counted))))
    total = 0.0
    for step in counted:
        value = float(getattr(step, unit) or 0) if unit != "steps" else 1.0
        bins.add((step.start_us - one.start_us) / 1e6, (step.end_us - one.start_us) / 1e6, value)
        total += value
    rates = [value / bins.width for value in bins.sums]
    box = plot_frame(round_up_tick(max(rates)), across=(0.0, seconds), tall=120, top=14)
    mean = total / seconds
    y = svg_number(box.y(mean))
    level = element("path", d=f"M{svg_number(PLOT_LEFT)} {y}H{svg_number(PLOT_RIGHT)}", class_="mean")
    shapes: MarkupPart = (_throughput_columns(box, rates, bins.width), level, fault_lines(box, one))
    picture = svg_chart(box, f"{unit} per second", value_grid(box, si_text, 3), shapes, time_axis(box, seconds))
    note = f"Steps that count, {unit} a second; dashed: {si_text(mean)} a second over all of the time"
    best = max(rates)
    share = f", {percent_text(mean / best)} of the best moment" if best else ""
    return report_section("throughput", "Throughput", picture, note=f"{note}{share}.")


def _throughput_columns(box: PlotFrame, rates: Sequence[float], width: float) -> list[Markup]:
    over = []
    for place, rate in enumerate(rates):
        first, last, y = box.x(place * width), box.x((place + 1) * width), box.y(rate)
        over += [(first, y), (last, y)]
    under = [(PLOT_RIGHT, box.bottom), (PLOT_LEFT, box.bottom)]
    area = element("path", d=polyline_points([*over, *under]) + "z", class_="area")
    return [area, element("path", d=polyline_points(over), class_="curve")]
