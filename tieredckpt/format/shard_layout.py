"""Layout of a shard, which is a safetensors file: tensors, items, offsets, column encoding. Pure.

A shard is one valid safetensors file::

    0        8                      header_bytes                                        size
    ├────────┼──────────────────────┼───────────────────────────────┬────────────────────┤
    │ length │ JSON, padded with    │ tensors: those whose size is a │ items: byte strings │
    │ u64 LE │ spaces               │ multiple of 64 first, so that  │ whose size may      │
    │        │                      │ each starts at a multiple of 64│ change every save   │
    └────────┴──────────────────────┴───────────────────────────────┴────────────────────┘

The positions of tensors depend only on names, types and shapes. They are computed once and used for every save, and
each save writes a new tail and header.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
import xxhash

from peerstore.message_codec import from_msgpack
from tieredckpt.errors import CheckpointDamagedError
from tieredckpt.format.slice_boxes import Box

SAFETENSORS_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Types that every safetensors reader knows.

Tensors of other types are written as bytes; the layout has the type.
"""

_BY_WIDTH = {
    1: "bool uint8 int8 quint8 qint8 bits8 bits1x8 bits2x4 bits4x2 quint4x2 quint2x4 float4_e2m1fn_x2 float8_e4m3fn "
    "float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu uint1 uint2 uint3 uint4 uint5 uint6 uint7 "
    "int1 int2 int3 int4 int5 int6 int7",
    2: "int16 uint16 float16 bfloat16 bits16",
    4: "int32 uint32 float32 complex32 qint32",
    8: "int64 uint64 float64 complex64",
    16: "complex128",
}
DTYPE_WIDTHS = {name: width for width, names in _BY_WIDTH.items() for name in names.split()}
"""Bytes per element of every torch type."""


def safetensors_dtype_and_shape(dtype: str, sizes: tuple[int, ...], size_bytes: int) -> tuple[str, tuple[int, ...]]:
    """Return the type and shape of a tensor in the safetensors header."""
    name = SAFETENSORS_DTYPES.get(dtype)
    return (name, sizes) if name is not None else ("U8", (size_bytes,))


TENSOR_ALIGNMENT = 64
HEADER_ALIGNMENT = 4096
_MAX_ELEMENTS, _MAX_BYTES = 1 << 60, 1 << 62
_FEW_ROWS = 8192
"""Rows of a layout up to which a process without numpy checks them in Python."""
_TOO_MANY_BYTES = "more bytes than any file has"
_GAP = "a tensor does not start where the one before it ends"
_MAX_NAMELESS = 1 << 16
"""Most list elements of a state that may have no name."""
_WIDEST_ITEM = len('":{"dtype":"U8","shape":[],"data_offsets":[,]},') + 3 * 20


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor, or one slice of a tensor, in a shard."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    box: Box
    """Part of the tensor in this shard."""
    itemsize: int
    sharded: bool = False
    """Whether it was saved as a slice of a distributed tensor, which DCP distinguishes."""
    requires_grad: bool = False
    start: int = 0
    """Offset of its first byte from the end of the header."""

    @property
    def size_bytes(self) -> int:
        return self.box.volume * self.itemsize


OBJECT_ITEM: Final = "object"
"""Kind of an item with a Python object, as bytes that only the planner reads."""
ARCHIVE_ITEM: Final = "archive"
"""Kind of an item with a ``torch.save`` archive of a tensor.

Archives are for tensors that their bytes do not describe: sparse tensors and subclasses.
"""


class ItemEntry(msgspec.Struct, frozen=True):
    """One byte string of a shard. Its position differs between saves."""

    fqn: str
    kind: Literal["object", "archive"]
    tensor: TensorEntry | None = None
    """Tensor in an archive; ``None`` for an object."""


