"""Fingerprint of bytes, with the same value from numpy in host memory and from a device.

::

    sum of  word(j) * column(lo) * row(hi)  mod 2^64        j = hi * 8192 + lo: number of the word

A word is a signed little-endian integer of 32 bits. The numbers of both tables are odd, so every weight is odd, and a
change of one word always changes the fingerprint. Words of 64 bits do not work, because two flipped signs would cancel.
Each bit adds its own number, so the fingerprints of parts add up at any cut. Zeros at the end add nothing, so only
fingerprints of the same size are compared.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from tieredckpt.format.slice_boxes import full_box, split_box
from tieredckpt.restore.tensor_bytes import flat_in_memory, narrow_to_box, tensor_memory
from tieredckpt.tensors.device import accelerator
from tieredckpt.tensors.plain_tensors import has_ordinary_dispatch, is_plain_tensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MASK64 = (1 << 64) - 1
ROW_WORDS = 1 << 13
"""Words of one row, which share a row weight."""
CARRIER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Element types, by size, that torch copies bit by bit."""
_ROW_BYTES = 4 * ROW_WORDS
_WINDOW_BYTES = 16 << 20
"""Bytes of one batch. A device needs about four times as much memory for it."""
_GOLDEN = 0x9E3779B97F4A7C15
_COLUMN_SEED, _ROW_SEED = 0x243F6A8885A308D3, 0x452821E638D01377


