"""Chunk checksums of a shard whose bytes are in memory."""

import xxhash

from peerstore.checksums import CHUNK_BYTES


def chunk_checksums(data, *, chunk_bytes=CHUNK_BYTES):
    starts = range(0, len(data), chunk_bytes)
    return b"".join(xxhash.xxh3_64_digest(data[start : start + chunk_bytes])[::-1] for start in starts)
