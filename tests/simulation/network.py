"""Simulated time, and a network that loses, delays, duplicates and reorders messages."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

DELAY_S = 0.002
SLOW_S = 4.0


class Events:
    """The scheduled events by time. Events of the same time run in the order of scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self.count = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def schedule(self, delay_s: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), work))

    def next(self, until: float) -> Callable[[], None] | None:
        """Pop the next event up to ``until``, and advance the clock to it."""
        if not self._heap or self._heap[0][0] > until:
            self.now = max(self.now, until)
            return None
        self.now, _, work = heapq.heappop(self._heap)
        self.count += 1
        return work


class SimulatedNetwork:
    """The delays and losses of messages between nodes."""

    def __init__(self, events: Events, rng: random.Random) -> None:
        self._events = events
        self._random = rng
        self.cut: set[tuple[str, str]] = set()
        """Pairs of source and target between which no message arrives."""
        self.sides: tuple[frozenset[str], ...] = ()
        """The two halves of a partition that cuts both directions."""
        self.parted_at = 0.0
        self.slow: set[str] = set()
        self.loss = 0.0
        self.doubled = 0.0
        self.troubled_at = float("-inf")
        """When the network last healed."""

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
        """Draw the seconds that a message takes, or ``None`` if it is lost."""
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
