"""Copies verified against the seal in one pass: all bits arrive, damaged chunks are named."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peerstore.shard_records import ShardKey
from tests.support.chunk_sums import chunk_checksums
from tieredckpt.format.manifest import ShardIndex, ShardMeta
from tieredckpt.restore import verified_copy
from tieredckpt.restore.verified_copy import ShardFile, copy_verified
from tieredckpt.tensors.slot_copy import Copier, MappedSlot, MemoryCopy

CHUNK = 64
KEY = ShardKey("job", 1, 1, "i", 0, 0)


@pytest.fixture(scope="module")
def copier():
    copier = Copier(2)
    yield copier
    copier.close()


def shard_of(data):
    return ShardIndex(KEY, 1, len(data), CHUNK, chunk_checksums(data, chunk_bytes=CHUNK), ShardMeta("", ()))


def file_of(data):
    fd = os.memfd_create("shard", os.MFD_CLOEXEC)
    os.write(fd, data)
    return fd


@st.composite
def reads(draw):
    """A shard's bytes, and runs of them that may overlap, each with a target of its own."""
    data = draw(st.binary(min_size=1, max_size=5 * CHUNK))
    runs = []
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, len(data) - 1))
        runs.append((start, draw(st.integers(start + 1, len(data)))))
    return data, runs


def moves_to(targets, runs):
    return [
        MemoryCopy(target.data_ptr(), start, stop - start) for target, (start, stop) in zip(targets, runs, strict=True)
    ]


@given(reads(), st.sampled_from([1, 7, 64, 1 << 17]))
def test_every_run_arrives(copier, case, stride):
    data, runs = case
    targets = [torch.zeros(stop - start, dtype=torch.uint8) for start, stop in runs]
    fd = file_of(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verified_copy, "_STRIDE_BYTES", stride)
        try:
            assert copy_verified(copier, ShardFile(fd), shard_of(data), moves_to(targets, runs)) == []
        finally:
            os.close(fd)
    assert [bytes(target.numpy()) for target in targets] == [data[start:stop] for start, stop in runs]


@given(reads(), st.data())
def test_damaged_chunks_that_are_read_are_named(copier, case, choice):
    data, runs = case
    at = choice.draw(st.integers(0, len(data) - 1))
    damaged = bytearray(data)
    damaged[at] ^= 1 << choice.draw(st.integers(0, 7))
    targets = [torch.zeros(stop - start, dtype=torch.uint8) for start, stop in runs]
    fd = file_of(bytes(damaged))
    try:
        bad = copy_verified(copier, ShardFile(fd), shard_of(data), moves_to(targets, runs))
    finally:
        os.close(fd)
    read = {chunk for start, stop in runs for chunk in range(start // CHUNK, (stop - 1) // CHUNK + 1)}
    assert bad == sorted({at // CHUNK} & read)


def test_populated_mapping_is_copied_and_compared(copier):
    data = os.urandom(3 * CHUNK + 7)
    slot = MappedSlot(file_of(data), len(data), 1)
    slot.populate(0, len(data))
    target = torch.zeros(len(data), dtype=torch.uint8)
    moves = [MemoryCopy(target.data_ptr(), 0, len(data))]
    file = ShardFile(-1, slot.address)  # nothing is read through the descriptor
    assert copy_verified(copier, file, shard_of(data), moves) == []
    assert bytes(target.numpy()) == data
    slot.tensor(2 * CHUNK, torch.uint8, (1,))[0] ^= 1
    assert copy_verified(copier, file, shard_of(data), moves) == [2]
    slot.close()


def test_slot_maps_only_its_own_file_once_touched():
    fd, other = file_of(bytes(3 * CHUNK)), file_of(bytes(3 * CHUNK))
    slot = MappedSlot(os.dup(fd), 3 * CHUNK, 1)
    assert not slot.maps_file(fd, 3 * CHUNK)
    slot.note_populated(0, 3 * CHUNK)
    assert slot.maps_file(fd, 3 * CHUNK)
    assert not slot.maps_file(fd, 3 * CHUNK + 1)
    assert not slot.maps_file(other, 3 * CHUNK)
    os.truncate(fd, 2 * CHUNK)
    assert not slot.maps_file(fd, 3 * CHUNK)
    slot.close()
    os.close(fd)
    os.close(other)


def test_chunks_behind_the_end_of_a_short_file_are_named(copier):
    data = os.urandom(4 * CHUNK)
    target = torch.zeros(len(data), dtype=torch.uint8)
    fd = file_of(data[: 2 * CHUNK + 5])
    try:
        assert copy_verified(copier, ShardFile(fd), shard_of(data), [MemoryCopy(target.data_ptr(), 0, len(data))]) == [
            2,
            3,
        ]
    finally:
        os.close(fd)


def test_target_that_changes_before_it_is_hashed_is_named(copier, monkeypatch):
    """The checksum covers the target, not the bytes that were read."""
    data = os.urandom(3 * CHUNK)
    target = torch.zeros(len(data), dtype=torch.uint8)
    read = verified_copy.read_shard

    def reading(file, address, offset, size_bytes):
        read(file, address, offset, size_bytes)
        if offset == CHUNK:
            target[CHUNK + 3] ^= 1

    monkeypatch.setattr(verified_copy, "read_shard", reading)
    fd = file_of(data)
    try:
        assert copy_verified(copier, ShardFile(fd), shard_of(data), [MemoryCopy(target.data_ptr(), 0, len(data))]) == [
            1
        ]
    finally:
        os.close(fd)
