"""Checksums depend only on values, not on their placement, and detect wrong reshards."""

import itertools

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from elastic.reshard.state_checksum import (
    ChecksumPart,
    RankChecksum,
    WholeChecksum,
    boxes_from_runs,
    canonical_bytes,
    checksum_part,
    combine_checksums,
    name_seed,
    replica_of,
    shard_runs,
    state_checksum,
    weighted_sum,
)
from tests.support.example_counts import examples
from tieredckpt.errors import CheckpointDamagedError, MismatchError, UsageError
from tieredckpt.format.shard_layout import DTYPE_WIDTHS
from tieredckpt.format.slice_boxes import Box
from tieredckpt.restore.fingerprint import MASK64
from tieredckpt.tensors.plain_tensors import is_plain_tensor

NAME = "model.layer.0.weight"


def bits(dtype, shape, seed=0):
    """Return random bit patterns, including NaNs with payloads and negative zeros."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return (data & 1 if dtype is torch.bool else data).view(dtype).view(shape)


def sum_of(tensor, shape=None, offsets=None, name=NAME):
    return weighted_sum(
        name_seed(name), tensor, tuple(shape or tensor.shape), tuple(offsets or (0,) * len(shape or tensor.shape))
    )


# -- what it is -----------------------------------------------------------------------------------------------------


def mix(x):
    x &= MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def weight(name, number):
    """Compute the definition of docs/explanation/resharding.md in integers."""
    high, low = divmod(number, 8192)
    golden, seed = 0x9E3779B97F4A7C15, name_seed(name)
    t, u = mix(low * golden + 0x243F6A8885A308D3) | 1, mix(low * golden + 0x13198A2E03707344)
    a, b = mix(high * golden + seed) | 1, mix(high * golden + (seed ^ 0xA4093822299F31D0)) << 1
    return (t * a + u * b) & MASK64


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (8191,), (8192,), (3, 9001)])
def test_checksum_matches_its_definition(dtype, shape):
    tensor = bits(dtype, shape)
    size = min(4, dtype.itemsize)
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    words = [int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size)]
    assert sum_of(tensor) == sum(word * weight(NAME, j) for j, word in enumerate(words)) & MASK64
    assert all(weight(NAME, j) % 2 for j in range(0, 20000, 97))


def test_checksum_values_are_stable_across_releases():
    """A checksum stored with a checkpoint must stay valid in the next release."""
    state = {"w": torch.arange(20000, dtype=torch.float32), "b": {"x": torch.tensor(3, dtype=torch.int64)}, "lr": 0.5}
    found = state_checksum(state).all_reduced()
    assert str(found) == "0x3d40f02ff48fc79e"


# -- any partition --------------------------------------------------------------------------------------------------

DTYPES = [getattr(torch, name) for name in sorted(DTYPE_WIDTHS) if isinstance(getattr(torch, name, None), torch.dtype)]
PLAIN = [dtype for dtype in DTYPES if not str(dtype).startswith("torch.q")]


@st.composite
def partitions(draw, shape):
    """Draw boxes that partition the shape, by repeated cuts along some axis."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        if not box.sizes:
            return [box]
        axis = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.sizes[axis]))
        for start, size in ((0, cut), (cut, box.sizes[axis] - cut)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[axis], sizes[axis] = offsets[axis] + start, size
            boxes.append(Box(tuple(offsets), tuple(sizes)))
    return boxes


def cut(tensor, box):
    return tensor[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]


SHAPES = st.one_of(
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
    st.sampled_from([(3, 8192), (5, 4099), (2, 3, 5000), (17000,), (20000, 2), (8193, 3)]),
)


@settings(max_examples=examples(120), derandomize=True, database=None)
@given(SHAPES, st.sampled_from(PLAIN), st.data())
def test_any_partition_adds_up_to_the_same(shape, dtype, data):
    tensor = bits(dtype, shape)
    boxes = data.draw(partitions(shape))
    total = sum(sum_of(cut(tensor, box), shape, box.offsets) for box in boxes) & MASK64
    assert total == sum_of(tensor)


@settings(max_examples=30, derandomize=True, database=None)
@given(st.sampled_from([torch.bfloat16, torch.float32, torch.complex64]), st.permutations([0, 1, 2]))
def test_strides_do_not_count(dtype, order):
    tensor = bits(dtype, (6, 50, 70))
    stored = tensor.permute(order).contiguous().permute([order.index(axis) for axis in range(3)])
    assert sum_of(stored) == sum_of(tensor)
    wide = torch.zeros(6, 50, 140, dtype=dtype)
    wide[:, :, ::2] = tensor
    assert sum_of(wide[:, :, ::2]) == sum_of(tensor)


def test_large_tensors_are_taken_in_pieces(monkeypatch):
    from elastic.reshard import state_checksum

    tensor = bits(torch.bfloat16, (70, 3001))
    expected = sum_of(tensor)
    for words in (8192, 20000, 1000, 100):
        monkeypatch.setattr(state_checksum, "_CPU_WORDS", words)
        assert sum_of(tensor) == expected


def test_lazy_conjugates_and_negatives_are_resolved():
    tensor = torch.randn(40, dtype=torch.complex64)
    assert sum_of(tensor.conj()) == sum_of(tensor.conj().clone().resolve_conj()) != sum_of(tensor)
    assert sum_of(tensor.conj().imag) == sum_of(tensor.conj().imag.clone().resolve_neg())


# -- what it sees ---------------------------------------------------------------------------------------------------


@settings(max_examples=examples(80), derandomize=True, database=None)
@given(st.sampled_from([torch.uint8, torch.float16, torch.float32, torch.float64, torch.complex128]), st.data())
def test_a_flipped_bit_is_always_seen(dtype, data):
    tensor = bits(dtype, (9, 1000))
    before = sum_of(tensor)
    raw = tensor.view(-1).view(torch.uint8)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert sum_of(tensor) != before


@settings(max_examples=examples(80), derandomize=True, database=None)
@given(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]), st.data())
def test_swapped_elements_are_seen(dtype, data):
    tensor = torch.arange(20000).to(torch.uint8).view(-1, dtype.itemsize).reshape(-1).view(dtype)
    i, j = (data.draw(st.integers(0, len(tensor) - 1)) for _ in range(2))
    words = tensor.view(torch.uint8).view(-1, dtype.itemsize)
    changed = tensor.clone()
    changed[i], changed[j] = tensor[j].clone(), tensor[i].clone()
    assert (sum_of(changed) == sum_of(tensor)) == bool((words[i] == words[j]).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_two_flipped_signs_do_not_cancel(dtype):
    """With one 64-bit word per element they always would: twice an odd multiple of 2**63 is 0."""
    tensor = torch.arange(1, 101).to(dtype)
    changed = tensor.clone()
    changed[3], changed[60] = -changed[3], -changed[60]
    assert sum_of(changed) != sum_of(tensor)
    assert sum_of(-tensor) != sum_of(tensor)


def test_changes_that_cancel_in_a_rectangle_are_seen():
    """The same two columns of two blocks: the weakest case for products of row and column weights."""
    tensor = torch.zeros(4 * 8192, dtype=torch.int32)
    before = sum_of(tensor)
    for low in range(1, 200):
        changed = tensor.clone()
        changed[0], changed[low], changed[8192], changed[8192 + low] = 1, -1, -1, 1
        assert sum_of(changed) != before


def test_another_place_and_another_name_are_seen():
    part = bits(torch.float32, (10, 30))
    sums = {sum_of(part, (100, 30), (row, 0)) for row in range(90)}
    sums |= {sum_of(part, (10, 60), (0, column)) for column in range(1, 31)}
    assert len(sums) == 120
    one, other = bits(torch.float32, (5,), 1), bits(torch.float32, (5,), 2)
    saved, swapped = (
        state_checksum({"a": one, "b": other}).all_reduced(),
        state_checksum({"a": other, "b": one}).all_reduced(),
    )
    assert saved.value != swapped.value
    assert list(saved.differences(swapped)) == ["a", "b"]


def test_the_same_bits_as_another_type_or_shape_are_seen():
    tensor = bits(torch.int16, (4, 6))
    saved = state_checksum({"w": tensor}).all_reduced()
    for other in (tensor.view(torch.float16), tensor.view(6, 4), tensor.view(-1)):
        with pytest.raises(CheckpointDamagedError, match="w"):
            state_checksum({"w": other}).all_reduced().assert_equal(saved)
    state_checksum({"w": tensor.clone()}).all_reduced().assert_equal(saved)


# -- shardings ------------------------------------------------------------------------------------------------------


def shares(tensor, mesh, placements):
    """Return the checksum parts of all processes of a mesh."""
    shape, found = tuple(tensor.shape), []
    ranks = torch.arange(torch.Size(mesh).numel()).view(mesh)
    for coordinate in itertools.product(*map(range, mesh)):
        boxes = [there for _, there in boxes_from_runs(shard_runs(NAME, shape, mesh, coordinate, placements))]
        total = sum(sum_of(cut(tensor, box), shape, box.offsets) for box in boxes) & MASK64
        count = sum(box.volume for box in boxes)
        part = ChecksumPart("float32", shape, total, count, replica_of(ranks, coordinate, placements))
        found.append(RankChecksum({NAME: part}))
    return found


PLACEMENTS = st.one_of(
    st.just(Replicate()),
    st.builds(Shard, st.integers(0, 1)),
    st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), st.integers(0, 1), st.integers(2, 4)),
)