@dataclass(frozen=True)
class Layout:
    """Layout of a shard: tensors in file order, then items in file order."""

    tensors: tuple[TensorEntry, ...]
    items: tuple[ItemEntry, ...]
    paths: Mapping[str, tuple[str | int, ...]] | None
    """Path of each name in the nested state dict; ``None`` if the planner did not flatten it."""

    @functools.cached_property
    def digest(self) -> str:
        """Digest that identifies this layout. Equal digests mean equal layouts."""
        return xxhash.xxh3_128_hexdigest(encode_layout(self))

    @functools.cached_property
    def tensor_bytes(self) -> int:
        return self.tensors[-1].start + self.tensors[-1].size_bytes if self.tensors else 0

    @property
    def _entries(self) -> Iterator[TensorEntry | ItemEntry]:
        yield from self.tensors
        yield from self.items

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Unique safetensors names of all tensors and items: the name itself, or ``fqn@offsets`` for a slice."""
        taken = {"__metadata__"}
        return tuple(_unique(_base_name(entry), taken) for entry in self._entries)

    @functools.cached_property
    def _tensor_json(self) -> str:
        fields = []
        for name, entry in zip(self.names, self.tensors, strict=False):
            kind, shape = safetensors_dtype_and_shape(entry.dtype, entry.box.sizes, entry.size_bytes)
            fields.append(_field(name, kind, shape, entry.start, entry.size_bytes))
        return ",".join(fields)

    @functools.cached_property
    def header_bytes(self) -> int:
        """Size of the header, sufficient for items of any size."""
        widest = sum(len(json.dumps(name)) + _WIDEST_ITEM for name in self.names[len(self.tensors) :])
        return round_up(8 + len(_META_JSON) + len(self._tensor_json) + widest + 8, HEADER_ALIGNMENT)

    def size_bytes(self, item_sizes: Sequence[int]) -> int:
        return self.header_bytes + self.tensor_bytes + sum(item_sizes)

    def item_starts(self, item_sizes: Sequence[int]) -> list[int]:
        """Return the offset of each item from the end of the header."""
        starts, at = [], self.tensor_bytes
        for size in item_sizes:
            starts.append(at)
            at += size
        return starts

    def header(self, item_sizes: Sequence[int]) -> bytes:
        """Return the safetensors header of a save, exactly :attr:`header_bytes` long."""
        names = self.names[len(self.tensors) :]
        fields = [_META_JSON, self._tensor_json] if self.tensors else [_META_JSON]
        for name, start, size in zip(names, self.item_starts(item_sizes), item_sizes, strict=True):
            fields.append(_field(name, "U8", (size,), start, size))
        text = ("{" + ",".join(fields) + "}").encode()
        json_bytes = self.header_bytes - 8
        return json_bytes.to_bytes(8, "little") + text.ljust(json_bytes)


_META_JSON = '"__metadata__":{"format":"pt","tieredckpt":"1"}'


def build_layout(
    tensors: Sequence[TensorEntry], items: Sequence[ItemEntry], paths: Mapping[str, tuple[str | int, ...]] | None
) -> Layout:
    """Return a layout with a position for every tensor.

    Aligned tensors come first, the others follow by decreasing item size. Equal ones remain in the given order.
    """

    def rank(entry: TensorEntry) -> tuple[bool, int]:
        aligned = entry.size_bytes % TENSOR_ALIGNMENT == 0
        return (not aligned, 0 if aligned else -entry.itemsize)

    placed, at = [], 0
    for entry in sorted(tensors, key=rank):
        placed.append(msgspec.structs.replace(entry, start=at))
        at += entry.size_bytes
    names = [entry.fqn for entry in tensors] + [item.fqn for item in items]
    known_paths = None if paths is None else {name: paths[name] for name in names if name in paths}
    return Layout(tuple(placed), tuple(items), known_paths)


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _base_name(entry: TensorEntry | ItemEntry) -> str:
    tensor = entry if isinstance(entry, TensorEntry) else entry.tensor
    if tensor is None or tensor.box.sizes == tensor.shape:
        return entry.fqn
    return f"{entry.fqn}@{','.join(map(str, tensor.box.offsets))}"


def _unique(name: str, taken: set[str]) -> str:
    unique, number = name, 1
    while unique in taken:
        number += 1
        unique = f"{name}#{number}"
    taken.add(unique)
    return unique


def _field(name: str, kind: str, shape: Sequence[int], start: int, size_bytes: int) -> str:
    dims = ",".join(map(str, shape))
    return f'{json.dumps(name)}:{{"dtype":"{kind}","shape":[{dims}],"data_offsets":[{start},{start + size_bytes}]}}'


class _Columns(msgspec.Struct, frozen=True):
    """A layout by columns: a few strings and one array of integers, which are small and fast to decode."""

    names: list[str]
    dtypes: list[str]
    dtype_of: bytes
    itemsizes: bytes
    ranks: bytes
    flags: bytes
    """One byte for each tensor: 1 for sharded plus 2 for requires_grad."""
    numbers: bytes
    """Little-endian int64 for each tensor: start, then shape, offsets and sizes."""
    items: list[ItemEntry]
    paths: dict[str, tuple[str | int, ...]] | None
    """Paths that differ from the name split at its dots."""
    split: bool


def encode_layout(layout: Layout) -> bytes:
    """Return the layout as msgpack. Equal layouts have equal bytes."""
    numbers = array("q")
    dtypes: dict[str, int] = {}
    for entry in layout.tensors:
        dtypes.setdefault(entry.dtype, len(dtypes))
        numbers.extend((entry.start, *entry.shape, *entry.box.offsets, *entry.box.sizes))
    if sys.byteorder == "big":
        numbers.byteswap()
    paths = layout.paths
    return msgspec.msgpack.encode(
        _Columns(
            names=[entry.fqn for entry in layout.tensors],
            dtypes=list(dtypes),
            dtype_of=bytes(dtypes[entry.dtype] for entry in layout.tensors),
            itemsizes=bytes(entry.itemsize for entry in layout.tensors),
            ranks=bytes(len(entry.shape) for entry in layout.tensors),
            flags=bytes(entry.sharded + 2 * entry.requires_grad for entry in layout.tensors),
            numbers=numbers.tobytes(),
            items=list(layout.items),
            paths=None if paths is None else {n: p for n, p in sorted(paths.items()) if p != _split(n)},
            split=paths is not None,
        )
    )


def check_nested_paths(paths: Mapping[str, tuple[str | int, ...]]) -> None:
    """Raise :class:`CheckpointDamagedError` if lists would be much longer than their contents.

    A single name with a huge list index would create a list of that length. An empty container (``{}``) is a list
    element without a name, so lists may be somewhat longer than the names.
    """
    lengths: dict[tuple[str | int, ...], int] = {}
    for name, path in paths.items():
        for at, key in enumerate(path):
            if isinstance(key, int):
                if key < 0:
                    raise CheckpointDamagedError(f"{name} is in place {key} of a list")
                lengths[path[:at]] = max(lengths.get(path[:at], 0), key + 1)
    if sum(lengths.values()) > _MAX_NAMELESS + sum(map(len, paths.values())):
        raise CheckpointDamagedError("the lists of this state would be longer than all that is in them")


def decode_layout(data: bytes) -> Layout:
    """Return the layout in ``data``, completely checked, or raise :class:`CheckpointDamagedError`."""
    columns = LayoutColumns(data)
    return Layout(tuple(map(columns.entry, range(len(columns.names)))), tuple(columns.items), columns.paths)


class LayoutColumns:
    """A layout in its stored form, completely checked. Entries become Python objects only on request."""

    def __init__(self, data: bytes) -> None:
        try:
            columns = from_msgpack(data, _Columns)
            self._at, self.tensor_bytes = _check_columns(columns)
            for item in columns.items:
                if (item.kind == ARCHIVE_ITEM) != (item.tensor is not None):
                    raise ValueError(f"item {item.fqn} of kind {item.kind}")
                if item.tensor is not None:
                    _check_entry(item.tensor)
        except (msgspec.DecodeError, ValueError, IndexError, OverflowError, RecursionError) as error:
            raise CheckpointDamagedError(f"not a layout: {error}") from error
        self._columns = columns
        self._numbers = _numbers(columns)
        self.names = columns.names
        """Names of the tensors, in file order."""
        self.items = columns.items
        self.ranks = columns.ranks

    @property
    def paths(self) -> dict[str, tuple[str | int, ...]] | None:
        """Path of each name in the nested state dict; ``None`` if the planner did not flatten it."""
        if not self._columns.split:
            return None
        stored = self._columns.paths or {}
        names = [*self.names, *(item.fqn for item in self.items)]
        return {name: tuple(stored.get(name, _split(name))) for name in names}

    def numbers_offset(self, row: int) -> int:
        """Return the index of a row's first number. Its numbers are start, shape, offsets and sizes."""
        return self._at[row]

    @property
    def numbers(self) -> memoryview:
        return self._numbers

    def box(self, row: int) -> Box:
        rank, at = self.ranks[row], self._at[row] + 1
        numbers = self._numbers[at + rank : at + 3 * rank].tolist()
        return Box(tuple(numbers[:rank]), tuple(numbers[rank:]))

    def entry(self, row: int) -> TensorEntry:
        columns, rank, at = self._columns, self.ranks[row], self._at[row]
        numbers = self._numbers[at : at + 1 + 3 * rank].tolist()
        flags = columns.flags[row]
        return TensorEntry(
            self.names[row],
            columns.dtypes[columns.dtype_of[row]],
            tuple(numbers[1 : 1 + rank]),
            Box(tuple(numbers[1 + rank : 1 + 2 * rank]), tuple(numbers[1 + 2 * rank :])),
            columns.itemsizes[row],
            bool(flags & 1),
            bool(flags & 2),
            numbers[0],
        )


