"""Offline resharding: interfaces of source and target, plans of slices, write, read back, compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from elastic.reshard.state_checksum import (
    OBJECT_DTYPE,
    ChecksumPart,
    RankChecksum,
    WholeChecksum,
    combine_checksums,
    name_seed,
    object_checksum_part,
    weighted_sum,
)
from tieredckpt.errors import CheckpointDamagedError, MismatchError, SaveFailedError, TieredCheckpointError, UsageError
from tieredckpt.format.slice_boxes import Box, Tiling, full_box
from tieredckpt.restore.fingerprint import MASK64
from tieredckpt.tensors.plain_tensors import dtype_name

AdvanceBytes = Callable[[int], None]
"""Callback for progress, with the number of bytes since the last call."""
READ_WINDOW_BYTES = 64 << 20
"""Bytes of a tensor that are in memory at a time."""


@dataclass(frozen=True)
class CheckpointTensor:
    """Type, shape and pieces of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    pieces: tuple[tuple[int, Box], ...]
    """Part number and box of each stored piece. Pieces may overlap."""
    requires_grad: bool = False

    @property
    def size_bytes(self) -> int:
        return full_box(self.shape).volume * self.itemsize


class ReshardSource(Protocol):
    """A checkpoint that can be read.

    - ``read`` returns exactly the requested box, on the CPU and contiguous. It raises ``CheckpointDamagedError`` if
      bytes are damaged or missing, and ``TierUnavailableError`` if the storage cannot be reached.
    """

    @property
    def name(self) -> str: ...
    @property
    def step(self) -> int | None: ...
    @property
    def parts(self) -> int:
        """Number of ranks that wrote the checkpoint."""

    @property
    def tensors(self) -> Mapping[str, CheckpointTensor]: ...
    @property
    def objects(self) -> tuple[str, ...]: ...
    @property
    def paths(self) -> Mapping[str, tuple[str | int, ...]] | None:
        """Path of each name in the nested state; ``None`` if unknown."""

    def read(self, name: str, box: Box) -> torch.Tensor: ...
    def object_bytes(self, name: str) -> bytes: ...
    def close(self) -> None: ...


