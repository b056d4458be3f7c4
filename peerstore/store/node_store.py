"""NodeStore, the facade over one node's slots, jobs, leases and shards, and the listeners of its events.

::

    lease ──> write (through a mapping of the slot) ──> seal ──> read (pinned) ──> given up for a newer version
      │                                                  │
      └─ abandoned, expired, fenced: the slot is free    └─ note with checksums beside the slot: survives this process

Each of those steps has a room of its own; they share the shelf of slots and its lock:
:mod:`~peerstore.store.leases`, :mod:`~peerstore.store.leases`, :mod:`~peerstore.store.shards`,
:mod:`~peerstore.store.shards`,
:mod:`~peerstore.store.shards`, :mod:`~peerstore.store.job_table`, :mod:`~peerstore.store.crash_recovery`. What may be
given up for what is decided in :mod:`~peerstore.store.slot_eviction`.
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
    ExpiredJob,
    Lease,
    Pin,
    ShardInfo,
    ShardKey,
    ShardRecord,
    SlotInfo,
    StoreStatus,
    VersionId,
    validate_incarnation,
    validate_job_name,
)
from peerstore.store.arena import Arena
from peerstore.store.crash_recovery import CrashRecovery, start_daemon_thread
from peerstore.store.job_table import JobTable
from peerstore.store.leases import LeaseManager, SlotPrefaulter
from peerstore.store.received_replicas import ReplicaStore
from peerstore.store.shards import ShardReader, ShardRemoval, ShardSealer
from peerstore.store.slot_eviction import SlotLimits
from peerstore.store.slots import EXPIRED_JOB_METADATA, SlotTable

__all__ = ["MAX_BLOB_BYTES", "NodeStore", "StoreListener"]

log = logging.getLogger(__name__)

MAX_BLOB_BYTES = 48 << 20


class NodeStore:
    """Sealed shards in this machine's memory. Every method may be called from any thread."""

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
        self._shelf = SlotTable(arena, limits, clock)
        self._lock = self._shelf.lock
        self._listeners = StoreListeners()
        self._descriptors = OpenFileGuard()
        self._pool = ThreadPoolExecutor(threads or _hash_threads(), thread_name_prefix="peerstore-hash")
        self._jobs = JobTable(self._shelf, settings.job_ttl_s)
        self._keeping = ShardRemoval(self._shelf, self._jobs)
        self._leasing = LeaseManager(self._shelf, self._jobs, self._listeners.give_way, self._keeping.expire)
        self._sealing = ShardSealer(self._shelf, self._jobs, self._pool)
        self._adoption = CrashRecovery(self._shelf, self._jobs, self._leasing)
        self._reading = ShardReader(self._shelf, self._jobs, self._pool, self._adoption.wait)
        self._warming = SlotPrefaulter(self._shelf)
        self.copies = ReplicaStore(
            self._shelf,
            self._jobs,
            self._leasing,
            self._keeping,
            torn=lambda job, group: self._listeners.decided(job, group, torn=True),
        )
        self.arena_id = self._shelf.notes.identity()
        self.started = secrets.token_hex(6)
        with self._lock:
            self._adoption.read_notes()
        for record, reason in self._adoption.lost:
            self._listeners.damaged(record.key, record, reason)
        self._background = [
            start_daemon_thread(self._verify_adopted, "peerstore-adopt"),
            start_daemon_thread(self._warming.work, "peerstore-populate"),
        ]

    def _verify_adopted(self) -> None:
        self._adoption.verify(self._reading.damaged_chunks, self._adopted, self.report)

    def _adopted(self, record: ShardRecord, holders: tuple[str, ...]) -> None:
        if holders:
            self._listeners.copied(record, holders)
        else:
            self._listeners.sealed(record)

    def set_budget(self, budget: str) -> None:
        """Another size of the arena from here on, as bytes or a share. :class:`RequestError`: it would keep nothing."""
        size_bytes = parse_budget(StoreSettings(budget=budget).budget)
        with self._lock:
            self._shelf.set_budget(size_bytes)

    # -- who owns a job ---------------------------------------------------------------------------------------

    def epoch(self, job: str) -> int:
        """The newest incarnation of ``job`` this node has heard of; 0 when there was none."""
        with self._lock:
            return self._jobs.epoch(job)

    def claim(self, job: str, incarnation: str, *, at_least: int = 0) -> int:
        """Make ``incarnation`` the owner of ``job`` and return its epoch; claiming again changes nothing."""
        with self._lock:
            self._shelf.notes.catch_up()
            return self._jobs.claim(job, incarnation, at_least)

    # -- writing ----------------------------------------------------------------------------------------------

    def lease(
        self, key: ShardKey, size_bytes: int, parts: int, *, wait_s: float = 0.0, owner: ProcessIdentity | None = None
    ) -> Lease:
        """A slot for ``size_bytes`` to write ``key`` into; waits up to ``wait_s`` for one to come free.

        Its file may be larger, and never changes its size.
        """
        _check_written(key)
        self._descriptors.check(f"a slot for {key}")
        return self._leasing.lease(key, size_bytes, parts, wait_s=wait_s, owner=owner or current_process())

    def grow(self, lease_id: str, size_bytes: int, *, wait_s: float = 0.0) -> Lease:
        """The leased slot with room for ``size_bytes``; what was written so far stays. It never shrinks.

        Where its file is too small, another one of another generation takes its place: who had mapped the old one maps
        the new one. Nothing may be written meanwhile. Repeating the call is harmless.
        """
        return self._leasing.grow(lease_id, size_bytes, wait_s=wait_s)

    def open_slot(self, slot: str) -> int:
        """The file of a leased slot (or one that was reserved), open for writing: the caller's to close.

        Whoever has mapped a slot of this name before needs no other: the name stays with the file.
        """
        return self._leasing.open_slot(slot)

    def has_slot(self, slot: str) -> bool:
        """Whether the slot is still there."""
        with self._lock:
            return slot in self._shelf.slots

    def relabel(self, lease_id: str, key: ShardKey) -> Lease:
        """Write the leased slot under another key of the same writer: for bytes that were placed before their version
        was known.
        """
        _check_written(key)
        return self._leasing.relabel(lease_id, key)

    def seal(self, lease_id: str, size_bytes: int, meta: bytes = b"", blobs: Collection[str] = ()) -> ShardRecord:
        """Checksum what was written, keep the note beside it, and make it immutable. Idempotent by lease.

        Without one of the ``blobs`` it is :class:`ShardNotFoundError`, and the lease holds: the job may have been
        forgotten since they were put.
        """
        record = self._sealing.seal(lease_id, size_bytes, meta, blobs, self._listeners.sealed)
        with self._lock:
            torn = self._jobs.is_torn(record.key.job, record.key.group)
        if torn:  # another writer has left its part out meanwhile
            self._keeping.forget(record.key.job, [record.key.group])
            self._listeners.decided(record.key.job, record.key.group, torn=True)
        return record

    def abandon(self, lease_id: str) -> None:
        """Give the slot back unsealed. Unknown leases are fine: there is nothing to give back."""
        self._leasing.abandon(lease_id)

    def reserve(self, job: str, part: int, size_bytes: int, *, slots: int = 0) -> list[SlotInfo]:
        """Have free slots of this size ready, with pages behind them, for a writer's next saves.

        Returns those this writer could be given next; fewer than asked for where the budget ends. Pages come in the
        background.
        """
        return self._warming.reserve(job, part, size_bytes, slots)

    # -- reading ----------------------------------------------------------------------------------------------

    def inventory(self, job: str | None = None) -> list[ShardInfo]:
        """Every sealed shard (of ``job``) whose bytes this agent has checksummed itself."""
        return self._reading.inventory(job)

    def records(self, job: str, group: VersionId) -> list[ShardRecord]:
        """The sealed parts of one version, with their checksums."""
        return self._reading.records(job, group)

    def pin(self, key: ShardKey, *, owner: ProcessIdentity | None = None) -> Pin:
        """Keep a sealed shard as it is while somebody reads it; its file comes open with the pin.

        One whose file is gone or too short is dropped and recorded: :class:`~peerstore.errors.ShardDamagedError`.
        """
        self._descriptors.check(f"reading {key}")
        with self._lock:
            try:
                return self._reading.pin(key, owner or current_process())
            except ShardUnreadableError:
                self._shelf.counters["unreadable"] += 1
                raise
            except ShardDamagedError as error:
                damaged = error
                lost = self._keeping.damaged(key, str(error))
        if lost is not None:
            self._listeners.damaged(key, lost, str(damaged))
        raise damaged

    def unpin(self, pin_id: str) -> bool:
        """The reader is done. False when the pin did not hold until now: what was read has to be verified again."""
        return self._reading.unpin(pin_id)

    def hold(self, key: ShardKey, name: str) -> ShardRecord:
        """Like a pin, but named and without an owner: for work this process does itself."""
        return self._reading.hold(key, name)

    def unhold(self, key: ShardKey, name: str) -> None:
        self._reading.unhold(key, name)

    def path_of(self, key: ShardKey) -> str:
        """Where a held shard's bytes are."""
        return self._reading.path_of(key)

    def verify(self, key: ShardKey, chunks: tuple[int, int] | None = None) -> tuple[int, ...]:
        """Hash a sealed shard's bytes again (or chunks ``[start, stop)`` of it); returns the damaged chunks.

        A damaged shard is dropped and recorded: it is offered to nobody again. One that cannot be read is not damaged:
        :class:`~peerstore.errors.ShardUnreadableError`, and it stays.
        """
        pin, record, path = self._reading.pin_as_it_is(key, current_process())
        try:
            bad = self._reading.damaged_chunks(record, path, chunks)
        except ShardUnreadableError:
            with self._lock:
                self._shelf.counters["unreadable"] += 1
            raise
        finally:
            held = self.unpin(pin)
        if bad and held:
            self.report(key, f"{len(bad)} of its chunks changed after it was sealed, first: {bad[0]}")
        return bad

    # -- keeping and giving up --------------------------------------------------------------------------------

    def report(self, key: ShardKey, reason: str) -> None:
        """This copy is not what was sealed: record it and drop it."""
        record = self._keeping.damaged(key, reason)
        if record is not None:
            self._listeners.damaged(key, record, reason)

    def call_whole(self, job: str, group: VersionId) -> None:
        """Every part of this version was sealed, as is known from elsewhere: it was loaded, or is durable, or all ranks
        of a job whose agents do not know each other have agreed on it. It counts while no part of it is lost here.
        """
        with self._lock:
            self._shelf.notes.catch_up()
            news = self._jobs.call_whole(validate_job_name(job), group)
        if news:
            self._listeners.decided(job, group, torn=False)

    def leave_out(self, job: str, group: VersionId, part: int) -> None:
        """The writer of this part will never seal it: what there is of the version is given up, on every node."""
        with self._lock:
            self._shelf.notes.catch_up()
            news = self._jobs.leave_out(validate_job_name(job), group, part)
        if news:
            log.info("job %s: part %d of version %s was left out, which is given up", job, part, group.version)
            self._keeping.forget(job, [group])
            self._listeners.decided(job, group, torn=True)

    def newest_whole(self, job: str) -> VersionId | None:
        """The newest version that is known to be whole, and lost nothing here."""
        with self._lock:
            return max(self._jobs.whole().get(job, ()), default=None)

    def forget(self, job: str, groups: list[VersionId] | None = None) -> int:
        """Drop versions (all when ``groups`` is None) because their owner said so. Who reads one may finish.

        All of them: also what is noted of an earlier end of the job.
        """
        if groups is None:
            with self._lock:
                self._shelf.notes.remove(EXPIRED_JOB_METADATA, validate_job_name(job))
        found = self._keeping.forget(job, groups)
        if groups is not None:
            self._listeners.withdrawn(job, groups)
        return found

    def not_durable(self, job: str, group: VersionId, why: str) -> None:
        """Another node's part of a version does not become durable: for who listens here, and makes versions so."""
        self._listeners.not_durable(job, group, why)

    def keep(self, job: str, group: VersionId, *, kept: bool = True) -> None:
        """The version is not given up for newer ones, nor for want of room; or may be again. Survives this process."""
        with self._lock:
            self._shelf.notes.catch_up()
            said = self._jobs.of(validate_job_name(job)).said(group, kept=kept, now_ns=time.time_ns())
            self._jobs.keep(job, [said])

    def kept(self, job: str) -> set[VersionId]:
        """Versions of the job that somebody wants kept, here or on other nodes."""
        with self._lock:
            known = self._jobs.if_known(job)
            return {one.group for one in known.kept.values() if one.kept} if known is not None else set()

    # -- for other nodes --------------------------------------------------------------------------------------

    def begin_copy(self, record: ShardRecord, *, whole: bool) -> Lease | None:
        """A slot for a copy of another node's shard; ``None`` when it is here already."""
        self._descriptors.check(f"a copy of {record.key}")
        return self.copies.begin(record, whole=whole, owner=current_process())

    def seal_copy(self, lease_id: str, record: ShardRecord, holders: tuple[str, ...]) -> None:
        """The copy is here: the caller has compared every chunk of it with ``record``."""
        self.copies.seal(lease_id, record, holders)
        self._adopted(record, holders)

    def begin_parity(self, key: ShardKey, size_bytes: int, parts: int, *, whole: bool) -> Lease | None:
        """A slot for a parity of this node's group; ``None`` when it is here already."""
        self._descriptors.check(f"a parity {key}")
        return self.copies.begin_parity(key, size_bytes, parts, whole=whole, owner=current_process())

    def seal_parity(self, lease_id: str, record: ShardRecord) -> None:
        """The parity is there: the caller has taken its checksums of bytes that were compared with their shards'."""
        self.copies.seal(lease_id, record, ())
        self._listeners.parity(record)

    def take_over(self, key: ShardKey) -> None:
        """The node that wrote this shard is gone: it is this node's own now, with what that brings (a drain)."""
        if self.copies.relist(key, ()):
            with self._lock:
                _, record = self._shelf.sealed(key)
            self._listeners.sealed(record)

    # -- blobs ------------------------------------------------------------------------------------------------

    def put_blob(self, job: str, name: str, data: bytes) -> None:
        """Keep small bytes beside a job's shards (layouts, settings). Overwrites."""
        if len(data) > MAX_BLOB_BYTES:
            raise RequestError(f"blob {name} has {len(data)} bytes, at most {MAX_BLOB_BYTES} are kept")
        self._shelf.notes.put_blob(job, name, data)

    def get_blob(self, job: str, name: str) -> bytes:
        data = self._shelf.notes.get_blob(job, name)
        if data is None:
            raise ShardNotFoundError(f"job {job} has no blob {name}")
        return data

    def blobs(self, job: str) -> list[str]:
        return self._shelf.notes.blobs(job)

    def remove_blob(self, job: str, name: str) -> None:
        self._shelf.notes.remove_blob(job, name)

    # -- who is there -----------------------------------------------------------------------------------------

    def arrived(self, owner: ProcessIdentity, job: str) -> None:
        """A process opened a connection for ``job``."""
        with self._lock:
            self._jobs.arrived(owner, job)

    def departed(self, owner: ProcessIdentity, job: str) -> None:
        """One of its connections closed."""
        with self._lock:
            last = self._jobs.departed(owner, job)
        if last:
            self._listeners.departed(owner, job)
        self.sweep()

    def manage(self, job: str, epoch: int, incarnation: str) -> None:
        """Somebody in this process decides what of ``job`` is kept: every shard is a version of its own, and goes when
        it is forgotten by name. ``incarnation`` owns it on every node, so nobody has to be asked whether it may begin.
        """
        with self._lock:
            self._jobs.managed.add(validate_job_name(job))
            self._jobs.fence(job, epoch, validate_incarnation(incarnation))

    def jobs(self) -> list[str]:
        """Every job this node has heard of."""
        with self._lock:
            return [status.job for status in self._jobs.status()]

    def drop_aside(self, names: list[str] | None = None) -> int:
        """Drop slots that were set aside (all when ``names`` is None); how many bytes they had."""
        with self._lock:
            return self._shelf.drop_aside(names)

    def sweep(self) -> None:
        """Take back what belonged to processes and jobs that went away. Call now and then."""
        with self._lock:
            self._leasing.sweep(self._grace_s)
            self._reading.sweep(self._grace_s)
            expired, self._leasing.expired = self._leasing.expired, []
            for job in self._jobs.expired():
                hours = f"{self._jobs.unused_s(job) / 3600:.1f} hours"
                self._keeping.expire(job, f"no process had used it for {hours} (agent.job_ttl_s says how long it may)")
                expired.append(job)
            self._jobs.gone = {owner: since for owner, since in self._jobs.gone.items() if owner.alive}
            self._shelf.arena.lingering()  # what nobody uses any more is closed
            try:
                self._shelf.notes.catch_up()
            except (ArenaFullError, UnavailableError) as error:
                log.warning("what is known of a job is not noted yet: %s", error)
        for job in expired:
            self._listeners.dropped(job)

    def forgotten(self, job: str) -> ExpiredJob | None:
        """When and why what was kept for the job was given back, where nobody had said so."""
        with self._lock:
            return self._jobs.forgotten(validate_job_name(job))

    def drop_unused(self) -> None:
        """Give back the slots of jobs that have nothing here and nobody who takes part."""
        with self._lock:
            self._keeping.drop_unused()

    def idle_s(self) -> float:
        """How long nobody has been connected; 0 while somebody is or while jobs still own shards."""
        with self._lock:
            return self._jobs.idle_s()

    def subscribe(self, listener: StoreListener) -> None:
        """From now on, tell ``listener``; it is told of everything that is here already first."""
        with self._lock:
            here = [(record, slot.holders) for slot, record in self._shelf.offered()]
            damaged = self._listeners.add(listener)
        for record, reason in damaged:
            self._listeners.tell(
                f"{record.key} is damaged",
                lambda one, record=record, reason=reason: one.damaged(record.key, record, reason),  # type: ignore[misc]
                only=listener,
            )
        for record, holders in here:
            self._listeners.tell(
                f"{record.key} is here",
                lambda one, record=record, holders=holders: (  # type: ignore[misc]
                    one.copied(record, holders) if holders else one.sealed(record)
                ),
                only=listener,
            )

    def status(self) -> StoreStatus:
        with self._lock:
            return StoreStatus(
                self._shelf.status(self._reading.pins),
                self._jobs.status(),
                tuple(self._shelf.damages),
                {**self._shelf.counters, "listener_errors": self._listeners.errors, **self._descriptors.counters()},
                self._adoption.left(),
                tuple(self._shelf.aside.values()),
            )

    def shut(self) -> None:
        """Give out nothing any more, and wake up who waits for something."""
        with self._lock:
            self._shelf.closed = True
            self._shelf.changed.notify_all()

    def close(self) -> None:
        """Stop the threads. What is sealed stays in the arena for the next agent."""
        self.shut()
        for thread in self._background:
            thread.join()
        self._pool.shutdown()
        self._shelf.arena.close()


