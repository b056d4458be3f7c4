"""Copies out of a sealed shard, compared with its checksums in the same pass.

A thread reads a block of a chunk into its target and hashes the target while it is in the core's cache. So every byte
is read once, and the comparison covers the bytes in the targets.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import xxhash

from tieredckpt.format.manifest import ShardIndex
from tieredckpt.tensors.slot_copy import Copier, MemoryCopy, copy_memory, memory_at_address, read_into

_STRIDE_BYTES = 256 << 10
"""Bytes to read and hash at a time: a core's cache holds them, and threads need few Python calls."""
_BYTES_PER_THREAD = 2 << 20
"""Bytes for which another thread pays off: fewer than for a copy, because hashing takes longer."""


class ShardFile(NamedTuple):
    """Open shard and its mapping in this process."""

    fd: int
    address: int = 0
    """Address of a mapping with populated pages, or 0. A new mapping would take as long as a read."""


def read_shard(file: ShardFile, target: int, offset: int, size_bytes: int) -> None:
    """Read bytes of a shard to an address; raise ``OSError`` if the file ends too early."""
    if file.address:
        copy_memory(target, file.address + offset, size_bytes)
    else:
        read_into(file.fd, target, offset, size_bytes)


class _ChunkCopy:
    """One chunk of a shard and the targets of its bytes. Bytes without a target are only hashed."""

    __slots__ = ("number", "segments")

    def __init__(self, number: int) -> None:
        self.number = number
        self.segments: list[MemoryCopy] = []

    def run(self, file: ShardFile, shard: ShardIndex, then: Callable[[MemoryCopy], None] | None) -> int:
        """Do the copies, and ``then`` after each; return the checksum of the chunk."""
        at = self.number * shard.chunk_bytes
        stop = min(at + shard.chunk_bytes, shard.size_bytes)
        state = xxhash.xxh3_64()
        for segment in self.segments:
            target, source, size = segment
            _hash_gap(file, at, source, state)
            for done in range(0, size, _STRIDE_BYTES):
                count = min(size - done, _STRIDE_BYTES)
                read_shard(file, target + done, source + done, count)
                state.update(memory_at_address(target + done, count))
            if then is not None:
                then(segment)
            at = source + size
        _hash_gap(file, at, stop, state)
        return state.intdigest()


def copy_verified(
    copier: Copier,
    file: ShardFile,
    shard: ShardIndex,
    moves: Sequence[MemoryCopy],
    *,
    then: Callable[[MemoryCopy], None] | None = None,
) -> list[int]:
    """Do all moves out of a shard's file; return the numbers of damaged or unreadable chunks.

    A chunk is damaged if it differs from the seal; the bytes in its targets must not be used. The sources of ``moves``
    are offsets in the file. After each copy within a chunk, its thread calls ``then`` with the copy.
    """
    seal = struct.unpack(f"<{len(shard.checksums) // 8}Q", shard.checksums)
    bad: set[int] = set()

    def copy_chunk(chunk: _ChunkCopy) -> None:
        try:
            same = chunk.run(file, shard, then) == seal[chunk.number]
        except OSError:
            same = False
        if not same:
            bad.add(chunk.number)

    for chunks in _layers(moves, shard.chunk_bytes):
        size = len(chunks) * shard.chunk_bytes
        copier.run_parallel(chunks, copy_chunk, size, bytes_per_thread=_BYTES_PER_THREAD, halfway="load.half")
    return sorted(bad)


def _layers(moves: Sequence[MemoryCopy], chunk_bytes: int) -> Iterator[list[_ChunkCopy]]:
    """Yield the copies by chunks; bytes with several targets are in a chunk of each list."""
    left = sorted(moves, key=lambda move: move.source)
    while left:
        later: list[MemoryCopy] = []
        chunks: list[_ChunkCopy] = []
        end, chunk = 0, _ChunkCopy(-1)
        for move in left:
            if move.source < end:
                later.append(move)
                continue
            at, end = move.source, move.source + move.size_bytes
            while at < end:
                number = at // chunk_bytes
                if number != chunk.number:
                    chunk = _ChunkCopy(number)
                    chunks.append(chunk)
                stop = min(end, (number + 1) * chunk_bytes)
                chunk.segments.append(MemoryCopy(move.target + at - move.source, at, stop - at))
                at = stop
        yield chunks
        left = later


def _hash_gap(file: ShardFile, start: int, stop: int, state: xxhash.xxh3_64) -> None:
    if start >= stop:
        return
    buffer = (ctypes.c_char * min(stop - start, _STRIDE_BYTES))()
    view = memoryview(buffer)
    while start < stop:
        count = min(stop - start, len(buffer))
        read_shard(file, ctypes.addressof(buffer), start, count)
        state.update(view[:count])
        start += count
