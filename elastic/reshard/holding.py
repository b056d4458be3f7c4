"""Which part of a tensor this process holds: boxes of it, in global coordinates.

DCP describes a local shard by one offset and one shape. That is not enough for a ``_StridedShard`` that does not divide
evenly, whose rows are not neighbours; so the placements are followed here row by row, and what is found is compared
with the shard that is really there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from tieredckpt.boxes import Box, whole
from tieredckpt.errors import UsageError

Rows = tuple[tuple[int, int], ...]
"""Runs ``(start, size)`` of an axis's global numbers, in local order."""


class Held(NamedTuple):
    """The local tensor, and which of its boxes is which of the whole."""

    local: torch.Tensor
    boxes: tuple[tuple[Box, Box], ...]
    """(in the local tensor, in the whole one)"""
    copy: int
    """Which of the copies of the whole this is a part of: the lowest rank that holds some of the same one."""


def held(name: str, tensor: torch.Tensor, rank: int) -> Held:
    """What of ``tensor`` is here. One that is not distributed is whole on every rank: each has a copy of its own."""
    if isinstance(tensor, ShardedTensor):
        raise UsageError(f"{name} is a ShardedTensor: make it a DTensor (FSDP2, or FSDP's sharded state as DTensor)")
    if not isinstance(tensor, DTensor):
        box = whole(tuple(tensor.shape))
        return Held(tensor, ((box, box),), rank)
    mesh, local, shape = tensor.device_mesh, tensor.to_local(), tuple(tensor.shape)
    coordinate = mesh.get_coordinate()
    ranks = mesh.mesh
    if coordinate is None:  # the mesh is of other ranks
        return Held(local, (), int(ranks.min()))
    axes = shard_rows(name, shape, tuple(mesh.shape), coordinate, tensor.placements)
    expected = tuple(map(length, axes))
    # An empty shard may be empty in another way: FSDP2's own are, over an empty TP shard.
    if expected != tuple(local.shape) and (0 not in expected or local.numel()):
        raise UsageError(
            f"{name} of shape {shape} on a mesh {tuple(mesh.shape)} as {tensor.placements}: this rank should hold "
            f"{expected} and holds {tuple(local.shape)}, so nobody can say which part that is"
        )
    return Held(local, tuple(boxes_of(axes)), copy_of(ranks, coordinate, tensor.placements))


def shard_rows(
    name: str, shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> list[Rows]:
    """For each axis, which of its rows the process at ``coordinate`` of a mesh has."""
    axes: list[Rows] = [((0, size),) for size in shape]
    for count, index, placement in zip(mesh, coordinate, placements, strict=True):
        if placement.is_partial():
            raise UsageError(f"{name} is a partial sum on each rank ({placement}): redistribute it first")
        axis = getattr(placement, "dim", None)
        if axis is None:
            continue
        # A strided shard: a later dimension of the mesh has cut the axis into so many pieces before.
        factor = getattr(placement, "split_factor", 1)
        pieces = (chunk(chunk(axes[axis], factor, number), count, index) for number in range(factor))
        axes[axis] = tuple(itertools.chain.from_iterable(pieces))
    return axes


def chunk(rows: Rows, count: int, index: int) -> Rows:
    """Piece ``index`` of ``count``, cut as ``torch.chunk`` cuts."""
    size = -(-length(rows) // count)
    first, last = size * index, size * (index + 1)
    found, at = [], 0
    for start, run in rows:
        low, high = max(first, at), min(last, at + run)
        if low < high:
            found.append((start + low - at, high - low))
        at += run
    return tuple(found)


def length(rows: Rows) -> int:
    return sum(size for _, size in rows)


def boxes_of(axes: Sequence[Rows]) -> Iterator[tuple[Box, Box]]:
    """The boxes that rows of every axis make together: where each is in the local tensor, and where in the whole."""
    runs = []
    for rows in axes:
        ends = itertools.accumulate((size for _, size in rows), initial=0)
        runs.append([(at, start, size) for at, (start, size) in zip(ends, rows, strict=False)])
    for place in itertools.product(*runs):
        sizes = tuple(size for _, _, size in place)
        yield Box(tuple(at for at, _, _ in place), sizes), Box(tuple(start for _, start, _ in place), sizes)


def copy_of(ranks: torch.Tensor, coordinate: Sequence[int], placements: Sequence[Any]) -> int:
    """The lowest rank of those that hold the same copy: they differ in their place along sharded dimensions only."""
    for index, placement in zip(coordinate, placements, strict=True):
        # What was looked at goes to the end, so that the next dimension is the first one.
        ranks = ranks[index] if getattr(placement, "dim", None) is None else ranks.movedim(0, -1)
    return int(ranks.min())
