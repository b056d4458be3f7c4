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


def _remaining_s() -> float | None:
    left_s = deadlines.remaining_s()
    return None if math.isinf(left_s) else left_s


def _deadline_error() -> UnavailableError:
    return UnavailableError("the answers that were asked for have not all come in the time that was given")


class SingleFlight(Generic[T]):
    """At most one run of ``work`` at a time, shared by its callers. Thread-safe.

    Callers that arrive during a run wait for the next run and share its result. So the result is never older than the
    call, and two runs serve any number of concurrent callers.
    """

    def __init__(self, work: Callable[[], T], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._work = work
        self._clock = clock
        self._changed = threading.Condition()
        self._working = False
        self._begun = 0
        self._last: tuple[float, int, T] | None = None
        """Start time, number and result of the last run."""
        self.waiting = 0
        """Number of callers that wait for a result."""

    def run(self) -> T:
        """Return the result of a run that starts after this call.

        Raise :class:`UnavailableError` at the deadline.
        """
        with self._changed:
            begun = self._begun
            self.waiting += 1
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: not self._working or self._found_after(begun), _remaining_s()):
                    raise _deadline_error()
                if self._last is not None and self._found_after(begun):
                    return self._last[2]
                self._working = True
            return deadlines.run_within_deadline(self._run_once, _deadline_error)
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
            with deadlines.no_deadline():  # other callers, with later deadlines, share the run
                found = self._work()
            with self._changed:
                self._last = (since, number, found)
            return found
        finally:
            with self._changed:
                self._working = False
                self._changed.notify_all()

    def cached(self, within_s: float) -> T:
        """Return the result of a run that started within the last ``within_s`` seconds, or of a new run."""
        with self._changed:
            if self._last is not None and self._clock() - self._last[0] < within_s:
                return self._last[2]
        return self.run()

    def invalidate(self) -> None:
        """Drop the cached result."""
        with self._changed:
            self._last = None
