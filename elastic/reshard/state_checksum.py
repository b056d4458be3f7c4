"""A checksum of a whole state that does not depend on its sharding.

Each rank sums its words, and the ranks' sums are added. The same state has the same checksum on one rank, on a
thousand, before a save and after a load into another sharding::

    before = state_checksum(state).all_reduced()
    dcp.save(...); ...; dcp.load(...)              # at another world size
    state_checksum(other).all_reduced().assert_equal(before)

::

    sum of  word(j) * weight(name, j)  mod 2^64        j: global row-major number of the word

    weight(name, j) = T[lo] * a(name, hi) + U[lo] * b(name, hi)        j = hi * 8192 + lo

An element of up to 32 bits is one word, a wider one is several. With words of 64 bits, two flipped signs would cancel.
``T`` and ``a`` are odd and ``b`` is even, so every weight is odd. So a change of one word always changes the sum.
splitmix64 produces all of them. A weight does not depend on the sharding, so the sums of any partition add up.

With tables, each word costs two multiplications instead of a hash. The second table detects changes of a block whose
sum with the first table is 0. ``docs/explanation/resharding.md`` states the probability of a miss.

DCP describes a local shard by one offset and one shape. That is not enough for a ``_StridedShard`` that does not divide
evenly, because its rows are not adjacent. So this module computes the rows from the placements, and compares their
number with the shape of the local tensor.
"""

from __future__ import annotations

import functools
import itertools
import math
import pickle
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
import xxhash
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from tieredckpt.errors import CheckpointDamagedError, MismatchError, UsageError
from tieredckpt.export.step_source import tensor_raw_bytes
from tieredckpt.format.slice_boxes import Box, full_box
from tieredckpt.restore.fingerprint import CARRIER_DTYPES, MASK64, ROW_WORDS, column_weights, seeded_numbers
from tieredckpt.tensors.device import accelerator
from tieredckpt.tensors.plain_tensors import dtype_name, is_plain_tensor
from tieredckpt.tensors.state_dict import archive_object, flatten_state, resolve_stateful

OBJECT_DTYPE = "object"
"""Type name of objects other than tensors. An object has one element, the hash of its bytes."""
_SHOWN = 5


class ChecksumPart(msgspec.Struct, frozen=True):
    """One rank's part of the checksum of one name."""

    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    sum: int
    count: int
    """Elements of this rank."""
    replica: int = 0
    """Copy of the tensor that this part belongs to: the lowest rank with a part of that copy."""

    @property
    def kind(self) -> tuple[str, tuple[int, ...]]:
        """Element type and shape."""
        return self.dtype, self.shape

    @property
    def element_count(self) -> int:
        """Number of elements in one copy."""
        return math.prod(self.shape)


class ChecksumEntry(msgspec.Struct, frozen=True):
    """Checksum of one name of a whole state."""

    dtype: str
    shape: tuple[int, ...]
    sum: int


class WholeChecksum(msgspec.Struct, frozen=True):
    """Checksum of a whole state. msgpack can encode it, for storage next to a checkpoint."""

    entries: dict[str, ChecksumEntry]
    diverged_names: tuple[str, ...] = ()
    """Names with different copies on different ranks; ``entries`` has the sums of the first copies."""

    @property
    def value(self) -> int:
        """Sum of all entries, modulo 2^64."""
        return sum(entry.sum for entry in self.entries.values()) & MASK64

    @property
    def tensors_only(self) -> WholeChecksum:
        """Checksum without objects, because their bytes in a file differ from those in memory."""
        return WholeChecksum(
            {name: entry for name, entry in self.entries.items() if entry.dtype != OBJECT_DTYPE}, self.diverged_names
        )

    def __str__(self) -> str:
        return f"0x{self.value:016x}"

    def differences(self, other: WholeChecksum) -> dict[str, str]:
        """Return the names that differ in ``other``, each with a description of the difference."""
        found = {}
        for name in sorted(self.entries.keys() | other.entries.keys()):
            here, there = self.entries.get(name), other.entries.get(name)
            if here is None or there is None:
                found[name] = "only in the second" if here is None else "only in the first"
            elif (here.dtype, here.shape) != (there.dtype, there.shape):
                found[name] = f"{here.dtype} {here.shape} and {there.dtype} {there.shape}"
            elif here.sum != there.sum:
                found[name] = f"0x{here.sum:016x} and 0x{there.sum:016x}"
        return found

    def assert_equal(self, other: WholeChecksum) -> None:
        """Raise :class:`CheckpointDamagedError` with the names that differ, or with different copies."""
        different = self.differences(other)
        different |= dict.fromkeys((*self.diverged_names, *other.diverged_names), "not the same on all ranks")
        if different:
            raise CheckpointDamagedError(f"{len(different)} names differ: {_examples(different)}")


