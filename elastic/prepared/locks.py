"""Locks that the kernel lets go of when their owner dies."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator

_FIRST_PAUSE_S = 50e-6
_LONGEST_PAUSE_S = 5e-3


def acquire(fd: int, *, wait_s: float, shared: bool = False, stop: Callable[[], bool] = lambda: False) -> bool:
    """Lock an open file against all other openings of it, also in this process; False when that took too long."""
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
    deadline, pause_s = time.monotonic() + wait_s, _FIRST_PAUSE_S
    while True:
        try:
            fcntl.flock(fd, kind)
        except BlockingIOError:
            if stop() or time.monotonic() >= deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        else:
            return True


@contextlib.contextmanager
def released(fd: int) -> Iterator[None]:
    """Let go at the end, by word and not by closing: a process forked meanwhile has the same opening."""
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)
