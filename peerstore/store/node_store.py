"""NodeStore: facade over one node's slots, jobs, leases and shards, with event listeners.

::

    lease ──> write (through a mapping of the slot) ──> seal ──> read (pinned) ──> evicted for a newer version
      │                                                  │
      └─ released, expired, fenced: the slot is free     └─ checksums in the slot's metadata: survives this process

Each step has its module: :mod:`~peerstore.store.leases`, :mod:`~peerstore.store.shards`,
:mod:`~peerstore.store.crash_recovery` and :mod:`~peerstore.store.job_table`, which has the versions of each job, its
:mod:`~peerstore.store.incarnations` and its :mod:`~peerstore.store.job_clients`. They share the slots and the lock of
:mod:`~peerstore.store.slot_table`; :mod:`~peerstore.store.slots` lists a slot's states.
:mod:`~peerstore.store.slot_eviction` decides which slots may be evicted.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from peerstore.daemon_process import OpenFileGuard, ProcessIdentity, current_process
from peerstore.errors import (
    ArenaFullError,
    RequestError,
    ShardDamagedError,
    ShardNotFoundError,
    ShardUnreadableError,
    UnavailableError,
)
from peerstore.settings import StoreSettings, parse_budget
from peerstore.shard_records import (
    MAX_BLOB_BYTES,
    Lease,
    Pin,
    ShardInfo,
    ShardKey,
    ShardRecord,
    SlotInfo,
    StoreStatus,
    VersionId,
    validate_job_name,
)
from peerstore.store.arena import Arena
from peerstore.store.crash_recovery import CrashRecovery, start_daemon_thread
from peerstore.store.job_table import JobTable
from peerstore.store.leases import LeaseManager, SlotPrefaulter
from peerstore.store.received_replicas import ReplicaStore
from peerstore.store.shards import ShardReader, ShardRemoval, ShardSealer
from peerstore.store.slot_eviction import SlotLimits
from peerstore.store.slot_metadata import EXPIRED_JOB_METADATA
from peerstore.store.slot_table import SlotTable

__all__ = ["NodeStore", "StoreListener"]

log = logging.getLogger(__name__)


class NodeStore:
    """Sealed shards in this machine's memory. All methods are thread-safe."""

    def __init__(
        self,
        arena: Arena,
        settings: StoreSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        threads: int = 0,
    ) -> None:
        settings = settings or StoreSettings()
        limits = SlotLimits(parse_budget(settings.budget), settings.slots_per_part, settings.burst_slots)
        self._grace_s = settings.lease_grace_s
        self.table = SlotTable(arena, limits, clock)
        self.listeners = StoreListeners()
        self._descriptors = OpenFileGuard()
        self._pool = ThreadPoolExecutor(threads or _hash_threads(), thread_name_prefix="peerstore-hash")
        self.jobs = JobTable(self.table, settings.job_ttl_s)
        self.removal = ShardRemoval(self.table, self.jobs)
        self._leasing = LeaseManager(self.table, self.jobs, self.listeners.free_a_slot, self.removal.expire_job)
        self._sealing = ShardSealer(self.table, self.jobs, self._pool)
        self._recovery = CrashRecovery(self.table, self.jobs, self._leasing)
        self.reader = ShardReader(self.table, self.jobs, self._pool, self._recovery.wait_verified)
        self._prefaulter = SlotPrefaulter(self.table)
        self.replicas = ReplicaStore(
            self.table,
            self.jobs,
            self._leasing,
            self.removal,
            torn=lambda job, group: self.listeners.on_version_decided(job, group, torn=True),
        )
        self.arena_id = self.table.metadata.arena_id()
        self.start_id = secrets.token_hex(6)
        with self.table.lock:
            self._recovery.load_metadata()
        for record, reason in self._recovery.lost:
            self.listeners.on_shard_damaged(record.key, record, reason)
        self._background = [
            start_daemon_thread(self._verify_adopted, "peerstore-adopt"),
            start_daemon_thread(self._prefaulter.run, "peerstore-populate"),
        ]

    def _verify_adopted(self) -> None:
        self._recovery.verify_checksums(self.reader.damaged_chunks, self._notify_stored, self.report_damage)

    def _notify_stored(self, record: ShardRecord, holders: tuple[str, ...]) -> None:
        if holders:
            self.listeners.on_replica_stored(record, holders)
        else:
            self.listeners.on_shard_sealed(record)

    def set_budget(self, budget: str) -> None:
        """Change the arena's budget, in bytes or as a share; raise :class:`RequestError` if it is 0."""
        size_bytes = parse_budget(StoreSettings(budget=budget).budget)
        with self.table.lock:
            self.table.set_budget(size_bytes)

    def epoch(self, job: str) -> int:
        """Return the newest epoch of ``job`` that this node knows; 0 if the job is unknown."""
        with self.table.lock:
            return self.jobs.incarnations.epoch(job)

    def claim(self, job: str, incarnation: str, *, at_least: int = 0) -> int:
        """Make ``incarnation`` the owner of ``job`` and return its epoch; a repeated claim changes nothing."""
        with self.table.lock:
            self.table.metadata.flush_pending()
            return self.jobs.incarnations.claim(job, incarnation, at_least)

    # -- writing ----------------------------------------------------------------------------------------------

    def lease(
        self, key: ShardKey, size_bytes: int, parts: int, *, wait_s: float = 0.0, owner: ProcessIdentity | None = None
    ) -> Lease:
        """Return a slot of at least ``size_bytes`` for ``key``, waiting up to ``wait_s`` seconds for one.

        The slot's file may be larger, and its size never changes.
        """
        _require_shard(key)
        self._descriptors.check(f"a slot for {key}")
        return self._leasing.lease(key, size_bytes, parts, wait_s=wait_s, owner=owner or current_process())

    def grow(self, lease_id: str, size_bytes: int, *, wait_s: float = 0.0) -> Lease:
        """Grow the lease to ``size_bytes`` and return it; written bytes remain, and a lease never shrinks.

        If the file is too small, a slot of another generation replaces it, and the writer maps the new file. The writer
        must not write during the call. Repeating the call is harmless.
        """
        return self._leasing.grow(lease_id, size_bytes, wait_s=wait_s)

    def open_slot(self, slot: str) -> int:
        """Open the file of a leased or reserved slot for writing; the caller closes the descriptor.

        A writer that has mapped a slot of this name before need not map it again: the name stays with the file.
        """
        return self._leasing.open_slot(slot)

    def relabel(self, lease_id: str, key: ShardKey) -> Lease:
        """Change the key of a lease to another key of the same writer.

        Writers use this for bytes that were placed before their version was known.
        """
        _require_shard(key)
        return self._leasing.relabel(lease_id, key)

    def seal(self, lease_id: str, size_bytes: int, meta: bytes = b"", blobs: Collection[str] = ()) -> ShardRecord:
        """Compute and store the checksums of the written bytes, and make the bytes immutable.

        Idempotent per lease. Raise :class:`ShardNotFoundError` if one of the ``blobs`` is missing, because the job may
        have expired since they were put. The lease stays valid then.
        """
        record = self._sealing.seal(lease_id, size_bytes, meta, blobs, self.listeners.on_shard_sealed)
        with self.table.lock:
            torn = self.jobs.is_aborted(record.key.job, record.key.version_id)
        if torn:  # another writer has aborted its part meanwhile
            self.removal.delete_versions(record.key.job, [record.key.version_id])
            self.listeners.on_version_decided(record.key.job, record.key.version_id, torn=True)
        return record

    def release(self, lease_id: str) -> None:
        """Release the lease without a seal; an unknown lease is ignored."""
        self._leasing.release(lease_id)

    def reserve(self, job: str, part: int, size_bytes: int, *, slots: int = 0) -> list[SlotInfo]:
        """Reserve slots of this size for a writer's next saves, and allocate their pages in the background.

        Return the writer's slots, fewer than requested if the budget is used up. They include slots with sealed shards:
        the writer maps those now, and writes only after it has a lease.
        """
        return self._prefaulter.reserve(job, part, size_bytes, slots)

    # -- reading ----------------------------------------------------------------------------------------------

    def list_shards(self, job: str | None = None) -> list[ShardInfo]:
        """Return the sealed shards (of ``job``) whose checksums this agent has verified."""
        return self.reader.list_shards(job)

    def pin(self, key: ShardKey, *, owner: ProcessIdentity | None = None) -> Pin:
        """Pin a sealed shard for a reader, and open its file.

        Raise :class:`~peerstore.errors.ShardDamagedError` if the file is missing or too short; the shard is dropped
        then.
        """
        self._descriptors.check(f"reading {key}")
        with self.table.lock:
            try:
                return self.reader.pin(key, owner or current_process())
            except ShardUnreadableError:
                self.table.incidents.count("unreadable_reads")
                raise
            except ShardDamagedError as error:
                damaged = error
                lost = self.removal.drop_damaged(key, str(error))
        if lost is not None:
            self.listeners.on_shard_damaged(key, lost, str(damaged))
        raise damaged

    def unpin(self, pin_id: str) -> bool:
        """Release the pin; return ``False`` if it had been revoked, so that the reader verifies what it read."""
        return self.reader.unpin(pin_id)

    def verify(self, key: ShardKey, chunks: tuple[int, int] | None = None) -> tuple[int, ...]:
        """Hash a sealed shard's bytes again (or chunks ``[start, stop)``) and return the damaged chunks.

        A damaged shard is dropped and recorded. Raise :class:`~peerstore.errors.ShardUnreadableError` if the bytes
        cannot be read; the shard stays then.
        """
        pin, record, path = self.reader.pin_unchecked(key, current_process())
        try:
            damaged = self.reader.damaged_chunks(record, path, chunks)
        except ShardUnreadableError:
            with self.table.lock:
                self.table.incidents.count("unreadable_reads")
            raise
        finally:
            held = self.unpin(pin)
        if damaged and held:
            self.report_damage(key, f"{len(damaged)} of its chunks changed after it was sealed, first: {damaged[0]}")
        return damaged

    # -- damage, commits and deletion -------------------------------------------------------------------------

    def report_damage(self, key: ShardKey, reason: str) -> None:
        """Record that the shard's bytes differ from the sealed ones, and drop it."""
        record = self.removal.drop_damaged(key, reason)
        if record is not None:
            self.listeners.on_shard_damaged(key, record, reason)

    def mark_committed(self, job: str, group: VersionId) -> None:
        """Record that every part of this version was sealed, as the caller knows from another source.

        The version was loaded, or is durable, or all ranks of a job without connected agents have agreed on it. It
        counts as complete while none of its parts is lost here.
        """
        with self.table.lock:
            self.table.metadata.flush_pending()
            news = self.jobs.mark_committed(validate_job_name(job), group)
        if news:
            self.listeners.on_version_decided(job, group, torn=False)

    def abort_part(self, job: str, group: VersionId, part: int) -> None:
        """Record that the writer will never seal this part: every node deletes its shards of the version."""
        with self.table.lock:
            self.table.metadata.flush_pending()
            news = self.jobs.abort_part(validate_job_name(job), group, part)
        if news:
            log.info("job %s: part %d of version %s was aborted; deleting the version", job, part, group.version)
            self.removal.delete_versions(job, [group])
            self.listeners.on_version_decided(job, group, torn=True)

    def newest_committed(self, job: str) -> VersionId | None:
        """Return the newest committed version that lost no part on this node."""
        with self.table.lock:
            return max(self.jobs.committed([job])[job], default=None)

    def delete_versions(self, job: str, groups: list[VersionId] | None = None) -> int:
        """Delete versions (``None``: all) on request of their owner and return the number of shards.

        Readers of the shards may finish. With ``None`` the record of an earlier expiry of the job is deleted as well.
        """
        if groups is None:
            with self.table.lock:
                self.table.metadata.remove(EXPIRED_JOB_METADATA, validate_job_name(job))
        found = self.removal.delete_versions(job, groups)
        self.removal.drop_unused()
        if groups is not None:
            self.listeners.on_versions_deleted(job, groups)
        return found

    def superseded_replicas(self, job: str, version: int) -> set[VersionId]:
        """Return the versions up to ``version`` that are not retained, or none if this node wrote any shard."""
        shards = self.list_shards(job)
        if any(not shard.holders for shard in shards):
            return set()
        return {shard.key.version_id for shard in shards if shard.key.version <= version} - self.retained(job)

    def retain(self, job: str, group: VersionId, *, kept: bool = True) -> None:
        """Retain the version in memory even if newer ones are complete, or end that. The mark is persistent."""
        with self.table.lock:
            self.table.metadata.flush_pending()
            mark = self.jobs.get_or_create(validate_job_name(job)).new_retention_mark(
                group, kept=kept, now_ns=time.time_ns()
            )
            self.jobs.apply_retention(job, [mark])

    def retained(self, job: str) -> set[VersionId]:
        """Return the job's versions that are retained on request of this or another node."""
        return {one.version_id for one in self.jobs.versions(job).retention.values() if one.retained}

    # -- shards of other nodes --------------------------------------------------------------------------------

    def begin_replica(self, record: ShardRecord, *, whole: bool) -> Lease | None:
        """Return a slot for a copy of another node's shard, or ``None`` if it is stored already."""
        self._descriptors.check(f"a copy of {record.key}")
        return self.replicas.begin_replica(record, whole=whole, owner=current_process())

    def seal_replica(self, lease_id: str, record: ShardRecord, holders: tuple[str, ...]) -> None:
        """Seal the copy; the caller has compared every chunk with ``record``."""
        self.replicas.seal_replica(lease_id, record, holders)
        self._notify_stored(record, holders)

    def begin_parity(self, key: ShardKey, size_bytes: int, parts: int, *, whole: bool) -> Lease | None:
        """Return a slot for a parity of this node's group, or ``None`` if it is stored already."""
        self._descriptors.check(f"a parity {key}")
        return self.replicas.begin_parity(key, size_bytes, parts, whole=whole, owner=current_process())

    def seal_parity(self, lease_id: str, record: ShardRecord) -> None:
        """Seal the parity; the caller computed its checksums from verified shards."""
        self.replicas.seal_replica(lease_id, record, ())
        self.listeners.on_parity_changed(record)

    def take_ownership(self, key: ShardKey) -> None:
        """Make a shard of a dead node this node's own, so that this node drains it."""
        if self.replicas.set_holders(key, ()):
            with self.table.lock:
                _, record = self.table.slots.find_shard(key)
            self.listeners.on_shard_sealed(record)

    # -- blobs ------------------------------------------------------------------------------------------------

    def put_blob(self, job: str, name: str, data: bytes) -> None:
        """Store a small value of the job, such as a layout; replace an earlier value."""
        if len(data) > MAX_BLOB_BYTES:
            raise RequestError(f"blob {name} has {len(data)} bytes, the limit is {MAX_BLOB_BYTES}")
        self.table.blobs.put(job, name, data)

    def get_blob(self, job: str, name: str) -> bytes:
        data = self.table.blobs.get(job, name)
        if data is None:
            raise ShardNotFoundError(f"job {job} has no blob {name}")
        return data

    def list_blobs(self, job: str) -> list[str]:
        return self.table.blobs.list_names(job)

    def remove_blob(self, job: str, name: str) -> None:
        self.table.blobs.remove(job, name)

    # -- clients and events -----------------------------------------------------------------------------------

    def client_disconnected(self, owner: ProcessIdentity, job: str) -> None:
        """Record that one of a client's connections closed."""
        with self.table.lock:
            last = self.jobs.clients.client_disconnected(owner, job)
        if last:
            self.listeners.on_client_left(owner, job)
        self.sweep()

    def drop_unrecognized(self, names: list[str] | None = None) -> int:
        """Drop unrecognized slots (``None``: all) and return their bytes."""
        with self.table.lock:
            size_bytes = self.table.unrecognized.drop(names)
            self.table.lock.notify_all()  # the budget has room again
            return size_bytes

    def sweep(self) -> None:
        """Release the leases, pins and jobs of ended processes; the agent calls this periodically."""
        with self.table.lock:
            self._leasing.sweep(self._grace_s)
            self.reader.sweep(self._grace_s)
            expired, self._leasing.expired_jobs = self._leasing.expired_jobs, []
            for job in self.jobs.clients.expired():
                hours = f"{self.jobs.clients.unused_s(job) / 3600:.1f} hours"
                self.removal.expire_job(job, f"no process had used it for {hours} (the limit is agent.job_ttl_s)")
                expired.append(job)
            self.removal.drop_unused(self._grace_s)
            self.jobs.clients.prune_disconnected()
            self.table.arena.removed_in_use()  # closes the files of slots without users
            try:
                self.table.metadata.flush_pending()
            except (ArenaFullError, UnavailableError) as error:
                log.warning("cannot store job metadata yet: %s", error)
        for job in expired:
            self.listeners.on_job_expired(job)

    def subscribe(self, listener: StoreListener) -> None:
        """Add a listener, and notify it of all damage and shards that exist already."""
        with self.table.lock:
            here = [(record, slot.holders) for slot, record in self.table.slots.available_shards()]
            damaged = self.listeners.add(listener)
        for record, reason in damaged:
            self.listeners.notify(
                f"{record.key} is damaged",
                lambda one, record=record, reason=reason: one.on_shard_damaged(record.key, record, reason),  # type: ignore[misc]
                only=listener,
            )
        for record, holders in here:
            self.listeners.notify(
                f"{record.key} is stored",
                lambda one, record=record, holders=holders: (  # type: ignore[misc]
                    one.on_replica_stored(record, holders) if holders else one.on_shard_sealed(record)
                ),
                only=listener,
            )

    def status(self) -> StoreStatus:
        with self.table.lock:
            counters = self.table.incidents.counters() | self._descriptors.counters()
            return StoreStatus(
                self.table.status(self.reader.pins),
                self.jobs.status(),
                self.table.incidents.damage_reports(),
                {**counters, "listener_errors": self.listeners.errors},
                self._recovery.unverified_count(),
                self.table.unrecognized.find(),
            )

    def close(self) -> None:
        """Stop the threads; sealed shards stay in the arena for the next agent."""
        self.table.lock.close()
        for thread in self._background:
            thread.join()
        self._pool.shutdown()
        self.table.arena.close()


