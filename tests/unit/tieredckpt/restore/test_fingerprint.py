"""Fingerprints from numpy and torch, in one pass or in parts, and the changes they detect."""

from __future__ import annotations

import itertools
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.async_device import AsyncDevice
from tieredckpt.restore import fingerprint
from tieredckpt.restore.fingerprint import (
    MASK64,
    ROW_WORDS,
    bytes_fingerprint,
    fingerprints_by_device,
    tensor_fingerprints,
)
from tieredckpt.restore.tensor_bytes import tensor_bytes
from tieredckpt.tensors.device import use_device_backend

ROW_BYTES = 4 * ROW_WORDS
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.int16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


def content(size: int, seed: int = 0) -> bytes:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=made).numpy().tobytes()


def as_tensor(data: bytes, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)


def of_bytes(data: bytes, position: int = 0) -> int:
    return bytes_fingerprint(memoryview(data), position)


def by_definition(data: bytes) -> int:
    """Compute the sum word by word in Python's integers."""
    words = struct.unpack(f"<{-(-len(data) // 4)}i", data + bytes(-len(data) % 4))
    columns = fingerprint.column_weights(torch.device("cpu")).tolist()
    rows = fingerprint.row_weights(torch.arange(len(words) // ROW_WORDS + 1)).tolist()
    return sum(word * columns[j % ROW_WORDS] * rows[j // ROW_WORDS] for j, word in enumerate(words)) & MASK64


@pytest.mark.parametrize("size", [0, 1, 3, 4, 7, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 1, 3 * ROW_BYTES + 10])
def test_fingerprint_is_the_defined_sum_on_both_ways(size):
    data = content(size)
    expected = by_definition(data)
    assert of_bytes(data) == expected
    if size:
        assert tensor_fingerprints([as_tensor(data)]) == [expected]


@settings(deadline=None)
@given(st.integers(0, 3 * ROW_BYTES), st.integers(0, 100), st.lists(st.integers(0, 3 * ROW_BYTES), max_size=6))
def test_parts_add_up_wherever_they_are_cut(size, seed, cuts):
    data = content(size, seed)
    edges = sorted({0, size, *(cut for cut in cuts if cut < size)})
    parts = [of_bytes(data[a:b], a) for a, b in itertools.pairwise(edges)]
    assert sum(parts) & MASK64 == of_bytes(data)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 40), max_size=3)), min_size=1, max_size=6),
    st.sampled_from([1, 4 * ROW_BYTES, 16 << 20]),
    st.booleans(),
)
def test_host_and_devices_agree_for_every_dtype_and_stride(shapes, window, turned):
    tensors = []
    for seed, (dtype, shape) in enumerate(shapes):
        size = torch.Size(shape).numel() * dtype.itemsize
        data = content(size, seed) if dtype is not torch.bool else bytes(one & 1 for one in content(size, seed))
        tensor = as_tensor(data, dtype).view(shape) if size else torch.zeros(shape, dtype=dtype)
        tensors.append(tensor.transpose(0, -1) if turned and tensor.ndim > 1 else tensor)
    expected = [of_bytes(tensor_bytes(tensor)) for tensor in tensors]
    with pytest.MonkeyPatch.context() as patch, use_device_backend(AsyncDevice()) as device:
        largest = max(tensor.nbytes for tensor in tensors)
        patch.setattr(fingerprint, "_WINDOW_BYTES", max(window, 16, largest // 100))
        assert tensor_fingerprints(tensors) == fingerprints_by_device(tensors) == expected
        there = [device.to_device(tensor, number % 2) for number, tensor in enumerate(tensors)]
        assert fingerprints_by_device(there) == expected
        device.close()
        assert (device.violations, device.races) == ([], [])


def test_large_tensor_is_taken_in_windows_that_cut_words(monkeypatch):
    tensor = as_tensor(content(3 * 70001)).view(3, 70001)
    expected = of_bytes(tensor_bytes(tensor))
    for window in (ROW_BYTES + 3, 50001, 1 << 20):
        monkeypatch.setattr(fingerprint, "_WINDOW_BYTES", window)
        assert tensor_fingerprints([tensor]) == [expected]


def test_single_element_with_a_stride_is_fingerprinted():
    tensor = torch.arange(18, dtype=torch.bfloat16).view(9, 2)[4:5, 1:]
    assert tensor_fingerprints([tensor, tensor[:, 0]]) == [of_bytes(tensor_bytes(tensor))] * 2


def test_lazy_conjugates_and_negatives_are_resolved():
    tensor = torch.randn(40, dtype=torch.complex64)
    lazy = [tensor.conj(), tensor.conj().imag]
    assert tensor_fingerprints(lazy) == [of_bytes(tensor_bytes(one)) for one in lazy]
    assert tensor_fingerprints([tensor.conj()]) != tensor_fingerprints([tensor])


# -- what it detects --------------------------------------------------------------------------------------------------


def differs(data: bytes, other: bytes) -> bool:
    """Return whether both implementations detect the change."""
    there = tensor_fingerprints([as_tensor(data), as_tensor(other)])
    assert there == [of_bytes(data), of_bytes(other)]
    return there[0] != there[1]


@settings(deadline=None)
@given(st.integers(1, 2 * ROW_BYTES), st.integers(0, 100), st.data())
def test_change_of_one_word_is_always_detected(size, seed, data):
    before = bytearray(content(-(-size // 4) * 4, seed))
    after = bytearray(before)
    word = data.draw(st.integers(0, len(before) // 4 - 1))
    after[4 * word : 4 * word + 4] = data.draw(st.binary(min_size=4, max_size=4))
    assert differs(bytes(before), bytes(after)) == (before != after)


@settings(deadline=None)
@given(st.integers(0, 100), st.integers(0, 3 * ROW_WORDS - 1), st.integers(0, 3 * ROW_WORDS - 1))
def test_swapped_words_are_detected(seed, i, j):
    before = as_tensor(content(3 * ROW_BYTES, seed), torch.int32)
    after = before.clone()
    after[i], after[j] = before[j].item(), before[i].item()
    assert differs(tensor_bytes(before), tensor_bytes(after)) == bool(before[i] != before[j])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_two_flipped_signs_do_not_cancel(dtype):
    before = torch.arange(1, 20001).to(dtype)
    after = before.clone()
    after[3], after[15000] = -after[3], -after[15000]
    assert differs(tensor_bytes(before), tensor_bytes(after))


def test_no_two_signs_of_a_row_cancel():
    """No two weights of a row have a sum or a difference that a flipped sign multiplies to zero."""
    low = fingerprint.column_weights(torch.device("cpu")) % (1 << 33)
    assert len(torch.cat([low, (1 << 33) - low]).unique()) == 2 * ROW_WORDS


def test_swapped_rows_are_detected():
    before = as_tensor(content(4 * ROW_BYTES), torch.int32).view(4, ROW_WORDS)
    assert differs(tensor_bytes(before), tensor_bytes(before[[0, 2, 1, 3]].contiguous()))
