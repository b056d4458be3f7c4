"""Numbers and times as people read them."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Sequence

_BYTES = ("KiB", "MiB", "GiB", "TiB", "PiB")
_TIMES = ("k", "M", "G", "T", "P")
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def percent(share: float) -> str:
    """Two digits where it matters: what is missing from 100 %, or there at all."""
    value = 100 * share
    if 0 < value < 0.005:
        return "< 0.01 %"
    digits = 2 if value > 99 or value < 1 else 1
    return f"{value:.{digits}f} %" if 0 < value < 100 else f"{value:.0f} %"


def lasting(seconds: float) -> str:
    """``0.0123`` as ``12.3 ms``, ``75.2`` as ``75.2 s``, ``5400`` as ``1 h 30 min``."""
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


def since(seconds: float) -> str:
    """A point of the job's time: ``1:02:03.4``, days in front; tenths within the first hour only."""
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


def tick(seconds: float) -> str:
    """The same where it is a round number: on an axis."""
    if seconds >= 86400:
        days, rest = divmod(round(seconds), 86400)
        return f"{days} d" + (f" {rest // 3600:02}:{rest % 3600 // 60:02}" if rest else "")
    return since(seconds).removesuffix(".0")


def clock(time_us: int) -> str:
    """A point in time, UTC."""
    return dt.datetime.fromtimestamp(time_us // 1_000_000, dt.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def size(number_bytes: float) -> str:
    return f"{number_bytes:.0f} B" if number_bytes < 1024 else _scaled(number_bytes, 1024, _BYTES, ".1f")


def amount(value: float) -> str:
    """``1234567`` as ``1.23 M``; whole numbers below 10,000 as they are."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) < 10_000:
        return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"
    return _scaled(value, 1000, _TIMES, ".3g")


def _scaled(value: float, by: int, units: Sequence[str], form: str) -> str:
    place = 0
    value /= by
    while abs(value) >= by - 0.5 and place < len(units) - 1:
        value, place = value / by, place + 1
    return f"{value:{form}} {units[place]}"


def count(value: int, word: str) -> str:
    return f"{value:,} {word}" + ("" if value == 1 else "s")
