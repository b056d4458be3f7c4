"""Ranges of sealed shards for other nodes: compared with the seal before they leave, as few bytes as were asked for."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import xxhash

from peerstore import checksum
from peerstore.errors import PeerStoreError, RequestError, ShardDamagedError
from peerstore.peers.messages import MAX_RANGES, Read, Sent
from peerstore.reading import unreadable
from peerstore.records import Pin, ShardKey, ShardRecord
from peerstore.store import NodeStore
from peerstore.transport.seam import MAX_PAYLOAD_BYTES, FileSlice


def aligned(start: int, stop: int, *, size_bytes: int, chunk_bytes: int) -> bool:
    """Whether a range is made of whole chunks, so that whoever reads it can compare it with the seal itself."""
    return start % chunk_bytes == 0 and (stop % chunk_bytes == 0 or stop == size_bytes)


log = logging.getLogger(__name__)


class Lending:
    """Answers reads of one node's store."""

    def __init__(self, store: NodeStore) -> None:
        self._store = store
        self.sent_bytes = 0

    def prepare(self, job: str, read: Read) -> Loan:
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
        return Loan(self._store, pin, read)

    def suspect(self, key: ShardKey, chunks: Sequence[tuple[int, int]]) -> None:
        """What was to be sent is not what was sealed: look again, and keep what cannot be looked at."""
        try:
            self.suspected(key, chunks)
        except PeerStoreError as error:
            log.warning("%s was not looked at again: %s", key, error)

    def suspected(self, key: ShardKey, chunks: Sequence[tuple[int, int]]) -> bool:
        """Another node got something else than was sealed: look again; whether it is damaged here."""
        return any(self._store.verify(key, (first, stop)) for first, stop in chunks)


class Loan:
    """One answer to a read: the digests, and the bytes behind them. Close it when it was sent."""

    def __init__(self, store: NodeStore, pin: Pin, read: Read) -> None:
        self._store = store
        self._pin = pin
        self._record = pin.record
        self._read = read
        self.payload: list[memoryview | FileSlice] = []
        self.size_bytes = 0

    @property
    def chunk_bytes(self) -> int:
        return self._record.chunk_bytes

    def fill(self) -> Sent:
        """Whole chunks go as they are: the reader compares them with the seal. Of others the chunk is compared here."""
        digests = []
        window = _Window(self._pin.fd, self._record)
        for start, stop in self._read.ranges:
            self.size_bytes += stop - start
            if aligned(start, stop, size_bytes=self._record.size_bytes, chunk_bytes=self._record.chunk_bytes):
                self.payload.append(FileSlice(self._pin.fd, start, stop - start))
            else:
                data = window.verified(start, stop)
                digests.append(xxhash.xxh3_64_digest(data)[::-1])
                self.payload.append(data)
        return Sent(b"".join(digests))

    def close(self) -> None:
        try:
            self._pin.close()
        finally:
            self._store.unpin(self._pin.id)


class _Window:
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
        with unreadable(record.key):
            data = memoryview(bytearray(end - start))
            while got < len(data):
                count = os.preadv(self._fd, [data[got:]], start + got)
                if not count:
                    raise ShardDamagedError(f"{record.key} ends at byte {start + got} of {record.size_bytes}")
                got += count
        expected = record.checksums[8 * first : 8 * stop]
        bad = checksum.mismatches(data, expected, chunk_bytes=record.chunk_bytes)
        if bad:
            raise ShardDamagedError(f"{record.key}: chunk {first + bad[0]} differs from what was sealed")
        self._first, self._stop, self._data = first, stop, data.toreadonly()


def _check(read: Read, record: ShardRecord) -> None:
    if checksum.digest(record.checksums) != read.checksums:
        raise ShardDamagedError(f"{read.key} has other checksums here")
    if len(read.ranges) > MAX_RANGES:
        raise RequestError(f"{len(read.ranges)} ranges in one read, at most {MAX_RANGES} are answered")
    total = 0
    for start, stop in read.ranges:
        if not 0 <= start < stop <= record.size_bytes:
            raise RequestError(f"{read.key}: bytes {start} to {stop} of {record.size_bytes}")
        total += stop - start
    if total > MAX_PAYLOAD_BYTES // 4:
        raise RequestError(f"{read.key}: {total} bytes in one read")
