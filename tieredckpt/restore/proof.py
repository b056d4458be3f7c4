"""Evidence of a load, and its comparison with the live tensors.

While it reads, a load keeps what its bytes can be told by (:class:`LoadEvidence`). Where most of a shard goes into this
process that is the seal itself: the checksums of the shard's chunks, taken when it was saved. What is cut otherwise,
converted, or comes from other tiers has a digest of what was put into the target. After everybody's
``load_state_dict`` the state is asked again what it is made of, and its memory is hashed, in the copying threads, piece
by piece in the order of the shard (:class:`RestoreProof`): the same whatever the sharding was, and is.

What is on a device stays there: its evidence is a fingerprint of the bytes in the buffer that the device copied them
from, and the device computes the fingerprint of the live tensor (:mod:`tieredckpt.restore.fingerprint`).
"""

from __future__ import annotations

import logging
import os
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import xxhash
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem
from torch.distributed.checkpoint.utils import find_state_dict_object

from tieredckpt.errors import TieredCheckpointError
from tieredckpt.format.manifest import ShardIndex
from tieredckpt.format.slice_boxes import Box, ByteRun, byte_runs, full_box
from tieredckpt.restore.filled_tensors import FilledTensors
from tieredckpt.restore.fingerprint import can_be_fingerprinted, fingerprints_by_device
from tieredckpt.restore.step_index import ByteRange, RankReadPlan, TensorPiece
from tieredckpt.restore.tensor_bytes import (
    flat_in_memory,
    is_flat_in_memory,
    part_of_tensor,
    tensor_bytes,
    tensor_digests,
    tensor_memory,
)
from tieredckpt.restore.verified_reads import PinnedShards, ShardCheck
from tieredckpt.tensors.device import accelerator
from tieredckpt.tensors.slot_copy import Copier, memory_at_address
from tieredckpt.tensors.state_dict import has_ordinary_dispatch

log = logging.getLogger(__name__)

_WINDOW_BYTES = 256 << 20
"""Of what has to be brought together before it can be hashed (from a device, out of strides)."""
_RUN_BYTES = 64 << 10
"""Runs that are shorter on average are told by a digest of all of them."""
_LARGEST_OBJECT = 4 << 20
_EXPLAINED = 5
_COMPARED_WITH = 64
ABSENT_REASON = "is not in the live state any more"


SealedRun = tuple[int, int, int, int]
"""Where in a shard bytes are, how many, the number of who has them, and where in that."""


class CopiedBox(NamedTuple):
    """A digest of what was put into a part of a target."""

    box: Box | None
    """Relative to the target; ``None``: all of it."""
    digest: bytes


class FingerprintedBox(NamedTuple):
    """The fingerprint of what was put into a part of a target on a device."""

    box: Box | None
    """Relative to the target; ``None``: all of it."""
    fingerprint: int
    is_sealed: bool = False
    """Whether the same bytes were compared with the seal of their shard when the fingerprint was computed."""


@dataclass(slots=True)
class LoadedItem:
    """What one read item has brought, and what its bytes can be told by."""

    fqn: str
    item: ReadItem
    box: Box
    dtype: torch.dtype
    number: int
    """How many were brought before it."""
    sealed: list[TensorPiece] = field(default_factory=list)
    copied: list[CopiedBox] = field(default_factory=list)
    fingerprinted: list[FingerprintedBox] = field(default_factory=list)

    @property
    def is_sealed(self) -> bool:
        """Whether all its bytes can be told by seals, and read from the shards again."""
        return bool(self.sealed) and not self.copied and all(one.is_sealed for one in self.fingerprinted)


