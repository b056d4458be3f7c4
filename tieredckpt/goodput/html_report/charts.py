"""Charts over a job's time: frame with axes and fault marks, world timeline, loss and throughput."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from peerstore.sizes_and_durations import show_count
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
_AXIS_HEIGHT = 24.0
MAX_FAULT_LINES = 60
_MARK_COLUMNS = 120


@dataclass(frozen=True)
class PlotFrame:
    """Scales and vertical extent of a plot. ``height`` includes the axis below it."""

    x: LinearScale
    y: LinearScale
    top: float
    bottom: float

    @property
    def height(self) -> float:
        return self.bottom + _AXIS_HEIGHT


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
    """Return horizontal grid lines with their values."""
    parts = []
    for value in round_ticks(one.y.low, one.y.high, most):
        y = one.y(value)
        parts.append(
            element("path", d=f"M{svg_number(PLOT_LEFT)} {svg_number(y)}H{svg_number(PLOT_RIGHT)}", class_="grid")
        )
        parts.append(element("text", words(value), x=PLOT_LEFT - 8, y=y + 4, text_anchor="end"))
    return parts


def time_axis(one: PlotFrame, seconds: float) -> list[Markup]:
    """Return the time axis below the plot. The x scale is in seconds from the start of the job."""
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
    """Return one line per fault. Above ``MAX_FAULT_LINES`` faults, marks along the top show their density."""
    faults = all_faults(analysis)
    if len(faults) > MAX_FAULT_LINES:
        return fault_marks(one, analysis)
    x_of = [one.x((fault.at_us - analysis.start_us) / 1e6) for fault in faults]
    span = f"{svg_number(one.top)}V{svg_number(one.bottom)}"
    return [element("path", d=f"M{svg_number(x)} {span}", class_="fault") for x in x_of]


def fault_marks(one: PlotFrame, analysis: Analysis) -> list[Markup]:
    """Return marks above the plot: a triangle per fault, or columns that count many faults."""
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
    width = (PLOT_RIGHT - PLOT_LEFT) / _MARK_COLUMNS
    for fault in faults:
        x = one.x((fault.at_us - analysis.start_us) / 1e6)
        places[min(_MARK_COLUMNS - 1, int((x - PLOT_LEFT) / width))] += 1
    most = max(places.values())
    parts = []
    for place, there in sorted(places.items()):
        tall = max(1.5, 11 * there / most)
        x = PLOT_LEFT + place * width
        box = (
            f"M{svg_number(x)} "
            f"{svg_number(one.top - 1 - tall)}h{svg_number(width - 1)}v{svg_number(tall)}h-{svg_number(width - 1)}z"
        )
        parts.append(element("path", element("title", show_count(there, "fault")), d=box, class_="mark"))
    return parts


def all_faults(analysis: Analysis) -> list[FaultRecord]:
    found = [fault for recovery in analysis.recoveries for fault in recovery.faults]
    return sorted(found, key=lambda fault: (fault.at_us, fault.noticed_us))


def describe_fault(fault: FaultRecord, analysis: Analysis) -> str:
    text = f"{run_time_text((fault.at_us - analysis.start_us) / 1e6)}  {fault_location(fault)} {fault.kind}".rstrip()
    return f"{text}: {fault.reason}" if fault.reason else text


def fault_location(fault: FaultRecord) -> str:
    rank = f" local rank {fault.local_rank}" if fault.local_rank >= 0 else ""
    return f"{fault.node or 'unknown node'}{rank}"


def polyline_points(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{svg_number(x)} {svg_number(y)}" for x, y in points)


_MAX_TIMELINE_PIECES = 240
_TIMELINE_COLUMNS = 486
_MAX_HOVER_AREAS = 300


def timeline_section(one: Analysis) -> Markup:
    seconds = (one.end_us - one.start_us) / 1e6
    box = plot_frame(one.ranks, across=(0.0, seconds), top=20, tall=170)
    merged = _merged(one.timeline)
    exact = len(merged) <= _MAX_TIMELINE_PIECES
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
        _hover_areas(one, box),
        fault_marks(box, one),
        _unprotected(one, box),
        time_axis(box, seconds),
    )
    there = {display_kind(interval) for interval in one.timeline}
    marks = element("span", element("i", class_="k f-detect"), "▼ fault") if one.faults else None
    note = "Number of ranks, colored by their activity. Triangles mark faults."
    if not exact:
        each = duration_text(seconds / _TIMELINE_COLUMNS)
        note += f" Each column covers {each} of the job and is divided by activity."
    if one.unprotected:
        note += " The line along the bottom: newer saves were not protected."
    return report_section(
        "timeline", "The world over time", picture, color_legend(there, [marks, _unprotected_key(one)]), note=note
    )


def _unprotected_key(one: Analysis) -> Markup | None:
    return element("span", element("i", class_="k unprotected-key"), "unprotected") if one.unprotected else None


def _unprotected(one: Analysis, box: PlotFrame) -> list[Markup]:
    """Return bars along the bottom for the unprotected periods, at most the ``_MAX_HOVER_AREAS`` longest."""
    parts = []
    times = sorted(one.unprotected, key=lambda part: part.start_us - part.end_us)[:_MAX_HOVER_AREAS]
    for part in sorted(times, key=lambda part: part.start_us):
        start, end = (max(0.0, (at - one.start_us) / 1e6) for at in (part.start_us, part.end_us))
        first, last = box.x(start), box.x(end)
        newer = f"newer than step {part.step:,}" if part.step >= 0 else "at all"
        missed = f", {show_count(part.left_out, 'save')} skipped or failed" if part.left_out else ""
        words = f"{run_time_text(start)}  nothing {newer} was protected for {duration_text(end - start)}{missed}"
        if part.lasts:
            words += "; no end was recorded"
        wide = max(last - first, 2.0)
        shape = element(
            "rect", element("title", words), x=first, y=box.bottom - 5, width=wide, height=5.0, class_="unprotected"
        )
        parts.append(shape)
    return parts


def _merged(intervals: Sequence[TimeInterval]) -> list[tuple[int, int, str, int]]:
    """Merge neighbours of equal kind and ranks into (start, end, kind, ranks), in microseconds."""
    found: list[tuple[int, int, str, int]] = []
    for one in intervals:
        kind = display_kind(one)
        if found and found[-1][1] == one.start_us and found[-1][2:] == (kind, one.ranks):
            found[-1] = (found[-1][0], one.end_us, kind, one.ranks)
        else:
            found.append((one.start_us, one.end_us, kind, one.ranks))
    return found


def _timeline_pieces(one: Analysis, merged: Sequence[tuple[int, int, str, int]], box: PlotFrame) -> list[Markup]:
    """Return one bar per merged interval. Interruptions are at least one pixel wide."""
    parts = []
    for start, end, kind, ranks in sorted(merged, key=lambda piece: piece[2] != "productive"):
        first, last = (box.x((at - one.start_us) / 1e6) for at in (start, end))
        top = box.y(ranks or one.ranks)
        wide = max(last - first, 0.0 if kind in ("productive", "save") else 1.0)
        words = (
            f"{DISPLAY_KINDS[kind].words}: {duration_text((end - start) / 1e6)}, "
            f"{show_count(ranks or one.ranks, 'rank')}"
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
            shape = _stacked_path(floor, ceiling, wide, box)
            if shape:
                parts.append(element("path", element("title", DISPLAY_KINDS[kind].words), d=shape, class_=f"f-{kind}"))
            floor = ceiling
    return parts


def _stacked_path(floor: Sequence[float], ceiling: Sequence[float], wide: float, box: PlotFrame) -> str:
    """Return the SVG path of columns from ``floor`` to ``ceiling``.

    Neighbours of equal heights are merged.
    """
    edges = [(svg_number(box.y(high)), svg_number(box.y(low))) for low, high in zip(floor, ceiling, strict=True)]
    text = []
    first = 0
    for place in range(1, len(edges) + 1):
        if place < len(edges) and edges[place] == edges[first]:
            continue
        top, bottom = edges[first]
        if top != bottom:
            left, right = svg_number(PLOT_LEFT + first * wide), svg_number(PLOT_LEFT + place * wide)
            text.append(f"M{left} {bottom}V{top}H{right}V{bottom}z")
        first = place
    return "".join(text)


def _hover_areas(one: Analysis, box: PlotFrame) -> list[Markup]:
    """Return hover areas that describe the transitions, at most the ``_MAX_HOVER_AREAS`` longest."""
    longest = sorted(one.recoveries, key=lambda transition: -transition.seconds)[:_MAX_HOVER_AREAS]
    parts = []
    for transition in sorted(longest, key=lambda transition: transition.start_us):
        first, last = (box.x((at - one.start_us) / 1e6) for at in (transition.start_us, transition.end_us))
        wide = max(last - first, 5.0)
        left, tall = (first + last - wide) / 2, box.bottom - box.top
        title = element("title", describe_transition(transition, one))
        parts.append(element("rect", title, x=left, y=box.top, width=wide, height=tall, class_="hover"))
    return parts


def describe_transition(transition: TransitionRecord, one: Analysis) -> str:
    began = run_time_text((transition.start_us - one.start_us) / 1e6)
    text = [f"{began}  {transition.category.value}, {duration_text(transition.seconds)}"]
    text += [describe_fault(fault, one) for fault in transition.faults[:3]]
    if transition.category is not TimeCategory.STARTUP and transition.ranks != transition.next_ranks:
        text.append(f"{transition.ranks} ranks become {transition.next_ranks}")
    text += [f"{name.replace('_', ' ')} {duration_text(seconds)}" for name, seconds in transition.stages.items()]
    return "\n".join(text)


_POINTS = 900
_DOTS = 400
_THROUGHPUT_COLUMNS = 324
Point = tuple[float, float]


def loss_section(one: Analysis) -> Markup:
    reported = [step for step in one.step_views if step.loss is not None and math.isfinite(step.loss)]
    bad = [step for step in one.step_views if step.not_finite]
    if not reported:
        words = _not_finite(bad) if bad else "No loss was reported. Call world.report(loss=...) in the script"
        return report_section("loss", "Loss", note=f"{words}.")
    undone = sum(not step.counts for step in reported)
    note = f"{show_count(len(reported), 'step')} reported a loss"
    if undone:
        note += f"; {undone:,} of them {'was' if undone == 1 else 'were'} undone by a fault (in yellow)"
    if bad:
        note += f"; {_not_finite(bad)} (in red)"
    lines = ", and dashed lines are faults" if one.faults else ""
    parts = (
        element("h3", "over steps"),
        _over_steps(reported, bad),
        element("h3", "over time", lines),
        _over_time(one, reported, bad),
    )
    return report_section("loss", "Loss", parts, note=f"{note}.")


def _bounds(reported: Sequence[StepRecord]) -> tuple[float, float]:
    values = [step.loss for step in reported if step.loss is not None]
    low, high = min(values), max(values)
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return (0.0 if 0 <= low < high / 2 else low - room), high + room


def _not_finite(bad: Sequence[StepRecord]) -> str:
    kinds = ", ".join(sorted({step.not_finite for step in bad}))
    numbers = sorted({step.step for step in bad})
    which = f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]}"
    return f"{show_count(len(bad), 'step')} had a loss that is not finite ({kinds}; {which})"


def _over_steps(reported: Sequence[StepRecord], bad: Sequence[StepRecord]) -> Markup:
    low, high = _bounds(reported)
    numbers = [step.step for step in (*reported, *bad)]
    box = plot_frame(high, low=low, across=(min(numbers), max(*numbers, min(numbers) + 1)), tall=170)
    counted = sorted((step for step in (*reported, *bad) if step.counts), key=lambda step: step.step)
    curves = _curve_pieces(counted, lambda step: float(step.step), lambda _before, _after: False)
    undone = sorted((step.step, step.loss or 0.0) for step in reported if not step.counts)
    marks = _not_finite_marks(box, [float(step.step) for step in bad])
    axis = number_axis(box, lambda value: f"step {value:,.0f}" if value == int(value) else "")
    return svg_chart(box, "loss over steps", value_grid(box, si_text), marks, _loss_shapes(box, curves, undone), axis)


def _over_time(one: Analysis, reported: Sequence[StepRecord], bad: Sequence[StepRecord]) -> Markup:
    low, high = _bounds(reported)
    seconds = (one.end_us - one.start_us) / 1e6
    box = plot_frame(high, low=low, across=(0.0, seconds), tall=170, top=14)

    def at(step: StepRecord) -> float:
        return (step.end_us - one.start_us) / 1e6

    counted = sorted((step for step in (*reported, *bad) if step.counts), key=at)
    curves = _curve_pieces(counted, at, lambda before, after: (before.run, before.epoch) != (after.run, after.epoch))
    undone = sorted((at(step), step.loss or 0.0) for step in reported if not step.counts)
    marks = (fault_lines(box, one), _not_finite_marks(box, [at(step) for step in bad]))
    shapes = (marks, _loss_shapes(box, curves, undone))
    return svg_chart(box, "loss over time", value_grid(box, si_text), shapes, time_axis(box, seconds))


def _curve_pieces(
    steps: Sequence[StepRecord], across: Callable[[StepRecord], float], apart: Callable[[StepRecord, StepRecord], bool]
) -> list[list[Point]]:
    """Split the loss curve at losses that were not finite, and where ``apart`` separates two steps."""
    pieces: list[list[Point]] = [[]]
    for before, step in zip([*steps[:1], *steps], steps, strict=False):
        if apart(before, step) or before.not_finite:
            pieces.append([])
        if not step.not_finite:
            pieces[-1].append((across(step), step.loss or 0.0))
    return [piece for piece in pieces if piece]


def _not_finite_marks(box: PlotFrame, places: Sequence[float]) -> list[Markup]:
    """Return marks where the loss was not finite."""
    every = math.ceil(len(places) / _DOTS) or 1
    return [
        element("path", d=f"M{svg_number(box.x(x))} {svg_number(box.top)}v8", class_="bad") for x in places[::every]
    ]


def _loss_shapes(box: PlotFrame, curves: Sequence[Sequence[Point]], undone: Sequence[Point]) -> list[Markup]:
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
        return report_section("throughput", "Throughput", note="No step that counts was recorded.")
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
    note = f"Steps that count, {unit} per second; dashed: {si_text(mean)} per second over all of the time"
    best = max(rates)
    share = f", {percent_text(mean / best)} of the highest rate" if best else ""
    return report_section("throughput", "Throughput", picture, note=f"{note}{share}.")


def _throughput_columns(box: PlotFrame, rates: Sequence[float], width: float) -> list[Markup]:
    over = []
    for place, rate in enumerate(rates):
        first, last, y = box.x(place * width), box.x((place + 1) * width), box.y(rate)
        over += [(first, y), (last, y)]
    under = [(PLOT_RIGHT, box.bottom), (PLOT_LEFT, box.bottom)]
    area = element("path", d=polyline_points([*over, *under]) + "z", class_="area")
    return [area, element("path", d=polyline_points(over), class_="curve")]
