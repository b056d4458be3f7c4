"""Evidence of a load, and its comparison with the live tensors.

A load records evidence of the bytes that it reads (:class:`LoadEvidence`). If this process reads most of a shard, the
evidence is the seal itself: the checksums of the shard's chunks from the save. Pieces with other cuts, converted
tensors and bytes from other tiers have a digest of the filled target instead.

After all calls of ``load_state_dict`` the state is flattened again (:class:`RestoreProof`). The copy threads hash its
memory in the order of the shard. So the proof does not depend on the sharding at the save or at the restore.

Tensors on a device stay there. Their evidence is a fingerprint of the bytes in the buffer that the device copied. The
device computes the fingerprint of the live tensor (:mod:`tieredckpt.restore.fingerprint`).
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
from tieredckpt.tensors.plain_tensors import has_ordinary_dispatch
from tieredckpt.tensors.slot_copy import Copier, memory_at_address

log = logging.getLogger(__name__)

_WINDOW_BYTES = 256 << 20
"""Bytes of one batch of tensors that are copied for the hash, because of a device or strides."""
_RUN_BYTES = 64 << 10
"""Average size below which runs have one digest instead of the seal as evidence."""
_LARGEST_OBJECT = 4 << 20
"""Bytes of the largest object that is stored as evidence."""
_EXPLAINED = 5
"""Number of mismatched entries that are described in detail."""
_COMPARED_WITH = 64
"""Number of other entries that a mismatched tensor is compared with."""
ABSENT_REASON = "is not in the live state any more"


SealedRun = tuple[int, int, int, int]
"""Offset in a shard, size in bytes, number of the loaded item, and offset in its target."""


class CopiedBox(NamedTuple):
    """Digest of a filled part of a target."""

    box: Box | None
    """Relative to the target; ``None``: all of it."""
    digest: bytes


class FingerprintedBox(NamedTuple):
    """Fingerprint of a filled part of a target on a device."""

    box: Box | None
    """Relative to the target; ``None``: all of it."""
    fingerprint: int
    is_sealed: bool = False
    """Whether the same bytes were compared with the seal of their shard when the fingerprint was computed."""


@dataclass(slots=True)
class LoadedItem:
    """One read item and the evidence of its bytes."""

    fqn: str
    item: ReadItem
    box: Box
    dtype: torch.dtype
    number: int
    """Position in :attr:`LoadEvidence.brought`."""
    sealed: list[TensorPiece] = field(default_factory=list)
    copied: list[CopiedBox] = field(default_factory=list)
    fingerprinted: list[FingerprintedBox] = field(default_factory=list)

    @property
    def is_sealed(self) -> bool:
        """Whether seals cover all its bytes, so that they can be read from the shards again."""
        return bool(self.sealed) and not self.copied and all(one.is_sealed for one in self.fingerprinted)


class LoadEvidence:
    """Evidence of one rank's load."""

    def __init__(self, step: RankReadPlan, copier: Copier, in_place: Callable[[str], bool] = lambda _: True) -> None:
        """``in_place`` returns whether only torch's own code runs between an entry's load and the proof."""
        self.step = step
        self._in_place = in_place
        self.copier = copier
        self.brought: list[LoadedItem] = []
        self.objects: dict[str, bytes | None] = {}
        """Pickled objects by name; ``None`` for objects that are too large."""
        self.moves: defaultdict[int, list[SealedRun]] = defaultdict(list)
        """Runs with the seal as evidence, by part."""
        self.filled = FilledTensors()

    def start_item(self, item: ReadItem, box: Box, target: torch.Tensor) -> LoadedItem:
        loaded = LoadedItem(item.storage_index.fqn, item, box, target.dtype, len(self.brought))
        self.brought.append(loaded)
        self.filled.add_target(loaded.number, target)
        return loaded

    def add_verified(self, loaded: LoadedItem, target: torch.Tensor) -> None:
        """Record that all bytes of ``target`` are compared with the seal while they are copied."""
        if self._in_place(loaded.fqn):
            self.filled.add_verified(loaded.number, target)

    def add_sealed(self, loaded: LoadedItem, piece: TensorPiece, base: int, found: Sequence[ByteRun]) -> bool:
        """Record runs with the seal as evidence; return ``False`` if the seal does not fit them."""
        if not fits_seal(self.step, piece, found):
            return False
        loaded.sealed.append(piece)
        moves, index = self.moves[piece.part], loaded.number
        for source, target, size_bytes in found:
            moves.append((base + source, size_bytes, index, target))
        return True

    def add_copied(self, parts: Sequence[tuple[LoadedItem, Box | None, torch.Tensor]]) -> None:
        """Record digests or fingerprints of tensors that were filled just now."""
        on_host = [part for part in parts if not _is_on_device(part[2])]
        digests = tensor_digests([tensor for _, _, tensor in on_host], self.copier)
        for (loaded, box, _), digest in zip(on_host, digests, strict=True):
            loaded.copied.append(CopiedBox(box, digest))
        on_device = [part for part in parts if _is_on_device(part[2])]
        fingerprints = fingerprints_by_device([tensor for _, _, tensor in on_device])
        for (loaded, box, _), fingerprint in zip(on_device, fingerprints, strict=True):
            loaded.fingerprinted.append(FingerprintedBox(box, fingerprint))

    def add_object(self, fqn: str, data: bytes) -> None:
        self.objects[fqn] = data if len(data) <= _LARGEST_OBJECT else None


