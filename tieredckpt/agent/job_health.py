"""The newest protected step of a job, and loads that crashed their process.

A load counts as crashed if its process died during the load, or after it and before the first step. A process that
reports its normal end (a notebook, an evaluation, a finished script, an exception) does not count. A process that
reaches a step shows that the step can be loaded. Each agent counts in its own memory only, and counts expire.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from peerstore.daemon_process import ProcessIdentity
from peerstore.shard_records import ShardRecord, VersionId
from peerstore.store.store_listener import StoreListener
from tieredckpt.agent.agent_api import ProtectionStatus

log = logging.getLogger(__name__)
UNPROTECTED_GRACE_S = 30.0
"""Seconds after its seal in which a shard may lack replicas without a warning."""


def protection_status(
    step: int, newer: Collection[float], left_out: tuple[int, float], *, now: float
) -> ProtectionStatus:
    """Return a job's protection. ``step`` is the newest replicated or durable step; -1 for none.

    ``newer`` holds the Unix times at which newer shards were sealed. ``left_out`` is the number of saves that were
    skipped or failed since ``step`` was protected, and the Unix time of the first of them.
    """
    missed_saves, first = left_out
    since = min([*newer, *([first] if missed_saves else [])], default=None)
    if since is None or (not missed_saves and now - since < UNPROTECTED_GRACE_S):
        return ProtectionStatus(step, None, missed_saves)
    return ProtectionStatus(step, since, missed_saves)


def describe_protection(status: ProtectionStatus) -> str:
    protected = f"protected up to step {status.step}" if status.step >= 0 else "no step is protected yet"
    if status.unprotected_since is None:
        return protected
    since = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(status.unprotected_since))
    missed = f" ({status.missed_saves} saves skipped or failed)" if status.missed_saves else ""
    return f"{protected}, unprotected since {since}{missed}"


_LOG_S = 60.0


class TrainerHealth:
    """Metrics of the trainers, and the saves that they missed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.metrics: dict[str, Counter[str]] = defaultdict(Counter)
        """Totals by job and name."""
        self._missed_saves: dict[str, tuple[int, int, float]] = {}
        """By job: newest protected step, number of saves missed since, and the Unix time of the first of them."""
        self._logged: dict[str, tuple[bool, float]] = {}
        """By job: whether the last log line reported it as unprotected, and the monotonic time of that line."""

    def add_metrics(self, job: str, values: Mapping[str, float], missed: int) -> None:
        """Add to the totals; ``missed`` saves were skipped or failed."""
        with self._lock:
            counter = self.metrics[job]
            for name, value in values.items():
                counter[name] += value  # type: ignore[assignment]
            if missed:
                protected, earlier, first = self._missed_saves[job]
                self._missed_saves[job] = protected, earlier + missed, first or time.time()

    def protection(self, job: str, protected: int, newer: Collection[float]) -> ProtectionStatus:
        """Return a job's protection; ``newer`` holds the Unix times at which newer shards were sealed."""
        with self._lock:
            counted_from, missed_saves, first = self._missed_saves.get(job, (protected, 0, 0.0))
            if counted_from != protected:
                missed_saves, first = 0, 0.0
            self._missed_saves[job] = protected, missed_saves, first
        return protection_status(protected, newer, (missed_saves, first), now=time.time())

    def log_protection(self, job: str, status: ProtectionStatus) -> None:
        """Log a change of the job's protection, at most one line a minute."""
        now = time.monotonic()
        with self._lock:
            was_bad, logged_at = self._logged.get(job, (False, -math.inf))
            is_bad = status.unprotected_since is not None
            if is_bad == was_bad or now - logged_at < _LOG_S:
                return
            self._logged[job] = is_bad, now
        log.log(logging.WARNING if is_bad else logging.INFO, "job %s: %s", job, describe_protection(status))


CRASHED_LOAD_EXPIRY_S = 3600.0
"""Seconds for which a crashed load counts."""
_FIRST_STEP_S = 600.0
"""Seconds after a load for which the end of its process counts as a crash.

A process that reaches its next step earlier has not crashed.
"""


@dataclass
class _Load:
    version_id: VersionId
    rank: int
    done_at: float | None = None
    left_at: float | None = None


class CrashedLoads(StoreListener):
    """Loads of this node's processes, and counts of those that crashed their process. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._loads: dict[tuple[ProcessIdentity, str], _Load] = {}
        self._crashes: dict[str, dict[tuple[VersionId, int], list[float]]] = defaultdict(dict)

    def load_started(self, owner: ProcessIdentity, job: str, group: VersionId, rank: int) -> None:
        with self._lock:
            self._loads[owner, job] = _Load(group, rank)

    def load_done(self, owner: ProcessIdentity, job: str) -> None:
        """Record that the load is complete. A process that dies before its next step still counts as crashed."""
        with self._lock:
            load = self._loads.get((owner, job))
            if load is not None and load.done_at is None:
                load.done_at = self._clock()

    def load_ended(self, owner: ProcessIdentity, job: str, *, stepped: bool) -> None:
        """Record that the process reached its next step (``stepped``), or reports its normal end."""
        with self._lock:
            load = self._loads.pop((owner, job), None)
            self._collect_crashes()
            if stepped and load is not None:
                self._crashes[job].pop((load.version_id, load.rank), None)

    def on_client_left(self, owner: ProcessIdentity, job: str) -> None:
        with self._lock:
            load = self._loads.get((owner, job))
            if load is not None:
                load.left_at = self._clock()

    def on_job_expired(self, job: str) -> None:
        self.forget(job)

    def on_shard_sealed(self, record: ShardRecord) -> None:
        """Drop the counts of older steps: the job has passed them, so no rank will load them."""
        self.forget(record.key.job, before=record.key.version)

    def count(self, job: str) -> dict[VersionId, int]:
        """Return the number of recent crashed loads of each step, the maximum over its ranks."""
        with self._lock:
            self._collect_crashes()
            found: dict[VersionId, int] = {}
            since = self._clock() - CRASHED_LOAD_EXPIRY_S
            for (group, rank), times in list(self._crashes[job].items()):
                recent = self._crashes[job][group, rank] = [at for at in times if at > since]
                found[group] = max(found.get(group, 0), len(recent))
            return {group: count for group, count in found.items() if count}

    def _collect_crashes(self) -> None:
        for (owner, job), load in list(self._loads.items()):
            if load.left_at is None or owner.is_alive:
                continue
            del self._loads[owner, job]
            if load.done_at is None or load.left_at - load.done_at < _FIRST_STEP_S:
                self._crashes[job].setdefault((load.version_id, load.rank), []).append(load.left_at)

    def forget(self, job: str, *, before: int | None = None, group: VersionId | None = None) -> None:
        """Drop the job's counts: all, those of steps ``before`` this one, or those of ``group``."""
        with self._lock:
            self._collect_crashes()
            if before is None and group is None:
                self._crashes.pop(job, None)
                return
            self._crashes[job] = {
                key: times
                for key, times in self._crashes[job].items()
                if key[0] != group and not (before is not None and key[0].version < before)
            }