class RankChecksum(msgspec.Struct, frozen=True):
    """One rank's parts of the checksum of a state."""

    parts: dict[str, ChecksumPart]

    def all_reduced(self, group: dist.ProcessGroup | None = None) -> WholeChecksum:
        """Return the checksum of the whole state, on every rank of ``group``.

        This needs three all-reduces: of two numbers, then of one and of four numbers per name. If the ranks have
        different names (pipeline stages, objects of one rank), it gathers the parts instead.
        """
        if not dist.is_initialized():
            return combine_checksums([self])
        names = sorted(self.parts)
        digest = xxhash.xxh3_64_intdigest(msgspec.msgpack.encode([(name, *self.parts[name].kind) for name in names]))
        digest = _signed(digest)
        highest, lowest = _all_reduced([digest, ~digest], dist.ReduceOp.MAX, group)
        if highest != ~lowest:
            shares: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(shares, self, group)
            return combine_checksums(shares)
        firsts = _all_reduced([self.parts[name].replica for name in names], dist.ReduceOp.MIN, group)
        rows = [_row(self.parts[name], first) for name, first in zip(names, firsts, strict=True)]
        sums = _all_reduced([number for row in rows for number in row], dist.ReduceOp.SUM, group)
        return _whole_checksum(
            {name: (self.parts[name], _Total(*sums[4 * i : 4 * i + 4])) for i, name in enumerate(names)}
        )


def state_checksum(state: Mapping[str, Any]) -> RankChecksum:
    """Return this rank's parts of the checksum of ``state``, without communication.

    Every local byte is read once. ``state`` is a state dict for DCP: nested, with ``Stateful`` objects.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    return RankChecksum(
        {name: checksum_part(name, value, rank) for name, value in flatten_state(resolve_stateful(state)).items()}
    )


def checksum_part(name: str, value: Any, rank: int = 0) -> ChecksumPart:
    """Return this rank's part of the checksum of one name."""
    if not isinstance(value, torch.Tensor):
        return object_checksum_part(name, canonical_bytes(value), rank)
    local, boxes, copy = local_boxes(name, value, rank)
    if not is_plain_tensor(local):
        return object_checksum_part(name, canonical_bytes(local), rank)
    seed, shape = name_seed(name), tuple(value.shape)
    total = count = 0
    for here, there in boxes:
        part = local.detach()
        for axis, (start, size) in enumerate(zip(here.offsets, here.sizes, strict=True)):
            part = part.narrow(axis, start, size)
        total += weighted_sum(seed, part, shape, there.offsets)
        count += there.volume
    return ChecksumPart(dtype_name(local.dtype), shape, total & MASK64, count, copy)


def object_checksum_part(name: str, data: bytes, rank: int = 0) -> ChecksumPart:
    """Return the part of an object that is not a tensor, from its bytes."""
    return ChecksumPart(OBJECT_DTYPE, (), xxhash.xxh3_64_intdigest(data, name_seed(name)), 1, rank)


def combine_checksums(shares: Iterable[RankChecksum]) -> WholeChecksum:
    """Combine the parts of all ranks into the checksum of the whole state, without communication."""
    found: dict[str, list[ChecksumPart]] = {}
    for share in shares:
        for name, part in share.parts.items():
            found.setdefault(name, []).append(part)
    totals = {}
    for name, parts in found.items():
        kinds = {part.kind for part in parts}
        if len(kinds) > 1:
            raise MismatchError(f"{name} is not the same kind of tensor on all ranks: {sorted(kinds)}")
        first = min(part.replica for part in parts)
        totals[name] = parts[0], _total(_row(part, first) for part in parts)
    return _whole_checksum(totals)


class _Total(msgspec.Struct, frozen=True):
    """Sums and element counts over all ranks: of the first copy, and of all copies."""

    first_sum: int
    first_count: int
    sum: int
    count: int


def _row(part: ChecksumPart, first: int) -> list[int]:
    amounts = [_signed(part.sum), part.count]
    return [*(amounts if part.replica == first else [0, 0]), *amounts]


def _total(rows: Iterator[list[int]]) -> _Total:
    return _Total(*map(sum, zip(*rows, strict=True)))


