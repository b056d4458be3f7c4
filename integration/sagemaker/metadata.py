"""What AWS's library says of a checkpoint it wrote: DCP's metadata, read as data and checked before it is believed."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from integration.sagemaker.pickled import Made, Name, RefusedPickleError, parse
from tieredckpt.boxes import Box
from tieredckpt.errors import CheckpointDamagedError
from tieredckpt.tensors import dtype_name, dtype_named

MOST_METADATA_BYTES = 256 << 20
_MOST_RANKS = 1 << 20
_MOST = 1 << 62
_MOST_DIMENSIONS = 64
"""Of a tensor, and of a path in a nested state."""

_DCP = "torch.distributed.checkpoint.metadata"
_METADATA, _STORAGE_META = Name(_DCP, "Metadata"), Name(_DCP, "StorageMeta")
_TENSOR, _BYTES = Name(_DCP, "TensorStorageMetadata"), Name(_DCP, "BytesStorageMetadata")
_PROPERTIES, _CHUNK = Name(_DCP, "TensorProperties"), Name(_DCP, "ChunkStorageMetadata")
_INDEX, _FORMAT = Name(_DCP, "MetadataIndex"), Name(_DCP, "_MEM_FORMAT_ENCODING")
_INFO = Name("amzn_sagemaker_checkpointing.checkpointing.filesystem.storage_info", "_SageMakerStorageInfo")
_SIZE = Name("torch", "Size")
_LAYOUT = Name("torch.serialization", "_get_layout")
_GETATTR = frozenset({Name("builtins", "getattr"), Name("__builtin__", "getattr")})
"""How Python 3.11.0 to 3.11.3 pickle a member of an enum; protocol 2 has the older name. Nothing here ever calls it."""


class Extent(NamedTuple):
    """Where an item is: bytes ``[start, start + length)`` of what ``rank`` wrote."""

    rank: int
    start: int
    length: int


class Chunk(NamedTuple):
    box: Box
    extent: Extent


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    requires_grad: bool = False


@dataclass(frozen=True)
class Written:
    """A checkpoint's contents, and where in its blobs they are."""

    tensors: Mapping[str, Tensor]
    objects: Mapping[str, Extent]
    paths: Mapping[str, tuple[str | int, ...]] | None = None
    sizes: Mapping[int, int] = field(default_factory=dict)
    """How long each rank's blob has to be; ranks that wrote nothing are not there."""


@functools.cache
def _dtypes() -> dict[Name, str]:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return {Name("torch", dtype_name(dtype)): dtype_name(dtype) for dtype in found}


@functools.cache
def _names() -> frozenset[Name]:
    known = (_METADATA, _TENSOR, _BYTES, _PROPERTIES, _CHUNK, _INDEX, _STORAGE_META, _FORMAT, _INFO)
    return frozenset({*known, _SIZE, _LAYOUT, *_GETATTR, *_dtypes()})


def read_metadata(data: bytes, name: str) -> Written:
    """``data`` as metadata of the checkpoint called ``name``, or :class:`CheckpointDamagedError`."""
    if len(data) > MOST_METADATA_BYTES:
        raise CheckpointDamagedError(f"{name}: metadata of {len(data)} bytes, {MOST_METADATA_BYTES} are the most")
    try:
        return _written(parse(data, _names()))
    except RefusedPickleError as error:
        raise CheckpointDamagedError(f"{name}: its metadata is not what AWS's library writes: {error}") from error


def _written(value: Any) -> Written:
    fields = _fields(value, _METADATA)
    described = _mapping(fields.get("state_dict_metadata"), "state_dict_metadata")
    extents = dict(_extents(_mapping(fields.get("storage_data"), "storage_data")))
    tensors: dict[str, Tensor] = {}
    objects: dict[str, Extent] = {}
    budget = len(extents)  # every chunk has a place of its own
    for name, item in described.items():
        if type(name) is not str:
            raise RefusedPickleError("an entry without a name")
        if type(item) is Made and item.kind == _BYTES:
            objects[name] = _found(extents, name, None)
            continue
        tensor = _tensor(name, item, extents, budget)
        budget -= len(tensor.chunks)
        tensors[name] = tensor
    sizes: dict[int, int] = {}
    for extent in extents.values():
        sizes[extent.rank] = max(sizes.get(extent.rank, 0), extent.start + extent.length)
    return Written(tensors, objects, _paths(fields.get("planner_data")), sizes)


