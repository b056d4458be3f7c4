"""Shards served to peers by range, and replicas received from peers into slots, verified chunk by chunk.

::

    offer ──> what is missing ──> chunk, chunk, … (several connections) ──> flush ──> commit: sealed
                │
                └─ what an older version here has already is copied over, and compared like the rest
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
from peerstore.shard_records import Lease, Pin, ShardKey, ShardRecord
from peerstore.store.arena import FileMapping, closing_fd, prefault_file
from peerstore.store.node_store import NodeStore
from peerstore.store.received_replicas import holders_to_store
from peerstore.store.shards import raise_as_unreadable
from peerstore.transport.base import MAX_PAYLOAD_BYTES, FileSlice, MessageChannel

log = logging.getLogger(__name__)


def is_chunk_aligned(start: int, stop: int, *, size_bytes: int, chunk_bytes: int) -> bool:
    """Whether a range is made of whole chunks, so that whoever reads it can compare it with the seal itself."""
    return start % chunk_bytes == 0 and (stop % chunk_bytes == 0 or stop == size_bytes)


class RangeServer:
    """Answers reads of one node's store."""

    def __init__(self, store: NodeStore) -> None:
        self._store = store
        self.sent_bytes = 0

    def open(self, job: str, read: ReadRanges) -> RangeReply:
        """Pin the shard, and have what is asked for ready to be sent."""
        if read.key.job != job:
            raise RequestError(f"{read.key} was asked for on a connection of job {job}")
        pin = self._store.pin(read.key)
        try:
            _check(read, pin.record)
        except BaseException:
            pin.close()
            self._store.unpin(pin.id)
            raise
        return RangeReply(self._store, pin, read)

    def try_verify_chunks(self, key: ShardKey, chunks: Sequence[tuple[int, int]]) -> None:
        """What was to be sent is not what was sealed: look again, and keep what cannot be looked at."""
        try:
            self.verify_chunks(key, chunks)
        except PeerStoreError as error:
            log.warning("%s was not looked at again: %s", key, error)

    def verify_chunks(self, key: ShardKey, chunks: Sequence[tuple[int, int]]) -> bool:
        """Another node got something else than was sealed: look again; whether it is damaged here."""
        return any(self._store.verify(key, (first, stop)) for first, stop in chunks)


class RangeReply:
    """One answer to a read: the digests, and the bytes behind them. Close it when it was sent."""

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
        """Whole chunks go as they are: the reader compares them with the seal. Of others the chunk is compared here."""
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
    """Verified bytes of a shard; ranges that follow each other in one chunk cost one look at it."""

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
        got = 0
        with raise_as_unreadable(record.key):
            data = memoryview(bytearray(end - start))
            while got < len(data):
                count = os.preadv(self._fd, [data[got:]], start + got)
                if not count:
                    raise ShardDamagedError(f"{record.key} ends at byte {start + got} of {record.size_bytes}")
                got += count
        expected = record.checksums[8 * first : 8 * stop]
        bad = checksums.mismatched_chunks(data, expected, chunk_bytes=record.chunk_bytes)
        if bad:
            raise ShardDamagedError(f"{record.key}: chunk {first + bad[0]} differs from what was sealed")
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
_MISSING, _HERE, _COMING = 0, 1, 2


@dataclass
class _Transfer:
    """One copy on its way in."""

    sender: str
    record: ShardRecord
    lease: Lease
    holders: tuple[str, ...]
    view: memoryview
    done: bytearray
    """For each chunk one of ``_MISSING``, ``_HERE`` (it has been compared) and ``_COMING``."""
    given_up: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def chunk(self, number: int) -> memoryview:
        size = self.record.chunk_bytes
        return self.view[number * size : min((number + 1) * size, self.record.size_bytes)]

    def expected(self, number: int) -> bytes:
        return self.record.checksums[8 * number : 8 * number + 8]

    def take(self, number: int) -> bool:
        """Compare what lies in the slot; whether it is right."""
        right = checksums.chunk_checksum(self.chunk(number)).to_bytes(8, "little") == self.expected(number)
        self.done[number] = _HERE if right else _MISSING
        return right

    def begin(self, number: int) -> bool:
        """Whether somebody may write this chunk now: only one at a time does, and nobody after it was compared."""
        with self.lock:
            if self.given_up or self.done[number] != _MISSING:
                return False
            self.done[number] = _COMING
            return True

    def end(self, number: int) -> bool:
        """The chunk is not written any more. Whether the slot can be given back now."""
        with self.lock:
            if self.done[number] == _COMING:
                self.done[number] = _MISSING
            return self.given_up and _COMING not in self.done

    def give_up(self) -> bool:
        """Nothing more is written. Whether the slot can be given back: else whoever still writes into it does that."""
        with self.lock:
            self.given_up = True
            return _COMING not in self.done