def _whole_checksum(totals: Mapping[str, tuple[ChecksumPart, _Total]]) -> WholeChecksum:
    """Return the whole checksum, with the names of different copies.

    Raise :class:`MismatchError` unless every copy counts each element exactly once.
    """
    entries, diverged, incomplete = {}, [], {}
    for name in sorted(totals):
        part, total = totals[name]
        copies, rest = divmod(total.count, part.element_count) if part.element_count else (1, 0)
        if rest or total.first_count != part.element_count:
            incomplete[name] = f"{total.first_count} of {part.element_count} elements, {total.count} in all copies"
        elif (copies * total.first_sum - total.sum) & MASK64:
            diverged.append(name)
        entries[name] = ChecksumEntry(part.dtype, part.shape, total.first_sum & MASK64)
    if incomplete:
        raise MismatchError(f"the ranks together do not hold each element once: {_examples(incomplete)}")
    return WholeChecksum(entries, tuple(diverged))


def _all_reduced(numbers: list[int], how: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> list[int]:
    """Return the numbers after an all-reduce."""
    device = torch.device("cpu") if "gloo" in dist.get_backend(group) else accelerator().current()
    tensor = torch.tensor(numbers, dtype=torch.int64, device=device)
    dist.all_reduce(tensor, how, group)
    found: list[int] = tensor.tolist()
    return found


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _examples(found: Mapping[str, str]) -> str:
    shown = [f"{name} ({why})" for name, why in sorted(found.items())[:_SHOWN]]
    return ", ".join(shown) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")


_BLOCK = ROW_WORDS
_SEED_U, _SEED_B = 0x13198A2E03707344, 0xA4093822299F31D0
_CPU_WORDS = 1 << 18
"""Words per piece on a CPU, which fit into the cache of a core. Accelerators need larger pieces."""
_DEVICE_WORDS = 1 << 24
_WORD = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint32, 16: torch.uint32}


def name_seed(name: str) -> int:
    """Return the seed of the weights of one name."""
    return xxhash.xxh3_64_intdigest(name.encode())


