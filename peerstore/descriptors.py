"""How many files this process may have open: raised once, and kept from running out in the middle of something."""

from __future__ import annotations

import logging
import os
import resource
import threading
import time
from collections.abc import Callable

from peerstore.errors import AgentBusyError

log = logging.getLogger(__name__)

_KEPT_BACK = 48
"""For work that has begun: a seal, a note, an answer, each of which needs one or two for a moment."""
_KNOWN_S = 0.05


def raise_limit() -> int:
    """As many as this process may have without asking anybody; the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            log.warning("the limit of %d open files could not be raised to %d: %s", soft, hard, error)
    return limit()


def limit() -> int:
    """How many it may have."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if soft != resource.RLIM_INFINITY else 1 << 30


def in_use() -> int:
    """How many this process has open; its limit, where not even one is left to count them."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # noqa: PTH208 - names are enough
    except OSError:
        return limit()


class Descriptors:
    """Refuses new work while too few are left for what has begun."""

    def __init__(self, count: Callable[[], int] = in_use, limit: Callable[[], int] = limit) -> None:
        self._count = count
        self._limit = limit
        self._lock = threading.Lock()
        self._known = (-1.0, 0)
        self.refused = 0

    def counters(self) -> dict[str, float]:
        return {"files_open": self._count(), "files_limit": self._limit(), "refused_busy": self.refused}

    def check(self, what: str) -> None:
        """:class:`AgentBusyError` when ``what`` had better come again."""
        with self._lock:
            most = self._limit()
            enough = most - min(_KEPT_BACK, most // 4)
            now = time.monotonic()
            if now - self._known[0] <= _KNOWN_S and self._known[1] < enough:
                return
            self._known = now, self._count()
            used = self._known[1]
            if used < enough:
                return
            self.refused += 1
        raise AgentBusyError(
            f"{what}: this agent has {used} of {most} files open and takes on nothing more for now. Ask again; if it "
            "lasts, raise its limit (ulimit -Hn, LimitNOFILE=) or look for who holds connections to it"
        )