class LoadEvidence:
    """What a load has brought to one rank."""

    def __init__(self, step: RankReadPlan, copier: Copier, in_place: Callable[[str], bool] = lambda _: True) -> None:
        """``in_place`` says of an entry whether only torch's own code runs between the load and the proof."""
        self.step = step
        self._in_place = in_place
        self.copier = copier
        self.brought: list[LoadedItem] = []
        self.objects: dict[str, bytes | None] = {}
        """``None``: too large to be kept."""
        self.moves: defaultdict[int, list[SealedRun]] = defaultdict(list)
        """What can be told by the seal, for each shard."""
        self.filled = FilledTensors()

    def start_item(self, item: ReadItem, box: Box, target: torch.Tensor) -> LoadedItem:
        brought = LoadedItem(item.storage_index.fqn, item, box, target.dtype, len(self.brought))
        self.brought.append(brought)
        self.filled.add_target(brought.number, target)
        return brought

    def add_verified(self, brought: LoadedItem, target: torch.Tensor) -> None:
        """Remember that all bytes of ``target`` are compared with the seal while they are copied."""
        if self._in_place(brought.fqn):
            self.filled.add_verified(brought.number, target)

    def add_sealed(self, brought: LoadedItem, piece: TensorPiece, base: int, found: Sequence[ByteRun]) -> bool:
        """Whether what these runs bring can be told by the seal of their shard: it is remembered then."""
        if not fits_seal(self.step, piece, found):
            return False
        brought.sealed.append(piece)
        moves, index = self.moves[piece.part], brought.number
        for source, target, size_bytes in found:
            moves.append((base + source, size_bytes, index, target))
        return True

    def add_copied(self, parts: Sequence[tuple[LoadedItem, Box | None, torch.Tensor]]) -> None:
        """Remember what was put into these tensors, just now."""
        here = [part for part in parts if not _is_on_device(part[2])]
        digests = tensor_digests([tensor for _, _, tensor in here], self.copier)
        for (brought, box, _), digest in zip(here, digests, strict=True):
            brought.copied.append(CopiedBox(box, digest))
        there = [part for part in parts if _is_on_device(part[2])]
        fingerprints = fingerprints_by_device([tensor for _, _, tensor in there])
        for (brought, box, _), fingerprint in zip(there, fingerprints, strict=True):
            brought.fingerprinted.append(FingerprintedBox(box, fingerprint))

    def add_object(self, fqn: str, data: bytes) -> None:
        self.objects[fqn] = data if len(data) <= _LARGEST_OBJECT else None


def _is_on_device(tensor: torch.Tensor) -> bool:
    return accelerator().device_of(tensor) is not None and can_be_fingerprinted(tensor)


def fits_seal(step: RankReadPlan, piece: TensorPiece, found: Sequence[ByteRun]) -> bool:
    """Whether these runs are compared with the chunk checksums of their shard without reading much else."""
    if piece.part not in step.whole_parts:
        return False
    return len(found) < 2 or (len(found) - 1) * _RUN_BYTES <= sum(run.size_bytes for run in found)


@dataclass
class RestoreProof:
    """What was compared after a restore, and what came of it."""

    size_bytes: int = 0
    """Of live tensors that are what was saved."""
    objects: int = 0
    """Python objects that are."""
    seconds: float = 0.0
    share: float = 0.0
    """Of the time that the restore took."""
    not_compared: dict[str, str] = field(default_factory=dict)
    """Entries that could not be compared, and why."""
    mismatched: dict[str, str] = field(default_factory=dict)
    """Entries that are not what was saved, and what they are instead."""


FindTarget = Callable[[ReadItem], torch.Tensor | None]


def load_planner_is_transparent(planner: LoadPlanner) -> bool:
    """Whether the planner gives the state's own tensors, however often it is asked."""
    kind: Any = type(planner)
    return issubclass(kind, DefaultLoadPlanner) and all(
        getattr(kind, name) is getattr(DefaultLoadPlanner, name)
        for name in ("resolve_tensor", "lookup_tensor", "transform_tensor", "commit_tensor")
    )


def target_lookup(live: Mapping[str, Any]) -> FindTarget:
    """Looks a read item's target up in a flat state, as DCP's planner does; ``None`` where there is none."""

    def find(item: ReadItem) -> torch.Tensor | None:
        index = item.dest_index
        value = live.get(index.fqn)
        if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
            try:
                value = find_state_dict_object({index.fqn: value}, index)
            except (ValueError, KeyError, IndexError):
                return None
        if not isinstance(value, torch.Tensor):
            return None
        if value.shape != item.lengths:
            try:
                value = narrow_tensor_by_index(value.detach(), item.dest_offsets, item.lengths)
            except (RuntimeError, IndexError):
                return None
        return value

    return find


