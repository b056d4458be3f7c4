"""Sizes, durations and counts in text form: parse and format."""

from __future__ import annotations

import re
from decimal import Decimal

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGTP])(i?))?B?\s*", re.IGNORECASE | re.ASCII)
_MOST = 1 << 63


def parse_size(text: str | int) -> int:
    """Return the bytes of ``"64MiB"``, ``"64M"`` (both binary), ``"64MB"`` (decimal) or a number."""
    if isinstance(text, int):
        if text < 0:
            raise ValueError(f"{text} is negative")
        return text
    match = _SIZE.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is not a size: write for example 64MiB, 5GB or 1048576")
    power = " KMGTP".index((match[2] or " ").upper())
    decimal = text.strip().lower().endswith("b") and not match[3] and power
    size = Decimal(match[1]) * (1000 if decimal else 1024) ** power
    if size >= _MOST:
        raise ValueError(f"{text!r} is more than any machine has")
    return int(size)


def show_size(size_bytes: float) -> str:
    """Format bytes: ``1536`` as ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if size_bytes < 1024 or unit == "PiB":
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    raise AssertionError


def show_seconds(seconds: float) -> str:
    """Format seconds: ``0.0123`` as ``12.3 ms``, ``86400`` as ``24.0 h``."""
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def show_count(number: int, one: str, more: str = "") -> str:
    """Format a number with its noun: ``1 step``, ``2 steps``, or ``2 steps are`` with ``more``."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"
