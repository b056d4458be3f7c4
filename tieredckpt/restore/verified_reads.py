"""Bytes of stored shards, verified by checksum before use, from memory or the object store."""

from __future__ import annotations

import contextlib
import enum
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from typing_extensions import Buffer

from peerstore import checksums
from peerstore.client.store_api import Store
from peerstore.errors import PeerStoreError, ShardDamagedError, ShardNotFoundError, ShardUnreadableError
from peerstore.shard_records import Pin, VersionId
from peerstore.store.arena import FileMapping
from tieredckpt.durable.object_store import ObjectStore
from tieredckpt.errors import CheckpointDamagedError, TierUnavailableError
from tieredckpt.format.manifest import ShardIndex, decompress_chunk
from tieredckpt.restore.step_index import ByteRange, chunk_ranges

log = logging.getLogger(__name__)

_WINDOW_BYTES = 32 << 20


class VerifiedBytes(NamedTuple):
    """Bytes of a shard from ``start`` that match their checksums."""

    start: int
    data: memoryview


class ShardCheck(enum.Enum):
    """Result of the verification of a shard in this node's memory."""

    GOOD = "good"
    EVICTED = "given up while it was looked for"
    DAMAGED = "damaged"
    UNREADABLE = "kept, but cannot be read for now"


class ReadMismatchError(Exception):
    """Bytes of a shard in this node's memory differ from its checksums, as read by this process."""

    def __init__(self, part: int, ranges: Sequence[ByteRange]) -> None:
        super().__init__(f"part {part}: {len(ranges)} ranges of bytes are not what was sealed")
        self.part = part
        self.ranges = ranges


class PinnedShards:
    """Shards of one step in this node's memory, pinned against eviction while they are read."""

    def __init__(self, store: Store, group: VersionId) -> None:
        self._store = store
        self.version_id = group
        self._pins: dict[int, Pin] = {}
        self._maps: dict[int, FileMapping] = {}
        self._checked: dict[int, set[tuple[int, int]]] = {}

    def verify(self, shard: ShardIndex, ranges: Sequence[ByteRange], *, again: bool = False) -> ShardCheck:
        """Pin the shard, and let the agent verify its bytes in ``ranges`` once, or ``again``."""
        part = shard.key.part
        wanted = chunk_ranges(ranges, shard.chunk_bytes)
        try:
            if part not in self._pins:
                self._pins[part] = self._store.pin(shard.key)
            done = self._checked.setdefault(part, set())
            for chunks in wanted:
                if again or not any(first <= chunks[0] and chunks[1] <= stop for first, stop in done):
                    if self._store.verify(shard.key, chunks):
                        return ShardCheck.DAMAGED
                    done.add(chunks)
        except ShardNotFoundError:
            return ShardCheck.EVICTED
        except ShardDamagedError:
            return ShardCheck.DAMAGED
        except ShardUnreadableError as error:
            log.warning("%s", error)
            return ShardCheck.UNREADABLE
        except PeerStoreError as error:
            raise TierUnavailableError(f"{shard.key} cannot be verified: {error}") from error
        return ShardCheck.GOOD

    def open(self, shard: ShardIndex) -> int:
        """Pin the shard and return its file; raise :class:`TierUnavailableError` if it cannot be read."""
        part = shard.key.part
        if part not in self._pins:
            try:
                self._pins[part] = self._store.pin(shard.key)
            except PeerStoreError as error:
                raise TierUnavailableError(f"{shard.key} cannot be read again: {error}") from error
        return self._pins[part].fd

    def file(self, part: int) -> int:
        """Return the pinned shard's file, because a single read costs less than a new mapping."""
        return self._pins[part].fd

    def view(self, part: int) -> memoryview:
        return self._mapping(part).view

    def _mapping(self, part: int) -> FileMapping:
        known = self._maps.get(part)
        if known is None:
            pin = self._pins[part]
            try:
                known = self._maps[part] = FileMapping(pin.fd, pin.record.size_bytes)
            except (OSError, ValueError) as error:
                raise TierUnavailableError(f"{pin.record.key} cannot be mapped: {error}") from error
        return known

    def release(self) -> bool:
        """Unpin all shards; return ``False`` if one was not pinned all the time, so the reads are unproven."""
        held = True
        for mapping in self._maps.values():
            with contextlib.suppress(BufferError):  # a view still exists and is collected later
                mapping.close()
        for pin in self._pins.values():
            pin.close()
            try:
                held &= self._store.unpin(pin.id)
            except PeerStoreError:
                held = False
        self._maps.clear()
        self._pins.clear()
        self._checked.clear()
        return held