@settings(max_examples=examples(120), derandomize=True, database=None)
@given(
    st.tuples(st.integers(0, 12), st.integers(0, 12)),
    st.lists(st.tuples(st.integers(1, 5), PLACEMENTS), min_size=1, max_size=3),
)
def test_any_placement_on_any_mesh_adds_up(shape, dims):
    mesh, placements = zip(*dims, strict=True)
    tensor = bits(torch.float32, shape)
    found = combine_checksums(shares(tensor, mesh, placements))
    assert found.entries[NAME].sum == sum_of(tensor)
    assert not found.diverged_names


@settings(max_examples=examples(120), derandomize=True, database=None)
@given(
    st.tuples(st.integers(0, 12), st.integers(1, 12)),
    st.lists(st.tuples(st.integers(1, 4), PLACEMENTS), min_size=1, max_size=2),
    st.data(),
)
def test_shards_are_those_torch_makes(shape, dims, data):
    mesh, placements = zip(*dims, strict=True)
    coordinate = [data.draw(st.integers(0, size - 1)) for size in mesh]
    sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, coordinate, placements)
    rows = shard_runs(NAME, shape, mesh, coordinate, placements)
    assert tuple(sum(size for _, size in axis) for axis in rows) == tuple(sizes)
    if all(sizes):
        assert tuple(axis[0][0] for axis in rows) == tuple(offsets)


