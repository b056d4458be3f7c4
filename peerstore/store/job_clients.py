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

_MAX_EXPIRED_JOBS = 1000
_MIN_UNUSED_S = 3600.0
"""Seconds after its last process ended before a job may be dropped to make room for another one.

An interrupted job has this time to start again.
"""


class JobClients:
    """The client processes of each job, and the expiry of jobs. The slot table's lock guards it."""

    def __init__(self, table: SlotTable, jobs: JobTable, ttl_s: float) -> None:
        self._table = table
        self._jobs = jobs
        self._ttl_s = ttl_s
        self._started = table.clock()
        self.disconnected_since: dict[ProcessIdentity, float] = {}
        """Processes without a connection, with the clock time at which they lost it."""

    def has_clients(self, job: str) -> bool:
        """Return whether a process of this node works on the job."""
        with self._table.lock:
            known = self._jobs.entries.get(job)
            return known is not None and bool(known.clients)

    def touch(self, job: str) -> None:
        """Record that other nodes still work on the job: its shards here do not expire."""
        with self._table.lock:
            self._jobs.get_or_create(job).last_seen_at = self._table.clock()

    def expected_parts_here(self, job: str, parts: int) -> int:
        """Return the number of a version's parts that this node is expected to hold.

        This is one part for each local client, or two if the job requires replication; at least 1, at most ``parts``.
        """
        known = self._jobs.entries.get(job)
        here = len(known.clients) * (2 if known.requires_replication else 1) if known is not None else 0
        return min(parts, max(1, here))

    def client_connected(self, owner: ProcessIdentity, job: str) -> None:
        with self._table.lock:
            known = self._jobs.get_or_create(job)
            self.disconnected_since.pop(owner, None)
            known.clients[owner] += 1
            known.last_seen_at = self._table.clock()

    def client_disconnected(self, owner: ProcessIdentity, job: str) -> bool:
        """Record a closed connection; return whether it was the process's last one for the job."""
        with self._table.lock:
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
        """Return the seconds since the process lost its last connection: 0 if connected, infinite if it died."""
        if not owner.is_alive:
            return float("inf")
        since = self.disconnected_since.get(owner)
        return 0.0 if since is None else self._table.clock() - since

    def prune_disconnected(self) -> None:
        """Forget processes that have ended."""
        self.disconnected_since = {owner: at for owner, at in self.disconnected_since.items() if owner.is_alive}

    def expired(self) -> list[str]:
        """Return the jobs whose last process ended more than the TTL ago and whose shards have no reader."""
        used = {slot.job for slot in self._table.slots.all() if slot.users}
        now = self._table.clock()
        return [
            job
            for job, known in self._jobs.entries.items()
            if not known.clients
            and now - known.last_seen_at > self._ttl_s
            and job not in used | self._jobs.incarnations.managed
        ]

    def unused_jobs(self) -> list[str]:
        """Return jobs without clients, readers, leases and retained versions, the longest unused first.

        A job is not included within an hour (or the TTL, if shorter) after its last use.
        """
        used = {slot.job for slot in self._table.slots.all() if slot.users or slot.lease is not None}
        idle = {
            job: known.last_seen_at
            for job, known in self._jobs.entries.items()
            if not known.clients and self._table.clock() - known.last_seen_at > min(_MIN_UNUSED_S, self._ttl_s)
            if not any(one.retained for one in known.retention.values())
        }
        return sorted(idle.keys() - used - self._jobs.incarnations.managed, key=lambda job: (idle[job], job))

    def unused_s(self, job: str) -> float:
        return self._table.clock() - self._jobs.get_or_create(job).last_seen_at

    def record_expiry(self, job: str, reason: str) -> None:
        """Record the newest committed version of a job that expires without a request of its owner."""
        last_committed = self._jobs.get_or_create(job).last_committed()
        newest = max(
            {*self._jobs.committed([job])[job], *([last_committed] if last_committed is not None else [])}, default=None
        )
        if newest is None:
            return
        try:
            self._table.metadata.put(EXPIRED_JOB_METADATA, job, ExpiredJob(job, newest, time.time_ns(), reason))
        except (ArenaFullError, UnavailableError) as error:
            log.warning("job %s: cannot record that it expired: %s", job, error)
        others = [
            found
            for name in self._table.metadata.list_names(EXPIRED_JOB_METADATA)
            if (found := self.expired_job(name)) is not None
        ]
        for old in sorted(others, key=lambda one: one.at_ns)[:-_MAX_EXPIRED_JOBS]:
            self._table.metadata.remove(EXPIRED_JOB_METADATA, old.job)

    def expired_job(self, job: str) -> ExpiredJob | None:
        """Return when and why the job expired, or ``None`` if it did not expire or the record cannot be read."""
        with self._table.lock:
            try:
                return self._table.metadata.get(EXPIRED_JOB_METADATA, validate_job_name(job), ExpiredJob)
            except (UnsupportedFormatError, ShardDamagedError) as error:
                log.warning("job %s: cannot read the record of its expiry: %s", job, error)
                return None

    def idle_s(self) -> float:
        """Return the seconds since the last client left; 0 while a client is connected or a shard is stored."""
        with self._table.lock:
            if any(known.clients for known in self._jobs.entries.values()) or self._table.slots.in_state(*SHARD_STATES):
                return 0.0
            return self._table.clock() - max(
                (known.last_seen_at for known in self._jobs.entries.values()), default=self._started
            )

    def expires_in_s(self, job: str) -> float | None:
        """Return the seconds until the job expires; ``None`` while a process works on it."""
        return None if self._jobs.get_or_create(job).clients else self._ttl_s - self.unused_s(job)