def _check_written(key: ShardKey) -> None:
    if key.kind:
        raise RequestError(f"{key}: writers write shards, parities are made of them by agents")


def _hash_threads() -> int:
    return max(1, min(8, os.cpu_count() or 1))


_REMEMBERED = 1000


class StoreListener:
    """Told what happens to shards. Calls come from the thread that caused them and must return quickly."""

    def sealed(self, record: ShardRecord) -> None:
        """A shard was sealed (or adopted from a killed agent's arena)."""

    def copied(self, record: ShardRecord, holders: tuple[str, ...]) -> None:
        """A copy of a shard that another node wrote is here (or was adopted); ``holders`` were to have it."""

    def damaged(self, key: ShardKey, record: ShardRecord, reason: str) -> None:
        """A sealed shard was found to be damaged and was dropped: after a restart, or when it was looked at again."""

    def dropped(self, job: str) -> None:
        """The job's last process left long ago, and everything that was kept for it is gone."""

    def departed(self, owner: ProcessIdentity, job: str) -> None:
        """The last connection that a process had for the job is closed."""

    def parity(self, record: ShardRecord) -> None:
        """A parity came or went: it is no shard, and none of the above is said of it."""

    def decided(self, job: str, group: VersionId, *, torn: bool) -> None:
        """A version is whole, as is known from elsewhere, or torn: some writer has left its part out."""

    def withdrawn(self, job: str, groups: Collection[VersionId]) -> None:
        """Their owner drops these versions, here or on another node."""

    def not_durable(self, job: str, group: VersionId, why: str) -> None:
        """Another node's part of a version will not be where a listener there was to bring it; the version stays."""

    def give_way(self, job: str, last: bool) -> bool:
        """A writer of ``job`` finds no slot: let go of something that is held and can be spared; False: nothing is.

        ``last``: else the writer is refused now. Until then it waits.
        """
        return False