def _is_on_device(tensor: torch.Tensor) -> bool:
    return accelerator().device_of(tensor) is not None and can_be_fingerprinted(tensor)


def fits_seal(step: RankReadPlan, piece: TensorPiece, found: Sequence[ByteRun]) -> bool:
    """Return whether the chunk checksums fit these runs without many additional reads."""
    if piece.part not in step.whole_parts:
        return False
    return len(found) < 2 or (len(found) - 1) * _RUN_BYTES <= sum(run.size_bytes for run in found)


@dataclass
class RestoreProof:
    """Result of the comparison after a restore."""

    size_bytes: int = 0
    """Bytes of live tensors that equal the saved ones."""
    objects: int = 0
    """Number of Python objects that equal the saved ones."""
    seconds: float = 0.0
    """Seconds that the comparison took."""
    share: float = 0.0
    """Share of the restore's time, from 0 to 1."""
    not_compared: dict[str, str] = field(default_factory=dict)
    """Reasons by name of the entries that were not compared."""
    mismatched: dict[str, str] = field(default_factory=dict)
    """Descriptions by name of the entries that differ from the saved ones."""


FindTarget = Callable[[ReadItem], torch.Tensor | None]


def load_planner_is_transparent(planner: LoadPlanner) -> bool:
    """Return whether the planner always resolves to the state's own tensors."""
    kind: Any = type(planner)
    return issubclass(kind, DefaultLoadPlanner) and all(
        getattr(kind, name) is getattr(DefaultLoadPlanner, name)
        for name in ("resolve_tensor", "lookup_tensor", "transform_tensor", "commit_tensor")
    )


