"""Batches as bytes: supported values round-trip; unsupported and damaged ones are reported."""

import collections
import decimal
import enum
import math
from typing import NamedTuple

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from elastic.batch_cache.batch_format import (
    BATCH_DTYPES,
    MAX_BATCH_DEPTH,
    MAX_BATCH_HEADER_BYTES,
    MAX_TENSORS,
    TENSOR_ALIGN,
    ListNode,
    TensorNode,
    decode_batch,
    encode_batch,
    lay_out_batch,
    place_tensors,
    read_head,
)
from elastic.errors import BatchDamagedError, UnsupportedBatchError
from tests.support.bits import assert_same_bits
from tests.support.example_counts import examples

FINGERPRINT = "0" * 32


def there_and_back(batch, index=7):
    return decode_batch(encode_batch(FINGERPRINT, index, batch).to_bytes(), FINGERPRINT, index, verify=True)


_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(codec="utf-8")),
    st.binary(),
)
_trees = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=4), st.integers(-(1 << 63), (1 << 63) - 1)), inner, max_size=3),
    ),
    max_leaves=12,
)


def same_kinds(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same_kinds(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same_kinds, one, other))
    return one == other and (not isinstance(one, float) or math.copysign(1, one) == math.copysign(1, other))


@hypothesis.settings(max_examples=examples(40))
@hypothesis.given(_trees)
def test_values_round_trip_with_their_types(batch):
    assert same_kinds(there_and_back(batch), batch)


def test_every_dtype_round_trips_bit_for_bit():
    for dtype in BATCH_DTYPES:
        kind = getattr(torch, dtype)
        width = torch.empty((), dtype=kind).element_size()
        raw = torch.arange(15 * width, dtype=torch.int64).remainder(2 if dtype == "bool" else 251).to(torch.uint8)
        tensor = raw.view(kind).view(3, 5)
        found = there_and_back({"x": tensor})["x"]
        assert (found.dtype, found.shape) == (kind, tensor.shape)
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)), dtype


def test_tensors_of_every_shape_round_trip():
    base = torch.arange(24, dtype=torch.float32)
    batch = {
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 4),
        "last one is empty": (torch.ones(3), torch.empty(5, 0, dtype=torch.int32)),
        "transposed": base.view(4, 6).t(),
        "every second": base[::2],
        "one row for all": torch.ones(3).expand(4, 3),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "of a graph": torch.ones(2, requires_grad=True) * 2,
    }
    found = there_and_back(batch)
    assert not found["of a graph"].requires_grad
    assert all(tensor.is_contiguous() for tensor in found["last one is empty"])
    batch["of a graph"] = batch["of a graph"].detach()
    assert_same_bits(batch, found)


def test_tensors_lie_where_vector_instructions_want_them():
    laid = encode_batch(FINGERPRINT, 0, [torch.ones(3), torch.ones(1, dtype=torch.uint8), torch.ones(5)]).layout
    assert len(laid.head) % TENSOR_ALIGN == 0
    assert [part.start % TENSOR_ALIGN for part in laid.parts] == [0, 0, 0]


class Point(NamedTuple):
    x: int
    y: int


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ({"a": [1, {2}]}, r"batch 7\['a'\]\[1\] is a builtins.set"),
        (Point(1, 2), "Point"),
        (collections.OrderedDict(a=1), "collections.OrderedDict"),
        ({"n": torch.ones(1).numpy()}, "numpy.ndarray"),
        ({"n": decimal.Decimal(1)}, "decimal.Decimal"),
        ({"n": Colour.RED}, "Colour"),
        ({1.5: 0}, "has the key 1.5"),
        ({True: 0}, "has the key True"),
        ({"x": torch.eye(3).to_sparse()}, "sparse"),
        ({"x": torch.empty(3, device="meta")}, "on meta"),
        ({"x": 1 << 64}, "cannot be kept"),
        ({"x": "\ud800"}, "cannot be kept"),
        (bytes(MAX_BATCH_HEADER_BYTES), "put large values into tensors"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_unsupported_value_is_named(batch, named):
    with pytest.raises(UnsupportedBatchError, match=named):
        encode_batch(FINGERPRINT, 7, batch)


def test_batch_with_too_many_tensors_is_refused():
    parts, _ = place_tensors([("uint8", (0,))] * (MAX_TENSORS + 1))
    tree = ListNode(tuple(TensorNode(number) for number in range(len(parts))))
    with pytest.raises(UnsupportedBatchError, match=f"at most {MAX_TENSORS}"):
        lay_out_batch(FINGERPRINT, 7, tree, parts, bytes(8))


def nested(depth):
    return 1 if not depth else [nested(depth - 1)]


def test_nesting_has_an_end():
    assert there_and_back(nested(MAX_BATCH_DEPTH)) == nested(MAX_BATCH_DEPTH)
    with pytest.raises(UnsupportedBatchError, match="nested deeper"):
        encode_batch(FINGERPRINT, 7, nested(MAX_BATCH_DEPTH + 1))
    endless = []
    endless.append(endless)
    with pytest.raises(UnsupportedBatchError, match="nested deeper"):
        encode_batch(FINGERPRINT, 7, endless)


def test_batch_of_another_index_or_fingerprint_is_damaged():
    data = encode_batch(FINGERPRINT, 7, {"x": torch.ones(3)}).to_bytes()
    with pytest.raises(BatchDamagedError, match="this is batch 7"):
        decode_batch(data, FINGERPRINT, 8, verify=True)
    with pytest.raises(BatchDamagedError, match="this is batch 7"):
        decode_batch(data, "1" * 32, 7, verify=True)


_GOOD = bytes(encode_batch(FINGERPRINT, 7, {"x": torch.arange(6), "y": [torch.ones(2, 2), "z"]}).to_bytes())


@pytest.mark.parametrize("bit", [0, 7])
def test_every_flipped_bit_is_found(bit):
    for at in range(len(_GOOD)):
        data = bytearray(_GOOD)
        data[at] ^= 1 << bit
        with pytest.raises(BatchDamagedError):
            decode_batch(data, FINGERPRINT, 7, verify=True)


def test_every_cut_is_found():
    for end in range(len(_GOOD)):
        with pytest.raises(BatchDamagedError):
            decode_batch(bytearray(_GOOD[:end]), FINGERPRINT, 7, verify=False)
    with pytest.raises(BatchDamagedError):
        decode_batch(bytearray(_GOOD + b"\0"), FINGERPRINT, 7, verify=False)


def test_head_locates_every_tensor():
    read = read_head(memoryview(_GOOD))
    assert (read.header.index, [part.shape for part in read.header.tensors]) == (7, [(6,), (2, 2)])
