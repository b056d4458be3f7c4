"""Boxes: hyper-rectangles of tensors, their tilings, and their byte runs. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tieredckpt.errors import CheckpointDamagedError

_MAX_SPLITS, _MAX_OPEN_BOXES = 16, 1024
"""Limits on the number of boxes into which missing space may split.

Pieces of a tensor lie side by side in any sharding. A few forged pieces that cross in every direction would leave a
product of splits.
"""


class Box(NamedTuple):
    """A box of ``sizes`` elements from ``offsets``, in a tensor's global coordinates."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        return math.prod(self.sizes)


def full_box(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def intersection(a: Box, b: Box) -> Box | None:
    """Return the common box, or ``None`` if it is empty.

    Two 0-dimensional boxes are the same single element.
    """
    offsets = tuple(max(x, y) for x, y in zip(a.offsets, b.offsets, strict=True))
    sizes = tuple(
        min(x + n, y + m) - o for x, n, y, m, o in zip(a.offsets, a.sizes, b.offsets, b.sizes, offsets, strict=True)
    )
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def relative_box(inner: Box, outer: Box) -> Box:
    """Return ``inner`` in the coordinates of ``outer``."""
    return Box(tuple(i - o for i, o in zip(inner.offsets, outer.offsets, strict=True)), inner.sizes)


def split_box(box: Box, most: int, axis: int = 0) -> Iterator[Box]:
    """Yield a nonempty box as boxes of at most ``most`` elements, in order."""
    if box.volume <= most:
        yield box
        return
    while box.sizes[axis] == 1:
        axis += 1
    size = box.sizes[axis]
    step = max(1, most * size // box.volume)
    for first in range(0, size, step):
        offsets = (*box.offsets[:axis], box.offsets[axis] + first, *box.offsets[axis + 1 :])
        yield from split_box(
            Box(offsets, (*box.sizes[:axis], min(step, size - first), *box.sizes[axis + 1 :])), most, axis
        )


def subtract_box(box: Box, hole: Box) -> list[Box]:
    """Return ``box`` without ``hole``, as boxes that do not overlap."""
    common = intersection(box, hole)
    if common is None:
        return [box] if box.volume or not box.sizes else []
    rest = []
    offsets, sizes = list(box.offsets), list(box.sizes)
    for axis, (start, size) in enumerate(zip(common.offsets, common.sizes, strict=True)):
        before, after = start - offsets[axis], offsets[axis] + sizes[axis] - start - size
        if before:
            rest.append(Box(tuple(offsets), (*sizes[:axis], before, *sizes[axis + 1 :])))
        if after:
            rest.append(
                Box((*offsets[:axis], start + size, *offsets[axis + 1 :]), (*sizes[:axis], after, *sizes[axis + 1 :]))
            )
        offsets[axis], sizes[axis] = start, size
    return rest


class Tiling:
    """A box that is filled from other boxes, one at a time. Each element comes from only one of them."""

    def __init__(self, target: Box) -> None:
        self._target = target
        self._pieces = 0
        self.missing = [target] if target.volume else []
        """Boxes that are not covered so far. An empty target has none."""

    def add(self, cover: Box) -> list[Box]:
        """Cover missing boxes with ``cover``; return the boxes that it newly covers."""
        found, rest = [], []
        for hole in self.missing:
            common = intersection(hole, cover)
            if common is None:
                rest.append(hole)
            else:
                found.append(common)
                rest += subtract_box(hole, common)
        self._pieces += bool(found)
        if len(rest) > _MAX_OPEN_BOXES + _MAX_SPLITS * self._pieces * len(cover.sizes):
            raise CheckpointDamagedError(f"{self._pieces} pieces split {self._target} into {len(rest)} boxes and more")
        self.missing = rest
        return found


def uncovered(target: Box, covers: Iterable[Box]) -> list[Box]:
    """Return the boxes of ``target`` that no cover has. An empty target has none."""
    tiling = Tiling(target)
    for cover in covers:
        if not tiling.missing:
            break
        tiling.add(cover)
    return tiling.missing


class ByteRun(NamedTuple):
    """``size_bytes`` to copy from ``source`` to ``target``, each relative to the start of its block."""

    source: int
    target: int
    size_bytes: int


def byte_runs(box: Box, stored: Box, wanted: Box, itemsize: int) -> Iterator[ByteRun]:
    """Yield the contiguous runs that copy ``box`` from the block ``stored`` into ``wanted``.

    Both blocks are row-major.
    """
    if box == stored == wanted:
        if box.volume:
            yield ByteRun(0, 0, box.volume * itemsize)
        return
    if not box.volume:
        return
    rank = len(box.sizes)
    inner = rank  # axes [inner, rank) are copied in one run
    while inner > 0 and (inner == rank or box.sizes[inner] == stored.sizes[inner] == wanted.sizes[inner]):
        inner -= 1
    run_items = math.prod(box.sizes[inner:])
    source_strides, target_strides = _strides(stored.sizes), _strides(wanted.sizes)
    source = sum((o - s) * n for o, s, n in zip(box.offsets, stored.offsets, source_strides, strict=True))
    target = sum((o - w) * n for o, w, n in zip(box.offsets, wanted.offsets, target_strides, strict=True))
    outer = [(box.sizes[axis], source_strides[axis], target_strides[axis]) for axis in range(inner)]
    for source_step, target_step in _steps(outer):
        yield ByteRun((source + source_step) * itemsize, (target + target_step) * itemsize, run_items * itemsize)


def _steps(axes: list[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    if not axes:
        yield 0, 0
        return
    size, source_stride, target_stride = axes[0]
    for index in range(size):
        for source, target in _steps(axes[1:]):
            yield index * source_stride + source, index * target_stride + target


def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