def split_into_windows(
    box: Box, shape: tuple[int, ...], itemsize: int, most_bytes: int = READ_WINDOW_BYTES
) -> Iterator[Box]:
    """Split a box into boxes in row-major order that each span at most ``most_bytes`` of the whole tensor.

    The span is the distance from the first to the last byte, not the size, because a source may read whole rows.
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
        yield from split_into_windows(Box(tuple(offsets), tuple(sizes)), shape, itemsize, most_bytes)


def _span(box: Box, shape: tuple[int, ...]) -> int:
    last = 0
    for size, full in zip(box.sizes, shape, strict=True):
        last = last * full + size - 1
    return last + 1


def disjoint_boxes(name: str, form: CheckpointTensor) -> list[Box]:
    """Return the stored pieces without overlaps; raise ``CheckpointDamagedError`` if they have gaps."""
    tiling = Tiling(full_box(form.shape))
    found = [common for _, box in form.pieces for common in tiling.add(box)]
    if tiling.missing:
        raise CheckpointDamagedError(f"{name}: nothing holds {tiling.missing[0]} of {form.shape}")
    return found


def source_checksum(source: ReshardSource, advance: AdvanceBytes) -> WholeChecksum:
    """Return the checksum of a checkpoint, read in its stored pieces."""
    parts = {}
    for name, form in source.tensors.items():
        total, seed = 0, name_seed(name)
        for box in disjoint_boxes(name, form):
            for window in split_into_windows(box, form.shape, form.itemsize):
                data = source.read(name, window)
                if dtype_name(data.dtype) != form.dtype:
                    raise CheckpointDamagedError(f"{name} should be {form.dtype} and is {dtype_name(data.dtype)}")
                total += weighted_sum(seed, data, form.shape, window.offsets)
                advance(data.nbytes)
        parts[name] = ChecksumPart(form.dtype, form.shape, total & MASK64, full_box(form.shape).volume)
    for name in source.objects:
        parts[name] = object_checksum_part(name, source.object_bytes(name))
    return combine_checksums([RankChecksum(parts)])


MAX_RESHARD_RANKS = 1 << 16


class TensorSlice(NamedTuple):
    name: str
    box: Box


@dataclass(frozen=True)
class ReshardPlan:
    """Slices and objects in each part of the new checkpoint."""

    parts: tuple[tuple[TensorSlice, ...], ...]
    objects: int = 0
    """Number of the part that holds the objects."""


def plan_fsdp(forms: Mapping[str, CheckpointTensor], ranks: int) -> ReshardPlan:
    """Split each tensor along its first axis like ``fully_shard``, so that each rank reads only one part.

    Scalars and empty tensors are not split: each is placed in the part with the fewest bytes.
    """
    parts: list[list[TensorSlice]] = [[] for _ in range(_checked_ranks(ranks))]
    loads = [0] * ranks
    undivided = []
    for name, form in forms.items():
        box = full_box(form.shape)
        if not form.shape or not box.volume:
            undivided.append(name)
            continue
        size = -(-form.shape[0] // ranks)
        for rank in range(-(-form.shape[0] // size)):
            rows = min(size, form.shape[0] - rank * size)
            piece = Box((rank * size, *box.offsets[1:]), (rows, *box.sizes[1:]))
            parts[rank].append(TensorSlice(name, piece))
            loads[rank] += piece.volume * form.itemsize
    _spread({name: forms[name] for name in undivided}, parts, loads)
    return ReshardPlan(tuple(map(tuple, parts)))


def plan_whole_tensors(forms: Mapping[str, CheckpointTensor], ranks: int) -> ReshardPlan:
    """Assign whole tensors (as DDP saves them), the largest first, each to the part with the fewest bytes."""
    parts: list[list[TensorSlice]] = [[] for _ in range(_checked_ranks(ranks))]
    _spread(forms, parts, [0] * ranks)
    return ReshardPlan(tuple(map(tuple, parts)))


def plan_like(forms: Mapping[str, CheckpointTensor], other: Mapping[str, CheckpointTensor], ranks: int) -> ReshardPlan:
    """Return the boxes and parts of another checkpoint with the same tensors.

    Raise ``MismatchError`` if names or shapes differ.
    """
    missing, strange = sorted(other.keys() - forms.keys()), sorted(forms.keys() - other.keys())
    if missing or strange:
        raise MismatchError(
            f"the checkpoint to be like has other tensors: {len(strange)} are not in it ({', '.join(strange[:3])}), "
            f"{len(missing)} are only in it ({', '.join(missing[:3])})"
        )
    parts: list[list[TensorSlice]] = [[] for _ in range(_checked_ranks(ranks))]
    for name, form in forms.items():
        model = other[name]
        if model.shape != form.shape:
            raise MismatchError(f"{name} is {form.shape} here and {model.shape} in the checkpoint to be like")
        owner = {box: part for part, box in reversed(model.pieces)}
        for box in disjoint_boxes(name, model):
            part = owner.get(box)
            if part is None:  # its pieces overlap: choose a part that contains the whole box
                part = next(p for p, stored in model.pieces if _inside(box, stored))
            parts[part].append(TensorSlice(name, box))
        if not full_box(form.shape).volume:
            parts[model.pieces[0][0]].append(TensorSlice(name, full_box(form.shape)))
    return ReshardPlan(tuple(map(tuple, parts)))


def _spread(forms: Mapping[str, CheckpointTensor], parts: Sequence[list[TensorSlice]], loads: list[int]) -> None:
    for name in sorted(forms, key=lambda name: (-forms[name].size_bytes, name)):
        rank = loads.index(min(loads))
        parts[rank].append(TensorSlice(name, full_box(forms[name].shape)))
        loads[rank] += max(1, forms[name].size_bytes)


def _inside(box: Box, outer: Box) -> bool:
    axes = zip(box.offsets, box.sizes, outer.offsets, outer.sizes, strict=True)
    return all(o <= b and b + n <= o + m for b, n, o, m in axes)


def _checked_ranks(ranks: int) -> int:
    if not 1 <= ranks <= MAX_RESHARD_RANKS:
        raise UsageError(f"{ranks} ranks: from 1 to {MAX_RESHARD_RANKS}")
    return ranks


ReshardProgress = Callable[[str, int], AbstractContextManager[AdvanceBytes]]
"""Context that shows the progress of a stage, from its name and its number of bytes."""


class ReshardTarget(Protocol):
    """A checkpoint to write.

    - ``write`` yields a source that reads the written bytes.
    - The checkpoint exists only after the block of ``write`` has ended without an error. An error leaves no
      trace of it.
    """

    @property
    def name(self) -> str: ...
    @property
    def step(self) -> int | None: ...
    def write(
        self, source: ReshardSource, cut: ReshardPlan, advance: AdvanceBytes
    ) -> AbstractContextManager[ReshardSource]: ...


@dataclass(frozen=True)
class ReshardResult:
    """Numbers of parts, tensors, objects and bytes of a resharded checkpoint."""

    parts: int
    tensors: int
    objects: int
    size_bytes: int
    """Bytes of the tensors."""
    checksum: int
    """Checksum of the tensors, equal in source and target."""


def reshard_checkpoint(
    source: ReshardSource, target: ReshardTarget, cut: ReshardPlan, stage: ReshardProgress
) -> ReshardResult:
    """Write ``source`` to ``target`` with the slices of ``cut``, and compare the checksums of both.

    Each side is read in its own pieces, so that one error cannot affect both checksums equally.
    """
    total = sum(form.size_bytes for form in source.tensors.values())
    with stage(f"reading {source.name}", total) as advance:
        before = source_checksum(source, advance)
    with stage(f"writing {target.name}", 2 * total) as advance, target.write(source, cut, advance) as written:
        _compare(before, written, advance)
    tensors = sum(entry.dtype != OBJECT_DTYPE for entry in before.entries.values())
    return ReshardResult(len(cut.parts), tensors, len(before.entries) - tensors, total, before.tensors_only.value)


def _compare(before: WholeChecksum, written: ReshardSource, advance: AdvanceBytes) -> None:
    try:
        source_checksum(written, advance).assert_equal(before)
    except TieredCheckpointError as error:
        raise SaveFailedError(f"{written.name} did not become what was read, so it was not kept: {error}") from error
