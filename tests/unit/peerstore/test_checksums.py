"""Checksums of chunks in files and in memory."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import xxhash

from peerstore import checksums
from tests.support.chunk_sums import chunk_checksums


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as one:
        yield one


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000, 12345])
def test_files_and_memory_hash_the_same(tmp_path, pool, size):
    data = os.urandom(size)
    path = tmp_path / "file"
    path.write_bytes(data + b"more")
    expected = b"".join(xxhash.xxh3_64_digest(data[i : i + 100])[::-1] for i in range(0, size, 100))
    assert checksums.mismatched_chunks(memoryview(data), expected, chunk_bytes=100) == ()
    with path.open("rb") as file:
        fd = file.fileno()
        assert checksums.file_checksums(fd, size, chunk_bytes=100, pool=pool) == expected
        count = checksums.chunk_count(size, 100)
        assert (
            checksums.file_mismatched_chunks(fd, size, expected, chunks=range(count), chunk_bytes=100, pool=pool) == ()
        )


def test_flipped_bytes_are_found_in_their_chunks(tmp_path, pool):
    data = bytearray(os.urandom(70 << 20))
    sums = chunk_checksums(memoryview(data))
    for at in (0, 33 << 20, (70 << 20) - 1):
        data[at] ^= 1
    path = tmp_path / "file"
    path.write_bytes(data)
    with path.open("rb") as file:
        fd = file.fileno()
        found = [
            checksums.file_mismatched_chunks(fd, len(data), sums, chunks=chunks, pool=pool)
            for chunks in (range(70), range(1, 69), range(34, 69), range(69, 70))
        ]
    assert found == [(0, 33, 69), (33,), (), (69,)]
    assert checksums.mismatched_chunks(memoryview(data), sums) == (0, 33, 69)


def test_short_file_is_an_error(tmp_path, pool):
    path = tmp_path / "file"
    path.write_bytes(bytes(150))
    with path.open("rb") as file, pytest.raises(OSError, match="ends at byte 150, 200 were expected"):
        checksums.file_checksums(file.fileno(), 200, chunk_bytes=100, pool=pool)
