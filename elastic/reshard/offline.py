"""Offline resharding: the interfaces of source and target, the plan of slices, write, read back, compare."""

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
from tieredckpt.tensors.state_dict import dtype_name

AdvanceBytes = Callable[[int], None]
"""Called with the number of bytes just done."""
READ_WINDOW_BYTES = 64 << 20
"""Of a tensor in memory at a time."""


@dataclass(frozen=True)
class CheckpointTensor:
    """A stored tensor."""

    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    pieces: tuple[tuple[int, Box], ...]
    """Which part has which box of it; some may be there several times."""
    requires_grad: bool = False

    @property
    def size_bytes(self) -> int:
        return full_box(self.shape).volume * self.itemsize


class ReshardSource(Protocol):
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
    def tensors(self) -> Mapping[str, CheckpointTensor]: ...
    @property
    def objects(self) -> tuple[str, ...]: ...
    @property
    def paths(self) -> Mapping[str, tuple[str | int, ...]] | None:
        """Where each name was in the nested state, where that is known."""

    def read(self, name: str, box: Box) -> torch.Tensor: ...
    def object_bytes(self, name: str) -> bytes: ...
    def close(self) -> None: ...


def split_into_windows(
    box: Box, shape: tuple[int, ...], itemsize: int, most_bytes: int = READ_WINDOW_BYTES
) -> Iterator[Box]:
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
        yield from split_into_windows(Box(tuple(offsets), tuple(sizes)), shape, itemsize, most_bytes)


def _span(box: Box, shape: tuple[int, ...]) -> int:
    last = 0
    for size, full in zip(box.sizes, shape, strict=True):
        last = last * full + size - 1
    return last + 1


def disjoint_boxes(name: str, form: CheckpointTensor) -> list[Box]:
    """The tensor's own pieces, without what is there twice; an error when they are not all of it."""
    tiling = Tiling(full_box(form.shape))
    found = [common for _, box in form.pieces for common in tiling.add(box)]
    if tiling.missing:
        raise CheckpointDamagedError(f"{name}: nothing holds {tiling.missing[0]} of {form.shape}")
    return found


def source_checksum(source: ReshardSource, advance: AdvanceBytes) -> WholeChecksum:
    """Of everything in a checkpoint, read as it was written."""
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
    """What each part of the new checkpoint holds."""

    parts: tuple[tuple[TensorSlice, ...], ...]
    objects: int = 0
    """The part with the objects."""


def plan_fsdp(forms: Mapping[str, CheckpointTensor], ranks: int) -> ReshardPlan:
    """Each tensor along its first axis, as ``fully_shard`` cuts it: a rank of such a world reads one part alone.

    What has no first axis goes where there is the least so far.
    """
    parts: list[list[TensorSlice]] = [[] for _ in range(_checked(ranks))]
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
    """No tensor is cut (as DDP saves them); the largest first, each to the part with the least so far."""
    parts: list[list[TensorSlice]] = [[] for _ in range(_checked(ranks))]
    _spread(forms, parts, [0] * ranks)
    return ReshardPlan(tuple(map(tuple, parts)))


def plan_like(forms: Mapping[str, CheckpointTensor], other: Mapping[str, CheckpointTensor], ranks: int) -> ReshardPlan:
    """The boxes, in the parts, that another checkpoint of the same tensors has."""
    missing, strange = sorted(other.keys() - forms.keys()), sorted(forms.keys() - other.keys())
    if missing or strange:
        raise MismatchError(
            f"the checkpoint to be like has other tensors: {len(strange)} are not in it ({', '.join(strange[:3])}), "
            f"{len(missing)} are only in it ({', '.join(missing[:3])})"
        )
    parts: list[list[TensorSlice]] = [[] for _ in range(_checked(ranks))]
    for name, form in forms.items():
        model = other[name]
        if model.shape != form.shape:
            raise MismatchError(f"{name} is {form.shape} here and {model.shape} in the checkpoint to be like")
        owner = {box: part for part, box in reversed(model.pieces)}
        for box in disjoint_boxes(name, model):
            part = owner.get(box)
            if part is None:  # its pieces overlap: whoever has all of this one
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


def _checked(ranks: int) -> int:
    if not 1 <= ranks <= MAX_RESHARD_RANKS:
        raise UsageError(f"{ranks} ranks: from 1 to {MAX_RESHARD_RANKS}")
    return ranks


ReshardProgress = Callable[[str, int], AbstractContextManager[AdvanceBytes]]
"""Shows how far a stage of so many bytes is."""


class ReshardTarget(Protocol):
    """A checkpoint that is to be.

    - What ``write`` yields is what a reader would get, out of what was written.
    - The checkpoint is there when its block has ended well, and at no time before; otherwise nothing of it is.
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
    """What was done."""

    parts: int
    tensors: int
    objects: int
    size_bytes: int
    """Of the tensors."""
    checksum: int
    """Of the tensors, the same on both sides."""


def reshard_checkpoint(
    source: ReshardSource, target: ReshardTarget, cut: ReshardPlan, stage: ReshardProgress
) -> ReshardResult:
    """Write ``source`` anew as ``cut`` says. Both sides are read in their own pieces, so that no mistake is on both."""
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
