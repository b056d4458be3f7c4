"""Limits of a shard record, equal for clients, nodes, parities and files."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerstore.errors import RequestError
from peerstore.shard_records import CHUNK_BYTES, MAX_NUMBER, ShardKey, ShardRecord
from peerstore.store.record_validation import MAX_CHUNK_BYTES, MAX_META_BYTES, MAX_PARTS_PER_VERSION, validate_record

KEY = ShardKey("job", 1, 1, "a", 0, 0)
RECORD = ShardRecord(KEY, 2, CHUNK_BYTES + 1, CHUNK_BYTES, bytes(16), b"", 0)


def changed(**fields):
    return msgspec.structs.replace(RECORD, **fields)


def rekeyed(**fields):
    return changed(key=msgspec.structs.replace(KEY, **fields))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (rekeyed(job="../x"), "job"),
        (rekeyed(incarnation="a/b"), "incarnation"),
        (rekeyed(version=-1), "numbers from 0"),
        (rekeyed(epoch=MAX_NUMBER), "numbers from 0"),
        (rekeyed(part=2), "part 2 of 2"),
        (rekeyed(kind="parity.x"), "not a valid kind"),
        (changed(parts=0), "1 to 1048576 parts, not 0"),
        (changed(parts=MAX_PARTS_PER_VERSION + 1), "not 1048577"),
        (changed(size_bytes=-1), "negative"),
        (changed(chunk_bytes=0), "chunks of 0 bytes"),
        (changed(chunk_bytes=MAX_CHUNK_BYTES + 1, checksums=bytes(8)), "chunks of 67108865 bytes, 1 to 67108864"),
        (changed(checksums=bytes(8)), "8 bytes of checksums for 2 chunks"),
        (changed(checksums=bytes(17)), "17 bytes of checksums for 2 chunks"),
        (changed(meta=bytes(MAX_META_BYTES + 1)), "meta has 16777217 bytes, the limit is 16777216"),
    ],
)
def test_impossible_record_is_refused(record, message):
    with pytest.raises(RequestError, match=message):
        validate_record(record)


@given(size=st.integers(0, 1 << 40), chunk_bytes=st.integers(1 << 20, MAX_CHUNK_BYTES))
def test_record_with_a_checksum_for_each_chunk_is_accepted(size, chunk_bytes):
    chunks = -(-size // chunk_bytes)
    validate_record(changed(size_bytes=size, chunk_bytes=chunk_bytes, checksums=bytes(8 * chunks)))
