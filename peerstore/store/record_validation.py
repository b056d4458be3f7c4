"""Limits of a shard record that another process wrote."""

from __future__ import annotations

import re

from peerstore.checksums import chunk_count
from peerstore.errors import RequestError
from peerstore.shard_records import MAX_NUMBER, ShardKey, ShardRecord, validate_incarnation, validate_job_name

MAX_PARTS_PER_VERSION = 1 << 20
MAX_CHUNK_BYTES = 64 << 20
MAX_META_BYTES = 16 << 20
_KIND = re.compile(r"(parity\.[0-9a-f]{16})?")


def validate_shard_key(key: ShardKey, size_bytes: int, parts: int) -> None:
    validate_job_name(key.job)
    validate_incarnation(key.incarnation)
    numbers = (key.version, key.epoch, key.attempt, key.part)
    if min(numbers) < 0 or max(numbers) >= MAX_NUMBER:
        raise RequestError(f"{key}: version, epoch, attempt and part are numbers from 0 to 2^62")
    if not 1 <= parts <= MAX_PARTS_PER_VERSION:
        raise RequestError(f"{key}: a version has 1 to {MAX_PARTS_PER_VERSION} parts, not {parts}")
    if not _KIND.fullmatch(key.kind):
        raise RequestError(f"{key}: {key.kind!r} is not a valid kind")
    if key.part >= parts:
        raise RequestError(f"{key}: part {key.part} of {parts}; parts are counted from 0")
    if size_bytes < 0:
        raise RequestError(f"{key}: the size of {size_bytes} bytes is negative")


def validate_meta(owner: object, meta: bytes) -> None:
    if len(meta) > MAX_META_BYTES:
        raise RequestError(f"{owner}: meta has {len(meta)} bytes, the limit is {MAX_META_BYTES}")


def validate_record(record: ShardRecord) -> None:
    """Raise :class:`RequestError` unless the record describes a possible shard."""
    validate_shard_key(record.key, record.size_bytes, record.parts)
    if not 1 <= record.chunk_bytes <= MAX_CHUNK_BYTES:
        raise RequestError(f"{record.key}: chunks of {record.chunk_bytes} bytes, 1 to {MAX_CHUNK_BYTES} are allowed")
    count = chunk_count(record.size_bytes, record.chunk_bytes)
    if len(record.checksums) != 8 * count:
        raise RequestError(f"{record.key}: {len(record.checksums)} bytes of checksums for {count} chunks")
    validate_meta(record.key, record.meta)
