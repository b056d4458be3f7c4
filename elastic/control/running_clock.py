"""A clock that counts only the time in which this process ran, so that a process that was stopped accuses no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def since_boot() -> float:
    """Seconds that also count while the machine sleeps, as those of everybody else do."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class RunningClock:
    """Read at least once in ``interval_s`` by who runs: a reading that leapt further counts as one interval.

    A process is not told that it was stopped (``scontrol suspend``, ``docker pause``, a closed lid). Deadlines that the
    world outside has set go on meanwhile: :meth:`skipped` says by how much they are nearer. Any thread may read it.
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
            leapt_s, self._read_at = max(0.0, now - self._read_at), now
            counted_s = min(leapt_s, self._interval_s)
            self._counted += counted_s
            self._skipped_s += leapt_s - counted_s
            return self._counted

    def skipped(self) -> float:
        """Seconds that were not counted since this was last asked."""
        with self._lock:
            skipped_s, self._skipped_s = self._skipped_s, 0.0
            return skipped_s
