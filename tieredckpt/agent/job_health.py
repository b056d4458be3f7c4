"""The newest protected step of a job, and loads that crashed their process.

A load counts here when its process died in it, or after it and before its first step. Who says goodbye (a notebook, an
evaluation, a script that was at its end already, an exception) has ended no load; who came to a step shows that the
step can be loaded. The count is this agent's alone: it is in no file, and it expires.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from peerstore.daemon_process import ProcessIdentity
from peerstore.shard_records import VersionId
from tieredckpt.agent.agent_api import ProtectionStatus

UNPROTECTED_GRACE_S = 30.0
"""Copies take a moment: until then what is newer is on its way, and nothing to warn of."""


def protection_status(
    step: int, newer: Collection[float], left_out: tuple[int, float], *, now: float
) -> ProtectionStatus:
    """``step`` is the newest that has all the copies it was to have, or is durable; -1 for none.

    ``newer`` has the times of what was sealed after it and has not; ``left_out`` how many saves were skipped or failed
    since it had them, and when the first one was.
    """
    missed, first = left_out
    since = min([*newer, *([first] if missed else [])], default=None)
    if since is None or (not missed and now - since < UNPROTECTED_GRACE_S):
        return ProtectionStatus(step, None, missed)
    return ProtectionStatus(step, since, missed)


def describe_protection(found: ProtectionStatus) -> str:
    upto = f"protected up to step {found.step}" if found.step >= 0 else "no step is protected yet"
    if found.unprotected_since is None:
        return upto
    since = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(found.unprotected_since))
    missed = f" ({found.missed_saves} saves skipped or failed)" if found.missed_saves else ""
    return f"{upto}, unprotected since {since}{missed}"


CRASHED_LOAD_EXPIRY_S = 3600.0
"""How long a load that ended its process is remembered."""
_FIRST_STEP_S = 600.0
"""A process that lived so much longer than its load did not die of it, whether it came to a step or only looked."""


@dataclass
class _Load:
    version_id: VersionId
    rank: int
    done_at: float | None = None
    left_at: float | None = None


class CrashedLoads:
    """What the processes of this node are loading, and whom it has ended. Any thread may call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._loads: dict[tuple[ProcessIdentity, str], _Load] = {}
        self._crashes: dict[str, dict[tuple[VersionId, int], list[float]]] = defaultdict(dict)

    def load_started(self, owner: ProcessIdentity, job: str, group: VersionId, rank: int) -> None:
        with self._lock:
            self._loads[owner, job] = _Load(group, rank)

    def load_done(self, owner: ProcessIdentity, job: str) -> None:
        """Every byte is where it belongs; what is done with them may still end the process."""
        with self._lock:
            load = self._loads.get((owner, job))
            if load is not None and load.done_at is None:
                load.done_at = self._clock()

    def load_ended(self, owner: ProcessIdentity, job: str, *, stepped: bool) -> None:
        """The process has come to its next step, or says goodbye."""
        with self._lock:
            load = self._loads.pop((owner, job), None)
            self._look()
            if stepped and load is not None:
                self._crashes[job].pop((load.version_id, load.rank), None)

    def process_left(self, owner: ProcessIdentity, job: str) -> None:
        """The last connection of the process is closed."""
        with self._lock:
            load = self._loads.get((owner, job))
            if load is not None:
                load.left_at = self._clock()

    def count(self, job: str) -> dict[VersionId, int]:
        """How many loads of each step have ended their process lately; where ranks differ, the most of one rank."""
        with self._lock:
            self._look()
            found: dict[VersionId, int] = {}
            since = self._clock() - CRASHED_LOAD_EXPIRY_S
            for (group, rank), times in list(self._crashes[job].items()):
                recent = self._crashes[job][group, rank] = [at for at in times if at > since]
                found[group] = max(found.get(group, 0), len(recent))
            return {group: count for group, count in found.items() if count}

    def _look(self) -> None:
        for (owner, job), load in list(self._loads.items()):
            if load.left_at is None or owner.is_alive:
                continue
            del self._loads[owner, job]
            if load.done_at is None or load.left_at - load.done_at < _FIRST_STEP_S:
                self._crashes[job].setdefault((load.version_id, load.rank), []).append(load.left_at)

    def forget(self, job: str, *, before: int | None = None, group: VersionId | None = None) -> None:
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