def _extents(stored: Mapping[Any, Any]) -> Iterator[tuple[tuple[str, tuple[int, ...] | None], Extent]]:
    for index, info in stored.items():
        key, where = _fields(index, _INDEX), _fields(info, _INFO)
        fqn, offset = key.get("fqn"), key.get("offset")
        if type(fqn) is not str:
            raise RefusedPickleError("an index without a name")
        rank, start = _integer(where.get("rank"), _MOST_RANKS), _integer(where.get("offset"), _MOST)
        yield (
            (fqn, None if offset is None else _size(offset)),
            Extent(rank, start, _integer(where.get("length"), _MOST)),
        )


def _found(
    extents: Mapping[tuple[str, tuple[int, ...] | None], Extent], name: str, offset: tuple[int, ...] | None
) -> Extent:
    extent = extents.get((name, offset))
    if extent is None:
        raise RefusedPickleError(f"nothing says where {name[:200]!r} at {offset} is")
    return extent


def _tensor(name: str, item: Any, extents: Mapping[tuple[str, tuple[int, ...] | None], Extent], budget: int) -> Tensor:
    fields = _fields(item, _TENSOR)
    properties = fields.get("properties")
    if type(properties) is not Made or properties.kind != _PROPERTIES or type(properties.state) is not tuple:
        raise RefusedPickleError(f"{name[:200]!r} has no properties")
    dtype = _dtypes().get(properties.state[0]) if properties.state and type(properties.state[0]) is Name else None
    if dtype is None or len(properties.state) != 5:
        raise RefusedPickleError(f"{name[:200]!r} has no element type")
    if _text_of(properties.state[1]) != "torch.strided":
        raise RefusedPickleError(f"{name[:200]!r} is sparse: load it with the library that wrote it, and save it here")
    if not _is_format(properties.state[3]):
        raise RefusedPickleError(f"{name[:200]!r} has no memory format")
    itemsize = dtype_named(dtype).itemsize
    shape, chunks = _size(fields.get("size")), fields.get("chunks")
    if type(chunks) is not list or len(chunks) > budget:
        raise RefusedPickleError(f"{name[:200]!r} has no list of chunks, or too many")
    found = []
    for chunk in chunks:
        parts = _fields(chunk, _CHUNK)
        box = Box(_size(parts.get("offsets")), _size(parts.get("sizes")))
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
            raise RefusedPickleError(f"a chunk of {name[:200]!r} has another number of dimensions")
        if any(start + size > full for start, size, full in zip(box.offsets, box.sizes, shape, strict=True)):
            raise RefusedPickleError(f"a chunk of {name[:200]!r} is not within the tensor")
        extent = _found(extents, name, box.offsets)
        if box.volume * itemsize > extent.length:
            raise RefusedPickleError(f"a chunk of {name[:200]!r} is longer than the bytes it is in")
        found.append(Chunk(box, extent))
    return Tensor(dtype, shape, tuple(found), requires_grad=properties.state[2] is True)


def _fields(value: Any, kind: Name) -> Mapping[str, Any]:
    """What a dataclass of that kind was pickled with."""
    if type(value) is not Made or value.kind != kind or value.args or type(value.state) not in (dict, type(None)):
        raise RefusedPickleError(f"where a {kind.name} belongs there is something else")
    return value.state or {}


def _mapping(value: Any, what: str) -> Mapping[Any, Any]:
    if type(value) is not dict:
        raise RefusedPickleError(f"{what} is no dict")
    return value


def _integer(value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value < most:
        raise RefusedPickleError("where a rank, an offset or a size belongs there is something else")
    return value


def _size(value: Any) -> tuple[int, ...]:
    if type(value) is not Made or value.kind != _SIZE or len(value.args) != 1 or type(value.args[0]) is not tuple:
        raise RefusedPickleError("where a shape belongs there is something else")
    if len(value.args[0]) > _MOST_DIMENSIONS:
        raise RefusedPickleError("a shape that no tensor has")
    return tuple(_integer(one, _MOST) for one in value.args[0])


def _text_of(value: Any) -> str:
    made = type(value) is Made and value.kind == _LAYOUT and len(value.args) == 1
    return value.args[0] if made and type(value.args[0]) is str else ""


def _is_format(value: Any) -> bool:
    """A member of that one enum, by its value or by its name."""
    if type(value) is not Made:
        return False
    if value.kind in _GETATTR:
        return len(value.args) == 2 and value.args[0] == _FORMAT and type(value.args[1]) is str
    return value.kind == _FORMAT and len(value.args) == 1 and type(value.args[0]) is int


def _paths(value: Any) -> Mapping[str, tuple[str | int, ...]] | None:
    """Where each name was in the nested state; other planners keep other things there, which nobody here needs."""
    if type(value) is not dict:
        return None
    for name, path in value.items():
        if type(name) is not str or type(path) is not tuple or len(path) > _MOST_DIMENSIONS:
            return None
        if not all(type(key) in (str, int) for key in path):
            return None
    return value