def target_lookup(live: Mapping[str, Any]) -> FindTarget:
    """Return a function that finds a read item's target in a flat state, as DCP's planner does.

    It returns ``None`` if the state has no such target.
    """

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
    """Comparison of live tensors with the evidence of a load."""

    def __init__(self, evidence: LoadEvidence, find: FindTarget, pinned: PinnedShards) -> None:
        self._evidence = evidence
        self._step = evidence.step
        self._find = find
        self._pinned = pinned
        self._proof = RestoreProof()
        self._compared: list[tuple[LoadedItem, torch.Tensor]] = []
        self._live: list[torch.Tensor | None] = [None] * len(evidence.brought)
        """Live tensors by item number, for items that are compared with a seal."""
        self._mismatched: dict[str, tuple[LoadedItem, torch.Tensor | None, str]] = {}

    def run(self, skip: Mapping[str, str]) -> RestoreProof:
        """Compare all entries except those in ``skip``, which has the reasons by name."""
        proof = self._proof
        self._evidence.filled.drop_shared()
        copied: list[tuple[LoadedItem, torch.Tensor]] = []
        fingerprinted: list[tuple[LoadedItem, torch.Tensor]] = []
        for loaded in self._evidence.brought:
            if skip and loaded.fqn in skip:
                proof.not_compared[loaded.fqn] = skip[loaded.fqn]
                continue
            live = self._find(loaded.item)
            if live is None:
                self._mismatched[loaded.fqn] = loaded, None, ABSENT_REASON
                continue
            if live.dtype != loaded.dtype:
                self._compare_converted(loaded, live)
                continue
            self._compared.append((loaded, live))
            if self._evidence.filled.is_unchanged(loaded.number, live):
                continue
            if loaded.copied:
                copied.append((loaded, live))
            if loaded.fingerprinted:
                fingerprinted.append((loaded, live))
            if loaded.sealed:
                self._live[loaded.number] = live
        self._compare_copied(copied)
        self._compare_fingerprints(fingerprinted)
        for part, moves in self._evidence.moves.items():
            self._compare_sealed(part, moves)
        for loaded, _ in self._compared:
            if loaded.fqn not in self._mismatched and loaded.fqn not in proof.not_compared:
                proof.size_bytes += loaded.box.volume * loaded.dtype.itemsize
        for number, (fqn, (loaded, live, description)) in enumerate(self._mismatched.items()):
            proof.not_compared.pop(fqn, None)
            proof.mismatched[fqn] = description
            if number < _EXPLAINED and live is not None and not description:
                try:
                    proof.mismatched[fqn] = self._describe_live(loaded, live)
                except Exception as error:  # noqa: BLE001 - the mismatch is reported without a description
                    log.info("the difference of %s cannot be described: %s", fqn, error)
        return proof

    def _compare_copied(self, entries: Sequence[tuple[LoadedItem, torch.Tensor]]) -> None:
        for window in _windows(entries):
            parts = [(loaded, live, one) for loaded, live in window for one in loaded.copied]
            digests = tensor_digests([part_of_tensor(live, one.box) for _, live, one in parts], self._evidence.copier)
            for (loaded, live, one), digest in zip(parts, digests, strict=True):
                if not digest or not one.digest:
                    self._proof.not_compared[loaded.fqn] = _describe_unreadable(live)
                elif digest != one.digest:
                    self._mismatched.setdefault(loaded.fqn, (loaded, live, ""))

    def _compare_fingerprints(self, entries: Sequence[tuple[LoadedItem, torch.Tensor]]) -> None:
        parts: list[tuple[LoadedItem, torch.Tensor, FingerprintedBox]] = []
        for loaded, live in entries:
            if not can_be_fingerprinted(live):
                self._proof.not_compared[loaded.fqn] = _describe_unreadable(live)
            elif tuple(live.shape) != loaded.box.sizes:
                self._mismatched.setdefault(loaded.fqn, (loaded, live, f"has the shape {tuple(live.shape)} now"))
            else:
                parts.extend((loaded, live, one) for one in loaded.fingerprinted)
        found = fingerprints_by_device([part_of_tensor(live, one.box) for _, live, one in parts])
        for (loaded, live, one), fingerprint in zip(parts, found, strict=True):
            if fingerprint != one.fingerprint:
                self._mismatched.setdefault(loaded.fqn, (loaded, live, ""))

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
            digest = chunk.digest(fd, shard)
            if digest is None:
                unread.append(chunk)
            elif digest != seal[chunk.number]:
                bad.append(chunk)

        for chunks in _chunk_windows(moves, shard.chunk_bytes, _Views(live)):
            self._evidence.copier.run_parallel(chunks, compare, len(chunks) * shard.chunk_bytes)
        for chunk in unread:
            for index in chunk.owners:
                self._proof.not_compared[self._evidence.brought[index].fqn] = "its shard is not in memory any more"
        if bad:
            self._find_mismatched(shard, fd, bad)

    def _find_mismatched(self, shard: ShardIndex, fd: int, bad: Sequence[_Chunk]) -> None:
        """Find the entries in mismatched chunks that differ from the shard, if the shard is still intact."""
        size = shard.chunk_bytes
        spans = [ByteRange(c.number * size, min((c.number + 1) * size, shard.size_bytes)) for c in bad]
        found = self._verify_again(shard, fd, spans)
        for index in sorted({index for chunk in bad for index in chunk.owners}):
            loaded, live = self._evidence.brought[index], self._live[index]
            assert live is not None  # noqa: S101 - chunks consist of live tensors
            if found is not ShardCheck.GOOD:
                description = (
                    f"or another entry beside it: their shard in memory is {found.value} since it was verified"
                )
                self._mismatched.setdefault(loaded.fqn, (loaded, live, description))
            elif not self._equals_shard(loaded, live, shard.key.part, fd):
                self._mismatched.setdefault(loaded.fqn, (loaded, live, ""))

    def _verify_again(self, shard: ShardIndex, fd: int, spans: Sequence[ByteRange]) -> ShardCheck:
        if fd < 0:
            return ShardCheck.EVICTED
        try:
            return self._pinned.verify(shard, spans, again=True)
        except TieredCheckpointError as error:
            log.warning("%s", error)
            return ShardCheck.UNREADABLE

    def _equals_shard(self, loaded: LoadedItem, live: torch.Tensor, part: int, fd: int) -> bool:
        flat = flat_in_memory(live)
        view = tensor_memory(flat)
        for base, run in self._runs(loaded, part):
            if _read_exactly(fd, base + run.source, run.size_bytes) != view[run.target : run.target + run.size_bytes]:
                return False
        return True

    def _runs(self, loaded: LoadedItem, part: int) -> Iterator[tuple[int, ByteRun]]:
        for piece in loaded.sealed:
            if piece.part == part:
                base = self._step.start(piece)
                for run in byte_runs(piece.box, piece.entry.box, loaded.box, piece.entry.itemsize):
                    yield base, run

    def _compare_converted(self, loaded: LoadedItem, live: torch.Tensor) -> None:
        """Compare a tensor of another type with the converted saved one: an optimizer may convert its moments."""
        saved = self._read_saved(loaded)
        description = (
            f"is {str(live.dtype).removeprefix('torch.')} now, {str(loaded.dtype).removeprefix('torch.')} when read"
        )
        if saved is None or live.layout is not torch.strided:
            self._proof.not_compared[loaded.fqn] = description
        elif tensor_bytes(saved.to(live.dtype)) == tensor_bytes(live):
            self._proof.size_bytes += live.nbytes
        else:
            self._mismatched[loaded.fqn] = loaded, live, f"{description}, and not what was saved"

    def _read_saved(self, loaded: LoadedItem) -> torch.Tensor | None:
        """Read a tensor from its shards in memory; return ``None`` if they are not intact."""
        if not loaded.is_sealed:
            return None
        saved = torch.empty(loaded.box.sizes, dtype=loaded.dtype)
        view = tensor_memory(saved)
        for part in {piece.part for piece in loaded.sealed}:
            shard = self._step.shards[part]
            try:
                spans = [self._step.tensor_range(piece) for piece in loaded.sealed if piece.part == part]
                if self._pinned.verify(shard, spans) is not ShardCheck.GOOD:
                    return None
                fd = self._pinned.open(shard)
                for base, run in self._runs(loaded, part):
                    view[run.target : run.target + run.size_bytes] = _read_exactly(
                        fd, base + run.source, run.size_bytes
                    )
            except (TieredCheckpointError, OSError):
                return None
        return saved

    def _describe_live(self, loaded: LoadedItem, live: torch.Tensor) -> str:
        if live.layout is not torch.strided:
            return ""
        if not has_ordinary_dispatch(live):
            return ""
        for other, tensor in self._compared:
            if other.fqn == loaded.fqn or tensor.layout is not torch.strided or not has_ordinary_dispatch(tensor):
                continue
            if tensor.numel() and tensor.data_ptr() == live.data_ptr():
                return f"is the same memory as {other.fqn}"
        live_bytes = tensor_bytes(live)
        if not live_bytes.strip(b"\0"):
            return "is all zeros"
        candidates = [
            one
            for one in self._evidence.brought
            if one is not loaded and (one.box.sizes, one.dtype) == (loaded.box.sizes, loaded.dtype)
        ]
        for one in candidates[:_COMPARED_WITH]:
            saved = self._read_saved(one)
            if saved is not None:
                equal = tensor_bytes(saved) == live_bytes
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


