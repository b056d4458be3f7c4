"""Chunk checksums (xxh3-64) of memory and of open files."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from concurrent.futures import Executor

import xxhash

from peerstore.shard_records import CHUNK_BYTES

_RUN_BYTES = 32 << 20  # bytes that one thread hashes at a time


class TruncatedFileError(OSError):
    """A file has fewer bytes than were written to it, so that the rest is lost."""


def chunk_count(size_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    return -(-size_bytes // chunk_bytes)


def chunk_checksum(data: bytes | bytearray | memoryview) -> int:
    """Return the xxh3-64 of one run of bytes."""
    return xxhash.xxh3_64_intdigest(data)


def mismatched_chunks(data: memoryview, expected: bytes, *, chunk_bytes: int = CHUNK_BYTES) -> tuple[int, ...]:
    """Return the indexes of the chunks whose bytes do not match ``expected``."""
    count = chunk_count(len(data), chunk_bytes)
    if len(expected) != 8 * count:
        return tuple(range(count))
    got = _hash_run(data, range(0, len(data), chunk_bytes), chunk_bytes)
    return tuple(n for n in range(count) if got[8 * n : 8 * n + 8] != expected[8 * n : 8 * n + 8])


def file_checksums(fd: int, size_bytes: int, *, chunk_bytes: int = CHUNK_BYTES, pool: Executor) -> bytes:
    """Return the checksums of all chunks of an open file.

    Raise :class:`TruncatedFileError` if it has fewer bytes; another ``OSError`` proves nothing about the bytes. The
    bytes are read, not mapped: a truncated file, or a hole without memory, raises an error here, and SIGBUS with a
    mapping.
    """
    return b"".join(_hash_file(fd, range(chunk_count(size_bytes, chunk_bytes)), size_bytes, chunk_bytes, pool))


def file_mismatched_chunks(
    fd: int, size_bytes: int, expected: bytes, *, chunks: range, chunk_bytes: int = CHUNK_BYTES, pool: Executor
) -> tuple[int, ...]:
    """Return the indexes of the ``chunks`` of an open file that do not match ``expected``, or are missing.

    Raise ``OSError`` if they cannot be read, which proves nothing about them.
    """
    try:
        got = b"".join(_hash_file(fd, chunks, size_bytes, chunk_bytes, pool))
    except TruncatedFileError:
        have = os.fstat(fd).st_size
        there = range(chunks.start, max(chunks.start, min(chunks.stop, have // chunk_bytes)))
        cut = tuple(range(there.stop, chunks.stop))
        return file_mismatched_chunks(fd, size_bytes, expected, chunks=there, chunk_bytes=chunk_bytes, pool=pool) + cut
    want = expected[8 * chunks.start : 8 * chunks.stop]
    return tuple(c for i, c in enumerate(chunks) if got[8 * i : 8 * i + 8] != want[8 * i : 8 * i + 8])


def _hash_file(fd: int, chunks: range, size_bytes: int, chunk_bytes: int, pool: Executor) -> Iterator[bytes]:
    def one(run: range) -> bytes:
        buffer = memoryview(bytearray(min(chunk_bytes, size_bytes)))
        return b"".join(
            _hash_chunk(fd, buffer, c * chunk_bytes, min(chunk_bytes, size_bytes - c * chunk_bytes)) for c in run
        )

    step = max(1, _RUN_BYTES // chunk_bytes)
    runs = [chunks[i : i + step] for i in range(0, len(chunks), step)]
    return map(one, runs) if len(runs) < 2 else pool.map(one, runs)


def _hash_chunk(fd: int, buffer: memoryview, start: int, size: int) -> bytes:
    got = 0
    while got < size:
        count = os.preadv(fd, [buffer[got:size]], start + got)
        if not count:
            raise TruncatedFileError(f"the file ends at byte {start + got}, {start + size} were expected")
        got += count
    return xxhash.xxh3_64_intdigest(buffer[:size]).to_bytes(8, "little")


def _hash_run(data: memoryview, starts: range, chunk_bytes: int) -> bytes:
    return struct.pack(f"<{len(starts)}Q", *(xxhash.xxh3_64_intdigest(data[s : s + chunk_bytes]) for s in starts))
