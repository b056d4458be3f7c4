"""The frame that every chart over the job's time stands in: axes, grid, marks of faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tieredckpt.goodput.model import Analysis, FaultView
from tieredckpt.goodput.page.markup import Markup, Part, number, tag
from tieredckpt.goodput.page.scales import Scale, steps_of, times_of
from tieredckpt.goodput.page.words import count, since, tick

WIDTH = 1040.0
LEFT, RIGHT = 58.0, 1030.0
_BELOW = 24.0
MOST_MARKS = 60
_PLACES = 120


@dataclass(frozen=True)
class Frame:
    """A chart's plot, from ``top`` to ``bottom``; ``height`` has room for the axis below."""

    x: Scale
    y: Scale
    top: float
    bottom: float

    @property
    def height(self) -> float:
        return self.bottom + _BELOW


def frame(high: float, *, low: float = 0.0, across: tuple[float, float], top: float = 12, tall: float = 150) -> Frame:
    return Frame(Scale(*across, LEFT, RIGHT), Scale(low, high, top + tall, top), top, top + tall)


def drawn(one: Frame, title: str, *parts: Part) -> Markup:
    box = f"0 0 {number(WIDTH)} {number(one.height)}"
    picture = tag("svg", tag("title", title), parts, viewBox=box, class_="chart", role="img", aria_label=title)
    return tag("div", picture, class_="wide")


def grid(one: Frame, words: Callable[[float], str], most: int = 4) -> list[Markup]:
    """Lines and numbers of the values."""
    parts = []
    for value in steps_of(one.y.low, one.y.high, most):
        y = one.y(value)
        parts.append(tag("path", d=f"M{number(LEFT)} {number(y)}H{number(RIGHT)}", class_="grid"))
        parts.append(tag("text", words(value), x=LEFT - 8, y=y + 4, text_anchor="end"))
    return parts


def time_axis(one: Frame, seconds: float) -> list[Markup]:
    """Below, from the job's beginning on. ``x`` is in seconds."""
    parts = [tag("path", d=f"M{number(LEFT)} {number(one.bottom)}H{number(RIGHT)}", class_="axis")]
    fine = seconds < 2
    for value in times_of(seconds):
        x = one.x(value)
        words = f"{value:g} s" if fine else tick(value)
        anchor = "start" if x < LEFT + 20 else "end" if x > RIGHT - 20 else "middle"
        parts.append(tag("path", d=f"M{number(x)} {number(one.bottom)}v4", class_="axis"))
        parts.append(tag("text", words, x=x, y=one.bottom + 17, text_anchor=anchor))
    return parts


def number_axis(one: Frame, words: Callable[[float], str], most: int = 8) -> list[Markup]:
    parts = [tag("path", d=f"M{number(LEFT)} {number(one.bottom)}H{number(RIGHT)}", class_="axis")]
    for value in steps_of(one.x.low, one.x.high, most):
        x = one.x(value)
        anchor = "start" if x < LEFT + 14 else "end" if x > RIGHT - 14 else "middle"
        parts.append(tag("text", words(value), x=x, y=one.bottom + 17, text_anchor=anchor))
    return parts


def fault_lines(one: Frame, analysis: Analysis) -> list[Markup]:
    """One line a fault; where they are many, marks along the top say how dense they are."""
    faults = faults_of(analysis)
    if len(faults) > MOST_MARKS:
        return fault_marks(one, analysis)
    x_of = [one.x((fault.at_us - analysis.start_us) / 1e6) for fault in faults]
    span = f"{number(one.top)}V{number(one.bottom)}"
    return [tag("path", d=f"M{number(x)} {span}", class_="fault") for x in x_of]


def fault_marks(one: Frame, analysis: Analysis) -> list[Markup]:
    """Above the plot, when faults happened: triangles, or columns as high as there were many."""
    faults = faults_of(analysis)
    if len(faults) <= MOST_MARKS:
        return [
            tag(
                "path",
                tag("title", describe(fault, analysis)),
                d=f"M{number(one.x((fault.at_us - analysis.start_us) / 1e6))} {number(one.top - 2)}l-5 -9h10z",
                class_="mark",
            )
            for fault in faults
        ]
    places: Counter[int] = Counter()
    width = (RIGHT - LEFT) / _PLACES
    for fault in faults:
        x = one.x((fault.at_us - analysis.start_us) / 1e6)
        places[min(_PLACES - 1, int((x - LEFT) / width))] += 1
    most = max(places.values())
    parts = []
    for place, there in sorted(places.items()):
        tall = max(1.5, 11 * there / most)
        x = LEFT + place * width
        box = f"M{number(x)} {number(one.top - 1 - tall)}h{number(width - 1)}v{number(tall)}h-{number(width - 1)}z"
        parts.append(tag("path", tag("title", count(there, "fault")), d=box, class_="mark"))
    return parts


def faults_of(analysis: Analysis) -> list[FaultView]:
    found = [fault for recovery in analysis.recoveries for fault in recovery.faults]
    return sorted(found, key=lambda fault: (fault.at_us, fault.noticed_us))


def describe(fault: FaultView, analysis: Analysis) -> str:
    said = f"{since((fault.at_us - analysis.start_us) / 1e6)}  {where(fault)} {fault.kind}".rstrip()
    return f"{said}: {fault.reason}" if fault.reason else said


def where(fault: FaultView) -> str:
    rank = f" local rank {fault.local_rank}" if fault.local_rank >= 0 else ""
    return f"{fault.node or 'unknown node'}{rank}"


def line(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
