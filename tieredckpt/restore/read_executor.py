"""One rank's reads: from each piece's nearest copy into its tensor, through pinned buffers to devices.

Tensors on a device are filled through registered buffers: threads fill one while the device empties the other.
"""

from __future__ import annotations

import bisect
import io
import logging
import operator
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from peerstore.peers.range_reader import ReadTarget
from tieredckpt.errors import CheckpointDamagedError, MismatchError, TierUnavailableError
from tieredckpt.format.slice_boxes import Box, ByteRun, byte_runs, relative_box, split_box
from tieredckpt.resolve_step import Tier
from tieredckpt.restore.fingerprint import MASK64, bytes_fingerprint
from tieredckpt.restore.proof import FingerprintedBox, LoadedItem, LoadEvidence, fits_seal
from tieredckpt.restore.step_index import ByteRange, RankReadPlan, TensorPiece
from tieredckpt.restore.tensor_bytes import narrow_to_box
from tieredckpt.restore.tier_reader import TierReader
from tieredckpt.restore.verified_copy import ShardFile, copy_verified
from tieredckpt.restore.verified_reads import PinnedShards, ReadMismatchError, ShardCheck
from tieredckpt.session.session import Session
from tieredckpt.tensors.device import DeviceCopy, accelerator
from tieredckpt.tensors.plain_tensors import dtype_from_name, dtype_name, has_ordinary_dispatch, is_plain_tensor
from tieredckpt.tensors.safe_objects import check_safe_object
from tieredckpt.tensors.slot_copy import MemoryCopy, StagingBuffers, memory_at_address
from tieredckpt.tensors.state_dict import is_writable_in_place, require_materialized

log = logging.getLogger(__name__)

_WINDOW_BYTES = 256 << 20
"""Bytes of targets that are planned before they are filled."""
_COPY_BYTES = 32 << 20
"""Bytes from the durable tier that are copied to their targets at a time."""
_Wanted = list[tuple[ByteRange, int]]
_FINGERPRINTED_BYTES = 1 << 20
"""Bytes of a buffer that one thread fingerprints at a time."""
_ALIGNED = 64
"""Alignment in a buffer that suits elements of any type."""


class _DeviceRead(NamedTuple):
    """Piece and the tensor on a device that contains it."""

    piece: TensorPiece
    base: int
    """Offset of its entry in the shard."""
    target: torch.Tensor
    wanted: Box
    """Position of ``target`` in the whole tensor."""
    place: torch.device
    evidence: LoadedItem | None
    """Item that records the fingerprints of its bytes, if any."""
    in_one_pass: bool
    """Whether the copy into the buffer compares it with the seal."""


class _BufferPart(NamedTuple):
    """Part of a target in a buffer."""

    address: int
    size_bytes: int
    read: _DeviceRead
    box: Box
    """Relative to the target."""
    sums: list[int]
    """Fingerprints of ranges of it."""

    def add_fingerprint(self, start: int, size_bytes: int) -> None:
        if self.read.evidence is not None:
            address = self.address + start
            self.sums.append(bytes_fingerprint(memory_at_address(address, size_bytes), start))


class _Batch:
    """Parts in one buffer, and the copies that fill and empty it."""

    def __init__(self) -> None:
        self.parts: list[_BufferPart] = []
        """Parts in the order of their addresses."""
        self.whole: defaultdict[int, list[MemoryCopy]] = defaultdict(list)
        """Copies by part that are compared with the seal in the same pass."""
        self.end = 0
        """Bytes of the buffer that are in use."""
        self.near: defaultdict[int, list[MemoryCopy]] = defaultdict(list)
        self.far: defaultdict[int, _Wanted] = defaultdict(list)
        self.copies: defaultdict[torch.device, list[DeviceCopy]] = defaultdict(list)

    def add_fingerprint(self, copied: MemoryCopy) -> None:
        part = self.parts[bisect.bisect_right(self.parts, copied.target, key=lambda part: part.address) - 1]
        part.add_fingerprint(copied.target - part.address, copied.size_bytes)


@runtime_checkable
class TensorTaker(Protocol):
    """Planner without a template, which receives archived tensors with their original class and layout."""

    def take_tensor(self, fqn: str, tensor: torch.Tensor) -> None: ...


