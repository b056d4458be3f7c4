"""A checksum of a whole state that does not depend on its sharding.

Each rank adds up what it holds, the ranks' sums are added, and the same state gives the same number on one rank, on a
thousand, before a save and after a load into another sharding::

    before = state_checksum(state).all_reduced()
    dcp.save(...); ...; dcp.load(...)              # at another world size
    state_checksum(other).all_reduced().assert_equal(before)

::

    sum of  word(j) * weight(name, j)  mod 2^64        j: global row-major number of the word

    weight(name, j) = T[lo] * a(name, hi) + U[lo] * b(name, hi)        j = hi * 8192 + lo

An element of up to 32 bits is one word, a wider one is several: with words of 64 bits two flipped signs would cancel.
``T`` and ``a`` are odd and ``b`` is even, so every weight is odd: a change of one word always changes the sum. All of
them come out of splitmix64. A weight never depends on how the tensor is cut, so the sums of any partition add up.

Two tables, because a block's words then cost two multiplications each, and not a hash each; and two of them, so that a
block whose sum with one table happens to vanish is still seen through the other. ``docs/explanation/resharding.md`` has
the probability of a miss.

DCP describes a local shard by one offset and one shape. That is not enough for a ``_StridedShard`` that does not divide
evenly, whose rows are not neighbours; so the placements are followed here row by row, and what is found is compared
with the shard that is really there.
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
from tieredckpt.tensors.state_dict import archive_object, dtype_name, flatten_state, is_plain_tensor, resolve_stateful

OBJECT_DTYPE = "object"
"""In place of an element type: something that is not a tensor. It has one element, its bytes' hash."""
_SHOWN = 5


class ChecksumPart(msgspec.Struct, frozen=True):
    """What one rank holds of one name."""

    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    sum: int
    count: int
    """Elements held here."""
    replica: int = 0
    """Which copy of the whole this is a part of, by the lowest rank with a part of it. Copies are compared."""

    @property
    def kind(self) -> tuple[str, tuple[int, ...]]:
        return self.dtype, self.shape

    @property
    def element_count(self) -> int:
        """Elements of one copy."""
        return math.prod(self.shape)


class ChecksumEntry(msgspec.Struct, frozen=True):
    """One name of a whole state."""

    dtype: str
    shape: tuple[int, ...]
    sum: int


class WholeChecksum(msgspec.Struct, frozen=True):
    """Of a whole state. msgpack encodes it, to be kept beside what it vouches for."""

    entries: dict[str, ChecksumEntry]
    diverged_names: tuple[str, ...] = ()
    """Names of which not all ranks' copies are the same; ``entries`` has the first copy's."""

    @property
    def value(self) -> int:
        """One number for everything: the sum over all elements of all names."""
        return sum(entry.sum for entry in self.entries.values()) & MASK64

    @property
    def tensors_only(self) -> WholeChecksum:
        """Without objects, which are other bytes in a file than in memory."""
        return WholeChecksum(
            {name: entry for name, entry in self.entries.items() if entry.dtype != OBJECT_DTYPE}, self.diverged_names
        )

    def __str__(self) -> str:
        return f"0x{self.value:016x}"

    def differences(self, other: WholeChecksum) -> dict[str, str]:
        """The names that are not the same in ``other``, and how they differ."""
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
        """:class:`CheckpointDamagedError` that names what differs, or whose copies do."""
        different = self.differences(other)
        different |= dict.fromkeys((*self.diverged_names, *other.diverged_names), "not the same on all ranks")
        if different:
            raise CheckpointDamagedError(f"{len(different)} names differ: {_some(different)}")


class RankChecksum(msgspec.Struct, frozen=True):
    """One rank's share."""

    parts: dict[str, ChecksumPart]

    def all_reduced(self, group: dist.ProcessGroup | None = None) -> WholeChecksum:
        """The whole state's, on every rank of ``group``: three all-reduces, of two, one and four numbers per name.

        Only where the ranks do not all have the same names (pipeline stages, objects of one rank) are the shares
        themselves gathered.
        """
        if not dist.is_initialized():
            return combine_checksums([self])
        names = sorted(self.parts)
        form = xxhash.xxh3_64_intdigest(msgspec.msgpack.encode([(name, *self.parts[name].kind) for name in names]))
        form = _signed(form)
        highest, lowest = _reduced([form, ~form], dist.ReduceOp.MAX, group)
        if highest != ~lowest:
            shares: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(shares, self, group)
            return combine_checksums(shares)
        firsts = _reduced([self.parts[name].replica for name in names], dist.ReduceOp.MIN, group)
        rows = [_row(self.parts[name], first) for name, first in zip(names, firsts, strict=True)]
        sums = _reduced([number for row in rows for number in row], dist.ReduceOp.SUM, group)
        return _checked({name: (self.parts[name], _Total(*sums[4 * i : 4 * i + 4])) for i, name in enumerate(names)})


