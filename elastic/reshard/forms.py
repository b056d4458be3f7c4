"""What there is to know about a checkpoint before any of its bytes is read, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from elastic.reshard.checksum import Checksum, Part, StateChecksum, combine, object_part
from elastic.reshard.weights import MASK, seed_of, weighted_sum
from tieredckpt.boxes import Box, Tiling, whole
from tieredckpt.errors import CheckpointDamagedError
from tieredckpt.tensors import dtype_name

Advance = Callable[[int], None]
"""Called with the number of bytes just done."""
WINDOW_BYTES = 64 << 20
"""Of a tensor in memory at a time."""


@dataclass(frozen=True)
class Form:
    """A stored tensor."""

    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    pieces: tuple[tuple[int, Box], ...]
    """Which part has which box of it; some may be there several times."""
    requires_grad: bool = False

    @property
    def size_bytes(self) -> int:
        return whole(self.shape).volume * self.itemsize


class Source(Protocol):
    """A checkpoint that can be read.

    - ``read`` returns exactly the box asked for, on the CPU and contiguous, or raises: ``CheckpointDamagedError`` when
      bytes are not what was saved or are gone, ``TierUnavailableError`` when they could not be asked for.
    """

    @property
    def name(self) -> str: ...
    @property
    def step(self) -> int | None: ...
    @property
    def parts(self) -> int:
        """Ranks that wrote it."""

    @property
    def tensors(self) -> Mapping[str, Form]: ...
    @property
    def objects(self) -> tuple[str, ...]: ...
    @property
    def paths(self) -> Mapping[str, tuple[str | int, ...]] | None:
        """Where each name was in the nested state, where that is known."""

    def read(self, name: str, box: Box) -> torch.Tensor: ...
    def object_bytes(self, name: str) -> bytes: ...
    def close(self) -> None: ...


def windows(box: Box, shape: tuple[int, ...], itemsize: int, most_bytes: int = WINDOW_BYTES) -> Iterator[Box]:
    """The box in row-major order, in boxes that each lie within ``most_bytes`` of the whole tensor.

    The distance from its first to its last byte counts, not its size: whoever stored whole rows has to read them.
    """
    if box.volume <= 1 or _span(box, shape) * itemsize <= most_bytes:
        if box.volume:
            yield box
        return
    axis = next(axis for axis, size in enumerate(box.sizes) if size > 1)
    row = 1
    for size in shape[axis + 1 :]:
        row *= size
    step = max(1, most_bytes // (row * itemsize))
    for start in range(0, box.sizes[axis], step):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[axis] += start
        sizes[axis] = min(step, box.sizes[axis] - start)
        yield from windows(Box(tuple(offsets), tuple(sizes)), shape, itemsize, most_bytes)


def _span(box: Box, shape: tuple[int, ...]) -> int:
    last = 0
    for size, full in zip(box.sizes, shape, strict=True):
        last = last * full + size - 1
    return last + 1


def disjoint(name: str, form: Form) -> list[Box]:
    """The tensor's own pieces, without what is there twice; an error when they are not all of it."""
    tiling = Tiling(whole(form.shape))
    found = [common for _, box in form.pieces for common in tiling.lay(box)]
    if tiling.missing:
        raise CheckpointDamagedError(f"{name}: nothing holds {tiling.missing[0]} of {form.shape}")
    return found


def checksum_of(source: Source, advance: Advance) -> Checksum:
    """Of everything in a checkpoint, read as it was written."""
    parts = {}
    for name, form in source.tensors.items():
        total, seed = 0, seed_of(name)
        for box in disjoint(name, form):
            for window in windows(box, form.shape, form.itemsize):
                data = source.read(name, window)
                if dtype_name(data.dtype) != form.dtype:
                    raise CheckpointDamagedError(f"{name} should be {form.dtype} and is {dtype_name(data.dtype)}")
                total += weighted_sum(seed, data, form.shape, window.offsets)
                advance(data.nbytes)
        parts[name] = Part(form.dtype, form.shape, total & MASK, whole(form.shape).volume)
    for name in source.objects:
        parts[name] = object_part(name, source.object_bytes(name))
    return combine([StateChecksum(parts)])
