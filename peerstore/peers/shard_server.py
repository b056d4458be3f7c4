"""Shards served to peers by range, and replicas received from peers and verified by chunk.

::

    offer ──> missing chunks ──> chunk, chunk, … (several connections) ──> flush ──> commit: sealed
                │
                └─ chunks of an older version on this node are copied, and verified like the others
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

from peerstore import checksums
from peerstore.errors import (
    ArenaFullError,
    LeaseLostError,
    PeerStoreError,
    ProtocolError,
    RequestError,
    ShardDamagedError,
    UnavailableError,
)
from peerstore.failpoints import failpoint
from peerstore.peers.peer_messages import MAX_RANGES_PER_READ, OfferReplica, OfferReply, RangeDigests, ReadRanges
from peerstore.shard_records import Lease, Pin, ShardKey, ShardRecord, is_chunk_aligned
from peerstore.store.arena import FileMapping, closing_fd, prefault_file
from peerstore.store.node_store import NodeStore
from peerstore.store.received_replicas import holders_to_store
from peerstore.store.shards import raise_as_unreadable
from peerstore.transport.base import MAX_PAYLOAD_BYTES, FileSlice, MessageChannel

log = logging.getLogger(__name__)


class RangeServer:
    """Server of reads from one node's store."""

    def __init__(self, store: NodeStore) -> None:
        self._store = store
        self.sent_bytes = 0

    def open(self, job: str, read: ReadRanges) -> RangeReply:
        """Pin the shard and check the ranges; the caller closes the returned reply."""
        if read.key.job != job:
            raise RequestError(f"{read.key} was requested on a connection of job {job}")
        pin = self._store.pin(read.key)
        try:
            _check(read, pin.record)
        except BaseException:
            pin.close()
            self._store.unpin(pin.id)
            raise
        return RangeReply(self._store, pin, read)

    def try_verify_chunks(self, key: ShardKey, chunks: Sequence[tuple[int, int]]) -> None:
        """Verify chunks that were about to be sent and do not match; a shard that cannot be read stays."""
        try:
            self.verify_chunks(key, chunks)
        except PeerStoreError as error:
            log.warning("%s was not looked at again: %s", key, error)

    def verify_chunks(self, key: ShardKey, chunks: Sequence[tuple[int, int]]) -> bool:
        """Verify chunks that another node received damaged; return whether they are damaged here."""
        return any(self._store.verify(key, (first, stop)) for first, stop in chunks)


class RangeReply:
    """The response to one read: digests and bytes. The caller closes it after sending."""

    def __init__(self, store: NodeStore, pin: Pin, read: ReadRanges) -> None:
        self._store = store
        self._pin = pin
        self._record = pin.record
        self._read = read
        self.payload: list[memoryview | FileSlice] = []
        self.size_bytes = 0

    @property
    def chunk_bytes(self) -> int:
        return self._record.chunk_bytes

    def fill(self) -> RangeDigests:
        """Prepare the payload and return the digests of unaligned ranges.

        Whole chunks are sent without a check, because the reader verifies them. The chunks of other ranges are verified
        here.
        """
        digests = []
        window = _VerifiedWindow(self._pin.fd, self._record)
        for start, stop in self._read.ranges:
            self.size_bytes += stop - start
            if is_chunk_aligned(start, stop, size_bytes=self._record.size_bytes, chunk_bytes=self._record.chunk_bytes):
                self.payload.append(FileSlice(self._pin.fd, start, stop - start))
            else:
                data = window.verified(start, stop)
                digests.append(xxhash.xxh3_64_digest(data)[::-1])
                self.payload.append(data)
        return RangeDigests(b"".join(digests))

    def close(self) -> None:
        try:
            self._pin.close()
        finally:
            self._store.unpin(self._pin.id)


class _VerifiedWindow:
    """Verified bytes of a shard; consecutive ranges in one chunk cost one verification."""

    def __init__(self, fd: int, record: ShardRecord) -> None:
        self._fd = fd
        self._record = record
        self._first = self._stop = 0
        self._data = memoryview(b"")

    def verified(self, start: int, stop: int) -> memoryview:
        size = self._record.chunk_bytes
        first, last = start // size, -(-stop // size)
        if not (self._first <= first and last <= self._stop):
            self._read(first, last)
        base = self._first * size
        return self._data[start - base : stop - base]

    def _read(self, first: int, stop: int) -> None:
        record = self._record
        start, end = first * record.chunk_bytes, min(stop * record.chunk_bytes, record.size_bytes)
        read_bytes = 0
        with raise_as_unreadable(record.key):
            data = memoryview(bytearray(end - start))
            while read_bytes < len(data):
                count = os.preadv(self._fd, [data[read_bytes:]], start + read_bytes)
                if not count:
                    raise ShardDamagedError(f"{record.key} ends at byte {start + read_bytes} of {record.size_bytes}")
                read_bytes += count
        expected = record.checksums[8 * first : 8 * stop]
        bad = checksums.mismatched_chunks(data, expected, chunk_bytes=record.chunk_bytes)
        if bad:
            raise ShardDamagedError(f"{record.key}: chunk {first + bad[0]} does not match its checksum")
        self._first, self._stop, self._data = first, stop, data.toreadonly()