def state_checksum(state: Mapping[str, Any]) -> RankChecksum:
    """This rank's share of ``state``'s checksum. Reads every local byte once and talks to nobody.

    ``state`` is what DCP takes: nested, with ``Stateful`` objects.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    return RankChecksum(
        {name: checksum_part(name, value, rank) for name, value in flatten_state(resolve_stateful(state)).items()}
    )


def checksum_part(name: str, value: Any, rank: int = 0) -> ChecksumPart:
    """One name's part."""
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
    """The part of something that is not a tensor, by its bytes."""
    return ChecksumPart(OBJECT_DTYPE, (), xxhash.xxh3_64_intdigest(data, name_seed(name)), 1, rank)


def combine_checksums(shares: Iterable[RankChecksum]) -> WholeChecksum:
    """All ranks' shares as the whole state's checksum: no communication where they were kept with the shards."""
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
    return _checked(totals)


class _Total(msgspec.Struct, frozen=True):
    """Of all ranks: the first copy's sum and count, and those of all copies together."""

    first_sum: int
    first_count: int
    sum: int
    count: int


def _row(part: ChecksumPart, first: int) -> list[int]:
    amounts = [_signed(part.sum), part.count]
    return [*(amounts if part.replica == first else [0, 0]), *amounts]


def _total(rows: Iterator[list[int]]) -> _Total:
    return _Total(*map(sum, zip(*rows, strict=True)))


def _checked(totals: Mapping[str, tuple[ChecksumPart, _Total]]) -> WholeChecksum:
    """Every element was counted exactly once a copy, and all copies are the same."""
    entries, diverged, torn = {}, [], {}
    for name in sorted(totals):
        part, total = totals[name]
        copies, rest = divmod(total.count, part.element_count) if part.element_count else (1, 0)
        if rest or total.first_count != part.element_count:
            torn[name] = f"{total.first_count} of {part.element_count} elements, {total.count} in all copies"
        elif (copies * total.first_sum - total.sum) & MASK64:
            diverged.append(name)
        entries[name] = ChecksumEntry(part.dtype, part.shape, total.first_sum & MASK64)
    if torn:
        raise MismatchError(f"the ranks together do not hold each element once: {_some(torn)}")
    return WholeChecksum(entries, tuple(diverged))


def _reduced(numbers: list[int], how: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> list[int]:
    """The same numbers on all ranks."""
    device = torch.device("cpu") if "gloo" in dist.get_backend(group) else accelerator().current()
    tensor = torch.tensor(numbers, dtype=torch.int64, device=device)
    dist.all_reduce(tensor, how, group)
    found: list[int] = tensor.tolist()
    return found


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _some(found: Mapping[str, str]) -> str:
    shown = [f"{name} ({why})" for name, why in sorted(found.items())[:_SHOWN]]
    return ", ".join(shown) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")


_BLOCK = ROW_WORDS
_SEED_U, _SEED_B = 0x13198A2E03707344, 0xA4093822299F31D0
_CPU_WORDS = 1 << 18
"""Worked on at a time: what a core's cache holds. An accelerator would rather have more of them."""
_DEVICE_WORDS = 1 << 24
_WORD = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint32, 16: torch.uint32}


def name_seed(name: str) -> int:
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
    return total & MASK64


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
    plain = piece.detach().resolve_conj().resolve_neg().view(CARRIER_DTYPES[size]).contiguous()
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
    t = column_weights(device)
    u = seeded_numbers(_SEED_U, torch.arange(_BLOCK, dtype=torch.int64, device=device))
    return _Tables(torch.cat([t, t]), torch.cat([u, u]))