def _numbers(columns: _Columns) -> memoryview:
    if sys.byteorder == "little":
        return memoryview(columns.numbers).cast("q")
    numbers = array("q")
    numbers.frombytes(columns.numbers)
    numbers.byteswap()
    return memoryview(numbers)


def _check_columns(columns: _Columns) -> tuple[Sequence[int], int]:
    """Return the index of each tensor's first number, and the bytes of all tensors.

    Raise ``ValueError`` if the columns are inconsistent.
    """
    count = len(columns.names)
    if not len(columns.dtype_of) == len(columns.itemsizes) == len(columns.ranks) == len(columns.flags) == count:
        raise ValueError("columns of different lengths")
    # The import of numpy takes longer than these rows, and a node agent has not imported it.
    check = _check_rows if count <= _FEW_ROWS and "numpy" not in sys.modules else _check_arrays
    return check(columns)


def _check_rows(columns: _Columns) -> tuple[Sequence[int], int]:
    """Check each row of a layout in Python."""
    at = list(itertools.accumulate((1 + 3 * rank for rank in columns.ranks), initial=0))
    if len(columns.numbers) != 8 * at[-1]:
        raise _numbers_error(columns)
    numbers, starts, end = _numbers(columns).tolist(), [], 0
    if columns.dtype_of and max(columns.dtype_of) >= len(columns.dtypes):
        raise _dtype_error(columns)
    widths = [DTYPE_WIDTHS.get(dtype, 0) for dtype in columns.dtypes]
    for row, (start, rank, itemsize) in enumerate(zip(at, columns.ranks, columns.itemsizes, strict=False)):
        first = start + 1
        shape = numbers[first : first + rank]
        offsets = numbers[first + rank : first + 2 * rank]
        sizes = numbers[first + 2 * rank : first + 3 * rank]
        for length, offset, size in zip(shape, offsets, sizes, strict=True):
            if offset < 0 or size < 0 or size > length - offset:
                raise _row_error(columns, row)
        if not 1 <= itemsize <= 16 or widths[columns.dtype_of[row]] not in (0, itemsize):
            raise _row_error(columns, row)
        if math.prod(shape) >= _MAX_ELEMENTS:
            raise _row_error(columns, row)
        starts.append(end)
        end += math.prod(sizes) * itemsize
    if end >= _MAX_BYTES:
        raise ValueError(_TOO_MANY_BYTES)
    if [numbers[first] for first in at[:-1]] != starts:
        raise ValueError(_GAP)
    return at, end


