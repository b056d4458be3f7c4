"""Client processes of the jobs on this node, and the expiry of jobs that no process uses."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from peerstore.daemon_process import ProcessIdentity
from peerstore.errors import ArenaFullError, ShardDamagedError, UnavailableError, UnsupportedFormatError
from peerstore.shard_records import ExpiredJob, validate_job_name
from peerstore.store.slot_metadata import EXPIRED_JOB_METADATA
from peerstore.store.slot_table import SlotTable
from peerstore.store.slots import SHARD_STATES

if TYPE_CHECKING:
    from peerstore.store.job_table import JobTable

log = logging.getLogger(__name__)

_FORGOTTEN_REMEMBERED = 1000
_SPARED_S = 3600.0
"""Seconds after its last process in which a job is not dropped for another job: an interrupted job starts again."""


class JobClients:
    """The processes that work on each job, and the jobs that expire; the slot table's lock guards it."""

    def __init__(self, table: SlotTable, jobs: JobTable, ttl_s: float) -> None:
        self._table = table
        self._jobs = jobs
        self._ttl_s = ttl_s
        self._started = table.clock()
        self.disconnected_since: dict[ProcessIdentity, float] = {}
        """Processes without a connection, and since when."""

    def has_clients(self, job: str) -> bool:
        """Whether a process of this node takes part in it."""
        with self._table.exclusive():
            known = self._jobs.entries.get(job)
            return known is not None and bool(known.clients)

    def touch(self, job: str) -> None:
        """Record that other nodes still work on the job: its shards here do not expire."""
        with self._table.exclusive():
            self._jobs.get_or_create(job).last_seen_at = self._table.clock()

    def expected_parts_here(self, job: str, parts: int) -> int:
        """How many parts of the job's versions this node is expected to hold: those of its own processes, and as many
        copies where some are kept.
        """
        known = self._jobs.entries.get(job)
        here = len(known.clients) * (2 if known.requires_replication else 1) if known is not None else 0
        return min(parts, max(1, here))

    def client_connected(self, owner: ProcessIdentity, job: str) -> None:
        with self._table.exclusive():
            known = self._jobs.get_or_create(job)
            self.disconnected_since.pop(owner, None)
            known.clients[owner] += 1
            known.last_seen_at = self._table.clock()

    def client_disconnected(self, owner: ProcessIdentity, job: str) -> bool:
        """A connection was closed; whether it was the process's last one for the job."""
        with self._table.exclusive():
            known = self._jobs.entries.get(job)
            if known is None:
                return True
            known.clients[owner] -= 1
            if known.clients[owner] <= 0:
                del known.clients[owner]
            known.last_seen_at = self._table.clock()
            if not any(owner in other.clients for other in self._jobs.entries.values()):
                self.disconnected_since[owner] = self._table.clock()
            return owner not in known.clients

    def disconnected_s(self, owner: ProcessIdentity) -> float:
        """How long the process has had no connection; endless when it died."""
        if not owner.is_alive:
            return float("inf")
        since = self.disconnected_since.get(owner)
        return 0.0 if since is None else self._table.clock() - since

    def prune_disconnected(self) -> None:
        """Forget processes that have ended."""
        self.disconnected_since = {owner: at for owner, at in self.disconnected_since.items() if owner.is_alive}

    def expired(self) -> list[str]:
        """Jobs whose last process left too long ago and whose shards nobody uses."""
        used = {slot.job for slot in self._table.slots() if slot.users}
        now = self._table.clock()
        return [
            job
            for job, known in self._jobs.entries.items()
            if not known.clients
            and now - known.last_seen_at > self._ttl_s
            and job not in used | self._jobs.incarnations.managed
        ]

    def unused_jobs(self) -> list[str]:
        """Jobs that no process takes part in and nobody reads, for longer than an interruption: the one that nobody
        has used for the longest time first.
        """
        used = {slot.job for slot in self._table.slots() if slot.users or slot.lease is not None}
        idle = {
            job: known.last_seen_at
            for job, known in self._jobs.entries.items()
            if not known.clients and self._table.clock() - known.last_seen_at > min(_SPARED_S, self._ttl_s)
            if not any(one.retained for one in known.retention.values())
        }
        return sorted(idle.keys() - used - self._jobs.incarnations.managed, key=lambda job: (idle[job], job))

    def unused_s(self, job: str) -> float:
        return self._table.clock() - self._jobs.get_or_create(job).last_seen_at

    def record_expiry(self, job: str, reason: str) -> None:
        """Keep in mind what the job had that nobody has told this node to forget."""
        once = self._jobs.get_or_create(job).last_committed()
        newest = max({*self._jobs.committed([job])[job], *([once] if once is not None else [])}, default=None)
        if newest is None:
            return
        try:
            self._table.metadata.put(EXPIRED_JOB_METADATA, job, ExpiredJob(job, newest, time.time_ns(), reason))
        except (ArenaFullError, UnavailableError) as error:
            log.warning("that job %s is forgotten could not be noted: %s", job, error)
        others = [
            found
            for name in self._table.metadata.list_names(EXPIRED_JOB_METADATA)
            if (found := self.expired_job(name)) is not None
        ]
        for old in sorted(others, key=lambda one: one.at_ns)[:-_FORGOTTEN_REMEMBERED]:
            self._table.metadata.remove(EXPIRED_JOB_METADATA, old.job)

    def expired_job(self, job: str) -> ExpiredJob | None:
        """When and why what was kept for the job was given back, where nobody had said so."""
        with self._table.exclusive():
            try:
                return self._table.metadata.get(EXPIRED_JOB_METADATA, validate_job_name(job), ExpiredJob)
            except (UnsupportedFormatError, ShardDamagedError) as error:
                log.warning("what is noted of the end of job %s cannot be read: %s", job, error)
                return None

    def idle_s(self) -> float:
        """How long nobody has been connected; 0 while somebody is or while jobs still own shards."""
        with self._table.exclusive():
            if any(known.clients for known in self._jobs.entries.values()) or self._table.in_state(*SHARD_STATES):
                return 0.0
            return self._table.clock() - max(
                (known.last_seen_at for known in self._jobs.entries.values()), default=self._started
            )

    def expires_in_s(self, job: str) -> float | None:
        """Return the seconds until the job expires; ``None`` while a process works on it."""
        return None if self._jobs.get_or_create(job).clients else self._ttl_s - self.unused_s(job)
