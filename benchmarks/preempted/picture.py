"""Panels with one time axis, as self-contained SVG. Pure functions.

::

    4 |------+    +------      one Panel: curves over its own y axis,
    2 |      +----+            with a mark for each event
    0 +------------------ s
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]
INK, SOFT, GRID = "#1c2733", "#57697b", "#e3e8ed"
_WIDTH, _LEFT, _RIGHT, _TOP = 960, 84, 24, 104
_PANEL, _BETWEEN, _BOTTOM = 170, 44, 64
_FONT = 'font-family="system-ui, -apple-system, Segoe UI, sans-serif"'


@dataclass(frozen=True)
class Curve:
    name: str
    colour: str
    points: Sequence[Point]
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One quantity: ``axis`` names it with its unit."""

    axis: str
    curves: Sequence[Curve]
    top: float | None = None
    """Upper end of the y axis; by default the maximum of the curves."""
    whole: bool = False
    """Whether the axis shows only whole numbers."""


@dataclass(frozen=True)
class Mark:
    """An event: a line through all panels."""

    at_s: float
    kind: str
    text: str


@dataclass(frozen=True)
class Kind:
    """Color and shape of one kind of marks."""

    name: str
    colour: str
    shape: str
    """SVG path around (0, 0)."""


def picture(title: str, panels: Sequence[Panel], marks: Sequence[Mark], kinds: Sequence[Kind], until_s: float) -> str:
    """Return the whole SVG file."""
    height = _TOP + len(panels) * _PANEL + (len(panels) - 1) * _BETWEEN + _BOTTOM
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" {_FONT} font-size="13">',
            f"  <title>{escape(title)}</title>",
            f'  <rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
            f'  <text x="{_LEFT}" y="28" font-size="17" fill="{INK}">{escape(title)}</text>',
            *_legend_of_marks(kinds),
            *(line for at, panel in enumerate(panels) for line in _panel(panel, _top_of(at), until_s)),
            *_marks(marks, {kind.name: kind for kind in kinds}, until_s, len(panels)),
            *_time_axis(until_s, height - _BOTTOM),
            "</svg>\n",
        ]
    )


def ticks(top: float, most: int = 6, *, whole: bool = False) -> list[float]:
    """Return axis ticks from 0 to at most ``top``, at round distances."""
    rough = top / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * one for one in (1, 2, 2.5, 5, 10) if power * one >= rough * (1 - 1e-9))
    if whole:
        step = max(1.0, float(math.ceil(step)))
    return [at * step for at in range(int(top / step + 1e-9) + 1)]


def _top_of(panel: int) -> int:
    return _TOP + panel * (_PANEL + _BETWEEN)


def _x(at_s: float, until_s: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * at_s / until_s


def _panel(panel: Panel, top: int, until_s: float) -> Iterator[str]:
    highest = panel.top or 1.08 * max(y for curve in panel.curves for _, y in curve.points)
    bottom = top + _PANEL

    def y(value: float) -> float:
        return bottom - _PANEL * min(value, highest) / highest

    yield f'  <text x="{_LEFT}" y="{top - 14}" font-weight="600" fill="{INK}">{escape(panel.axis)}</text>'
    yield from _legend_of_curves(panel.curves, top - 14)
    for value in ticks(highest, whole=panel.whole):
        at = y(value)
        yield f'  <path d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}" stroke="{GRID if value else SOFT}"/>'
        yield f'  <text x="{_LEFT - 8}" y="{at + 4.5:.1f}" text-anchor="end" fill="{SOFT}">{value:,.10g}</text>'
    for curve in panel.curves:
        path = " ".join(f"{_x(x, until_s):.1f},{y(value):.1f}" for x, value in curve.points)
        dashes = ' stroke-dasharray="5 4"' if curve.dashed else ""
        width = 1.3 if curve.dashed else 1.8
        yield (
            f'  <polyline points="{path}" fill="none" stroke="{curve.colour}" stroke-width="{width}" '
            f'stroke-linejoin="round"{dashes}/>'
        )


def _legend_of_curves(curves: Sequence[Curve], y: int) -> Iterator[str]:
    """Yield the legend above the right end of a panel."""
    right = float(_WIDTH - _RIGHT)
    for curve in reversed(curves):
        yield f'  <text x="{right:.0f}" y="{y}" text-anchor="end" fill="{INK}">{escape(curve.name)}</text>'
        right -= _broad(curve.name) + 8
        dashes = ' stroke-dasharray="5 4"' if curve.dashed else ""
        yield f'  <path d="M{right - 26:.0f} {y - 4}h26" stroke="{curve.colour}" stroke-width="2"{dashes}/>'
        right -= 26 + 22


def _legend_of_marks(kinds: Sequence[Kind]) -> Iterator[str]:
    x = float(_LEFT + 6)
    for kind in kinds:
        yield f'  <path d="{kind.shape}" transform="translate({x:.0f} 48)" fill="{kind.colour}"/>'
        yield f'  <text x="{x + 12:.0f}" y="52.5" fill="{INK}">{escape(kind.name)}</text>'
        x += _broad(kind.name) + 44


def _broad(text: str) -> float:
    """Return the approximate width of a text in SVG units."""
    return 7.0 * len(text)


def _marks(marks: Sequence[Mark], kinds: dict[str, Kind], until_s: float, panels: int) -> Iterator[str]:
    for mark in marks:
        kind, x = kinds[mark.kind], _x(mark.at_s, until_s)
        lines = "".join(f"M{x:.1f} {_top_of(at)}v{_PANEL}" for at in range(panels))
        yield f"  <g><title>{mark.at_s:.1f} s: {escape(mark.text)}</title>"
        yield f'    <path d="{lines}" stroke="{kind.colour}" stroke-opacity="0.45"/>'
        for at in range(panels):
            yield f'    <path d="{kind.shape}" transform="translate({x:.1f} {_top_of(at) + 1})" fill="{kind.colour}"/>'
        yield "  </g>"


def _time_axis(until_s: float, bottom: int) -> Iterator[str]:
    for at in ticks(until_s, 10):
        x = _x(at, until_s)
        yield f'  <path d="M{x:.1f} {bottom}v5" stroke="{SOFT}"/>'
        yield f'  <text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle" fill="{SOFT}">{at:g}</text>'
    yield (
        f'  <text x="{(_LEFT + _WIDTH - _RIGHT) / 2:.0f}" y="{bottom + 44}" text-anchor="middle" fill="{INK}">'
        "time since the first world began (s)</text>"
    )
