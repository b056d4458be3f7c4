"""What the job learnt, and how fast it went."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tieredckpt.goodput.model import Analysis, StepView
from tieredckpt.goodput.page import chart
from tieredckpt.goodput.page.markup import Markup, Part, number, section, tag
from tieredckpt.goodput.page.scales import Bins, above, thinned
from tieredckpt.goodput.page.words import amount, count, percent

_POINTS = 900
_DOTS = 400
_COLUMNS = 324
Point = tuple[float, float]


def losses(one: Analysis) -> Markup:
    told = [step for step in one.step_views if step.loss is not None and math.isfinite(step.loss)]
    bad = [step for step in one.step_views if step.not_finite]
    if not told:
        words = _not_finite(bad) if bad else "The script said no loss: world.report(loss=...) does"
        return section("loss", "Loss", note=f"{words}.")
    undone = sum(not step.counts for step in told)
    note = f"{count(len(told), 'step')} said their loss"
    if undone:
        note += f"; {undone:,} of them {'was' if undone == 1 else 'were'} undone by a fault (in yellow)"
    if bad:
        note += f"; {_not_finite(bad)} (in red)"
    lines = ", and dashed lines are faults" if one.faults else ""
    parts = (tag("h3", "over steps"), _over_steps(told, bad), tag("h3", "over time", lines), _over_time(one, told, bad))
    return section("loss", "Loss", parts, note=f"{note}.")


def _bounds(told: Sequence[StepView]) -> tuple[float, float]:
    values = [step.loss for step in told if step.loss is not None]
    low, high = min(values), max(values)
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return (0.0 if 0 <= low < high / 2 else low - room), high + room


def _not_finite(bad: Sequence[StepView]) -> str:
    kinds = ", ".join(sorted({step.not_finite for step in bad}))
    numbers = sorted({step.step for step in bad})
    which = f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]}"
    return f"{count(len(bad), 'step')} had a loss that is not finite ({kinds}; {which})"


def _over_steps(told: Sequence[StepView], bad: Sequence[StepView]) -> Markup:
    low, high = _bounds(told)
    numbers = [step.step for step in (*told, *bad)]
    box = chart.frame(high, low=low, across=(min(numbers), max(*numbers, min(numbers) + 1)), tall=170)
    counted = sorted((step for step in (*told, *bad) if step.counts), key=lambda step: step.step)
    curves = _pieces(counted, lambda step: float(step.step), lambda _before, _after: False)
    undone = sorted((step.step, step.loss or 0.0) for step in told if not step.counts)
    marks = _marks(box, [float(step.step) for step in bad])
    axis = chart.number_axis(box, lambda value: f"step {value:,.0f}" if value == int(value) else "")
    return chart.drawn(box, "loss over steps", chart.grid(box, amount), marks, _drawn(box, curves, undone), axis)


def _over_time(one: Analysis, told: Sequence[StepView], bad: Sequence[StepView]) -> Markup:
    low, high = _bounds(told)
    seconds = (one.end_us - one.start_us) / 1e6
    box = chart.frame(high, low=low, across=(0.0, seconds), tall=170, top=14)

    def at(step: StepView) -> float:
        return (step.end_us - one.start_us) / 1e6

    counted = sorted((step for step in (*told, *bad) if step.counts), key=at)
    curves = _pieces(counted, at, lambda before, after: (before.run, before.epoch) != (after.run, after.epoch))
    undone = sorted((at(step), step.loss or 0.0) for step in told if not step.counts)
    marks = (chart.fault_lines(box, one), _marks(box, [at(step) for step in bad]))
    shapes = (marks, _drawn(box, curves, undone))
    return chart.drawn(box, "loss over time", chart.grid(box, amount), shapes, chart.time_axis(box, seconds))


def _pieces(
    steps: Sequence[StepView], across: Callable[[StepView], float], apart: Callable[[StepView, StepView], bool]
) -> list[list[Point]]:
    """A curve has a gap where a loss was not finite, and where two steps are not of one stretch."""
    pieces: list[list[Point]] = [[]]
    for before, step in zip([*steps[:1], *steps], steps, strict=False):
        if apart(before, step) or before.not_finite:
            pieces.append([])
        if not step.not_finite:
            pieces[-1].append((across(step), step.loss or 0.0))
    return [piece for piece in pieces if piece]


def _marks(box: chart.Frame, places: Sequence[float]) -> list[Markup]:
    """Where the loss was not finite."""
    every = math.ceil(len(places) / _DOTS) or 1
    return [tag("path", d=f"M{number(box.x(x))} {number(box.top)}v8", class_="bad") for x in places[::every]]


def _drawn(box: chart.Frame, curves: Sequence[Sequence[Point]], undone: Sequence[Point]) -> list[Markup]:
    every = math.ceil(len(undone) / _DOTS) or 1
    parts = [tag("circle", cx=box.x(x), cy=box.y(y), r=2.2, class_="dot") for x, y in undone[::every]]
    most = max(2, _POINTS // max(1, len(curves)))
    for curve in curves:
        if len(curve) == 1:
            parts.append(tag("circle", cx=box.x(curve[0][0]), cy=box.y(curve[0][1]), r=3, class_="point"))
        else:
            points = [(box.x(x), box.y(y)) for x, y in thinned(curve, most)]
            parts.append(tag("path", d=chart.line(points), class_="curve"))
    return parts


def throughput(one: Analysis) -> Markup:
    unit = "tokens" if one.tokens else "samples" if one.samples else "steps"
    seconds = (one.end_us - one.start_us) / 1e6
    counted = [step for step in one.step_views if step.counts]
    if not counted or not seconds:
        return section("throughput", "Throughput", note="No step was written down that counts.")
    bins = Bins(0.0, seconds, min(_COLUMNS, max(12, 2 * len(counted))))
    total = 0.0
    for step in counted:
        value = float(getattr(step, unit) or 0) if unit != "steps" else 1.0
        bins.add((step.start_us - one.start_us) / 1e6, (step.end_us - one.start_us) / 1e6, value)
        total += value
    rates = [value / bins.width for value in bins.sums]
    box = chart.frame(above(max(rates)), across=(0.0, seconds), tall=120, top=14)
    mean = total / seconds
    y = number(box.y(mean))
    level = tag("path", d=f"M{number(chart.LEFT)} {y}H{number(chart.RIGHT)}", class_="mean")
    shapes: Part = (_columns(box, rates, bins.width), level, chart.fault_lines(box, one))
    picture = chart.drawn(box, f"{unit} per second", chart.grid(box, amount, 3), shapes, chart.time_axis(box, seconds))
    note = f"Steps that count, {unit} a second; dashed: {amount(mean)} a second over all of the time"
    best = max(rates)
    share = f", {percent(mean / best)} of the best moment" if best else ""
    return section("throughput", "Throughput", picture, note=f"{note}{share}.")


def _columns(box: chart.Frame, rates: Sequence[float], width: float) -> list[Markup]:
    over = []
    for place, rate in enumerate(rates):
        first, last, y = box.x(place * width), box.x((place + 1) * width), box.y(rate)
        over += [(first, y), (last, y)]
    under = [(chart.RIGHT, box.bottom), (chart.LEFT, box.bottom)]
    area = tag("path", d=chart.line([*over, *under]) + "z", class_="area")
    return [area, tag("path", d=chart.line(over), class_="curve")]