class StoreListeners(StoreListener):
    """All of them, each on its own: what one cannot do (there is no room for its note, say) keeps nobody else from
    hearing. Never called with the store's lock held.
    """

    def __init__(self) -> None:
        self.errors = 0
        self._lock = threading.Lock()
        self._all: tuple[StoreListener, ...] = ()
        self._damaged: deque[tuple[ShardRecord, str]] = deque(maxlen=_REMEMBERED)

    def add(self, listener: StoreListener) -> list[tuple[ShardRecord, str]]:
        """From now on, tell ``listener``. The answer is the damage that was found before it came."""
        with self._lock:
            self._all = (*self._all, listener)
            return list(self._damaged)

    def tell(self, what: str, tell: Callable[[StoreListener], None], *, only: StoreListener | None = None) -> None:
        for listener in self._all if only is None else (only,):
            try:
                tell(listener)
            except Exception:  # whatever it is, the shard is where it is
                with self._lock:
                    self.errors += 1
                log.exception("%s did not take in that %s", type(listener).__name__, what)

    def sealed(self, record: ShardRecord) -> None:
        if record.key.kind:
            self.parity(record)
            return
        self.tell(f"{record.key} is sealed", lambda one: one.sealed(record))

    def copied(self, record: ShardRecord, holders: tuple[str, ...]) -> None:
        self.tell(f"{record.key} is here", lambda one: one.copied(record, holders))

    def parity(self, record: ShardRecord) -> None:
        self.tell(f"{record.key} came or went", lambda one: one.parity(record))

    def damaged(self, key: ShardKey, record: ShardRecord, reason: str) -> None:
        if key.kind:
            self.parity(record)
            return
        with self._lock:
            self._damaged.append((record, reason))
        self.tell(f"{key} is damaged", lambda one: one.damaged(key, record, reason))

    def departed(self, owner: ProcessIdentity, job: str) -> None:
        self.tell(f"process {owner.pid} left job {job}", lambda one: one.departed(owner, job))

    def dropped(self, job: str) -> None:
        self.tell(f"job {job} is forgotten", lambda one: one.dropped(job))

    def decided(self, job: str, group: VersionId, *, torn: bool) -> None:
        what = "torn" if torn else "whole"
        self.tell(f"version {group.version} of job {job} is {what}", lambda one: one.decided(job, group, torn=torn))

    def withdrawn(self, job: str, groups: Collection[VersionId]) -> None:
        self.tell(f"{len(groups)} versions of job {job} are dropped", lambda one: one.withdrawn(job, groups))

    def not_durable(self, job: str, group: VersionId, why: str) -> None:
        self.tell(f"version {group.version} is not durable: {why}", lambda one: one.not_durable(job, group, why))

    def give_way(self, job: str, last: bool) -> bool:
        return any(listener.give_way(job, last) for listener in self._all)