def test_a_copy_that_differs_is_named():
    tensor = bits(torch.float32, (8, 3))
    found = shares(tensor, (2, 2), (Replicate(), Shard(0)))
    combine_checksums(found)
    part = found[3].parts[NAME]
    found[3] = RankChecksum({NAME: ChecksumPart(part.dtype, part.shape, part.sum ^ 1, part.count, part.replica)})
    whole = combine_checksums(found)
    assert whole.diverged_names == (NAME,)
    with pytest.raises(CheckpointDamagedError, match="not the same on all ranks"):
        whole.assert_equal(whole)


@pytest.mark.parametrize("lost", [[0], [3], [0, 1, 2, 3]])
def test_checksum_of_a_missing_part_is_an_error(lost):
    found = shares(bits(torch.float32, (8, 3)), (2, 2), (Replicate(), Shard(0)))
    kept = [share for rank, share in enumerate(found) if rank not in lost]
    if kept:
        with pytest.raises(MismatchError, match="each element once"):
            combine_checksums(kept)
    with pytest.raises(MismatchError, match="each element once"):
        combine_checksums([*found, found[0]])


def test_partial_sums_have_no_place():
    with pytest.raises(UsageError, match="partial sum"):
        shard_runs(NAME, (4,), (2,), (0,), [Partial()])


# -- objects --------------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=examples(150), derandomize=True, database=None)
@given(VALUES, VALUES)
def test_objects_differ_by_value_and_type(a, b):
    assert (canonical_bytes(a) == canonical_bytes(b)) == (repr(form(a)) == repr(form(b)))


def form(value):
    """With mappings in one order, and floats by their bits."""
    if isinstance(value, float):
        return ("float", value.hex() if value == value else canonical_bytes(value))
    if isinstance(value, complex):
        return ("complex", form(value.real), form(value.imag))
    if isinstance(value, dict):
        return ("dict", sorted((repr(form(k)), repr(form(v))) for k, v in value.items()))
    if isinstance(value, list | tuple):
        return (type(value).__name__, [form(inner) for inner in value])
    return value


def test_the_order_of_a_mapping_does_not_count():
    assert canonical_bytes({"a": 1, "b": [2]}) == canonical_bytes({"b": [2], "a": 1})
    assert canonical_bytes({1, 2, 3}) == canonical_bytes({3, 2, 1})
    assert canonical_bytes(torch.arange(3)) == canonical_bytes(torch.arange(6)[:3])
    assert canonical_bytes(torch.arange(3)) != canonical_bytes(torch.arange(3).int())


def test_tensors_that_are_more_than_bytes_count_as_objects():
    sparse = torch.eye(3).to_sparse()
    assert not is_plain_tensor(sparse)
    part = checksum_part("s", sparse)
    assert part.dtype == "object"
    assert part == checksum_part("s", torch.eye(3).to_sparse())
    assert part != checksum_part("s", (2 * torch.eye(3)).to_sparse())


def test_a_checksum_can_be_kept():
    found = state_checksum({"w": torch.randn(5), "n": {"lr": 0.1}}).all_reduced()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=WholeChecksum) == found
