"""Who is on the other end of a connection, and whether that process is still alive."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Owner(NamedTuple):
    """A process, told apart from a later one that was given the same number."""

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        """Whether it still runs. A process of another namespace cannot be seen and counts as alive."""
        return self.pid <= 0 or started_at(self.pid) == self.started


def owner_of(pid: int) -> Owner:
    return Owner(pid, started_at(pid) if pid > 0 else 0)


def myself() -> Owner:
    return owner_of(os.getpid())


def started_at(pid: int) -> int:
    """Clock ticks after boot at which ``pid`` started, or -1 when it is gone or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return -1
    fields = stat[stat.rindex(b")") + 2 :].split()
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])
