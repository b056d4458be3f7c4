"""A checksum of a whole state that does not depend on who holds which part of it.

Each rank adds up what it holds, the ranks' sums are added, and the same state gives the same number on one rank, on a
thousand, before a save and after a load into another sharding::

    before = checksum(state).combined()
    dcp.save(...); ...; dcp.load(...)              # at another world size
    checksum(other).combined().must_equal(before)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import xxhash

from elastic.reshard.holding import held
from elastic.reshard.objects import canonical
from elastic.reshard.weights import MASK, seed_of, weighted_sum
from tieredckpt.device import accelerator
from tieredckpt.errors import CheckpointDamagedError, MismatchError
from tieredckpt.state import as_plain, flatten
from tieredckpt.tensors import dtype_name, is_plain

OBJECT = "object"
"""In place of an element type: something that is not a tensor. It has one element, its bytes' hash."""
_SHOWN = 5


class Part(msgspec.Struct, frozen=True):
    """What one rank holds of one name."""

    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    sum: int
    count: int
    """Elements held here."""
    copy: int = 0
    """Which copy of the whole this is a part of, by the lowest rank with a part of it. Copies are compared."""

    @property
    def kind(self) -> tuple[str, tuple[int, ...]]:
        return self.dtype, self.shape

    @property
    def whole(self) -> int:
        """Elements of one copy."""
        return math.prod(self.shape)


class Entry(msgspec.Struct, frozen=True):
    """One name of a whole state."""

    dtype: str
    shape: tuple[int, ...]
    sum: int


class Checksum(msgspec.Struct, frozen=True):
    """Of a whole state. msgpack encodes it, to be kept beside what it vouches for."""

    entries: dict[str, Entry]
    diverged: tuple[str, ...] = ()
    """Names of which not all ranks' copies are the same; ``entries`` has the first copy's."""

    @property
    def value(self) -> int:
        """One number for everything: the sum over all elements of all names."""
        return sum(entry.sum for entry in self.entries.values()) & MASK

    @property
    def of_tensors(self) -> Checksum:
        """Without objects, which are other bytes in a file than in memory."""
        return Checksum({name: entry for name, entry in self.entries.items() if entry.dtype != OBJECT}, self.diverged)

    def __str__(self) -> str:
        return f"0x{self.value:016x}"

    def differences(self, other: Checksum) -> dict[str, str]:
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

    def must_equal(self, other: Checksum) -> None:
        """:class:`CheckpointDamagedError` that names what differs, or whose copies do."""
        different = self.differences(other)
        different |= dict.fromkeys((*self.diverged, *other.diverged), "not the same on all ranks")
        if different:
            raise CheckpointDamagedError(f"{len(different)} names differ: {_some(different)}")


class StateChecksum(msgspec.Struct, frozen=True):
    """One rank's share."""

    parts: dict[str, Part]

    def combined(self, group: dist.ProcessGroup | None = None) -> Checksum:
        """The whole state's, on every rank of ``group``: three all-reduces, of two, one and four numbers per name.

        Only where the ranks do not all have the same names (pipeline stages, objects of one rank) are the shares
        themselves gathered.
        """
        if not dist.is_initialized():
            return combine([self])
        names = sorted(self.parts)
        form = xxhash.xxh3_64_intdigest(msgspec.msgpack.encode([(name, *self.parts[name].kind) for name in names]))
        form = _signed(form)
        highest, lowest = _reduced([form, ~form], dist.ReduceOp.MAX, group)
        if highest != ~lowest:
            shares: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(shares, self, group)
            return combine(shares)
        firsts = _reduced([self.parts[name].copy for name in names], dist.ReduceOp.MIN, group)
        rows = [_row(self.parts[name], first) for name, first in zip(names, firsts, strict=True)]
        sums = _reduced([number for row in rows for number in row], dist.ReduceOp.SUM, group)
        return _checked({name: (self.parts[name], _Total(*sums[4 * i : 4 * i + 4])) for i, name in enumerate(names)})


def checksum(state: Mapping[str, Any]) -> StateChecksum:
    """This rank's share of ``state``'s checksum. Reads every local byte once and talks to nobody.

    ``state`` is what DCP takes: nested, with ``Stateful`` objects.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    return StateChecksum({name: part_of(name, value, rank) for name, value in flatten(as_plain(state)).items()})


def part_of(name: str, value: Any, rank: int = 0) -> Part:
    """One name's part."""
    if not isinstance(value, torch.Tensor):
        return object_part(name, canonical(value), rank)
    local, boxes, copy = held(name, value, rank)
    if not is_plain(local):
        return object_part(name, canonical(local), rank)
    seed, shape = seed_of(name), tuple(value.shape)
    total = count = 0
    for here, there in boxes:
        part = local.detach()
        for axis, (start, size) in enumerate(zip(here.offsets, here.sizes, strict=True)):
            part = part.narrow(axis, start, size)
        total += weighted_sum(seed, part, shape, there.offsets)
        count += there.volume
    return Part(dtype_name(local.dtype), shape, total & MASK, count, copy)


def object_part(name: str, data: bytes, rank: int = 0) -> Part:
    """The part of something that is not a tensor, by its bytes."""
    return Part(OBJECT, (), xxhash.xxh3_64_intdigest(data, seed_of(name)), 1, rank)


def combine(shares: Iterable[StateChecksum]) -> Checksum:
    """All ranks' shares as the whole state's checksum: no communication where they were kept with the shards."""
    found: dict[str, list[Part]] = {}
    for share in shares:
        for name, part in share.parts.items():
            found.setdefault(name, []).append(part)
    totals = {}
    for name, parts in found.items():
        kinds = {part.kind for part in parts}
        if len(kinds) > 1:
            raise MismatchError(f"{name} is not the same kind of tensor on all ranks: {sorted(kinds)}")
        first = min(part.copy for part in parts)
        totals[name] = parts[0], _total(_row(part, first) for part in parts)
    return _checked(totals)


class _Total(msgspec.Struct, frozen=True):
    """Of all ranks: the first copy's sum and count, and those of all copies together."""

    first_sum: int
    first_count: int
    sum: int
    count: int


def _row(part: Part, first: int) -> list[int]:
    amounts = [_signed(part.sum), part.count]
    return [*(amounts if part.copy == first else [0, 0]), *amounts]


def _total(rows: Iterator[list[int]]) -> _Total:
    return _Total(*map(sum, zip(*rows, strict=True)))


def _checked(totals: Mapping[str, tuple[Part, _Total]]) -> Checksum:
    """Every element was counted exactly once a copy, and all copies are the same."""
    entries, diverged, torn = {}, [], {}
    for name in sorted(totals):
        part, total = totals[name]
        copies, rest = divmod(total.count, part.whole) if part.whole else (1, 0)
        if rest or total.first_count != part.whole:
            torn[name] = f"{total.first_count} of {part.whole} elements, {total.count} in all copies"
        elif (copies * total.first_sum - total.sum) & MASK:
            diverged.append(name)
        entries[name] = Entry(part.dtype, part.shape, total.first_sum & MASK)
    if torn:
        raise MismatchError(f"the ranks together do not hold each element once: {_some(torn)}")
    return Checksum(entries, tuple(diverged))


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