def _check(read: ReadRanges, record: ShardRecord) -> None:
    if checksums.chunk_checksum(record.checksums) != read.checksums:
        raise ShardDamagedError(f"{read.key} has other checksums here")
    if len(read.ranges) > MAX_RANGES_PER_READ:
        raise RequestError(f"{len(read.ranges)} ranges in one read, at most {MAX_RANGES_PER_READ} are answered")
    total = 0
    for start, stop in read.ranges:
        if not 0 <= start < stop <= record.size_bytes:
            raise RequestError(f"{read.key}: bytes {start} to {stop} of {record.size_bytes}")
        total += stop - start
    if total > MAX_PAYLOAD_BYTES // 4:
        raise RequestError(f"{read.key}: {total} bytes in one read")


_MAX_TRANSFERS = 256
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
_MISSING, _VERIFIED, _WRITING = 0, 1, 2


@dataclass
class _Transfer:
    """One replica that is being received."""

    sender: str
    record: ShardRecord
    lease: Lease
    holders: tuple[str, ...]
    view: memoryview
    done: bytearray
    """State of each chunk: ``_MISSING``, ``_VERIFIED`` (verified) or ``_WRITING`` (being written)."""
    given_up: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def chunk(self, number: int) -> memoryview:
        size = self.record.chunk_bytes
        return self.view[number * size : min((number + 1) * size, self.record.size_bytes)]

    def expected(self, number: int) -> bytes:
        return self.record.checksums[8 * number : 8 * number + 8]

    def take(self, number: int) -> bool:
        """Verify the chunk in the slot and record its state; return whether it is right."""
        right = checksums.chunk_checksum(self.chunk(number)).to_bytes(8, "little") == self.expected(number)
        self.done[number] = _VERIFIED if right else _MISSING
        return right

    def begin(self, number: int) -> bool:
        """Claim a chunk for writing; return ``False`` if it is claimed, verified or no longer wanted."""
        with self.lock:
            if self.given_up or self.done[number] != _MISSING:
                return False
            self.done[number] = _WRITING
            return True

    def end(self, number: int) -> bool:
        """End the write of a chunk; return whether the slot can be released now."""
        with self.lock:
            if self.done[number] == _WRITING:
                self.done[number] = _MISSING
            return self.given_up and _WRITING not in self.done

    def give_up(self) -> bool:
        """Abort the transfer; return whether the slot can be released now, or is by the last writer."""
        with self.lock:
            self.given_up = True
            return _WRITING not in self.done


