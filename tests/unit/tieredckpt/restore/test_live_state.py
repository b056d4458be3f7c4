"""The pure parts of the restore proof: chunks assembled from live memory, and object comparison."""

import copy
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peerstore.shard_records import ShardKey
from tests.support.chunk_sums import chunk_checksums
from tieredckpt.format.manifest import ShardIndex, ShardMeta
from tieredckpt.restore.live_state import object_matches
from tieredckpt.restore.proof import _chunk_windows, _Views
from tieredckpt.restore.tensor_bytes import inner_tensors, tensor_bytes
from tieredckpt.tensors.state_dict import archive_object

CHUNK = 64
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers()
leaves = plain | st.text(max_size=5) | st.binary(max_size=5)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
        | st.binary(min_size=1, max_size=8).map(lambda data: torch.frombuffer(bytearray(data), dtype=torch.uint8))
    ),
    max_leaves=8,
)


@given(values)
def test_unchanged_object_matches_its_archive(value):
    assert object_matches(copy.deepcopy(value), archive_object(value)) is True


def told(value):
    """Describe a value such that a list equals a tuple and equal numbers are equal."""
    if isinstance(value, list | tuple):
        return [told(inner) for inner in value]
    if isinstance(value, dict):
        return {key: told(inner) for key, inner in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value


@given(values, values)
def test_different_object_does_not_match(one, other):
    if told(one) != told(other) and repr(told(one)) != repr(told(other)):
        assert object_matches(one, archive_object(other)) is False


class Plain:
    def __init__(self, value):
        self.value = value


def test_indistinguishable_object_is_undecided():
    assert object_matches(Plain(3), archive_object(Plain(3))) is True
    assert object_matches(Plain(3), archive_object(Plain(4))) is None
    assert object_matches([1, Plain(3)], archive_object([2, Plain(4)])) is False


@st.composite
def shards(draw):
    """A shard's bytes, and tensors that have some of them: (where, how much, whose, where in that)."""
    data = draw(st.binary(min_size=1, max_size=5 * CHUNK))
    tensors, moves = [], []
    for index in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, len(data) - 1))
        size = draw(st.integers(1, len(data) - start))
        cut = draw(st.integers(0, size))
        tensors.append(torch.frombuffer(bytearray(data[start : start + size]), dtype=torch.uint8))
        moves += [(start + a, b - a, index, a) for a, b in ((0, cut), (cut, size)) if b > a]
    return data, tensors, sorted(moves)


def index_of(data):
    key = ShardKey("job", 1, 1, "i", 0, 0)
    return ShardIndex(key, 1, len(data), CHUNK, chunk_checksums(memoryview(data), chunk_bytes=CHUNK), ShardMeta("", ()))


def bad_chunks(data, tensors, moves, tmp):
    shard, bad = index_of(data), set()
    seal = memoryview(shard.checksums).cast("Q")
    fd = os.memfd_create(tmp)
    try:
        os.write(fd, data)
        for chunks in _chunk_windows(moves, CHUNK, _Views(tensors)):
            for chunk in chunks:
                if chunk.digest(fd, shard) != seal[chunk.number]:
                    bad |= chunk.owners
    finally:
        os.close(fd)
    return bad


@given(shards())
def test_chunks_of_live_memory_have_the_checksums_of_the_seal(shard):
    assert bad_chunks(*shard, "good") == set()


@given(shards(), st.data())
def test_flipped_bit_in_live_memory_is_detected(shard, data):
    content, tensors, moves = shard
    index = data.draw(st.integers(0, len(tensors) - 1))
    tensors[index][data.draw(st.integers(0, tensors[index].numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert index in bad_chunks(content, tensors, moves, "flipped")


@pytest.mark.filterwarnings("ignore:Sparse")
def test_composite_tensor_is_compared_by_its_parts():
    dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    assert [tensor_bytes(part) for part in inner_tensors(dense.t())] == [tensor_bytes(dense.t().contiguous())]
    for sparse in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()):
        changed = sparse.clone()
        changed.values()[0] = 5.0 if sparse.layout is not torch.sparse_coo else changed.values()[0]
        same = list(map(tensor_bytes, inner_tensors(sparse))) == list(map(tensor_bytes, inner_tensors(changed)))
        assert same is (sparse.layout is torch.sparse_coo)