class ReadExecutor:
    """Reads of one step by one rank."""

    def __init__(
        self,
        session: Session,
        step: RankReadPlan,
        pinned: PinnedShards,
        planner: LoadPlanner,
        *,
        cast: bool,
        trust: bool,
        evidence: LoadEvidence | None = None,
        verifies: bool = False,
    ) -> None:
        """``verifies``: verify mostly read shards during the copy, because the agent has not verified them."""
        self._session = session
        self._cast = cast
        self._trust = trust
        self._step = step
        self._pinned = pinned
        self._planner = planner
        self._evidence = evidence
        self._undigested: list[tuple[LoadedItem, Box | None, torch.Tensor]] = []
        """Targets whose digests are recorded once they are filled."""
        self._window_addresses: set[int] = set()
        """Addresses of the targets in the current window."""
        self._near: dict[int, list[MemoryCopy]] = defaultdict(list)
        """Copies from offsets in shards in memory to addresses, by part."""
        self._verifies = verifies
        self._whole: dict[int, list[MemoryCopy]] = defaultdict(list)
        """The same for copies that are compared with the seal in the same pass."""
        self._unverified: dict[int, list[ByteRange]] = defaultdict(list)
        """Ranges, by part, that the agent must verify before the copy."""
        self._far: dict[int, list[tuple[ByteRange, int]]] = defaultdict(list)
        """Ranges of shards on other nodes or in the durable tier, and their target addresses, by part."""
        self._arriving: dict[int, list[LoadedItem]] = defaultdict(list)
        """Items that are compared in their targets if other nodes deliver the part."""
        self._deferred: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Targets that are filled at the end of the window, each with its buffer."""
        self._device = accelerator()
        self._device_reads: list[_DeviceRead] = []
        self._buffers: StagingBuffers | None = None
        self._uncommitted: list[tuple[ReadItem, torch.Tensor]] = []
        self.shards = TierReader(step, pinned, session.peers, session.durable.open)

    def run(self, items: Sequence[ReadItem]) -> None:
        try:
            self._read_all(items)
        finally:
            if self._buffers is not None:
                self._buffers.close()

    def _read_all(self, items: Sequence[ReadItem]) -> None:
        size = 0
        for item in items:
            if item.type is LoadItemType.BYTE_IO:
                self._load_object(item)
                continue
            target = self._planner.resolve_tensor(item)
            if target.layout is torch.strided:  # a sparse target would be changed only in its detached copy
                target = target.detach()
            whole = self._plan_tensor(item, target)
            self._uncommitted.append((item, target))
            size += 0 if whole else target.numel() * target.element_size()
            if size >= _WINDOW_BYTES:
                self._flush()
                size = 0
        self._flush()

    def _load_object(self, item: ReadItem) -> None:
        """Load an object through the planner, which unpickles it, after a safety check."""
        data = self._read_object(item.storage_index.fqn)
        if not self._trust:
            check_safe_object(item.storage_index.fqn, data)
        if self._evidence is not None:
            self._evidence.add_object(item.storage_index.fqn, data)
        self._planner.load_bytes(item, io.BytesIO(data))

    def _flush(self) -> None:
        self._verify_pending()
        self._copy_whole(self._whole)
        self._whole.clear()
        from_durable = self._copy_bytes(self._near, self._far)
        if self._evidence is not None:
            for part in from_durable:
                for loaded in self._arriving[part]:
                    self._evidence.filled.discard(loaded.number)
        self._arriving.clear()
        if self._device_reads:
            self._fill_devices()
        for target, buffer in self._deferred:
            target.copy_(buffer)
        if self._evidence is not None:
            self._evidence.add_copied(self._undigested)
        self._undigested = []
        self._window_addresses.clear()
        for item, target in self._uncommitted:
            self._planner.commit_tensor(item, target)
        self._deferred, self._uncommitted, self._device_reads = [], [], []
        self._near.clear()
        self._far.clear()

    def _verify_pending(self) -> None:
        """Let the agent verify the pending ranges of shards in this node's memory."""
        for part, ranges in self._unverified.items():
            if self._pinned.verify(self._step.shards[part], ranges) is not ShardCheck.GOOD:
                raise ReadMismatchError(part, ranges)
        self._unverified.clear()

    def _copy_whole(
        self, whole: Mapping[int, list[MemoryCopy]], then: Callable[[MemoryCopy], None] | None = None
    ) -> None:
        """Copy and compare with the seal in one pass; raise :class:`ReadMismatchError` for damaged chunks."""
        for part, moves in whole.items():
            shard = self._step.shards[part]
            fd = self._pinned.file(part)
            mapped = self._session.slots.populated_mapping(fd, shard.size_bytes)  # the reference preserves the mapping
            file = ShardFile(fd, 0 if mapped is None else mapped.address)
            bad = copy_verified(self._session.copier, file, shard, moves, then=then)
            if bad:
                size = shard.chunk_bytes
                ranges = [ByteRange(at * size, min((at + 1) * size, shard.size_bytes)) for at in bad]
                raise ReadMismatchError(part, ranges)

    def _copy_bytes(self, near: Mapping[int, list[MemoryCopy]], far: Mapping[int, _Wanted]) -> Collection[int]:
        """Copy bytes of shards from any tier to addresses; return the parts that came from the durable tier."""
        copier = self._session.copier
        for part, moves in near.items():
            try:
                copier.copy_from_file(self._pinned.file(part), moves)
            except OSError as error:
                raise TierUnavailableError(f"{self._step.shards[part].key} cannot be read: {error}") from error
        durable = self._read_from_peers(far)
        for part, wanted in durable.items():
            self._read_from_durable(part, wanted)
        return durable

    def _fill_devices(self) -> None:
        """Fill the targets on devices, buffer by buffer in the order of the shards, and wait for the devices."""
        buffers = self._buffers = self._buffers or StagingBuffers(self._device, self._device_reads[0].place)
        buffer, batch = buffers.acquire(), _Batch()
        for one in sorted(self._device_reads, key=lambda one: (one.piece.part, one.base)):
            entry = one.piece.entry
            dtype = dtype_from_name(entry.dtype)
            near = self._step.tier(one.piece.part) is Tier.MEMORY
            for box in split_box(one.piece.box, buffers.size_bytes // entry.itemsize):
                size = box.volume * entry.itemsize
                if batch.end + size > buffers.size_bytes:
                    self._transfer(buffers, batch)
                    buffer, batch = buffers.acquire(), _Batch()
                at, part = batch.end, one.piece.part
                for run in byte_runs(box, entry.box, box, entry.itemsize):
                    source, address = one.base + run.source, buffer.address + at + run.target
                    if one.in_one_pass:
                        batch.whole[part].append(MemoryCopy(address, source, run.size_bytes))
                    elif near:
                        batch.near[part].append(MemoryCopy(address, source, run.size_bytes))
                    else:
                        batch.far[part].append((ByteRange(source, source + run.size_bytes), address))
                inside = relative_box(box, one.wanted)
                batch.parts.append(_BufferPart(buffer.address + at, size, one, inside, []))
                target = narrow_to_box(one.target, inside)
                batch.copies[one.place].append(DeviceCopy(target, buffer.tensor(at, dtype, box.sizes)))
                batch.end += -(-size // _ALIGNED) * _ALIGNED
        self._transfer(buffers, batch)
        buffers.synchronize()

    def _transfer(self, buffers: StagingBuffers, batch: _Batch) -> None:
        self._copy_whole(batch.whole, batch.add_fingerprint)
        self._copy_bytes(batch.near, batch.far)
        jobs = [
            (part, start, min(_FINGERPRINTED_BYTES, part.size_bytes - start))
            for part in batch.parts
            if part.read.evidence is not None and not part.read.in_one_pass
            for start in range(0, part.size_bytes, _FINGERPRINTED_BYTES)
        ]
        self._session.copier.run_parallel(
            jobs, lambda job: job[0].add_fingerprint(*job[1:]), sum(size for _, _, size in jobs)
        )
        buffers.submit(batch.copies)
        for part in batch.parts:
            read = part.read
            if read.evidence is not None:
                found = FingerprintedBox(part.box, sum(part.sums) & MASK64, read.in_one_pass)
                read.evidence.fingerprinted.append(found)

    def _plan_tensor(self, item: ReadItem, target: torch.Tensor) -> bool:
        """Plan the reads of a tensor; return whether all of it is compared with the seal while it is filled."""
        fqn, wanted = item.storage_index.fqn, read_item_box(item)
        if tuple(target.shape) != wanted.sizes:
            raise MismatchError(f"{fqn}: {wanted.sizes} elements are to be read into a tensor of {tuple(target.shape)}")
        if is_plain_tensor(target):
            require_materialized(fqn, target)
        place = self._device.device_of(target)
        if place is not None and not (is_plain_tensor(target) and has_ordinary_dispatch(target)):
            place = None  # only its class can copy its elements
        bytewise = place is None and is_writable_in_place(target)
        if bytewise and not target.is_inference():
            increment_version(target)  # autograd must see that saved references are stale
        loaded = None
        if self._evidence is not None:
            if target.layout is torch.strided and target.numel() and has_ordinary_dispatch(target):
                # Two items share the target: record the first fill before the second.
                if target.data_ptr() in self._window_addresses:
                    self._flush()
                self._window_addresses.add(target.data_ptr())
            loaded = self._evidence.start_item(item, wanted, target)
        whole = True
        for piece in self._step.pieces[fqn, wanted]:
            self._check_dtype(fqn, piece.entry.dtype, target)
            whole &= self._plan_piece(piece, target, wanted, loaded, place=place, bytewise=bytewise)
        if whole and place is None and loaded is not None and self._evidence is not None:
            self._evidence.add_verified(loaded, target)
        return whole

    def _plan_piece(
        self,
        piece: TensorPiece,
        target: torch.Tensor,
        wanted: Box,
        loaded: LoadedItem | None,
        *,
        place: torch.device | None,
        bytewise: bool,
    ) -> bool:
        """Plan the reads of a piece; return whether it is compared with the seal while it is filled."""
        step, entry = self._step, piece.entry
        near = step.tier(piece.part) is Tier.MEMORY
        if piece.item >= 0:
            saved = self._read_archived(piece)
            if isinstance(self._planner, TensorTaker) and piece.box.sizes == entry.shape:
                self._planner.take_tensor(entry.fqn, saved)
            else:
                _copy_archived(target, relative_box(piece.box, wanted), saved, entry.fqn)
                self._digest_later(loaded, piece, target, wanted)
            return False
        if near:
            self.shards.bytes_by_tier[Tier.MEMORY.value] += piece.box.volume * entry.itemsize
        base = step.start(piece)
        same_dtype = dtype_name(target.dtype) == entry.dtype
        if place is not None:
            found = list(byte_runs(piece.box, entry.box, wanted, entry.itemsize)) if same_dtype and near else []
            in_one_pass = self._verifies and bool(found) and fits_seal(step, piece, found)
            if near and not in_one_pass:
                self._verify_first(piece)
            evidence = loaded if same_dtype else None
            if in_one_pass and loaded is not None:
                loaded.sealed.append(piece)
            elif found and self._add_sealed(loaded, piece, base, found):
                evidence = None  # the proof compares the live tensor with the seal
            if not same_dtype:
                self._digest_later(loaded, piece, target, wanted)
            if piece.box.volume:
                self._device_reads.append(_DeviceRead(piece, base, target, wanted, place, evidence, in_one_pass))
            return in_one_pass
        simple = bytewise and same_dtype
        if near and not simple:
            self._verify_first(piece)
            self._verify_pending()
            source = self._near_tensor(piece.part, base, entry.dtype, entry.box.sizes)
            narrow_to_box(target, relative_box(piece.box, wanted)).copy_(
                narrow_to_box(source, relative_box(piece.box, entry.box))
            )
            self._digest_later(loaded, piece, target, wanted)
            return False
        frame, whole = wanted, target
        if not simple:
            buffer = torch.empty(piece.box.sizes, dtype=dtype_from_name(entry.dtype))
            self._deferred.append((narrow_to_box(target, relative_box(piece.box, wanted)), buffer))
            target, frame = buffer, piece.box
        address = target.data_ptr()
        found = list(byte_runs(piece.box, entry.box, frame, entry.itemsize))
        if not near or not self._add_sealed(loaded, piece, base, found):
            self._digest_later(loaded, piece, whole, wanted)
        if near:
            in_one_pass = self._verifies and fits_seal(step, piece, found)
            if not in_one_pass:
                self._verify_first(piece)
            moves = self._whole if in_one_pass else self._near
            moves[piece.part].extend(
                MemoryCopy(address + run.target, base + run.source, run.size_bytes) for run in found
            )
            return in_one_pass
        for run in found:
            at = base + run.source
            self._far[piece.part].append((ByteRange(at, at + run.size_bytes), address + run.target))
        if loaded is not None:
            self._arriving[piece.part].append(loaded)
        return simple and step.tier(piece.part) is Tier.PEER

    def _verify_first(self, piece: TensorPiece) -> None:
        """Let the agent verify a piece that this process should verify and cannot verify during the copy."""
        if self._verifies and piece.part in self._step.whole_parts and piece.box.volume:
            self._unverified[piece.part].append(self._step.tensor_range(piece))

    def _add_sealed(self, loaded: LoadedItem | None, piece: TensorPiece, base: int, found: Sequence[ByteRun]) -> bool:
        """Record the seal as evidence of a piece; return ``False`` if the piece needs a digest."""
        return (
            loaded is not None and self._evidence is not None and self._evidence.add_sealed(loaded, piece, base, found)
        )

    def _digest_later(self, loaded: LoadedItem | None, piece: TensorPiece, target: torch.Tensor, wanted: Box) -> None:
        if loaded is not None:
            box = relative_box(piece.box, wanted) if target.layout is torch.strided else None
            part = target if box is None else narrow_to_box(target, box)
            self._undigested.append((loaded, box, part))

    def _near_tensor(self, part: int, start: int, dtype: str, sizes: tuple[int, ...]) -> torch.Tensor:
        kind = dtype_from_name(dtype)
        size = Box(sizes, sizes).volume * kind.itemsize
        if not size:
            return torch.empty(sizes, dtype=kind)
        view = self._pinned.view(part)[start : start + size]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "not writable": it is only read
            return torch.frombuffer(view, dtype=torch.uint8).view(kind).view(sizes)

    def _read_from_peers(self, far: Mapping[int, _Wanted]) -> dict[int, _Wanted]:
        """Read from other nodes straight to the targets; return the rest, for the durable tier."""
        step = self._step
        near = {part: wanted for part, wanted in far.items() if step.tier(part) is Tier.PEER}
        left = {part: wanted for part, wanted in far.items() if part not in near}
        failed = self.shards.read_peers(
            {
                part: [ReadTarget(first, last, memory_at_address(at, last - first)) for (first, last), at in wanted]
                for part, wanted in near.items()
            }
        )
        return {**left, **{part: near[part] for part in failed}}

    def _read_from_durable(self, part: int, wanted: _Wanted) -> None:
        order = sorted(wanted)
        begun, at = list[tuple[ByteRange, int]](), 0
        moves: list[MemoryCopy] = []
        references: list[memoryview] = []
        size = 0
        for found in self.shards.read_durable(part, [one for one, _ in order]):
            stop = found.start + len(found.data)
            address = _address(found.data)
            while at < len(order) and order[at][0].start < stop:
                begun.append(order[at])
                at += 1
            for (first, last), target in begun:
                low, high = max(first, found.start), min(last, stop)
                if low < high:
                    moves.append(MemoryCopy(target + low - first, address + low - found.start, high - low))
            begun = [one for one in begun if one[0].stop > stop]
            references.append(found.data)
            size += len(found.data)
            if size >= _COPY_BYTES:
                self._session.copier.copy(moves)
                moves, references, size = [], [], 0
        self._session.copier.copy(moves)

    def _read_object(self, fqn: str) -> bytes:
        return self.shards.read(*self._step.object(fqn), is_verified=True)

    def _read_archived(self, piece: TensorPiece) -> torch.Tensor:
        saved = torch.load(
            io.BytesIO(self.shards.read(piece.part, self._step.archive_range(piece), is_verified=True)),
            map_location="cpu",
            weights_only=True,
        )
        if not isinstance(saved, torch.Tensor):
            raise CheckpointDamagedError(f"{piece.entry.fqn}: the archive holds a {type(saved).__name__}")
        return narrow_to_box(saved, relative_box(piece.box, piece.entry.box))

    def _check_dtype(self, fqn: str, saved: str, target: torch.Tensor) -> None:
        if not self._cast and saved != dtype_name(target.dtype):
            raise MismatchError(
                f"{fqn} was saved as {saved}, and the state has {dtype_name(target.dtype)}. Give the tensor the saved "
                "type, or convert it with dcp.load instead of restore(): add ?cast=1 to its URL, or pass "
                "storage_reader=TieredReader('tiered://JOB', on_dtype_mismatch='cast')"
            )


def read_item_box(item: ReadItem) -> Box:
    """Return the box of a read item in global coordinates, independent of the saved sharding."""
    index: MetadataIndex = item.storage_index
    start = index.offset if index.offset is not None else (0,) * len(item.lengths)
    return Box(tuple(map(operator.add, start, item.storage_offsets)), tuple(item.lengths))


def _address(data: memoryview) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(data, dtype=torch.uint8).data_ptr()


def _copy_archived(target: torch.Tensor, box: Box, saved: torch.Tensor, fqn: str) -> None:
    """Copy an archived tensor, whose layout may differ from the target's, into a target."""
    if target.layout is torch.strided:
        narrow_to_box(target, box).copy_(saved if saved.layout is torch.strided else saved.to_dense())
    elif target.layout is saved.layout:
        with torch.no_grad():
            target.resize_as_sparse_(saved).copy_(saved)
    else:
        raise MismatchError(f"{fqn} was saved as {saved.layout} and is to be loaded into {target.layout}")