def bytes_fingerprint(data: memoryview, position: int = 0) -> int:
    """Return the fingerprint of a part of a sequence of bytes, which begins at ``position``."""
    import numpy as np

    lead, tail = position % 4, -(position + len(data)) % 4
    if lead or tail:
        data = memoryview(b"".join((bytes(lead), data, bytes(tail))))
    words = np.frombuffer(data, dtype=np.int32)
    row, column = divmod(position // 4, ROW_WORDS)
    columns = _host_columns()
    head = min(len(words), -column % ROW_WORDS)
    total = 0
    if head:
        total += _scaled(words[:head], columns[column : column + head], row)
        row += 1
    count = (len(words) - head) // ROW_WORDS
    if count:
        body = words[head : head + count * ROW_WORDS].reshape(count, ROW_WORDS)
        # einsum converts block by block in the cache, and releases the interpreter.
        sums = np.einsum("ij,j->i", body, columns)
        total += int((sums * _host_rows(row + count)[row : row + count]).sum())
    rest = words[head + count * ROW_WORDS :]
    if len(rest):
        total += _scaled(rest, columns[: len(rest)], row + count)
    return total & MASK64


def tensor_fingerprints(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the fingerprint of each tensor's elements in row-major order, computed on their device.

    All tensors are plain tensors of one device. Only the results are copied to the host, once.
    """
    if not tensors:
        return []
    device = tensors[0].device
    with torch.no_grad():
        totals = torch.zeros(len(tensors), dtype=torch.int64, device=device)
        for window in _windows(tensors):
            _add_window(totals, window)
        return [number & MASK64 for number in accelerator().to_host(totals).tolist()]


def fingerprints_by_device(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the fingerprint of each tensor, computed on its device, or by numpy on the host."""
    device = accelerator()
    groups: defaultdict[torch.device, list[int]] = defaultdict(list)
    found = [0] * len(tensors)
    for number, tensor in enumerate(tensors):
        place = device.device_of(tensor)
        if place is None:
            flat = flat_in_memory(tensor)
            found[number] = bytes_fingerprint(tensor_memory(flat))
        else:
            groups[place].append(number)
    for numbers in groups.values():
        for number, value in zip(numbers, tensor_fingerprints([tensors[i] for i in numbers]), strict=True):
            found[number] = value
    return found


def can_be_fingerprinted(tensor: torch.Tensor) -> bool:
    """Return whether a tensor consists of type, shape and elements only, and torch can copy it."""
    return is_plain_tensor(tensor) and has_ordinary_dispatch(tensor) and not tensor.is_meta


class _Part(NamedTuple):
    """Part of a tensor and the position of its bytes in the tensor."""

    owner: int
    tensor: torch.Tensor
    position: int

    @property
    def lead(self) -> int:
        """Bytes between the start of a row and the start of this part."""
        return self.position % _ROW_BYTES

    @property
    def row_count(self) -> int:
        return -(-(self.lead + self.tensor.nbytes) // _ROW_BYTES)


def _windows(tensors: Sequence[torch.Tensor]) -> Iterator[list[_Part]]:
    window: list[_Part] = []
    size = 0
    for part in _parts(tensors):
        if window and size + part.row_count * _ROW_BYTES > _WINDOW_BYTES:
            yield window
            window, size = [], 0
        window.append(part)
        size += part.row_count * _ROW_BYTES
    if window:
        yield window


def _parts(tensors: Sequence[torch.Tensor]) -> Iterator[_Part]:
    for owner, tensor in enumerate(tensors):
        if not tensor.numel():
            continue
        position = 0
        for box in split_box(full_box(tuple(tensor.shape)), _WINDOW_BYTES // tensor.itemsize):
            yield _Part(owner, narrow_to_box(tensor, box), position)
            position += box.volume * tensor.itemsize


def _add_window(totals: torch.Tensor, window: Sequence[_Part]) -> None:
    """Add the parts' fingerprints to the totals of their owners, in a constant number of operations."""
    device = totals.device
    counts = torch.tensor([part.row_count for part in window], device="cpu")
    firsts = torch.tensor([part.position // _ROW_BYTES for part in window], device="cpu")
    owners = torch.tensor([part.owner for part in window], device="cpu")
    starts = counts.cumsum(0) - counts
    data = torch.zeros(int(counts.sum()) * _ROW_BYTES, dtype=torch.uint8, device=device)
    flat: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    strided: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for part, row in zip(window, starts.tolist(), strict=True):
        # Copies of integers preserve every bit. Copies of booleans or NaNs may not.
        plain = part.tensor.detach().resolve_conj().resolve_neg().view(CARRIER_DTYPES[part.tensor.itemsize])
        start = row * _ROW_BYTES + part.lead
        room = data[start : start + plain.nbytes]
        targets, sources = flat if plain.is_contiguous() else strided
        if plain.is_contiguous():
            targets.append(room)
            # Not reshape(): it preserves the stride of a single element.
            sources.append(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8))
        else:
            targets.append(room.view(plain.dtype).view(plain.shape))
            sources.append(plain)
    for targets, sources in (flat, strided):
        if targets:
            torch._foreach_copy_(targets, sources)
    number = torch.arange(int(counts.sum()), device="cpu")
    numbers = number + torch.repeat_interleave(firsts - starts, counts)
    indices = torch.stack([numbers, torch.repeat_interleave(owners, counts)]).to(device)
    sums = (data.view(torch.int32).view(-1, ROW_WORDS) * column_weights(device)).sum(1)
    totals.index_add_(0, indices[1], sums * row_weights(indices[0]))


@functools.lru_cache(maxsize=16)
def column_weights(device: torch.device) -> torch.Tensor:
    """Return the table of odd weights of the words of a row."""
    return seeded_numbers(_COLUMN_SEED, torch.arange(ROW_WORDS, dtype=torch.int64, device=device)) | 1


def row_weights(rows: torch.Tensor) -> torch.Tensor:
    """Return the odd weight of each row."""
    return seeded_numbers(_ROW_SEED, rows) | 1


def seeded_numbers(seed: int, numbers: torch.Tensor) -> torch.Tensor:
    """Return 64 pseudorandom bits for each number."""
    return _mix64(numbers * _as_int64(_GOLDEN) + _as_int64(seed))


def _mix64(x: torch.Tensor) -> torch.Tensor:
    """Return splitmix64's finalizer of each element. Products of int64 wrap, which is intended."""
    x = (x ^ _shift(x, 30)) * _as_int64(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _as_int64(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, count: int) -> torch.Tensor:
    """Shift right without the sign."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _as_int64(value: int) -> int:
    """Return the signed number with these 64 bits."""
    value &= MASK64
    return value - (1 << 64) if value >> 63 else value


@functools.cache
def _host_columns() -> NDArray[np.int64]:
    return column_weights(torch.device("cpu")).numpy()


def _host_rows(count: int) -> NDArray[np.int64]:
    """Return the weights of at least ``count`` rows."""
    return _host_row_table(max(1024, 1 << (count - 1).bit_length()))


@functools.lru_cache(maxsize=4)
def _host_row_table(count: int) -> NDArray[np.int64]:
    numbers = torch.arange(count, dtype=torch.int64, device="cpu")
    return row_weights(numbers).numpy()


def _scaled(words: NDArray[np.int32], columns: NDArray[np.int64], row: int) -> int:
    import numpy as np

    return int(np.einsum("i,i->", words, columns)) * int(_host_rows(row + 1)[row])
