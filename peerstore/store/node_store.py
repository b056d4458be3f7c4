"""NodeStore: facade over one node's slots, jobs, leases and shards, with event listeners.

::

    lease ──> write (through a mapping of the slot) ──> seal ──> read (pinned) ──> evicted for a newer version
      │                                                  │
      └─ released, expired, fenced: the slot is free     └─ checksums in the slot's metadata: survives this process

Each step has its module: :mod:`~peerstore.store.leases`, :mod:`~peerstore.store.shards`,
:mod:`~peerstore.store.received_replicas`, :mod:`~peerstore.store.version_store`,
:mod:`~peerstore.store.crash_recovery` and :mod:`~peerstore.store.job_table`, which has the versions of each job, its
:mod:`~peerstore.store.incarnations` and its :mod:`~peerstore.store.job_clients`. They share the slots and the lock of
:mod:`~peerstore.store.slot_table`; :mod:`~peerstore.store.slots` lists a slot's states.
:mod:`~peerstore.store.slot_eviction` decides which slots may be evicted.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from peerstore.daemon_process import OpenFileGuard, ProcessIdentity, current_process
from peerstore.errors import (
    ArenaFullError,
    RequestError,
    ShardDamagedError,
    ShardUnreadableError,
    UnavailableError,
)
from peerstore.settings import StoreSettings, parse_budget
from peerstore.shard_records import (
    Lease,
    Pin,
    ShardInfo,
    ShardKey,
    ShardRecord,
    SlotInfo,
    StoreStatus,
)
from peerstore.store.arena import Arena
from peerstore.store.crash_recovery import CrashRecovery, start_daemon_thread
from peerstore.store.job_table import JobTable
from peerstore.store.leases import LeaseManager, SlotPrefaulter
from peerstore.store.received_replicas import ReplicaStore
from peerstore.store.shards import ShardReader, ShardRemoval, ShardSealer
from peerstore.store.slot_eviction import SlotLimits
from peerstore.store.slot_table import SlotTable
from peerstore.store.store_listener import StoreListener, StoreListeners
from peerstore.store.version_store import VersionStore

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
        limits = SlotLimits(
            parse_budget(settings.budget), settings.slots_per_part, settings.burst_slots, arena.restart_command
        )
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
            self.table, self.jobs, self._leasing, self.removal, self.listeners, check_files=self._descriptors.check
        )
        self.versions = VersionStore(
            self.table, self.jobs, reader=self.reader, removal=self.removal, listeners=self.listeners
        )
        self.blobs = self.table.blobs
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
        self._recovery.verify_checksums(self.reader.damaged_chunks, self.listeners.on_stored, self.report_damage)

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
            self.versions.drop_aborted(record.key.job, record.key.version_id)
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

    # -- damage -------------------------------------------------------------------------

    def report_damage(self, key: ShardKey, reason: str) -> None:
        """Record that the shard's bytes differ from the sealed ones, and drop it."""
        record = self.removal.drop_damaged(key, reason)
        if record is not None:
            self.listeners.on_shard_damaged(key, record, reason)

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