def _describe_unreadable(live: torch.Tensor) -> str:
    return f"a {type(live).__name__} whose elements cannot be looked at"


class _Views:
    """Addresses of tensors' bytes in order. Strided tensors have temporary contiguous copies."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self._tensors = tensors
        self._flat: dict[int, int] = {}
        self._copies: dict[int, torch.Tensor] = {}
        self.copied_bytes = 0

    def address_of(self, index: int) -> int:
        address = self._flat.get(index)
        if address is not None:
            return address
        if index in self._copies:
            return self._copies[index].data_ptr()
        tensor = self._tensors[index]
        assert tensor is not None  # noqa: S101 - the caller has checked
        if is_flat_in_memory(tensor):
            address = self._flat[index] = tensor.data_ptr()
            return address
        copy = self._copies[index] = flat_in_memory(tensor)
        self.copied_bytes += copy.nbytes
        return copy.data_ptr()

    def release(self, *, keep: int = -1) -> None:
        self._copies = {index: copy for index, copy in self._copies.items() if index == keep}
        self.copied_bytes = 0


class _Chunk:
    """One chunk of a shard and its bytes in live memory. Other bytes are read from the shard."""

    __slots__ = ("number", "segments")

    def __init__(self, number: int) -> None:
        self.number = number
        self.segments: list[tuple[int, memoryview, int]] = []
        """Offset in the shard, bytes, and number of the loaded item."""

    @property
    def owners(self) -> set[int]:
        return {index for _, _, index in self.segments}

    def digest(self, fd: int, shard: ShardIndex) -> int | None:
        """Return the checksum as in the seal, or ``None`` if missing bytes cannot be read."""
        at = self.number * shard.chunk_bytes
        stop = min(at + shard.chunk_bytes, shard.size_bytes)
        start, view, _ = self.segments[0]
        if start == at and len(view) == stop - at:
            return xxhash.xxh3_64_intdigest(view)
        state = xxhash.xxh3_64()
        try:
            for start, view, _ in self.segments:
                if at < start:
                    state.update(_read_exactly(fd, at, start - at))
                state.update(view)
                at = start + len(view)
            if at < stop:
                state.update(_read_exactly(fd, at, stop - at))
        except OSError:
            return None
        return state.intdigest()


def _chunk_windows(moves: Sequence[SealedRun], size: int, views: _Views) -> Iterator[list[_Chunk]]:
    """Yield batches of chunks for ``moves``; bytes of several entries are in one chunk for each entry."""
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
                    if views.copied_bytes > _WINDOW_BYTES:
                        yield chunks
                        chunks = []
                        views.release(keep=index)
                    chunk = _Chunk(number)
                    chunks.append(chunk)
                count = min(left, (number + 1) * size - start)
                chunk.segments.append((start, memory_at_address(address, count), index))
                start, left, address = start + count, left - count, address + count
        yield chunks
        views.release()
        moves = later


def _read_exactly(fd: int, start: int, size: int) -> bytes:
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