class ReplicaReceiver:
    """Every copy that is on its way to this node. Any thread may call."""

    def __init__(self, store: NodeStore, me: str) -> None:
        self._store = store
        self._me = me
        self._lock = threading.Lock()
        self._transfers: dict[str, _Transfer] = {}
        self._maps: dict[str, FileMapping] = {}
        """Slots stay mapped: the next copy into one then finds its pages there."""
        self.damaged_chunks = 0

    def handle_offer(self, job: str, sender: str, offer: OfferReplica) -> OfferReply:
        record = offer.record
        if record.key.job != job:
            raise RequestError(f"{record.key} was offered on a connection of job {job}")
        if offer.resume_point is not None:
            self._store.jobs.incarnations.learn_resume_point(job, offer.resume_point)
        blobs = tuple(name for name in offer.blobs if name not in set(self._store.list_blobs(job)))
        lease = self._store.begin_replica(record, whole=offer.committed)
        if lease is None:
            self._store.replicas.merge_holders(record.key, offer.holders, me=self._me)
            return OfferReply("", (), blobs)
        try:
            transfer = self._begin(sender, record, lease, offer.holders)
        except BaseException:
            self._store.release(lease.id)
            raise
        # The next version will need the other slot of this part.
        self._store.reserve(job, record.key.part, lease.size_bytes)
        name = secrets.token_hex(8)
        with self._lock:
            full = len(self._transfers) >= _MAX_TRANSFERS
            if not full:
                self._transfers[name] = transfer
        if full:
            self._store.release(lease.id)
            raise RequestError(f"{_MAX_TRANSFERS} copies are on their way to this node already")
        return OfferReply(name, _runs(transfer.done), blobs)

    def _begin(self, sender: str, record: ShardRecord, lease: Lease, holders: tuple[str, ...]) -> _Transfer:
        try:
            view = self._mapped(lease, record.size_bytes).view[: record.size_bytes]
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_ROOM:
                raise UnavailableError(f"no copy of {record.key} can be taken in now: {error}") from error
            raise ArenaFullError(f"no memory for a copy of {record.key}: {error}") from error
        count = checksums.chunk_count(record.size_bytes, record.chunk_bytes)
        transfer = _Transfer(sender, record, lease, holders, view, bytearray(count))
        self._reuse(transfer)
        return transfer

    def _mapped(self, lease: Lease, size_bytes: int) -> FileMapping:
        known = self._known(lease.slot)
        if known is None or lease.prefaulted_bytes < size_bytes:
            with closing_fd(self._store.open_slot(lease.slot)) as fd:
                prefault_file(fd, size_bytes, lambda: False, start=lease.prefaulted_bytes)
                known = known or FileMapping(fd, lease.slot_bytes, writable=True)
            with self._lock:
                self._maps[lease.slot] = known
        return known

    def _known(self, slot_name: str) -> FileMapping | None:
        with self._lock:
            for slot, mapping in list(self._maps.items()):
                if slot not in self._store.table:
                    del self._maps[slot]
                    with contextlib.suppress(BufferError):
                        mapping.close()
            return self._maps.get(slot_name)

    def _reuse(self, transfer: _Transfer) -> None:
        """Fill in what an older version of the same part has: frozen layers, embeddings nobody looked up."""
        record = transfer.record
        found = self._store.replicas.previous_version(record.key)
        if found is None:
            return
        older, fd = found
        with closing_fd(fd):
            self._take_over(transfer, older, fd)

    def _take_over(self, transfer: _Transfer, older: ShardRecord, fd: int) -> None:
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
        except OSError as error:  # what could not be read is sent
            log.debug("%s: nothing more is taken over from an older version: %s", record.key, error)

    def receive_chunk(
        self, sender: str, name: str, number: int, channel: MessageChannel, payload_bytes: int
    ) -> int | None:
        """Take one chunk off the connection; its number, when it is not what the record says."""
        transfer = self._of(sender, name)
        if transfer is None:  # taken back in between: the sender is told when it asks
            channel.discard()
            return None
        if not 0 <= number < len(transfer.done) or payload_bytes != len(transfer.chunk(number)):
            raise ProtocolError(f"{sender} sent {payload_bytes} bytes as chunk {number} of {transfer.record.key}")
        if not transfer.begin(number):
            channel.discard()  # twice is once
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
        """The copy counts from here on; whose it is."""
        transfer = self._of(sender, name)
        if transfer is None:
            raise LeaseLostError(f"transfer {name} is not known: it was given up")
        missing = len(transfer.done) - transfer.done.count(_HERE)
        if missing:
            raise ShardDamagedError(f"{transfer.record.key}: {missing} chunks are missing or damaged")
        with self._lock:
            if self._transfers.pop(name, None) is None:
                raise LeaseLostError(f"transfer {name} was given up")
        try:
            self._store.seal_replica(transfer.lease.id, transfer.record, holders_to_store(self._me, transfer.holders))
            failpoint("replica.committed")
        except BaseException:
            self._store.release(transfer.lease.id)
            raise
        return transfer.record.key

    def abort(self, sender: str, name: str) -> None:
        """The sender gives up: the slot is free again."""
        transfer = self._of(sender, name)
        if transfer is None:
            return
        with self._lock:
            self._transfers.pop(name, None)
        if transfer.give_up():
            self._store.release(transfer.lease.id)

    def _of(self, sender: str, name: str) -> _Transfer | None:
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
    """The chunks that are not there, as runs."""
    found: list[tuple[int, int]] = []
    for number, there in enumerate(done):
        if there:
            continue
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return tuple(found)