def _check_arrays(columns: _Columns) -> tuple[Sequence[int], int]:
    """Check all rows of a layout with numpy."""
    import numpy as np

    count = len(columns.names)
    ranks = np.frombuffer(columns.ranks, np.uint8).astype(np.int64)
    at = np.concatenate((np.zeros(1, np.int64), np.cumsum(1 + 3 * ranks)))
    if len(columns.numbers) != 8 * at[-1]:
        raise _numbers_error(columns)
    numbers = np.frombuffer(columns.numbers, "<i8")
    itemsizes = np.frombuffer(columns.itemsizes, np.uint8).astype(np.int64)
    dtype_of = np.frombuffer(columns.dtype_of, np.uint8)
    if count and dtype_of.max() >= len(columns.dtypes):
        raise _dtype_error(columns)
    # A read copies bytes into a tensor of this type by this width.
    widths = (
        np.array([DTYPE_WIDTHS.get(dtype, 0) for dtype in columns.dtypes], np.int64)[dtype_of] if count else itemsizes
    )
    valid = (itemsizes >= 1) & (itemsizes <= 16) & ((widths == 0) | (widths == itemsizes))
    volumes = np.ones(count, np.int64)
    for rank in set(columns.ranks):
        rows = np.nonzero(ranks == rank)[0]
        table = numbers[at[rows][:, None] + np.arange(1, 1 + 3 * rank)]
        shape, offsets, sizes = table[:, :rank], table[:, rank : 2 * rank], table[:, 2 * rank :]
        inside = (offsets >= 0) & (sizes >= 0) & (shape >= offsets)
        inside[inside] = sizes[inside] <= (shape - offsets)[inside]
        valid[rows] &= inside.all(axis=1) & (shape.astype(np.float64).prod(axis=1) < _MAX_ELEMENTS)
        volumes[rows] = sizes.prod(axis=1)
    if not valid.all():
        raise _row_error(columns, int(np.argmin(valid)))
    if float((volumes.astype(np.float64) * itemsizes).sum()) >= _MAX_BYTES:
        raise ValueError(_TOO_MANY_BYTES)
    ends = np.cumsum(volumes * itemsizes)
    starts = numbers[at[:-1]]
    if count and (starts[0] != 0 or (starts[1:] != ends[:-1]).any()):
        raise ValueError(_GAP)
    return memoryview(at.data), int(ends[-1]) if count else 0