class RestoreProver:
    """Compares live tensors with what a load has brought."""

    def __init__(self, evidence: LoadEvidence, find: FindTarget, pinned: PinnedShards) -> None:
        self._evidence = evidence
        self._step = evidence.step
        self._find = find
        self._pinned = pinned
        self._proof = RestoreProof()
        self._seen: list[tuple[LoadedItem, torch.Tensor]] = []
        self._live: list[torch.Tensor | None] = [None] * len(evidence.brought)
        """Those of which something can be told by a seal."""
        self._wrong: dict[str, tuple[LoadedItem, torch.Tensor | None, str]] = {}

    def run(self, skip: Mapping[str, str]) -> RestoreProof:
        """Everything but what ``skip`` says, by name, why it is not compared."""
        proof = self._proof
        self._evidence.filled.drop_shared()
        copied: list[tuple[LoadedItem, torch.Tensor]] = []
        fingerprinted: list[tuple[LoadedItem, torch.Tensor]] = []
        for brought in self._evidence.brought:
            if skip and brought.fqn in skip:
                proof.not_compared[brought.fqn] = skip[brought.fqn]
                continue
            live = self._find(brought.item)
            if live is None:
                self._wrong[brought.fqn] = brought, None, ABSENT_REASON
                continue
            if live.dtype != brought.dtype:
                self._converted(brought, live)
                continue
            self._seen.append((brought, live))
            if self._evidence.filled.is_unchanged(brought.number, live):
                continue
            if brought.copied:
                copied.append((brought, live))
            if brought.fingerprinted:
                fingerprinted.append((brought, live))
            if brought.sealed:
                self._live[brought.number] = live
        self._compare_copied(copied)
        self._compare_fingerprints(fingerprinted)
        for part, moves in self._evidence.moves.items():
            self._compare_sealed(part, moves)
        for brought, _ in self._seen:
            if brought.fqn not in self._wrong and brought.fqn not in proof.not_compared:
                proof.size_bytes += brought.box.volume * brought.dtype.itemsize
        for number, (fqn, (brought, live, what)) in enumerate(self._wrong.items()):
            proof.not_compared.pop(fqn, None)
            proof.mismatched[fqn] = what
            if number < _EXPLAINED and live is not None and not what:
                try:
                    proof.mismatched[fqn] = self._what_it_is(brought, live)
                except Exception as error:  # noqa: BLE001 - that it is wrong is known, whatever cannot be looked at
                    log.info("what %s is instead cannot be said: %s", fqn, error)
        return proof

    # -- what was told by digests ---------------------------------------------------------------------------------

    def _compare_copied(self, entries: Sequence[tuple[LoadedItem, torch.Tensor]]) -> None:
        for window in _windows(entries):
            parts = [(brought, live, one) for brought, live in window for one in brought.copied]
            digests = tensor_digests([part_of_tensor(live, one.box) for _, live, one in parts], self._evidence.copier)
            for (brought, live, one), digest in zip(parts, digests, strict=True):
                if not digest or not one.digest:
                    self._proof.not_compared[brought.fqn] = _unreadable(live)
                elif digest != one.digest:
                    self._wrong.setdefault(brought.fqn, (brought, live, ""))

    def _compare_fingerprints(self, entries: Sequence[tuple[LoadedItem, torch.Tensor]]) -> None:
        parts: list[tuple[LoadedItem, torch.Tensor, FingerprintedBox]] = []
        for brought, live in entries:
            if not can_be_fingerprinted(live):
                self._proof.not_compared[brought.fqn] = _unreadable(live)
            elif tuple(live.shape) != brought.box.sizes:
                self._wrong.setdefault(brought.fqn, (brought, live, f"has the shape {tuple(live.shape)} now"))
            else:
                parts.extend((brought, live, one) for one in brought.fingerprinted)
        found = fingerprints_by_device([part_of_tensor(live, one.box) for _, live, one in parts])
        for (brought, live, one), fingerprint in zip(parts, found, strict=True):
            if fingerprint != one.fingerprint:
                self._wrong.setdefault(brought.fqn, (brought, live, ""))

    # -- what the seal tells --------------------------------------------------------------------------------------

    def _compare_sealed(self, part: int, moves: Sequence[SealedRun]) -> None:
        live = self._live
        moves = sorted(move for move in moves if live[move[2]] is not None)
        if not moves:
            return
        shard = self._step.shards[part]
        try:
            fd = self._pinned.open(shard)
        except TieredCheckpointError as error:
            log.info("%s", error)
            fd = -1
        seal = struct.unpack(f"<{len(shard.checksums) // 8}Q", shard.checksums)
        bad: list[_Chunk] = []
        unread: list[_Chunk] = []

        def compare(chunk: _Chunk) -> None:
            got = chunk.digest(fd, shard)
            if got is None:
                unread.append(chunk)
            elif got != seal[chunk.number]:
                bad.append(chunk)

        for chunks in _chunk_windows(moves, shard.chunk_bytes, _Views(live)):
            self._evidence.copier.run_parallel(chunks, compare, len(chunks) * shard.chunk_bytes)
        for chunk in unread:
            for index in chunk.owners:
                self._proof.not_compared[self._evidence.brought[index].fqn] = "its shard is not in memory any more"
        if bad:
            self._find_wrong(shard, fd, bad)

    def _find_wrong(self, shard: ShardIndex, fd: int, bad: Sequence[_Chunk]) -> None:
        """Which of the entries in these chunks differ: the shard is good, or it is not what it was when it was read."""
        size = shard.chunk_bytes
        spans = [ByteRange(c.number * size, min((c.number + 1) * size, shard.size_bytes)) for c in bad]
        found = self._looked_at(shard, fd, spans)
        for index in sorted({index for chunk in bad for index in chunk.owners}):
            brought, live = self._evidence.brought[index], self._live[index]
            assert live is not None  # noqa: S101 - chunks are made of what is there
            if found is not ShardCheck.GOOD:
                what = f"or another entry beside it: their shard in memory is {found.value} since it was verified"
                self._wrong.setdefault(brought.fqn, (brought, live, what))
            elif not self._is_in_slot(brought, live, shard.key.part, fd):
                self._wrong.setdefault(brought.fqn, (brought, live, ""))

    def _looked_at(self, shard: ShardIndex, fd: int, spans: Sequence[ByteRange]) -> ShardCheck:
        if fd < 0:
            return ShardCheck.EVICTED
        try:
            return self._pinned.verify(shard, spans, again=True)
        except TieredCheckpointError as error:
            log.warning("%s", error)
            return ShardCheck.UNREADABLE

    def _is_in_slot(self, brought: LoadedItem, live: torch.Tensor, part: int, fd: int) -> bool:
        there = flat_in_memory(live)
        view = tensor_memory(there)
        for base, run in self._runs(brought, part):
            if _read(fd, base + run.source, run.size_bytes) != view[run.target : run.target + run.size_bytes]:
                return False
        return True

    def _runs(self, brought: LoadedItem, part: int) -> Iterator[tuple[int, ByteRun]]:
        for piece in brought.sealed:
            if piece.part == part:
                base = self._step.start(piece)
                for run in byte_runs(piece.box, piece.entry.box, brought.box, piece.entry.itemsize):
                    yield base, run

    # -- what is there instead ------------------------------------------------------------------------------------

    def _converted(self, brought: LoadedItem, live: torch.Tensor) -> None:
        """An optimizer may keep a moment in another type than was saved: it is what was saved, converted."""
        saved = self._saved(brought)
        what = f"is {str(live.dtype).removeprefix('torch.')} now, {str(brought.dtype).removeprefix('torch.')} when read"
        if saved is None or live.layout is not torch.strided:
            self._proof.not_compared[brought.fqn] = what
        elif tensor_bytes(saved.to(live.dtype)) == tensor_bytes(live):
            self._proof.size_bytes += live.nbytes
        else:
            self._wrong[brought.fqn] = brought, live, f"{what}, and not what was saved"

    def _saved(self, brought: LoadedItem) -> torch.Tensor | None:
        """The tensor as its shards in memory have it; ``None`` where that cannot be known any more."""
        if not brought.is_sealed:
            return None
        saved = torch.empty(brought.box.sizes, dtype=brought.dtype)
        view = tensor_memory(saved)
        for part in {piece.part for piece in brought.sealed}:
            shard = self._step.shards[part]
            try:
                spans = [self._step.tensor_range(piece) for piece in brought.sealed if piece.part == part]
                if self._pinned.verify(shard, spans) is not ShardCheck.GOOD:
                    return None
                fd = self._pinned.open(shard)
                for base, run in self._runs(brought, part):
                    view[run.target : run.target + run.size_bytes] = _read(fd, base + run.source, run.size_bytes)
            except (TieredCheckpointError, OSError):
                return None
        return saved

    def _what_it_is(self, brought: LoadedItem, live: torch.Tensor) -> str:
        if live.layout is not torch.strided:
            return ""
        if not has_ordinary_dispatch(live):
            return ""
        for other, where in self._seen:
            if other.fqn == brought.fqn or where.layout is not torch.strided or not has_ordinary_dispatch(where):
                continue
            if where.numel() and where.data_ptr() == live.data_ptr():
                return f"is the same memory as {other.fqn}"
        there = tensor_bytes(live)
        if not there.strip(b"\0"):
            return "is all zeros"
        candidates = [
            one
            for one in self._evidence.brought
            if one is not brought and (one.box.sizes, one.dtype) == (brought.box.sizes, brought.dtype)
        ]
        for one in candidates[:_COMPARED_WITH]:
            saved = self._saved(one)
            if saved is not None:
                equal = tensor_bytes(saved) == there
            elif one.fingerprinted and not one.copied:
                parts = [part_of_tensor(live, part.box) for part in one.fingerprinted]
                equal = fingerprints_by_device(parts) == [part.fingerprint for part in one.fingerprinted]
            else:
                equal = [c.digest for c in one.copied if c.box in (None, full_box(one.box.sizes))] == tensor_digests(
                    [live], self._evidence.copier
                )
            if equal:
                return f"has what was saved as {one.fqn}"
        return ""


