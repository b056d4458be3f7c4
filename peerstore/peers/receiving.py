"""Copies of other nodes' shards, taken in: straight from the connection into a slot, every chunk compared at once.

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
from dataclasses import dataclass, field

from peerstore import checksum
from peerstore.copies import kept_for
from peerstore.crashpoints import reach
from peerstore.errors import (
    ArenaFullError,
    LeaseLostError,
    ProtocolError,
    RequestError,
    ShardDamagedError,
    UnavailableError,
)
from peerstore.pages import Mapping, closing, populate_file
from peerstore.peers.messages import Offer, Wanted
from peerstore.records import Lease, ShardKey, ShardRecord
from peerstore.store import NodeStore
from peerstore.transport.seam import Channel

log = logging.getLogger(__name__)

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
        right = checksum.digest(self.chunk(number)).to_bytes(8, "little") == self.expected(number)
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


class Receiving:
    """Every copy that is on its way to this node. Any thread may call."""

    def __init__(self, store: NodeStore, me: str) -> None:
        self._store = store
        self._me = me
        self._lock = threading.Lock()
        self._transfers: dict[str, _Transfer] = {}
        self._maps: dict[str, Mapping] = {}
        """Slots stay mapped: the next copy into one then finds its pages there."""
        self.reused_bytes = 0
        self.damaged_chunks = 0

    def offer(self, job: str, sender: str, offer: Offer) -> Wanted:
        record = offer.record
        if record.key.job != job:
            raise RequestError(f"{record.key} was offered on a connection of job {job}")
        if offer.base is not None:
            self._store.copies.learn(job, offer.base)
        blobs = tuple(name for name in offer.blobs if name not in set(self._store.blobs(job)))
        lease = self._store.begin_copy(record, whole=offer.whole)
        if lease is None:
            self._store.copies.offered(record.key, offer.holders, me=self._me)
            return Wanted("", (), blobs)
        try:
            transfer = self._begin(sender, record, lease, offer.holders)
        except BaseException:
            self._store.abandon(lease.id)
            raise
        # The next version will need the other slot of this part.
        self._store.reserve(job, record.key.part, lease.size_bytes)
        name = secrets.token_hex(8)
        with self._lock:
            full = len(self._transfers) >= _MAX_TRANSFERS
            if not full:
                self._transfers[name] = transfer
        if full:
            self._store.abandon(lease.id)
            raise RequestError(f"{_MAX_TRANSFERS} copies are on their way to this node already")
        return Wanted(name, _runs(transfer.done), blobs)

    def _begin(self, sender: str, record: ShardRecord, lease: Lease, holders: tuple[str, ...]) -> _Transfer:
        try:
            view = self._mapped(lease, record.size_bytes).view[: record.size_bytes]
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_ROOM:
                raise UnavailableError(f"no copy of {record.key} can be taken in now: {error}") from error
            raise ArenaFullError(f"no memory for a copy of {record.key}: {error}") from error
        count = checksum.chunk_count(record.size_bytes, record.chunk_bytes)
        transfer = _Transfer(sender, record, lease, holders, view, bytearray(count))
        self._reuse(transfer)
        return transfer

    def _mapped(self, lease: Lease, size_bytes: int) -> Mapping:
        known = self._known(lease.slot)
        if known is None or lease.warm_bytes < size_bytes:
            with closing(self._store.open_slot(lease.slot)) as fd:
                populate_file(fd, size_bytes, lambda: False, start=lease.warm_bytes)
                known = known or Mapping(fd, lease.slot_bytes, writable=True)
            with self._lock:
                self._maps[lease.slot] = known
        return known

    def _known(self, slot_name: str) -> Mapping | None:
        with self._lock:
            for slot, mapping in list(self._maps.items()):
                if not self._store.has_slot(slot):
                    del self._maps[slot]
                    with contextlib.suppress(BufferError):
                        mapping.close()
            return self._maps.get(slot_name)

    def _reuse(self, transfer: _Transfer) -> None:
        """Fill in what an older version of the same part has: frozen layers, embeddings nobody looked up."""
        record = transfer.record
        found = self._store.copies.like(record.key)
        if found is None:
            return
        older, fd = found
        with closing(fd):
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
                if os.preadv(fd, [chunk], at * record.chunk_bytes) == len(chunk) and transfer.take(number):
                    self.reused_bytes += len(chunk)
        except OSError as error:  # what could not be read is sent
            log.debug("%s: nothing more is taken over from an older version: %s", record.key, error)

    def chunk(self, sender: str, name: str, number: int, channel: Channel, payload_bytes: int) -> int | None:
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
            reach("peer.receiving")
            right = transfer.take(number)
        finally:
            if transfer.end(number):
                self._store.abandon(transfer.lease.id)
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
            self._store.seal_copy(transfer.lease.id, transfer.record, kept_for(self._me, transfer.holders))
            reach("peer.committed")
        except BaseException:
            self._store.abandon(transfer.lease.id)
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
            self._store.abandon(transfer.lease.id)

    def _of(self, sender: str, name: str) -> _Transfer | None:
        with self._lock:
            transfer = self._transfers.get(name)
        return transfer if transfer is not None and transfer.sender == sender else None

    @property
    def open(self) -> int:
        with self._lock:
            return len(self._transfers)

    def close(self) -> None:
        with self._lock:
            transfers, self._transfers = self._transfers, {}
            maps, self._maps = self._maps, {}
        for transfer in transfers.values():
            transfer.view.release()
            self._store.abandon(transfer.lease.id)
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