def _require_shard(key: ShardKey) -> None:
    if key.kind:
        raise RequestError(f"{key} is a parity: writers write shards, and agents compute the parities")


def _hash_threads() -> int:
    return max(1, min(8, os.cpu_count() or 1))


_MAX_DAMAGES = 1000


class StoreListener:
    """Receiver of the store's events. Calls come from the thread that caused them and must return quickly."""

    def on_shard_sealed(self, record: ShardRecord) -> None:
        """A shard was sealed, or recovered from a killed agent's arena."""

    def on_replica_stored(self, record: ShardRecord, holders: tuple[str, ...]) -> None:
        """A replica of another node's shard was stored or recovered; ``holders`` are its chosen nodes."""

    def on_shard_damaged(self, key: ShardKey, record: ShardRecord, reason: str) -> None:
        """A damaged shard was dropped, at recovery or at a later check."""

    def on_job_expired(self, job: str) -> None:
        """The job expired, and its shards were dropped."""

    def on_client_left(self, owner: ProcessIdentity, job: str) -> None:
        """A client's last connection for the job closed."""

    def on_parity_changed(self, record: ShardRecord) -> None:
        """A parity was stored or dropped. The other methods are not called for parities."""

    def on_version_decided(self, job: str, group: VersionId, *, torn: bool) -> None:
        """A version is committed, as another source reports, or aborted (``torn``)."""

    def on_versions_deleted(self, job: str, groups: Collection[VersionId]) -> None:
        """The owner deleted these versions, on this or another node."""

    def on_not_durable(self, job: str, group: VersionId, why: str) -> None:
        """Another node failed to upload its part of a version; the version stays in memory."""

    def free_a_slot(self, job: str, last: bool) -> bool:
        """Release a held shard for a writer of ``job`` that finds no slot; return whether one was released.

        With ``last`` the writer is refused if nothing is released; before that it waits.
        """
        return False


