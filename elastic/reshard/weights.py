"""A weighted sum of a tensor's bits, where every element's weight follows from its name and its global place.

::

    sum of  word(j) * weight(name, j)  mod 2^64        j: global row-major number of the word

    weight(name, j) = T[lo] * a(name, hi) + U[lo] * b(name, hi)        j = hi * 8192 + lo

An element of up to 32 bits is one word, a wider one is several: with words of 64 bits two flipped signs would cancel.
``T`` and ``a`` are odd and ``b`` is even, so every weight is odd: a change of one word always changes the sum. All of
them come out of splitmix64. A weight never depends on how the tensor is cut, so the sums of any partition add up.

Two tables, because a block's words then cost two multiplications each, and not a hash each; and two of them, so that a
block whose sum with one table happens to vanish is still seen through the other. ``docs/resharding.md`` has the
probability of a miss.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import xxhash

from tieredckpt.boxes import Box

MASK = (1 << 64) - 1
_BLOCK = 1 << 13
_GOLDEN = 0x9E3779B97F4A7C15
_SEED_T, _SEED_U, _SEED_B = 0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0
_CPU_WORDS = 1 << 18
"""Worked on at a time: what a core's cache holds. An accelerator would rather have more of them."""
_DEVICE_WORDS = 1 << 24
CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Some element types are only stored by torch, and none is to be interpreted."""
_WORD = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint32, 16: torch.uint32}


def seed_of(name: str) -> int:
    """What sets one tensor's weights apart from another's."""
    return xxhash.xxh3_64_intdigest(name.encode())


def weighted_sum(seed: int, tensor: torch.Tensor, shape: tuple[int, ...], offsets: tuple[int, ...]) -> int:
    """The part of a tensor's sum that lies in a box of it: ``tensor`` is that box, ``shape`` the whole tensor's.

    Any device, any strides, any element type; memory stays bounded whatever the box.
    """
    if not tensor.numel():
        return 0
    if not tensor.ndim:
        tensor, shape, offsets = tensor.reshape(1), (1,), (0,)
    words = max(1, tensor.dtype.itemsize // 4)
    limit = (_CPU_WORDS if tensor.device.type == "cpu" else _DEVICE_WORDS) // words
    room = _Room(min(limit, tensor.numel()) * words, tensor.device)
    total = 0
    for piece, box in _pieces(tensor, Box(offsets, tuple(tensor.shape)), limit):
        found = _piece_sum(seed, _words(piece, room), _in_words(shape, words), _box_in_words(box, words), room)
        total += int(found.item())
    return total & MASK


class _Room:
    """Memory for one piece, used again for every next one: fresh pages cost more than the arithmetic."""

    def __init__(self, words: int, device: torch.device) -> None:
        self._words = words
        self._device = device
        self._rows: list[torch.Tensor] = []

    def rows(self, number: int, like: torch.Tensor) -> torch.Tensor:
        while len(self._rows) <= number:
            self._rows.append(torch.empty(self._words, dtype=torch.int64, device=self._device))
        return self._rows[number][: like.numel()].view(like.shape)


def _pieces(tensor: torch.Tensor, box: Box, limit: int) -> Iterator[tuple[torch.Tensor, Box]]:
    """The box in boxes of at most ``limit`` elements, cut along the outermost axes."""
    if tensor.numel() <= limit:
        yield tensor, box
        return
    axis = next(axis for axis, size in enumerate(box.sizes) if size > 1)
    step = max(1, limit // (box.volume // box.sizes[axis]))
    for start in range(0, box.sizes[axis], step):
        size = min(step, box.sizes[axis] - start)
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[axis] += start
        sizes[axis] = size
        yield from _pieces(tensor.narrow(axis, start, size), Box(tuple(offsets), tuple(sizes)), limit)


def _words(piece: torch.Tensor, room: _Room) -> torch.Tensor:
    """Its words in row-major order, as non-negative numbers."""
    size = piece.dtype.itemsize
    plain = piece.detach().resolve_conj().resolve_neg().view(CARRIERS[size]).contiguous()
    flat = plain.reshape(-1).view(_WORD[size])
    return room.rows(0, flat).copy_(flat)


def _in_words(sizes: tuple[int, ...], words: int) -> tuple[int, ...]:
    return (*sizes[:-1], sizes[-1] * words)


def _box_in_words(box: Box, words: int) -> Box:
    return Box(_in_words(box.offsets, words), _in_words(box.sizes, words))


def _piece_sum(seed: int, words: torch.Tensor, shape: tuple[int, ...], box: Box, room: _Room) -> torch.Tensor:
    """The sum of one piece: its rows are the runs that are contiguous in the whole tensor."""
    inner = len(shape) - 1
    while inner > 0 and box.sizes[inner] == shape[inner]:
        inner -= 1
    width = math.prod(box.sizes[inner:])
    starts = torch.zeros(1, dtype=torch.int64, device=words.device)
    for axis, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        stride = math.prod(shape[axis + 1 :])
        starts = starts + offset * stride
        if axis < inner:
            steps = torch.arange(size, dtype=torch.int64, device=words.device) * stride
            starts = (starts[:, None] + steps).reshape(-1)
    tables = _tables(words.device)
    rows = words.view(-1, width)
    if len(rows) == 1 and width >= 2 * _BLOCK:
        return _run_sum(seed, rows[0], int(starts.item()), tables, room)
    total = words.new_zeros(())
    for column in range(0, width, _BLOCK):
        total += _rows_sum(seed, rows[:, column : column + _BLOCK], starts + column, tables, room)
    return total


class _Tables(NamedTuple):
    """Both tables, and once more behind themselves: a row may begin anywhere in a block."""

    t: torch.Tensor
    u: torch.Tensor


def _run_sum(seed: int, run: torch.Tensor, start: int, tables: _Tables, room: _Room) -> torch.Tensor:
    """One long run: whole blocks need no copies of the tables."""
    lead = -start % _BLOCK
    blocks = (len(run) - lead) // _BLOCK
    stop = lead + blocks * _BLOCK
    total = run.new_zeros(())
    for part, first in ((run[:lead], start), (run[stop:], start + stop)):
        if len(part):
            total += _rows_sum(seed, part[None, :], torch.tensor([first], device=run.device), tables, room)
    body = run[lead:stop].view(blocks, _BLOCK)
    a, b = _factors(seed, torch.arange(blocks, device=run.device) + (start + lead) // _BLOCK)
    return total + (a * _dot(body, tables.t[:_BLOCK]) + b * _dot(body, tables.u[:_BLOCK])).sum()


def _dot(rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    # Nothing but a CPU multiplies matrices of integers.
    return rows @ table if rows.device.type == "cpu" else (rows * table).sum(1)


def _rows_sum(seed: int, rows: torch.Tensor, starts: torch.Tensor, tables: _Tables, room: _Room) -> torch.Tensor:
    """Rows of at most a block each, from anywhere: one that begins in a block and ends in the next is cut there."""
    width = rows.shape[1]
    low, block = starts % _BLOCK, starts // _BLOCK
    a, b = _factors(seed, block)
    left_t, left_u = (
        torch.index_select(table.unfold(0, width, 1), 0, low, out=room.rows(1 + i, rows)).mul_(rows)
        for i, table in enumerate(tables)
    )
    total = (a * left_t.sum(1) + b * left_u.sum(1)).sum()
    crossing = low + width > _BLOCK
    if not bool(crossing.any()):
        return total
    # What lies behind the edge was counted with the factors of the block before it.
    behind = torch.arange(width, device=rows.device) >= (_BLOCK - low[crossing])[:, None]
    next_a, next_b = _factors(seed, block[crossing] + 1)
    for product, old, new in ((left_t, a, next_a), (left_u, b, next_b)):
        tail = (product[crossing] * behind).sum(1)
        total = total + ((new - old[crossing]) * tail).sum()
    return total


@functools.lru_cache(maxsize=16)
def _tables(device: torch.device) -> _Tables:
    numbers = torch.arange(_BLOCK, dtype=torch.int64, device=device)
    t = _mix(numbers * _signed(_GOLDEN) + _signed(_SEED_T)) | 1
    u = _mix(numbers * _signed(_GOLDEN) + _signed(_SEED_U))
    return _Tables(torch.cat([t, t]), torch.cat([u, u]))


def _factors(seed: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two factors of each block: an odd one and an even one."""
    places = blocks * _signed(_GOLDEN)
    return _mix(places + _signed(seed)) | 1, _mix(places + _signed(seed ^ _SEED_B)) << 1


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finalizer. Products of int64 wrap, which is what is wanted."""
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, count: int) -> torch.Tensor:
    """To the right, without the sign."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    """The number of 64 bits that int64 writes so."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value
