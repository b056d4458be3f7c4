"""A clock that counts only the time in which this process ran.

So a process that was stopped does not blame other processes for the gap.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def since_boot() -> float:
    """Return the seconds since boot, including time in which the machine slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class RunningClock:
    """Clock that counts at most ``interval_s`` seconds between two readings.

    A running process reads it at least once per ``interval_s``. A longer gap means that the process was stopped
    (``scontrol suspend``, ``docker pause``, a closed lid). Deadlines set outside this process do not stop meanwhile:
    :meth:`skipped` returns the time to subtract from them. Any thread may read the clock.
    """

    def __init__(self, interval_s: float, clock: Callable[[], float] = since_boot) -> None:
        self._interval_s, self._clock = interval_s, clock
        self._lock = threading.RLock()
        self._read_at = clock()
        self._counted = self._read_at
        self._skipped_s = 0.0

    def __call__(self) -> float:
        with self._lock:
            now = self._clock()
            elapsed_s, self._read_at = max(0.0, now - self._read_at), now
            counted_s = min(elapsed_s, self._interval_s)
            self._counted += counted_s
            self._skipped_s += elapsed_s - counted_s
            return self._counted

    def skipped(self) -> float:
        """Return the seconds that were not counted since the last call."""
        with self._lock:
            skipped_s, self._skipped_s = self._skipped_s, 0.0
            return skipped_s
