"""From values to pixels: where things are drawn, which ticks there are, and what many points become."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_TIMES = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200),
    *(86400, 2 * 86400, 5 * 86400, 10 * 86400, 20 * 86400, 50 * 86400, 100 * 86400, 365 * 86400),
)


@dataclass(frozen=True)
class Scale:
    """``low`` is drawn at ``first``, ``high`` at ``last``."""

    low: float
    high: float
    first: float
    last: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        return self.first if not span else self.first + (value - self.low) / span * (self.last - self.first)


def steps_of(low: float, high: float, most: int = 5) -> list[float]:
    """Round values between the two, so many at most."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def times_of(seconds: float, most: int = 9) -> list[float]:
    """Round points of time from 0 on."""
    step = next((step for step in _TIMES if seconds / step <= most), _TIMES[-1])
    step *= max(1, math.ceil(seconds / step / most))
    return [number * step for number in range(math.floor(seconds / step + 1e-9) + 1)]


def landmarks(low: float, high: float) -> list[float]:
    """Times that people count in, of all sizes between the two."""
    return [time for time in _TIMES if low <= time <= high]


def above(value: float, most: int = 4) -> float:
    """The least round number that is not less."""
    if value <= 0:
        return 1.0
    step = steps_of(0, value, most)[1]
    return math.ceil(value / step - 1e-9) * step


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Of points in order of the first number, the least and the greatest of each piece: peaks stay."""
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


class Bins:
    """Amounts that are spread evenly over stretches of time, collected in pieces of equal length."""

    def __init__(self, low: float, high: float, count: int) -> None:
        self.low, self.high = low, high
        self.sums = [0.0] * count
        self.width = (high - low) / count or 1.0

    def add(self, start: float, end: float, amount: float) -> None:
        """``amount`` in all, from ``start`` to ``end``; what is outside is left out."""
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
    """The nearest rank: always one of the values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
