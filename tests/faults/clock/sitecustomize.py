"""Python's clock of the day is off by what a file says, in every process that finds this on its path.

Only :func:`time.time` and :func:`time.time_ns`: the kernel's clock, files' times and whoever asks
:func:`time.clock_gettime` are as they were.
"""

from __future__ import annotations

import os
import time

_FILE = os.environ.get("FAULTS_CLOCK", "")


def _ahead_ns() -> int:
    try:
        with open(_FILE, "rb") as file:  # noqa: PTH123 - every look at the clock does this
            return int(file.read() or b"0") * 1_000_000_000
    except (OSError, ValueError):
        return 0


if _FILE:
    time.time_ns = lambda: time.clock_gettime_ns(time.CLOCK_REALTIME) + _ahead_ns()
    time.time = lambda: time.time_ns() / 1e9
