"""Shift of :func:`time.time` and :func:`time.time_ns` by the seconds in a file.

Python imports this module at its start if it is on the path. The kernel's clock, file times and
:func:`time.clock_gettime` do not change.
"""

from __future__ import annotations

import os
import time

_FILE = os.environ.get("FAULTS_CLOCK", "")


def _ahead_ns() -> int:
    try:
        with open(_FILE, "rb") as file:  # noqa: PTH123 - every read of the clock does this
            return int(file.read() or b"0") * 1_000_000_000
    except (OSError, ValueError):
        return 0


if _FILE:
    time.time_ns = lambda: time.clock_gettime_ns(time.CLOCK_REALTIME) + _ahead_ns()
    time.time = lambda: time.time_ns() / 1e9
