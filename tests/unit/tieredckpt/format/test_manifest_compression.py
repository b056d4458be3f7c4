"""Chunks compressed one by one: each yields its exact bytes or an error."""

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from peerstore.shard_records import ShardKey
from tests.support.chunk_sums import chunk_checksums
from tieredckpt.format.manifest import ShardIndex, ShardMeta, compressed_shard, decompress_chunk
from tieredckpt.restore.verified_reads import _chunk_offsets, _object_range, _verify_chunks


def index_of(data, chunk_bytes, **more):
    sums = chunk_checksums(memoryview(data), chunk_bytes=chunk_bytes)
    key = ShardKey("j", 1, 1, "a", 0, 0)
    return ShardIndex(key, 1, len(data), chunk_bytes, sums, ShardMeta("", ()), **more)


contents = st.builds(lambda noise, zeros: noise + b"\0" * zeros, st.binary(max_size=300), st.integers(0, 3000))


@given(contents, st.sampled_from([64, 1000, 4096]))
def test_every_window_of_chunks_round_trips(tmp_path_factory, data, chunk_bytes):
    source = tmp_path_factory.getbasetemp() / "shard"
    source.write_bytes(data)
    index = index_of(data, chunk_bytes)
    with compressed_shard(source, index, wanted=True) as (path, frames):
        stored = path.read_bytes()
    if frames is None:
        assert stored == data
        return
    assert sum(frames) == len(stored) < len(data)
    packed = index_of(data, chunk_bytes, encoding="zstd", frames=tuple(frames))
    count = len(frames)
    for first in range(count):
        for stop in (first + 1, count):
            low, high = _object_range((first, stop), _chunk_offsets(packed))
            bad = []
            found = _verify_chunks(packed, (first, stop), stored[low:high], bad)
            assert (found.start, bytes(found.data), bad) == (
                first * chunk_bytes,
                data[first * chunk_bytes : stop * chunk_bytes],
                [],
            )


@given(st.binary(min_size=1, max_size=500), st.data())
def test_a_damaged_chunk_is_seen(data, draw):
    raw = index_of(data, 64)
    at = draw.draw(st.integers(0, len(data) - 1))
    changed = bytearray(data)
    changed[at] ^= 1 << draw.draw(st.integers(0, 7))
    count = len(raw.checksums) // 8
    bad = []
    _verify_chunks(raw, (0, count), bytes(changed), bad)
    assert bad == [at // 64]
    for other in (data[:-1], data + b"\0", b""):
        bad = []
        _verify_chunks(raw, (0, count), other, bad)
        assert bad == list(range(count))


@given(st.binary(min_size=1, max_size=500), st.data())
def test_a_damaged_frame_is_seen(data, draw):
    frame = bytearray(zstandard.compress(data))
    packed = index_of(data, 1000, encoding="zstd", frames=(len(frame),))
    frame[draw.draw(st.integers(0, len(frame) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    bad = []
    found = _verify_chunks(packed, (0, 1), bytes(frame), bad)
    assert set(bad) == {0} or bytes(found.data) == data


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x28\xb5\x2f\xfd",
        zstandard.compress(b"\0" * 99),
        zstandard.compress(b"\0" * (1 << 30)),
        zstandard.ZstdCompressor(write_content_size=False).compress(b"\0" * 100),
        zstandard.compress(b"\0" * 100)[:-1],
    ],
    ids=["empty", "magic", "too little", "a bomb", "no size", "cut"],
)
def test_invalid_compressed_chunk_is_an_error_before_allocation(frame):
    assert decompress_chunk(zstandard.compress(b"\0" * 100), 100) == b"\0" * 100
    with pytest.raises(zstandard.ZstdError):
        decompress_chunk(frame, 100)


def test_nothing_is_compressed_unasked_or_for_nothing(tmp_path):
    source = tmp_path / "shard"
    source.write_bytes(b"\0" * 5000)
    with compressed_shard(source, index_of(b"\0" * 5000, 4096), wanted=False) as (path, frames):
        assert (path, frames) == (source, None)
    source.write_bytes(b"")
    with compressed_shard(source, index_of(b"", 4096), wanted=True) as (path, frames):
        assert (path, frames) == (source, None)
