"""Elements of the report: escaped HTML and SVG, numbers as text, axis scales, colors, style sheet."""

from __future__ import annotations

import datetime as dt
import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tieredckpt.event_log.event_types import STAGES
from tieredckpt.goodput.analysis_result import TimeCategory, TimeInterval

# Control characters and lone surrogates are not allowed in a page.
_UNFIT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_VOID = frozenset({"meta", "br"})


class Markup(str):
    """Text that is already markup."""

    __slots__ = ()


MarkupPart: TypeAlias = "str | int | float | Iterable[MarkupPart] | None"


def to_markup(part: MarkupPart) -> Markup:
    """Return ``part`` as markup.

    Strings are escaped, ``None`` is empty, items of iterables are concatenated.
    """
    if isinstance(part, Markup):
        return part
    if part is None:
        return Markup()
    if isinstance(part, str | int | float):
        return Markup(html.escape(_UNFIT.sub("\ufffd", str(part))))
    return Markup("".join(to_markup(one) for one in part))


def element(name: str, /, *parts: MarkupPart, **attributes: str | float | None) -> Markup:
    """Return an element with escaped content. Attributes that are ``None`` are skipped.

    ``element("p", "a < b", class_="x")`` returns ``<p class="x">a &lt; b</p>``.
    """
    rendered = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{rendered}>")
    return Markup(f"<{name}{rendered}>{to_markup(parts)}</{name}>")


def svg_number(value: float) -> str:
    """Return a coordinate with at most one decimal: a tenth of a pixel is enough."""
    shown = f"{value:.1f}"
    return shown.removesuffix(".0")


def _attribute(value: str | float) -> str:
    return to_markup(svg_number(value) if isinstance(value, float) else value)


def report_section(name: str, title: str, *parts: MarkupPart, note: MarkupPart = None) -> Markup:
    """Return a section of the page. Its id is ``name``, for links."""
    rendered = element("p", note, class_="note") if note else None
    return element("section", element("h2", title), rendered, parts, id=name)


def tile(name: str, value: MarkupPart, more: MarkupPart = "", *, look: str = "") -> Markup:
    """Return one number with its name; ``look`` is ``good``, ``warn``, ``bad`` or neutral."""
    content = (element("dt", name), element("dd", value, class_="value"), element("dd", more, class_="more"))
    return element("div", content, class_=f"tile {look}".strip())


def html_page(title: str, body: MarkupPart, *, refresh_s: int | None = None) -> str:
    """Return a complete page, which a browser loads again every ``refresh_s`` seconds."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="refresh", content=str(refresh_s)) if refresh_s is not None else None,
        element("title", title),
        element("style", Markup(style_sheet())),
    )
    return f"<!DOCTYPE html>\n{element('html', head, element('body', element('main', body)), lang='en')}\n"


def data_value(shown: str, value: float | str) -> Markup:
    """Return the text ``shown`` in an element that also holds the exact value."""
    return element("data", shown, value=repr(value) if isinstance(value, float) else str(value))


_PROSE = ("message", "most frequent message")
"""Columns of error messages, whose paths and names can be wider than the page."""


def html_table(head: Iterable[str], body: Iterable[Iterable[MarkupPart]], *, right: Iterable[str] = ()) -> Markup:
    """Return a table whose columns in ``right`` are numbers; only prose columns break inside a word."""
    names, numbers = list(head), set(right)
    sides = ["n" if name in numbers else "prose" if name in _PROSE else None for name in names]
    top = element(
        "tr", [element("th", name, class_=side, scope="col") for name, side in zip(names, sides, strict=True)]
    )
    lines = [
        element("tr", [element("td", cell, class_=side) for cell, side in zip(line, sides, strict=True)])
        for line in body
    ]
    return element("div", element("table", element("thead", top), element("tbody", lines)), class_="wide")


_SI_PREFIXES = ("k", "M", "G", "T", "P")
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def percent_text(share: float) -> str:
    """Return ``share`` as percent, with two decimals below 1 % and above 99 %."""
    value = 100 * share
    if 0 < value < 0.005:
        return "< 0.01 %"
    digits = 2 if value > 99 or value < 1 else 1
    return f"{value:.{digits}f} %" if 0 < value < 100 else f"{value:.0f} %"


def duration_text(seconds: float) -> str:
    """Return a duration as text: ``12.3 ms``, ``75.2 s``, ``1 h 30 min``."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms" if seconds else "0 s"
    if seconds < 100:
        return f"{seconds:.3g} s"
    rest = round(seconds)
    if rest < 120:
        return f"{rest} s"
    parts = []
    for size, unit in _UNITS:
        if rest >= size:
            parts.append(f"{rest // size} {unit}")
            rest %= size
    if rest:
        parts.append(f"{rest} s")
    return " ".join(parts[:2])