class ReplicaReceiver:
    """All replicas that this node is receiving. Thread-safe."""

    def __init__(self, store: NodeStore, me: str) -> None:
        self._store = store
        self._me = me
        self._lock = threading.Lock()
        self._transfers: dict[str, _Transfer] = {}
        self._maps: dict[str, FileMapping] = {}
        """Mapped slots. They stay mapped, so that the next replica in a slot finds its pages."""
        self.damaged_chunks = 0

    def handle_offer(self, job: str, sender: str, offer: OfferReplica) -> OfferReply:
        record = offer.record
        if record.key.job != job:
            raise RequestError(f"{record.key} was offered on a connection of job {job}")
        if offer.resume_point is not None:
            self._store.jobs.incarnations.learn_resume_point(job, offer.resume_point)
        blobs = tuple(name for name in offer.blobs if name not in set(self._store.blobs.list_names(job)))
        lease = self._store.replicas.begin_replica(record, whole=offer.committed)
        if lease is None:
            self._store.replicas.merge_holders(record.key, offer.holders, me=self._me)
            return OfferReply("", (), blobs)
        try:
            transfer = self._begin(sender, record, lease, offer.holders)
        except BaseException:
            self._store.release(lease.id)
            raise
        # The next version needs another slot of this part.
        self._store.reserve(job, record.key.part, lease.size_bytes)
        name = secrets.token_hex(8)
        with self._lock:
            full = len(self._transfers) >= _MAX_TRANSFERS
            if not full:
                self._transfers[name] = transfer
        if full:
            self._store.release(lease.id)
            raise RequestError(f"this node already receives {_MAX_TRANSFERS} copies, which is the limit")
        return OfferReply(name, _runs(transfer.done), blobs)

    def _begin(self, sender: str, record: ShardRecord, lease: Lease, holders: tuple[str, ...]) -> _Transfer:
        try:
            view = self._map_slot(lease, record.size_bytes).view[: record.size_bytes]
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_ROOM:
                raise UnavailableError(f"cannot receive a copy of {record.key} now: {error}") from error
            raise ArenaFullError(f"no memory for a copy of {record.key}: {error}") from error
        count = checksums.chunk_count(record.size_bytes, record.chunk_bytes)
        transfer = _Transfer(sender, record, lease, holders, view, bytearray(count))
        self._copy_from_older(transfer)
        return transfer

    def _map_slot(self, lease: Lease, size_bytes: int) -> FileMapping:
        known = self._mapping(lease.slot)
        if known is None or lease.prefaulted_bytes < size_bytes:
            with closing_fd(self._store.open_slot(lease.slot)) as fd:
                prefault_file(fd, size_bytes, lambda: False, start=lease.prefaulted_bytes)
                known = known or FileMapping(fd, lease.slot_bytes, writable=True)
            with self._lock:
                self._maps[lease.slot] = known
        return known

    def _mapping(self, slot_name: str) -> FileMapping | None:
        with self._lock:
            for slot, mapping in list(self._maps.items()):
                if slot not in self._store.table.slots:
                    del self._maps[slot]
                    with contextlib.suppress(BufferError):
                        mapping.close()
            return self._maps.get(slot_name)

    def _copy_from_older(self, transfer: _Transfer) -> None:
        """Copy chunks that an older version of the same part has, such as frozen layers and unused embeddings."""
        record = transfer.record
        found = self._store.replicas.previous_version(record.key)
        if found is None:
            return
        older, fd = found
        with closing_fd(fd):
            self._copy_matching_chunks(transfer, older, fd)

    def _copy_matching_chunks(self, transfer: _Transfer, older: ShardRecord, fd: int) -> None:
        record = transfer.record
        if older.chunk_bytes != record.chunk_bytes:
            return
        sums = older.checksums
        have = {sums[8 * n : 8 * n + 8]: n for n in range(len(sums) // 8)}
        wanted = [(n, have[transfer.expected(n)]) for n in range(len(transfer.done)) if transfer.expected(n) in have]
        try:
            for number, at in wanted:
                chunk = transfer.chunk(number)
                if os.preadv(fd, [chunk], at * record.chunk_bytes) == len(chunk):
                    transfer.take(number)
        except OSError as error:  # unread chunks are sent by the peer
            log.debug("%s: nothing more is taken over from an older version: %s", record.key, error)

    def receive_chunk(
        self, sender: str, name: str, number: int, channel: MessageChannel, payload_bytes: int
    ) -> int | None:
        """Receive one chunk from the connection; return its number if it does not match the record."""
        transfer = self._transfer(sender, name)
        if transfer is None:  # aborted meanwhile: the sender learns it from the flush or commit
            channel.discard()
            return None
        if not 0 <= number < len(transfer.done) or payload_bytes != len(transfer.chunk(number)):
            raise ProtocolError(f"{sender} sent {payload_bytes} bytes as chunk {number} of {transfer.record.key}")
        if not transfer.begin(number):
            channel.discard()  # another connection delivers the same chunk
            return None
        try:
            channel.receive_into([transfer.chunk(number)])
            failpoint("peer.receiving")
            right = transfer.take(number)
        finally:
            if transfer.end(number):
                self._store.release(transfer.lease.id)
        if right:
            return None
        self.damaged_chunks += 1
        log.warning("chunk %d of %s came from %s damaged", number, transfer.record.key, sender)
        return number

    def commit(self, sender: str, name: str) -> ShardKey:
        """Seal the replica and return its key; raise if chunks are missing."""
        transfer = self._transfer(sender, name)
        if transfer is None:
            raise LeaseLostError(f"transfer {name} is unknown: it was aborted")
        missing = len(transfer.done) - transfer.done.count(_VERIFIED)
        if missing:
            raise ShardDamagedError(f"{transfer.record.key}: {missing} chunks are missing or damaged")
        with self._lock:
            if self._transfers.pop(name, None) is None:
                raise LeaseLostError(f"transfer {name} was aborted")
        try:
            self._store.replicas.seal_replica(
                transfer.lease.id, transfer.record, holders_to_store(self._me, transfer.holders)
            )
            failpoint("replica.committed")
        except BaseException:
            self._store.release(transfer.lease.id)
            raise
        return transfer.record.key

    def abort(self, sender: str, name: str) -> None:
        """Abort the sender's transfer and release its slot."""
        transfer = self._transfer(sender, name)
        if transfer is None:
            return
        with self._lock:
            self._transfers.pop(name, None)
        if transfer.give_up():
            self._store.release(transfer.lease.id)

    def _transfer(self, sender: str, name: str) -> _Transfer | None:
        with self._lock:
            transfer = self._transfers.get(name)
        return transfer if transfer is not None and transfer.sender == sender else None

    def close(self) -> None:
        with self._lock:
            transfers, self._transfers = self._transfers, {}
            maps, self._maps = self._maps, {}
        for transfer in transfers.values():
            transfer.view.release()
            self._store.release(transfer.lease.id)
        for mapping in maps.values():
            with contextlib.suppress(BufferError):
                mapping.close()


def _runs(done: bytearray) -> tuple[tuple[int, int], ...]:
    """Return the missing chunks as runs ``[first, stop)``."""
    found: list[tuple[int, int]] = []
    for number, state in enumerate(done):
        if state:
            continue
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return tuple(found)