def weighted_sum(seed: int, tensor: torch.Tensor, shape: tuple[int, ...], offsets: tuple[int, ...]) -> int:
    """Return the weighted sum of one box of a tensor.

    ``tensor`` is the box at ``offsets``, and ``shape`` is the shape of the whole tensor. Devices, strides and element
    types are arbitrary. The memory for the calculation is bounded for any box.
    """
    if not tensor.numel():
        return 0
    if not tensor.ndim:
        tensor, shape, offsets = tensor.reshape(1), (1,), (0,)
    words = max(1, tensor.dtype.itemsize // 4)
    limit = (_CPU_WORDS if tensor.device.type == "cpu" else _DEVICE_WORDS) // words
    buffers = _Buffers(min(limit, tensor.numel()) * words, tensor.device)
    total = 0
    for piece, box in _pieces(tensor, Box(offsets, tuple(tensor.shape)), limit):
        found = _piece_sum(seed, _words(piece, buffers), _in_words(shape, words), _box_in_words(box, words), buffers)
        total += int(found.item())
    return total & MASK64


class _Buffers:
    """Reusable memory for one piece at a time: new pages would cost more than the arithmetic."""

    def __init__(self, words: int, device: torch.device) -> None:
        self._words = words
        self._device = device
        self._rows: list[torch.Tensor] = []

    def rows(self, number: int, like: torch.Tensor) -> torch.Tensor:
        while len(self._rows) <= number:
            self._rows.append(torch.empty(self._words, dtype=torch.int64, device=self._device))
        return self._rows[number][: like.numel()].view(like.shape)


def _pieces(tensor: torch.Tensor, box: Box, limit: int) -> Iterator[tuple[torch.Tensor, Box]]:
    """Split a box into boxes of at most ``limit`` elements along the outermost axes."""
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


def _words(piece: torch.Tensor, buffers: _Buffers) -> torch.Tensor:
    """Return the words of a piece in row-major order as non-negative numbers."""
    size = piece.dtype.itemsize
    plain = piece.detach().resolve_conj().resolve_neg().view(CARRIER_DTYPES[size]).contiguous()
    flat = plain.reshape(-1).view(_WORD[size])
    return buffers.rows(0, flat).copy_(flat)


def _in_words(sizes: tuple[int, ...], words: int) -> tuple[int, ...]:
    return (*sizes[:-1], sizes[-1] * words)


def _box_in_words(box: Box, words: int) -> Box:
    return Box(_in_words(box.offsets, words), _in_words(box.sizes, words))


def _piece_sum(seed: int, words: torch.Tensor, shape: tuple[int, ...], box: Box, buffers: _Buffers) -> torch.Tensor:
    """Return the sum of one piece. Its rows are the runs that are contiguous in the whole tensor."""
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
        return _run_sum(seed, rows[0], int(starts.item()), tables, buffers)
    total = words.new_zeros(())
    for column in range(0, width, _BLOCK):
        total += _rows_sum(seed, rows[:, column : column + _BLOCK], starts + column, tables, buffers)
    return total


class _Tables(NamedTuple):
    """Both tables, each repeated once, because a row may begin anywhere in a block."""

    t: torch.Tensor
    u: torch.Tensor


def _run_sum(seed: int, run: torch.Tensor, start: int, tables: _Tables, buffers: _Buffers) -> torch.Tensor:
    """Return the sum of one long run. Whole blocks need no copies of the tables."""
    lead = -start % _BLOCK
    blocks = (len(run) - lead) // _BLOCK
    stop = lead + blocks * _BLOCK
    total = run.new_zeros(())
    for part, first in ((run[:lead], start), (run[stop:], start + stop)):
        if len(part):
            total += _rows_sum(seed, part[None, :], torch.tensor([first], device=run.device), tables, buffers)
    body = run[lead:stop].view(blocks, _BLOCK)
    a, b = _factors(seed, torch.arange(blocks, device=run.device) + (start + lead) // _BLOCK)
    return total + (a * _dot(body, tables.t[:_BLOCK]) + b * _dot(body, tables.u[:_BLOCK])).sum()


def _dot(rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    # Only CPUs support the matrix product of integers.
    return rows @ table if rows.device.type == "cpu" else (rows * table).sum(1)


def _rows_sum(seed: int, rows: torch.Tensor, starts: torch.Tensor, tables: _Tables, buffers: _Buffers) -> torch.Tensor:
    """Return the sum of rows of at most one block each, which may cross into the next block."""
    width = rows.shape[1]
    low, block = starts % _BLOCK, starts // _BLOCK
    a, b = _factors(seed, block)
    left_t, left_u = (
        torch.index_select(table.unfold(0, width, 1), 0, low, out=buffers.rows(1 + i, rows)).mul_(rows)
        for i, table in enumerate(tables)
    )
    total = (a * left_t.sum(1) + b * left_u.sum(1)).sum()
    crossing = low + width > _BLOCK
    if not bool(crossing.any()):
        return total
    # Words after the block's end were counted with the factors of the previous block.
    behind = torch.arange(width, device=rows.device) >= (_BLOCK - low[crossing])[:, None]
    next_a, next_b = _factors(seed, block[crossing] + 1)
    for product, old, new in ((left_t, a, next_a), (left_u, b, next_b)):
        tail = (product[crossing] * behind).sum(1)
        total = total + ((new - old[crossing]) * tail).sum()
    return total


@functools.lru_cache(maxsize=16)
def _tables(device: torch.device) -> _Tables:
    t = column_weights(device)
    u = seeded_numbers(_SEED_U, torch.arange(_BLOCK, dtype=torch.int64, device=device))
    return _Tables(torch.cat([t, t]), torch.cat([u, u]))


def _factors(seed: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two factors of each block, one odd and one even."""
    return seeded_numbers(seed, blocks) | 1, seeded_numbers(seed ^ _SEED_B, blocks) << 1


AxisRuns = tuple[tuple[int, int], ...]
"""Runs ``(start, size)`` of global indexes along an axis, in local order."""


class LocalBoxes(NamedTuple):
    """The local tensor and the positions of its boxes in the whole tensor."""

    local: torch.Tensor
    boxes: tuple[tuple[Box, Box], ...]
    """Pairs of boxes: in the local tensor and in the whole tensor."""
    replica: int
    """Copy of the whole tensor that the local tensor belongs to: the lowest rank with a part of it."""


def local_boxes(name: str, tensor: torch.Tensor, rank: int) -> LocalBoxes:
    """Return the local part of ``tensor``. Without a ``DTensor`` each rank has a whole copy."""
    if isinstance(tensor, ShardedTensor):
        raise UsageError(f"{name} is a ShardedTensor: make it a DTensor (FSDP2, or FSDP's sharded state as DTensor)")
    if not isinstance(tensor, DTensor):
        box = full_box(tuple(tensor.shape))
        return LocalBoxes(tensor, ((box, box),), rank)
    mesh, local, shape = tensor.device_mesh, tensor.to_local(), tuple(tensor.shape)
    coordinate = mesh.get_coordinate()
    ranks = mesh.mesh
    if coordinate is None:  # this rank is not in the mesh
        return LocalBoxes(local, (), int(ranks.min()))
    axes = shard_runs(name, shape, tuple(mesh.shape), coordinate, tensor.placements)
    expected = tuple(map(runs_length, axes))
    # Empty shards may differ in shape, for example FSDP2's over an empty TP shard.
    if expected != tuple(local.shape) and (0 not in expected or local.numel()):
        raise UsageError(
            f"{name} has shape {shape} on a mesh {tuple(mesh.shape)} as {tensor.placements}. This rank should hold "
            f"{expected} and holds {tuple(local.shape)}, so its part of the tensor is unknown"
        )
    return LocalBoxes(local, tuple(boxes_from_runs(axes)), replica_of(ranks, coordinate, tensor.placements))


def shard_runs(
    name: str, shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> list[AxisRuns]:
    """Return the rows of each axis that the process at ``coordinate`` of a mesh has."""
    axes: list[AxisRuns] = [((0, size),) for size in shape]
    for count, index, placement in zip(mesh, coordinate, placements, strict=True):
        if placement.is_partial():
            raise UsageError(f"{name} is a partial sum on each rank ({placement}): redistribute it first")
        axis = getattr(placement, "dim", None)
        if axis is None:
            continue
        # A strided shard: a later mesh dimension has already split the axis into ``split_factor`` pieces.
        factor = getattr(placement, "split_factor", 1)
        pieces = (chunk_runs(chunk_runs(axes[axis], factor, number), count, index) for number in range(factor))
        axes[axis] = tuple(itertools.chain.from_iterable(pieces))
    return axes


def chunk_runs(rows: AxisRuns, count: int, index: int) -> AxisRuns:
    """Return piece ``index`` of ``count``, split like ``torch.chunk``."""
    size = -(-runs_length(rows) // count)
    first, last = size * index, size * (index + 1)
    found, at = [], 0
    for start, run in rows:
        low, high = max(first, at), min(last, at + run)
        if low < high:
            found.append((start + low - at, high - low))
        at += run
    return tuple(found)


def runs_length(rows: AxisRuns) -> int:
    return sum(size for _, size in rows)


def boxes_from_runs(axes: Sequence[AxisRuns]) -> Iterator[tuple[Box, Box]]:
    """Yield the boxes that the rows of all axes form: in the local tensor and in the whole tensor."""
    runs = []
    for rows in axes:
        ends = itertools.accumulate((size for _, size in rows), initial=0)
        runs.append([(at, start, size) for at, (start, size) in zip(ends, rows, strict=False)])
    for place in itertools.product(*runs):
        sizes = tuple(size for _, _, size in place)
        yield Box(tuple(at for at, _, _ in place), sizes), Box(tuple(start for _, start, _ in place), sizes)


def replica_of(ranks: torch.Tensor, coordinate: Sequence[int], placements: Sequence[Any]) -> int:
    """Return the lowest rank of the same copy, whose ranks differ only along sharded mesh dimensions."""
    for index, placement in zip(coordinate, placements, strict=True):
        # Move this dimension to the end, so that the next one is first.
        ranks = ranks[index] if getattr(placement, "dim", None) is None else ranks.movedim(0, -1)
    return int(ranks.min())


def canonical_bytes(value: Any) -> bytes:
    """Return bytes that are equal only for values of equal type and content.

    The insertion order of mappings and sets has no effect. Other types are pickled, so their bytes are only as
    canonical as their ``__reduce__``.
    """
    if value is None or value is True or value is False:
        return _tagged(str(value), b"")
    if type(value) is int:
        return _tagged("int", str(value).encode())
    if type(value) is float:
        return _tagged("float", struct.pack("<d", value))
    if type(value) is complex:
        return _tagged("complex", struct.pack("<dd", value.real, value.imag))
    if type(value) is str:
        return _tagged("str", value.encode("utf-8", "surrogatepass"))
    if type(value) in (bytes, bytearray):
        return _tagged("bytes", bytes(value))
    if type(value) in (list, tuple):
        return _tagged(type(value).__name__, _joined(map(canonical_bytes, value)))
    if type(value) in (set, frozenset):
        return _tagged("set", _joined(sorted(map(canonical_bytes, value))))
    if isinstance(value, Mapping):
        return _tagged(
            "map", _joined(sorted(canonical_bytes(key) + canonical_bytes(inner) for key, inner in value.items()))
        )
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    return _tagged("pickle", pickle.dumps(value, protocol=4))


def _tensor(tensor: torch.Tensor) -> bytes:
    if not is_plain_tensor(tensor):
        return _tagged("archive", archive_object(tensor))
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return _tagged(f"tensor {dtype_name(flat.dtype)} {tuple(flat.shape)}", bytes(tensor_raw_bytes(flat)))


def _tagged(kind: str, data: bytes) -> bytes:
    return f"{kind} {len(data)}:".encode() + data


def _joined(parts: Iterable[bytes]) -> bytes:
    return b"".join(parts)
