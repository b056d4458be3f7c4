"""Time and messages: one heap of events, and a network between nodes that loses, delays, doubles and reorders."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

DELAY_S = 0.002
SLOW_S = 4.0


class Events:
    """What happens when. Two things of one moment happen in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self.count = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def schedule(self, delay_s: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), work))

    def next(self, until: float) -> Callable[[], None] | None:
        """What happens next, no later than ``until``; the clock moves there."""
        if not self._heap or self._heap[0][0] > until:
            self.now = max(self.now, until)
            return None
        self.now, _, work = heapq.heappop(self._heap)
        self.count += 1
        return work


class SimulatedNetwork:
    """Which messages arrive, and when."""

    def __init__(self, events: Events, rng: random.Random) -> None:
        self._events = events
        self._random = rng
        self.cut: set[tuple[str, str]] = set()
        """Ways on which nothing passes, one direction each."""
        self.sides: tuple[frozenset[str], ...] = ()
        """The halves of a partition in both directions."""
        self.parted_at = 0.0
        self.slow: set[str] = set()
        self.loss = 0.0
        self.doubled = 0.0
        self.troubled_at = float("-inf")
        """When it last was not as it should be."""

    @property
    def is_calm(self) -> bool:
        return not (self.cut or self.slow or self.loss)

    def partition(self, side: frozenset[str], others: frozenset[str], *, both: bool) -> None:
        self.cut |= {(one, other) for one in side for other in others}
        if both:
            self.cut |= {(other, one) for one in side for other in others}
            self.sides, self.parted_at = (side, others), self._events.now

    def heal(self) -> None:
        self.cut.clear()
        self.slow.clear()
        self.sides = ()
        self.loss = self.doubled = 0.0
        self.troubled_at = self._events.now

    def is_open(self, one: str, other: str) -> bool:
        return (one, other) not in self.cut and (other, one) not in self.cut

    def delay_s(self, source: str, target: str) -> float | None:
        """How long a message takes, or ``None`` when it does not arrive."""
        if self.cut and (source, target) in self.cut:
            return None
        if self.loss and self._random.random() < self.loss:
            return None
        delay = DELAY_S * (0.5 + self._random.random())
        if self.slow and (source in self.slow or target in self.slow):
            delay += SLOW_S * self._random.random()
        return delay

    def is_duplicated(self) -> bool:
        return bool(self.doubled) and self._random.random() < self.doubled