class StoreListeners(StoreListener):
    """All listeners. An exception of one listener does not affect the others.

    Methods are never called with the store's lock held.
    """

    def __init__(self) -> None:
        self.errors = 0
        self._lock = threading.Lock()
        self._all: tuple[StoreListener, ...] = ()
        self._damaged: deque[tuple[ShardRecord, str]] = deque(maxlen=_MAX_DAMAGES)

    def add(self, listener: StoreListener) -> list[tuple[ShardRecord, str]]:
        """Add a listener and return the damage that was found before."""
        with self._lock:
            self._all = (*self._all, listener)
            return list(self._damaged)

    def notify(self, what: str, tell: Callable[[StoreListener], None], *, only: StoreListener | None = None) -> None:
        for listener in self._all if only is None else (only,):
            try:
                tell(listener)
            except Exception:  # the event has happened, so a listener's failure is only logged
                with self._lock:
                    self.errors += 1
                log.exception("%s failed to handle an event: %s", type(listener).__name__, what)

    def on_shard_sealed(self, record: ShardRecord) -> None:
        if record.key.kind:
            self.on_parity_changed(record)
            return
        self.notify(f"{record.key} is sealed", lambda one: one.on_shard_sealed(record))

    def on_replica_stored(self, record: ShardRecord, holders: tuple[str, ...]) -> None:
        self.notify(f"{record.key} is stored", lambda one: one.on_replica_stored(record, holders))

    def on_parity_changed(self, record: ShardRecord) -> None:
        self.notify(f"{record.key} was stored or dropped", lambda one: one.on_parity_changed(record))

    def on_shard_damaged(self, key: ShardKey, record: ShardRecord, reason: str) -> None:
        if key.kind:
            self.on_parity_changed(record)
            return
        with self._lock:
            self._damaged.append((record, reason))
        self.notify(f"{key} is damaged", lambda one: one.on_shard_damaged(key, record, reason))

    def on_client_left(self, owner: ProcessIdentity, job: str) -> None:
        self.notify(f"process {owner.pid} left job {job}", lambda one: one.on_client_left(owner, job))

    def on_job_expired(self, job: str) -> None:
        self.notify(f"job {job} expired", lambda one: one.on_job_expired(job))

    def on_version_decided(self, job: str, group: VersionId, *, torn: bool) -> None:
        what = "aborted" if torn else "committed"
        self.notify(
            f"version {group.version} of job {job} is {what}", lambda one: one.on_version_decided(job, group, torn=torn)
        )

    def on_versions_deleted(self, job: str, groups: Collection[VersionId]) -> None:
        self.notify(
            f"{len(groups)} versions of job {job} are deleted", lambda one: one.on_versions_deleted(job, groups)
        )

    def on_not_durable(self, job: str, group: VersionId, why: str) -> None:
        self.notify(f"version {group.version} is not durable: {why}", lambda one: one.on_not_durable(job, group, why))

    def free_a_slot(self, job: str, last: bool) -> bool:
        return any(listener.free_a_slot(job, last) for listener in self._all)