def read_durable_shard(store: ObjectStore, shard: ShardIndex, ranges: Sequence[ByteRange]) -> Iterator[VerifiedBytes]:
    """Yield the chunks that hold ``ranges``, in windows of bounded memory."""
    offsets = _chunk_offsets(shard)
    window: list[tuple[int, int]] = []
    size = 0
    for first, stop in chunk_ranges(ranges, shard.chunk_bytes):
        step = max(1, _WINDOW_BYTES // shard.chunk_bytes)
        for start in range(first, stop, step):
            chunks = (start, min(stop, start + step))
            window.append(chunks)
            size += (chunks[1] - chunks[0]) * shard.chunk_bytes
            if size >= _WINDOW_BYTES:
                yield from _read_window(store, shard, window, offsets)
                window, size = [], 0
    if window:
        yield from _read_window(store, shard, window, offsets)


def damaged_chunks(store: ObjectStore, shard: ShardIndex, advance: Callable[[int], None] = lambda _: None) -> list[int]:
    """Read a shard's object; return the chunks that differ from their checksums or are missing.

    A missing object raises an error, because it is not damage.
    """
    count = checksums.chunk_count(shard.size_bytes, shard.chunk_bytes)
    step = max(1, _WINDOW_BYTES // shard.chunk_bytes)
    offsets = _chunk_offsets(shard)
    bad: list[int] = []
    for first in range(0, count, step):
        stop = min(count, first + step)
        if _differs(store, shard, (first, stop), offsets):
            bad += [chunk for chunk in range(first, stop) if _differs(store, shard, (chunk, chunk + 1), offsets)]
        advance(min(stop * shard.chunk_bytes, shard.size_bytes) - first * shard.chunk_bytes)
    return bad


def _differs(store: ObjectStore, shard: ShardIndex, chunks: tuple[int, int], offsets: Sequence[int]) -> bool:
    bad: list[int] = []
    try:
        (buffer,) = store.get_ranges(shard.object, [_object_range(chunks, offsets)])
    except CheckpointDamagedError:  # the object ends early
        return True
    _verify_chunks(shard, chunks, buffer, bad)
    return bool(bad)


def _read_window(
    store: ObjectStore, shard: ShardIndex, window: Sequence[tuple[int, int]], offsets: Sequence[int]
) -> Iterator[VerifiedBytes]:
    for again in (False, True):
        buffers = store.get_ranges(shard.object, [_object_range(chunks, offsets) for chunks in window])
        bad: list[int] = []
        found = [_verify_chunks(shard, chunks, buffer, bad) for chunks, buffer in zip(window, buffers, strict=True)]
        if not bad:
            yield from found
            return
        # The object may be intact and the transfer faulty, so one retry comes before it counts as damaged.
        log.warning(
            "%s: chunk %d of %s differs%s", shard.key, bad[0], shard.object, " again" if again else ", asking again"
        )
    raise CheckpointDamagedError(
        f"{shard.key}: {len(bad)} chunks of {shard.object} in {store.url} are not what was saved, first: {bad[0]}"
    )


def _chunk_offsets(shard: ShardIndex) -> Sequence[int]:
    """Return the offset of each chunk in the object, and the end of the last one."""
    if shard.encoding == "zstd":
        return [*itertools.accumulate(shard.frames, initial=0)]
    return [*range(0, shard.size_bytes, shard.chunk_bytes), shard.size_bytes]


def _object_range(chunks: tuple[int, int], offsets: Sequence[int]) -> tuple[int, int]:
    last = len(offsets) - 1  # a range behind the end returns too few bytes, which count as damage
    return offsets[min(chunks[0], last)], offsets[min(chunks[1], last)]


def _verify_chunks(shard: ShardIndex, chunks: tuple[int, int], buffer: Buffer, bad: list[int]) -> VerifiedBytes:
    first, stop = chunks
    start = first * shard.chunk_bytes
    size = min(stop * shard.chunk_bytes, shard.size_bytes) - start
    data = memoryview(buffer).cast("B")
    if shard.encoding == "zstd":
        data = memoryview(_decompress(shard, chunks, data, bad))
    if len(data) != size:
        bad.extend(range(first, stop))
        return VerifiedBytes(start, data)
    expected = shard.checksums[8 * first : 8 * stop]
    bad.extend(first + chunk for chunk in checksums.mismatched_chunks(data, expected, chunk_bytes=shard.chunk_bytes))
    return VerifiedBytes(start, data)


def _decompress(shard: ShardIndex, chunks: tuple[int, int], data: memoryview, bad: list[int]) -> bytes:
    import zstandard

    out, at = [], 0
    for chunk in range(*chunks):
        size = min(shard.chunk_bytes, shard.size_bytes - chunk * shard.chunk_bytes)
        frame = data[at : at + shard.frames[chunk]]
        at += shard.frames[chunk]
        try:
            out.append(decompress_chunk(frame, size))
        except zstandard.ZstdError:
            bad.append(chunk)
            return b""
    return b"".join(out)
