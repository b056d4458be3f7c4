"""A shard after its write: sealed with checksums, listed, pinned and verified for readers, deleted."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from peerstore import checksums, deadlines
from peerstore.daemon_process import ProcessIdentity
from peerstore.errors import (
    LeaseLostError,
    RequestError,
    ShardDamagedError,
    ShardNotFoundError,
    ShardUnreadableError,
    UnavailableError,
)
from peerstore.failpoints import failpoint
from peerstore.shard_records import CHUNK_BYTES, Lease, Pin, ShardInfo, ShardKey, ShardRecord, VersionId
from peerstore.store.arena import closing_fd
from peerstore.store.job_table import JobTable
from peerstore.store.record_validation import validate_meta
from peerstore.store.slot_metadata import SEAL_METADATA, SealMetadata
from peerstore.store.slot_table import SlotTable
from peerstore.store.slots import SHARD_STATES, ArenaSlot, SlotState

log = logging.getLogger(__name__)


class ShardSealer:
    """Implementation of ``seal``. The lock is not held while bytes are hashed."""

    def __init__(self, table: SlotTable, jobs: JobTable, pool: Executor) -> None:
        self._table = table
        self._jobs = jobs
        self._pool = pool

    def seal(
        self,
        lease_id: str,
        size_bytes: int,
        meta: bytes,
        blobs: Collection[str],
        sealed: Callable[[ShardRecord], None],
    ) -> ShardRecord:
        validate_meta(f"lease {lease_id}", meta)
        with self._table.lock:
            slot, done = self._begin(lease_id, size_bytes)
            if done is not None:
                return done
            lease = slot.lease
        assert lease is not None  # noqa: S101 - _begin guarantees it
        started = time.monotonic()
        try:
            try:
                record = self._compute_record(lease, size_bytes, meta)
            except ShardDamagedError:
                self._drop_if_lost(slot, lease)
                raise
            failpoint("agent.hashed")
            with self._table.lock:
                if slot.lease is not lease:
                    raise LeaseLostError(f"the lease of {lease.key} was revoked while it was being sealed")
                lacking = sorted({*blobs} - {*self._table.blobs.list_names(lease.key.job)}) if blobs else []
                if lacking:
                    raise ShardNotFoundError(f"{lease.key} needs the blobs {', '.join(lacking)}, which this node lacks")
                self._commit(slot, lease, record)
        finally:
            with self._table.lock:
                self._table.resume_lease(slot, lease)
        self._count(size_bytes, time.monotonic() - started)
        sealed(record)
        return record

    def _begin(self, lease_id: str, size_bytes: int) -> tuple[ArenaSlot, ShardRecord | None]:
        """Begin to seal the lease's slot and return it.

        Also return the record if an earlier, equal call sealed the slot.
        """
        self._table.lock.check_open()
        slot, done = self._table.slots.for_lease(lease_id)
        while slot.state is not SlotState.LEASED and done is None:
            if deadlines.expired():
                raise UnavailableError(f"lease {lease_id} is still being sealed")
            self._table.lock.wait(deadlines.remaining_s(1.0))
            slot, done = self._table.slots.for_lease(lease_id)
        if done is not None or slot.lease is None:
            return slot, done
        self._jobs.incarnations.check_fence(slot.lease.key)
        if not 0 <= size_bytes <= slot.lease.size_bytes:
            raise RequestError(f"cannot seal {size_bytes} bytes: the lease has {slot.lease.size_bytes} bytes")
        self._table.begin_seal(slot)
        return slot, None

    def _compute_record(self, lease: Lease, size_bytes: int, meta: bytes) -> ShardRecord:
        with raise_as_unreadable(lease.key):
            try:
                with closing_fd(self._table.arena.open(lease.slot)) as fd:
                    sums = checksums.file_checksums(fd, size_bytes, pool=self._pool)
            except (FileNotFoundError, checksums.TruncatedFileError) as error:
                raise ShardDamagedError(f"{lease.key} cannot be sealed: {error}") from error
        return ShardRecord(lease.key, lease.parts, size_bytes, CHUNK_BYTES, sums, meta, time.time_ns())

    def _drop_if_lost(self, slot: ArenaSlot, lease: Lease) -> None:
        """Drop the slot if its file is not intact: this save is lost, and the next one gets another slot."""
        with self._table.lock:
            if slot.lease is lease and not slot.is_intact(self._table.arena):
                self._table.drop_lost(slot)

    def _commit(self, slot: ArenaSlot, lease: Lease, record: ShardRecord) -> None:
        seal = SealMetadata(lease.id, record)
        self._table.metadata.put(SEAL_METADATA, slot.name, seal)
        failpoint("agent.sealing")
        self._table.seal(slot, seal)
        failpoint("agent.sealed")

    def _count(self, size_bytes: int, seconds: float) -> None:
        with self._table.lock:
            self._table.incidents.count("sealed")
            self._table.incidents.count("sealed_bytes", size_bytes)
            self._table.incidents.count("seal_seconds", seconds)


@contextlib.contextmanager
def raise_as_unreadable(key: ShardKey) -> Iterator[None]:
    """Raise :class:`ShardUnreadableError` for errors that do not mean that ``key`` is damaged."""
    try:
        yield
    except (OSError, MemoryError, RuntimeError) as error:  # RuntimeError: no thread could be started
        what = str(error) or type(error).__name__
        raise ShardUnreadableError(f"{key} is stored but cannot be read for now: {what}") from error


@dataclass(frozen=True)
class _PinEntry:
    slot: str
    owner: ProcessIdentity


class ShardReader:
    """Inventory, pins and verification of the store's shards."""

    def __init__(
        self, table: SlotTable, jobs: JobTable, pool: Executor, await_adoption: Callable[[str | None], None]
    ) -> None:
        self._table = table
        self._jobs = jobs
        self._pool = pool
        self._wait_recovered = await_adoption
        self._pins: dict[str, _PinEntry] = {}

    @property
    def pins(self) -> int:
        return len(self._pins)

    def list_shards(self, job: str | None) -> list[ShardInfo]:
        with self._table.lock:
            self._wait_recovered(job)
            return [
                ShardInfo(
                    record.key,
                    record.parts,
                    record.size_bytes,
                    record.meta,
                    record.sealed_ns,
                    record.key.version_id in self._jobs.get_or_create(record.key.job).committed,
                    slot.holders,
                )
                for slot, record in self._table.slots.available_shards(job)
            ]

    def records(self, job: str, group: VersionId) -> list[ShardRecord]:
        with self._table.lock:
            self._wait_recovered(job)
            return [record for _, record in self._table.slots.available_shards(job) if record.key.version_id == group]

    def pin(self, key: ShardKey, owner: ProcessIdentity) -> Pin:
        with self._table.lock:
            self._wait_recovered(key.job)
            slot, record = self._table.slots.find_shard(key)
            fd = self._open(slot, record)
            return Pin(self._add_pin(slot, owner), record, fd)

    def _open(self, slot: ArenaSlot, record: ShardRecord) -> int:
        """Open the shard's file; raise :class:`ShardDamagedError` if it is missing or shorter than the shard."""
        with raise_as_unreadable(record.key):
            try:
                fd = self._table.arena.open(slot.name)
            except FileNotFoundError as error:
                raise ShardDamagedError(f"the file of {record.key} was removed by another process") from error
            try:
                size_bytes = os.fstat(fd).st_size
                if size_bytes < record.size_bytes:
                    raise ShardDamagedError(
                        f"the file of {record.key} was truncated by another process: {size_bytes} of "
                        f"{record.size_bytes} bytes remain"
                    )
            except BaseException:
                os.close(fd)
                raise
            return fd

    def _add_pin(self, slot: ArenaSlot, owner: ProcessIdentity) -> str:
        pin = f"pin-{secrets.token_hex(8)}"
        self._pins[pin] = _PinEntry(slot.name, owner)
        slot.add_user(pin)
        return pin

    def pin_unchecked(self, key: ShardKey, owner: ProcessIdentity) -> tuple[str, ShardRecord, str]:
        """Return a pin's id, the record, and the path of the shard's file, without opening the file.

        For callers that look for damage themselves.
        """
        with self._table.lock:
            self._wait_recovered(key.job)
            slot, record = self._table.slots.find_shard(key)
            return self._add_pin(slot, owner), record, self._table.arena.path(slot.name)

    def unpin(self, pin_id: str) -> bool:
        with self._table.lock:
            pin = self._pins.pop(pin_id, None)
            slot = self._table.slots.get(pin.slot) if pin is not None else None
            if slot is None or pin_id not in slot.users:
                return False
            self._table.release_reader(slot, pin_id)
            return True

    def hold(self, key: ShardKey, name: str) -> ShardRecord:
        """Retain the shard's bytes under the hold ``name`` and return its record."""
        with self._table.lock:
            slot, record = self._table.slots.find_shard(key)
            slot.add_user(f"hold-{name}")
            return record

    def release_hold(self, key: ShardKey, name: str) -> None:
        with self._table.lock:
            for slot in self._table.slots.with_shard(key):
                if f"hold-{name}" in slot.users:
                    self._table.release_reader(slot, f"hold-{name}")

    def shard_path(self, key: ShardKey) -> str:
        with self._table.lock:
            for slot in self._table.slots.with_shard(key):
                return self._table.arena.path(slot.name)
            raise ShardNotFoundError(f"{key} is not on this node")

    def damaged_chunks(self, record: ShardRecord, path: str, chunks: tuple[int, int] | None) -> tuple[int, ...]:
        """Hash a shard's bytes again and return the chunks that differ; all of them if the file is missing.

        Raise :class:`ShardUnreadableError` if the bytes cannot be read for lack of descriptors or memory, or after an
        I/O error. Such a shard may be intact, so it stays.
        """
        count = checksums.chunk_count(record.size_bytes, record.chunk_bytes)
        first, stop = chunks or (0, count)
        if not 0 <= first <= stop <= count:
            raise RequestError(f"chunks {first}..{stop} do not exist: the shard has {count} chunks")
        selected = range(first, stop)
        with raise_as_unreadable(record.key):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return tuple(range(max(count, 1)))
            try:
                return checksums.file_mismatched_chunks(
                    fd,
                    record.size_bytes,
                    record.checksums,
                    chunks=selected,
                    chunk_bytes=record.chunk_bytes,
                    pool=self._pool,
                )
            finally:
                os.close(fd)

    def sweep(self, grace_s: float) -> None:
        """Release the pins of readers that have been disconnected for more than ``grace_s`` seconds."""
        for pin_id, pin in list(self._pins.items()):
            if self._jobs.clients.disconnected_s(pin.owner) > grace_s:
                slot = self._table.slots.get(pin.slot)
                if slot is not None and pin.owner.is_alive:
                    slot.forbid_reuse()  # its reader may still read
                self.unpin(pin_id)


