"""One request in flight for all callers that want the same thing."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from peerstore import deadlines
from peerstore.errors import UnavailableError

T = TypeVar("T")


def _left() -> float | None:
    left_s = deadlines.remaining_s()
    return None if math.isinf(left_s) else left_s


def _late() -> UnavailableError:
    return UnavailableError("the answers that were asked for have not all come in the time that was given")


class SingleFlight(Generic[T]):
    """One turn at a time. Any thread may ask.

    Who asks while somebody works waits for the next turn and shares it with everybody else who waited: what was so
    before the question was asked is in the answer, and however many ask, two turns serve all of them.
    """

    def __init__(self, work: Callable[[], T], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._work = work
        self._clock = clock
        self._changed = threading.Condition()
        self._working = False
        self._begun = 0
        self._last: tuple[float, int, T] | None = None
        """When the last turn was begun, which one it was, and what came of it."""
        self.waiting = 0
        """How many have asked and have no answer yet."""

    def run(self) -> T:
        """What comes of a turn that begins from now on; :class:`UnavailableError` where who asks cannot wait for it."""
        with self._changed:
            begun = self._begun
            self.waiting += 1
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: not self._working or self._found_after(begun), _left()):
                    raise _late()
                if self._last is not None and self._found_after(begun):
                    return self._last[2]
                self._working = True
            return deadlines.run_within_deadline(self._run_once, _late)
        finally:
            with self._changed:
                self.waiting -= 1

    def _found_after(self, begun: int) -> bool:
        return self._last is not None and self._last[1] > begun

    def _run_once(self) -> T:
        try:
            with self._changed:
                self._begun = number = self._begun + 1
                since = self._clock()
            with deadlines.no_deadline():  # others share it, who may have more time
                found = self._work()
            with self._changed:
                self._last = (since, number, found)
            return found
        finally:
            with self._changed:
                self._working = False
                self._changed.notify_all()

    def cached(self, within_s: float) -> T:
        """What came of a turn that was begun within the last ``within_s``; else of the next."""
        with self._changed:
            if self._last is not None and self._clock() - self._last[0] < within_s:
                return self._last[2]
        return self.run()

    def invalidate(self) -> None:
        """What was found is not so any more."""
        with self._changed:
            self._last = None
