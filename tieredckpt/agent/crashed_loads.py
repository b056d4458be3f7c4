"""Loads that ended their process: the one thing about a step that only restarts can tell.

A load counts here when its process died in it, or after it and before its first step. Who says goodbye (a notebook, an
evaluation, a script that was at its end already, an exception) has ended no load; who came to a step shows that the
step can be loaded. The count is this agent's alone: it is in no file, and it expires.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from peerstore.owners import Owner
from peerstore.records import Group

EXPIRY_S = 3600.0
"""How long a load that ended its process is remembered."""
_FIRST_STEP_S = 600.0
"""A process that lived so much longer than its load did not die of it, whether it came to a step or only looked."""


@dataclass
class _Load:
    group: Group
    rank: int
    done_at: float | None = None
    left_at: float | None = None


class CrashedLoads:
    """What the processes of this node are loading, and whom it has ended. Any thread may call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._loads: dict[tuple[Owner, str], _Load] = {}
        self._crashes: dict[str, dict[tuple[Group, int], list[float]]] = defaultdict(dict)

    def begun(self, owner: Owner, job: str, group: Group, rank: int) -> None:
        with self._lock:
            self._loads[owner, job] = _Load(group, rank)

    def done(self, owner: Owner, job: str) -> None:
        """Every byte is where it belongs; what is done with them may still end the process."""
        with self._lock:
            load = self._loads.get((owner, job))
            if load is not None and load.done_at is None:
                load.done_at = self._clock()

    def over(self, owner: Owner, job: str, *, stepped: bool) -> None:
        """The process has come to its next step, or says goodbye."""
        with self._lock:
            load = self._loads.pop((owner, job), None)
            self._look()
            if stepped and load is not None:
                self._crashes[job].pop((load.group, load.rank), None)

    def left(self, owner: Owner, job: str) -> None:
        """The last connection of the process is closed."""
        with self._lock:
            load = self._loads.get((owner, job))
            if load is not None:
                load.left_at = self._clock()

    def count(self, job: str) -> dict[Group, int]:
        """How many loads of each step have ended their process lately; where ranks differ, the most of one rank."""
        with self._lock:
            self._look()
            found: dict[Group, int] = {}
            since = self._clock() - EXPIRY_S
            for (group, rank), times in list(self._crashes[job].items()):
                recent = self._crashes[job][group, rank] = [at for at in times if at > since]
                found[group] = max(found.get(group, 0), len(recent))
            return {group: count for group, count in found.items() if count}

    def _look(self) -> None:
        for (owner, job), load in list(self._loads.items()):
            if load.left_at is None or owner.alive:
                continue
            del self._loads[owner, job]
            if load.done_at is None or load.left_at - load.done_at < _FIRST_STEP_S:
                self._crashes[job].setdefault((load.group, load.rank), []).append(load.left_at)

    def forget(self, job: str, *, before: int | None = None, group: Group | None = None) -> None:
        """Drop what was counted of the job: all, of steps ``before`` one, or of one ``group``."""
        with self._lock:
            self._look()
            if before is None and group is None:
                self._crashes.pop(job, None)
                return
            self._crashes[job] = {
                key: times
                for key, times in self._crashes[job].items()
                if key[0] != group and not (before is not None and key[0].version < before)
            }