class ShardRemoval:
    """Deletion of versions, expired jobs and damaged shards."""

    def __init__(self, table: SlotTable, jobs: JobTable) -> None:
        self._table = table
        self._jobs = jobs

    def delete_versions(self, job: str, groups: Sequence[VersionId] | None) -> int:
        """Delete the shards of these versions (``None``: of all) and return their number; readers may finish."""
        with self._table.lock:
            found = [
                (slot, slot.record)
                for slot in self._table.slots.of_job(job)
                if slot.record is not None and slot.state is not SlotState.RETIRED
                if groups is None or slot.record.key.version_id in groups
            ]
            for slot, _ in found:
                self._table.retire(slot)
            self._jobs.drop_versions(job, groups)
            if groups is None:
                self._drop_job(job)
            return sum(not record.key.kind for _, record in found)

    def expire_job(self, job: str, reason: str) -> None:
        """Drop all shards of a job without a request of its owner.

        The job's newest version and the reason stay recorded.
        """
        with self._table.lock:
            log.warning("job %s: dropping its shards: %s", job, reason)
            self._jobs.clients.record_expiry(job, reason)
            self.delete_versions(job, None)

    def drop_unused(self, unused_s: float = -1.0) -> None:
        """Drop the free slots of jobs without shards and clients for more than ``unused_s`` seconds.

        The jobs' metadata stays.
        """
        clients = self._jobs.clients
        with self._table.lock:
            free = [slot for slot in self._table.slots.in_state(SlotState.FREE) if not clients.has_clients(slot.job)]
            held = {slot.job for slot in self._table.slots.in_state(*SHARD_STATES)} if free else set()
            for slot in free:
                if slot.job not in held and clients.unused_s(slot.job) > unused_s:
                    self._table.drop(slot)

    def _drop_job(self, job: str) -> None:
        for slot in self._table.slots.of_job(job):
            if slot.state is SlotState.FREE:
                self._table.drop(slot)
        self._table.blobs.remove_all(job)
        self._jobs.remove_if_empty(job)

    def drop_damaged(self, key: ShardKey, reason: str) -> ShardRecord | None:
        """Drop the shard, and mark its part as lost; return the record, or ``None`` if it is not stored here."""
        with self._table.lock:
            slot = self._table.slots.for_key(key)
            if slot is None or slot.record is None:
                return None
            record = slot.record
            self._table.incidents.record_damage(key.job, str(key), reason)
            self._drop(slot)
            if not key.kind:
                self._jobs.record_lost_part(key.job, key.version_id, key.part)
            return record

    def _drop(self, slot: ArenaSlot) -> None:
        # Readers may still read these bytes, so only a slot without readers is reused.
        if slot.users:
            self._table.drop(slot)
        else:
            self._table.free(slot)