def run_time_text(seconds: float) -> str:
    """Return seconds since the start of the job as text: ``2:03.4``, ``1:02:03`` or ``2 d 01:02:03``."""
    sign, seconds = ("-" if seconds < 0 else ""), abs(seconds)
    tenths = round(seconds * 10)
    if tenths >= 36000:
        tenths -= tenths % 10
    rest, tenth = divmod(tenths, 10)
    minutes, second = divmod(rest, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{sign}{days} d {hour:02}:{minute:02}:{second:02}"
    if hour:
        return f"{sign}{hour}:{minute:02}:{second:02}"
    return f"{sign}{minute}:{second:02}.{tenth}"


def axis_time_text(seconds: float) -> str:
    """Return :func:`run_time_text` in a short form for round values on an axis."""
    if seconds >= 86400:
        days, rest = divmod(round(seconds), 86400)
        return f"{days} d" + (f" {rest // 3600:02}:{rest % 3600 // 60:02}" if rest else "")
    return run_time_text(seconds).removesuffix(".0")


def utc_text(time_us: int) -> str:
    """Return a time as UTC text, from microseconds since 1970."""
    return dt.datetime.fromtimestamp(time_us // 1_000_000, dt.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def si_text(value: float) -> str:
    """Return a number with an SI prefix: ``1.23 M``. Numbers below 10,000 have no prefix."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) < 10_000:
        return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"
    value, place = value / 1000, 0
    while abs(value) >= 999.5 and place < len(_SI_PREFIXES) - 1:
        value, place = value / 1000, place + 1
    return f"{value:.3g} {_SI_PREFIXES[place]}"


_ROUND_TIMES = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200),
    *(86400, 2 * 86400, 5 * 86400, 10 * 86400, 20 * 86400, 50 * 86400, 100 * 86400, 365 * 86400),
)


@dataclass(frozen=True)
class LinearScale:
    """Linear scale that maps ``low`` to the coordinate ``first`` and ``high`` to ``last``."""

    low: float
    high: float
    first: float
    last: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        return self.first if not span else self.first + (value - self.low) / span * (self.last - self.first)


def round_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round values from ``low`` to ``high``, about ``most`` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def time_ticks(seconds: float, most: int = 9) -> list[float]:
    """Return round times from 0 to ``seconds``, about ``most`` of them."""
    step = next((step for step in _ROUND_TIMES if seconds / step <= most), _ROUND_TIMES[-1])
    step *= max(1, math.ceil(seconds / step / most))
    return [number * step for number in range(math.floor(seconds / step + 1e-9) + 1)]


def log_time_ticks(low: float, high: float) -> list[float]:
    """Return round times from ``low`` to ``high`` seconds, for a logarithmic axis."""
    return [time for time in _ROUND_TIMES if low <= time <= high]


def round_up_tick(value: float, most: int = 4) -> float:
    """Return the smallest round number that is not less than ``value``."""
    if value <= 0:
        return 1.0
    step = round_ticks(0, value, most)[1]
    return math.ceil(value / step - 1e-9) * step


def downsampled(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return about ``most`` points: minimum and maximum of each piece, so that peaks remain.

    The x values must ascend.
    """
    if len(points) <= most:
        return list(points)
    low, high = points[0][0], points[-1][0]
    pieces: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        piece = int((point[0] - low) / (high - low) * (most // 2) * (1 - 1e-12)) if high > low else 0
        pieces.setdefault(piece, []).append(point)
    kept: list[tuple[float, float]] = []
    for inside in pieces.values():
        ends = {min(inside, key=lambda point: point[1]), max(inside, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


class TimeBins:
    """Sums of amounts over time, in bins of equal width."""

    def __init__(self, low: float, high: float, count: int) -> None:
        self.low, self.high = low, high
        self.sums = [0.0] * count
        self.width = (high - low) / count or 1.0

    def add(self, start: float, end: float, amount: float) -> None:
        """Spread ``amount`` evenly from ``start`` to ``end``. The part outside of the bins is dropped."""
        if end <= start:
            return
        rate = amount / (end - start)
        first = max(0, int((start - self.low) / self.width))
        last = min(len(self.sums) - 1, int((end - self.low) / self.width))
        for number in range(first, last + 1):
            left = self.low + number * self.width
            inside = min(end, left + self.width) - max(start, left)
            if inside > 0:
                self.sums[number] += rate * inside


def quantile(values: Iterable[float], share: float) -> float:
    """Return a quantile by nearest rank: always one of the values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True)
class DisplayKind:
    name: str
    words: str
    light: str
    dark: str


CATEGORY_KINDS = (
    DisplayKind("productive", "steps that count", "#2e9e68", "#2f9a68"),
    DisplayKind("save", "saving", "#58b2e6", "#4aa3d8"),
    DisplayKind("lost", "work undone", "#e5a50a", "#d99e13"),
    DisplayKind("startup", "start", "#9aa7b5", "#7b8896"),
    DisplayKind("resize", "resize", "#9a6fd8", "#9d78d6"),
    DisplayKind("recovery", "recovery", "#d33f49", "#dd5560"),
    DisplayKind("ending", "end", "#b7c1cc", "#5d6975"),
    DisplayKind("down", "not running", "#6b7785", "#46515c"),
    DisplayKind("unknown", "unknown", "#dde2e8", "#333d47"),
    DisplayKind("missing", "missing ranks", "#eef1f4", "#232b33"),
)
_STAGES = (
    DisplayKind("detect", "detect", "#c62f45", "#dc4a5e"),
    DisplayKind("seal", "seal", "#b863a8", "#c070b2"),
    DisplayKind("abort", "abort", "#ea6a3c", "#ea7448"),
    DisplayKind("leave", "leave", "#b98552", "#b98a5c"),
    DisplayKind("launch", "launch", "#f0934e", "#ef9a5b"),
    DisplayKind("rendezvous", "rendezvous", "#f4b860", "#eeb45f"),
    DisplayKind("groups", "groups", "#e48bb0", "#db83a8"),
    DisplayKind("hydrate", "hydrate", "#3f6fd0", "#5b87e0"),
    DisplayKind("loader", "loader", "#2fa6b5", "#34a3b1"),
    DisplayKind("first_step", "first step", "#8fbf4f", "#86b549"),
    DisplayKind("other", "not reported", "#c3b3a6", "#8d8078"),
)
DISPLAY_KINDS = {one.name: one for one in (*CATEGORY_KINDS, *_STAGES)}
_ORDER = ("productive", "save", "lost", "startup", "resize", *(one.name for one in _STAGES), "recovery")
DISPLAY_ORDER = (*_ORDER, "ending", "down", "unknown", "missing")
"""Kinds from the bottom of a stack to its top."""
STAGE_NAMES = frozenset(STAGES)


def stage_kind(name: str) -> str:
    return name if name in STAGE_NAMES else "lost" if name in ("lost", "interrupted") else "other"


def display_kind(interval: TimeInterval) -> str:
    """Return the display kind of an interval: its stage in a recovery, otherwise its category."""
    return stage_kind(interval.stage) if interval.category is TimeCategory.RECOVERY else interval.category.value


def color_legend(names: Iterable[str], more: MarkupPart = None) -> Markup:
    there = set(names)
    keys = [
        element("span", element("i", class_=f"k f-{name}"), DISPLAY_KINDS[name].words)
        for name in DISPLAY_ORDER
        if name in there
    ]
    return element("p", keys, more, class_="legend")


def color_properties(dark: bool) -> str:
    """Return the colors as CSS custom properties."""
    return "".join(f"--{one.name}:{one.dark if dark else one.light};" for one in DISPLAY_KINDS.values())


def color_classes() -> str:
    return "".join(f".f-{name}{{fill:var(--{name});background:var(--{name})}}" for name in DISPLAY_KINDS)


_LIGHT = "--page:#f6f8fa;--card:#fff;--ink:#17212b;--soft:#5a6876;--line:#dfe5eb;--grid:#e9eef2;--curve:#2f6fb2;"
_DARK = "--page:#0f1419;--card:#171e25;--ink:#e6ebf0;--soft:#95a3b1;--line:#2a343e;--grid:#232c35;--curve:#6fa8e6;"
_RULES = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1120px;margin:0 auto;padding:28px 20px 40px}
header{display:flex;flex-wrap:wrap;align-items:baseline;gap:4px 14px;margin:0 2px 18px}
h1{font-size:26px;line-height:1.2;margin:0;overflow-wrap:anywhere}
h2{font-size:17px;margin:0 0 2px}
h3{font-size:13px;font-weight:600;color:var(--soft);margin:16px 0 2px}
header p{flex-basis:100%;margin:0;color:var(--soft)}
.state{border-radius:99px;padding:1px 11px;font-size:13px;font-weight:600;background:var(--line)}
.state.good{background:var(--productive);color:#fff}.state.bad{background:var(--detect);color:#fff}
section{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:18px 20px;margin:0 0 16px}
.note{margin:0 0 8px;color:var(--soft);font-size:13.5px;max-width:110ch}
.hero{display:grid;grid-template-columns:auto 1fr;gap:12px 30px;align-items:center}
.ring{width:212px;height:212px;display:block}
.ring path{stroke:var(--card);stroke-width:1.5}.ring .big{font-size:35px;font-weight:700}.ring .small{font-size:14px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(148px,1fr));gap:12px 18px;margin:0}
.tile{border-left:3px solid var(--line);padding:0 0 0 11px}
.tile dt{color:var(--soft);font-size:13px}.tile dd{margin:0}
.tile .value{font-size:24px;font-weight:650;line-height:1.25;white-space:nowrap}
.tile .more{color:var(--soft);font-size:12.5px;line-height:1.35}
.tile.bad{border-color:var(--detect)}.tile.good{border-color:var(--productive)}.tile.warn{border-color:var(--lost)}
.spent{display:flex;height:16px;border-radius:8px;overflow:hidden;margin:20px 0 8px;background:var(--missing)}
.spent i{display:block;min-width:1px}
.legend{display:flex;flex-wrap:wrap;gap:3px 16px;margin:6px 0 2px;font-size:13px;color:var(--soft)}
.legend span{white-space:nowrap}.legend b{color:var(--ink);font-weight:600;margin-left:5px}
.k{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.wide{overflow-x:auto}
.chart{display:block;width:100%;min-width:640px;height:auto;font-size:12px}
.chart text{fill:var(--soft)}.chart .strong{fill:var(--ink);font-weight:600}
.grid{stroke:var(--grid);fill:none}.axis{stroke:var(--line);fill:none}
.curve{fill:none;stroke:var(--curve);stroke-width:1.6;stroke-linejoin:round}
.area{fill:var(--curve);opacity:.28}.mean{stroke:var(--soft);stroke-dasharray:5 4;fill:none}
.undone{fill:none;stroke:var(--lost);stroke-width:1.6}.dot{fill:var(--lost)}.point{fill:var(--curve)}
.fault{stroke:var(--detect);stroke-width:1;stroke-dasharray:2 3;opacity:.75}.mark{fill:var(--detect)}
.bad{stroke:#d33;stroke-width:2}
.full{stroke:var(--soft);stroke-dasharray:3 4;fill:none;opacity:.7}
.hover{fill:transparent}.hover:hover{fill:var(--ink);opacity:.14}
.bar:hover{opacity:.8}
.unprotected{fill:#d33;stroke:var(--card);stroke-width:.6}.unprotected-key{background:#d33}
.hist{fill:var(--hydrate)}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th{color:var(--soft);font-weight:600;text-align:left;font-size:12.5px}
td,th{padding:5px 14px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}
tr:last-child td{border-bottom:0}
td.n,th.n{text-align:right;white-space:nowrap}
td.prose{overflow-wrap:anywhere}td .sub{color:var(--soft);font-size:12.5px}.wide table{min-width:580px}
.tag{border:1px solid var(--line);border-radius:6px;padding:0 6px;font-size:12px;color:var(--soft);white-space:nowrap}
.meter{display:inline-block;vertical-align:middle;height:9px;border-radius:3px;min-width:2px}
details{margin-top:10px}summary{cursor:pointer;color:var(--soft);font-size:13.5px}
footer{color:var(--soft);font-size:13px;margin:8px 4px}
@media(max-width:760px){main{padding:16px 10px}.hero{grid-template-columns:1fr;justify-items:center}
.tiles{width:100%}section{padding:14px}}
@media print{body{background:#fff}section{break-inside:avoid;border-color:#ccc}.wide{overflow:visible}}
"""


def style_sheet() -> str:
    light, dark = _LIGHT + color_properties(dark=False), _DARK + color_properties(dark=True)
    return (
        f":root{{color-scheme:light dark;{light}}}"
        f"@media(prefers-color-scheme:dark){{:root{{{dark}}}}}{_RULES}{color_classes()}"
    )
