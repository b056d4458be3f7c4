"""Work that many want the result of at one time, done once for all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """One turn at a time. Any thread may ask.

    Who asks while somebody works waits for the next turn and shares it with everybody else who waited: what was so
    before the question was asked is in the answer, and however many ask, two turns serve all of them.
    """

    def __init__(self, work: Callable[[], T], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._work = work
        self._clock = clock
        self._lock = threading.Lock()
        self._working = threading.Lock()
        self._begun = 0
        self._last: tuple[float, int, T] | None = None
        """When the last turn was begun, which one it was, and what came of it."""

    def next(self) -> T:
        """What comes of a turn that begins from now on."""
        with self._lock:
            begun = self._begun
        with self._working:
            with self._lock:
                if self._last is not None and self._last[1] > begun:
                    return self._last[2]
                self._begun = number = self._begun + 1
            since = self._clock()
            found = self._work()
            with self._lock:
                self._last = (since, number, found)
            return found

    def recent(self, within_s: float) -> T:
        """What came of a turn that was begun within the last ``within_s``; else of the next."""
        with self._lock:
            if self._last is not None and self._clock() - self._last[0] < within_s:
                return self._last[2]
        return self.next()

    def forget(self) -> None:
        """What was found is not so any more."""
        with self._lock:
            self._last = None
