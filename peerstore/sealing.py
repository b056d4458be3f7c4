"""Checksums of what was written, and the note that makes a shard exist."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import Executor

from peerstore import checksum, deadlines
from peerstore.crashpoints import reach
from peerstore.errors import LeaseLostError, RequestError, ShardDamagedError, ShardNotFoundError, UnavailableError
from peerstore.jobs import Jobs
from peerstore.notes import LEASE, SEAL, SealNote
from peerstore.pages import closing
from peerstore.reading import unreadable
from peerstore.records import CHUNK_BYTES, Lease, ShardRecord
from peerstore.shelf import Shelf, Slot

MAX_META_BYTES = 16 << 20


class Sealing:
    """``seal`` of the store. The lock is not held while bytes are hashed."""

    def __init__(self, shelf: Shelf, jobs: Jobs, pool: Executor) -> None:
        self._shelf = shelf
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
        if len(meta) > MAX_META_BYTES:
            raise RequestError(f"meta has {len(meta)} bytes, at most {MAX_META_BYTES} are kept")
        with self._shelf.lock:
            slot, done = self._begin(lease_id, size_bytes)
            if done is not None:
                return done
            lease = slot.lease
        assert lease is not None  # noqa: S101 - _begin promises it
        started = time.monotonic()
        try:
            try:
                record = self._checksummed(lease, size_bytes, meta)
            except ShardDamagedError:
                self._lose(slot, lease)
                raise
            reach("agent.hashed")
            with self._shelf.lock:
                if slot.lease is not lease:
                    raise LeaseLostError(f"the lease of {lease.key} was taken back while it was being sealed")
                lacking = sorted({*blobs} - {*self._shelf.notes.blobs(lease.key.job)})
                if lacking:
                    raise ShardNotFoundError(f"{lease.key} needs {', '.join(lacking)}, which are not kept here now")
                self._keep(slot, lease, record)
        finally:
            with self._shelf.lock:
                slot.sealing = False
                self._shelf.changed.notify_all()
        self._count(size_bytes, time.monotonic() - started)
        sealed(record)
        return record

    def _begin(self, lease_id: str, size_bytes: int) -> tuple[Slot, ShardRecord | None]:
        """The slot, from here on being sealed; or what the same call, repeated after a lost answer, made of it."""
        self._shelf.check_open()
        slot, done = self._shelf.leased(lease_id)
        while slot.sealing and done is None:
            if deadlines.over():
                raise UnavailableError(f"what lease {lease_id} was for is still being sealed")
            self._shelf.changed.wait(deadlines.left(1.0))
            slot, done = self._shelf.leased(lease_id)
        if done is not None or slot.lease is None:
            return slot, done
        self._jobs.check_fence(slot.lease.key)
        if not 0 <= size_bytes <= slot.lease.size_bytes:
            raise RequestError(f"seal of {size_bytes} bytes in a slot of {slot.lease.size_bytes}")
        slot.sealing = True
        return slot, None

    def _checksummed(self, lease: Lease, size_bytes: int, meta: bytes) -> ShardRecord:
        with unreadable(lease.key):
            try:
                with closing(self._shelf.arena.open(lease.slot)) as fd:
                    sums = checksum.file_checksums(fd, size_bytes, pool=self._pool)
            except (FileNotFoundError, checksum.ShortFileError) as error:
                raise ShardDamagedError(f"{lease.key} cannot be sealed: {error}") from error
        return ShardRecord(lease.key, lease.parts, size_bytes, CHUNK_BYTES, sums, meta, time.time_ns())

    def _lose(self, slot: Slot, lease: Lease) -> None:
        """Where the slot's file is gone, this save is lost with it. The next one gets another slot."""
        with self._shelf.lock:
            if slot.lease is lease and not self._shelf.intact(slot):
                self._shelf.lose(slot)

    def _keep(self, slot: Slot, lease: Lease, record: ShardRecord) -> None:
        self._shelf.notes.put(SEAL, slot.name, SealNote(lease.id, record))
        reach("agent.sealing")
        slot.record, slot.sealed_under = record, lease.id
        slot.lease = slot.owner = None
        self._shelf.drop_note(LEASE, slot.name)
        slot.warm_bytes = max(slot.warm_bytes, record.size_bytes)
        reach("agent.sealed")

    def _count(self, size_bytes: int, seconds: float) -> None:
        with self._shelf.lock:
            self._shelf.counters["sealed"] += 1
            self._shelf.counters["sealed_bytes"] += size_bytes
            self._shelf.counters["seal_seconds"] += seconds