def _unreadable(live: torch.Tensor) -> str:
    return f"a {type(live).__name__} whose elements cannot be looked at"


class _Views:
    """The bytes of tensors; those that do not lie in order are brought together, and let go of again."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self._tensors = tensors
        self._flat: dict[int, int] = {}
        self._made: dict[int, torch.Tensor] = {}
        self.made_bytes = 0

    def address_of(self, index: int) -> int:
        address = self._flat.get(index)
        if address is not None:
            return address
        if index in self._made:
            return self._made[index].data_ptr()
        tensor = self._tensors[index]
        assert tensor is not None  # noqa: S101 - who asks has looked
        if is_flat_in_memory(tensor):
            address = self._flat[index] = tensor.data_ptr()
            return address
        made = self._made[index] = flat_in_memory(tensor)
        self.made_bytes += made.nbytes
        return made.data_ptr()

    def let_go(self, *, but: int = -1) -> None:
        self._made = {index: made for index, made in self._made.items() if index == but}
        self.made_bytes = 0


class _Chunk:
    """One chunk of a shard: where its bytes are in live memory. What is not there is read from the shard."""

    __slots__ = ("number", "segments")

    def __init__(self, number: int) -> None:
        self.number = number
        self.segments: list[tuple[int, memoryview, int]] = []
        """Where in the shard, the bytes, whose they are."""

    @property
    def owners(self) -> set[int]:
        return {index for _, _, index in self.segments}

    def digest(self, fd: int, shard: ShardIndex) -> int | None:
        """As the seal has it; ``None`` when what is missing cannot be read."""
        at = self.number * shard.chunk_bytes
        stop = min(at + shard.chunk_bytes, shard.size_bytes)
        start, view, _ = self.segments[0]
        if start == at and len(view) == stop - at:
            return xxhash.xxh3_64_intdigest(view)
        state = xxhash.xxh3_64()
        try:
            for start, view, _ in self.segments:
                if at < start:
                    state.update(_read(fd, at, start - at))
                state.update(view)
                at = start + len(view)
            if at < stop:
                state.update(_read(fd, at, stop - at))
        except OSError:
            return None
        return state.intdigest()


def _chunk_windows(moves: Sequence[SealedRun], size: int, views: _Views) -> Iterator[list[_Chunk]]:
    """``moves``, in their order, by chunks. Bytes that several entries have are in as many chunks of that number."""
    while moves:
        later, end = [], 0
        chunks: list[_Chunk] = []
        chunk = _Chunk(-1)
        for move in moves:
            start, left, index, offset = move
            if start < end:
                later.append(move)
                continue
            end = start + left
            address = views.address_of(index) + offset
            while left:
                number = start // size
                if number != chunk.number:
                    if views.made_bytes > _WINDOW_BYTES:
                        yield chunks
                        chunks = []
                        views.let_go(but=index)
                    chunk = _Chunk(number)
                    chunks.append(chunk)
                count = min(left, (number + 1) * size - start)
                chunk.segments.append((start, memory_at_address(address, count), index))
                start, left, address = start + count, left - count, address + count
        yield chunks
        views.let_go()
        moves = later


def _read(fd: int, start: int, size: int) -> bytes:
    if fd < 0:
        raise OSError("not open")
    found = os.pread(fd, size, start)
    while len(found) < size:
        more = os.pread(fd, size - len(found), start + len(found))
        if not more:
            raise OSError(f"the file ends {size - len(found)} bytes early")
        found += more
    return found


def _windows(entries: Sequence[tuple[LoadedItem, torch.Tensor]]) -> Iterator[list[tuple[LoadedItem, torch.Tensor]]]:
    window: list[tuple[LoadedItem, torch.Tensor]] = []
    size = 0
    for one in entries:
        window.append(one)
        size += one[0].box.volume * one[0].dtype.itemsize
        if size >= _WINDOW_BYTES:
            yield window
            window, size = [], 0
    if window:
        yield window