def _factors(seed: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two factors of each block: an odd one and an even one."""
    return seeded_numbers(seed, blocks) | 1, seeded_numbers(seed ^ _SEED_B, blocks) << 1


AxisRuns = tuple[tuple[int, int], ...]
"""Runs ``(start, size)`` of an axis's global numbers, in local order."""


class LocalBoxes(NamedTuple):
    """The local tensor, and which of its boxes is which of the whole."""

    local: torch.Tensor
    boxes: tuple[tuple[Box, Box], ...]
    """(in the local tensor, in the whole one)"""
    replica: int
    """Which of the copies of the whole this is a part of: the lowest rank that holds some of the same one."""


def local_boxes(name: str, tensor: torch.Tensor, rank: int) -> LocalBoxes:
    """What of ``tensor`` is here. One that is not distributed is whole on every rank: each has a copy of its own."""
    if isinstance(tensor, ShardedTensor):
        raise UsageError(f"{name} is a ShardedTensor: make it a DTensor (FSDP2, or FSDP's sharded state as DTensor)")
    if not isinstance(tensor, DTensor):
        box = full_box(tuple(tensor.shape))
        return LocalBoxes(tensor, ((box, box),), rank)
    mesh, local, shape = tensor.device_mesh, tensor.to_local(), tuple(tensor.shape)
    coordinate = mesh.get_coordinate()
    ranks = mesh.mesh
    if coordinate is None:  # the mesh is of other ranks
        return LocalBoxes(local, (), int(ranks.min()))
    axes = shard_runs(name, shape, tuple(mesh.shape), coordinate, tensor.placements)
    expected = tuple(map(runs_length, axes))
    # An empty shard may be empty in another way: FSDP2's own are, over an empty TP shard.
    if expected != tuple(local.shape) and (0 not in expected or local.numel()):
        raise UsageError(
            f"{name} of shape {shape} on a mesh {tuple(mesh.shape)} as {tensor.placements}: this rank should hold "
            f"{expected} and holds {tuple(local.shape)}, so nobody can say which part that is"
        )
    return LocalBoxes(local, tuple(boxes_from_runs(axes)), replica_of(ranks, coordinate, tensor.placements))


def shard_runs(
    name: str, shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> list[AxisRuns]:
    """For each axis, which of its rows the process at ``coordinate`` of a mesh has."""
    axes: list[AxisRuns] = [((0, size),) for size in shape]
    for count, index, placement in zip(mesh, coordinate, placements, strict=True):
        if placement.is_partial():
            raise UsageError(f"{name} is a partial sum on each rank ({placement}): redistribute it first")
        axis = getattr(placement, "dim", None)
        if axis is None:
            continue
        # A strided shard: a later dimension of the mesh has cut the axis into so many pieces before.
        factor = getattr(placement, "split_factor", 1)
        pieces = (chunk_runs(chunk_runs(axes[axis], factor, number), count, index) for number in range(factor))
        axes[axis] = tuple(itertools.chain.from_iterable(pieces))
    return axes


def chunk_runs(rows: AxisRuns, count: int, index: int) -> AxisRuns:
    """Piece ``index`` of ``count``, cut as ``torch.chunk`` cuts."""
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
    """The boxes that rows of every axis make together: where each is in the local tensor, and where in the whole."""
    runs = []
    for rows in axes:
        ends = itertools.accumulate((size for _, size in rows), initial=0)
        runs.append([(at, start, size) for at, (start, size) in zip(ends, rows, strict=False)])
    for place in itertools.product(*runs):
        sizes = tuple(size for _, _, size in place)
        yield Box(tuple(at for at, _, _ in place), sizes), Box(tuple(start for _, start, _ in place), sizes)


def replica_of(ranks: torch.Tensor, coordinate: Sequence[int], placements: Sequence[Any]) -> int:
    """The lowest rank of those that hold the same copy: they differ in their place along sharded dimensions only."""
    for index, placement in zip(coordinate, placements, strict=True):
        # What was looked at goes to the end, so that the next dimension is the first one.
        ranks = ranks[index] if getattr(placement, "dim", None) is None else ranks.movedim(0, -1)
    return int(ranks.min())


def canonical_bytes(value: Any) -> bytes:
    """Bytes that tell values and their types apart; the order in which a mapping or a set was filled does not count.

    What has no form of its own here is pickled. That is as canonical as its ``__reduce__`` is.
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