def _numbers_error(columns: _Columns) -> ValueError:
    return ValueError(f"{len(columns.numbers)} bytes of numbers for {len(columns.names)} tensors")


def _dtype_error(columns: _Columns) -> ValueError:
    return ValueError(f"a type that is not among {len(columns.dtypes)}")


def _row_error(columns: _Columns, row: int) -> ValueError:
    return ValueError(f"{columns.names[row]} does not lie within its shape, or has no such type")


def _check_entry(entry: TensorEntry) -> None:
    box = entry.box
    inside = len(entry.shape) == len(box.offsets) == len(box.sizes) and all(
        o >= 0 and n >= 0 and o + n <= s for o, n, s in zip(box.offsets, box.sizes, entry.shape, strict=True)
    )
    # A read copies bytes into a tensor of this type by this width.
    if not inside or DTYPE_WIDTHS.get(entry.dtype, entry.itemsize) != entry.itemsize:
        raise ValueError(f"{entry.fqn} at {box} of {entry.shape}, {entry.itemsize} bytes a {entry.dtype}")
    if not 1 <= entry.itemsize <= 16 or math.prod(entry.shape) >= _MAX_ELEMENTS:
        raise ValueError(f"{entry.fqn} at {box} of {entry.shape}, {entry.itemsize} bytes an element")


def _split(name: str) -> tuple[str, ...]:
    return tuple(name.split("."))
