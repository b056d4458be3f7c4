"""Checkpoints of AWS's library, validated before use: DCP metadata and torch.save archives.

``torch.load`` trusts the sizes in an archive and compares no checksums. Here an archive may contain only the
uncompressed members of a plain tensor. Its checksums are compared, and the tensor's description must fit its bytes.
"""

from __future__ import annotations

import functools
import io
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from integration.sagemaker.safe_pickle import PersistentRef, PickledCall, PickledName, RefusedPickleError, parse_pickle
from tieredckpt.errors import CheckpointDamagedError
from tieredckpt.format.slice_boxes import Box
from tieredckpt.tensors.plain_tensors import dtype_from_name, dtype_name

MAX_METADATA_BYTES = 256 << 20
_MAX_RANKS = 1 << 20
_MAX_VALUE = 1 << 62
_MAX_DIMENSIONS = 64
"""Maximum dimensions of a tensor, and depth of a path in a nested state."""

_DCP = "torch.distributed.checkpoint.metadata"
_METADATA, _STORAGE_META = PickledName(_DCP, "Metadata"), PickledName(_DCP, "StorageMeta")
_TENSOR, _BYTES = PickledName(_DCP, "TensorStorageMetadata"), PickledName(_DCP, "BytesStorageMetadata")
_PROPERTIES, _CHUNK = PickledName(_DCP, "TensorProperties"), PickledName(_DCP, "ChunkStorageMetadata")
_INDEX, _FORMAT = PickledName(_DCP, "MetadataIndex"), PickledName(_DCP, "_MEM_FORMAT_ENCODING")
_INFO = PickledName("amzn_sagemaker_checkpointing.checkpointing.filesystem.storage_info", "_SageMakerStorageInfo")
_SIZE = PickledName("torch", "Size")
_LAYOUT = PickledName("torch.serialization", "_get_layout")
_GETATTR = frozenset({PickledName("builtins", "getattr"), PickledName("__builtin__", "getattr")})
"""Pickles of enum members by Python 3.11.0 to 3.11.3; protocol 2 uses the older name. Never called."""


class BlobRange(NamedTuple):
    """Location of an item: bytes ``[start, start + length)`` of the blob of ``rank``."""

    rank: int
    start: int
    length: int


class TensorChunk(NamedTuple):
    box: Box
    extent: BlobRange


@dataclass(frozen=True)
class StoredTensor:
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[TensorChunk, ...]
    requires_grad: bool = False


@dataclass(frozen=True)
class CheckpointContents:
    """Contents of a checkpoint, and their locations in its blobs."""

    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, BlobRange]
    paths: Mapping[str, tuple[str | int, ...]] | None = None
    sizes: Mapping[int, int] = field(default_factory=dict)
    """Expected bytes of each rank's blob. Ranks that wrote nothing are missing."""


@functools.cache
def _metadata_dtypes() -> dict[PickledName, str]:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return {PickledName("torch", dtype_name(dtype)): dtype_name(dtype) for dtype in found}


@functools.cache
def _metadata_names() -> frozenset[PickledName]:
    known = (_METADATA, _TENSOR, _BYTES, _PROPERTIES, _CHUNK, _INDEX, _STORAGE_META, _FORMAT, _INFO)
    return frozenset({*known, _SIZE, _LAYOUT, *_GETATTR, *_metadata_dtypes()})


def parse_metadata(data: bytes, name: str) -> CheckpointContents:
    """Parse the metadata of the checkpoint ``name``, or raise :class:`CheckpointDamagedError`."""
    if len(data) > MAX_METADATA_BYTES:
        raise CheckpointDamagedError(f"{name}: metadata of {len(data)} bytes, {MAX_METADATA_BYTES} are the most")
    try:
        return _checkpoint_contents(parse_pickle(data, _metadata_names()))
    except RefusedPickleError as error:
        raise CheckpointDamagedError(f"{name}: its metadata is not what AWS's library writes: {error}") from error


def _checkpoint_contents(value: Any) -> CheckpointContents:
    fields = _fields(value, _METADATA)
    described = _mapping(fields.get("state_dict_metadata"), "state_dict_metadata")
    extents = dict(_extents(_mapping(fields.get("storage_data"), "storage_data")))
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, BlobRange] = {}
    budget = len(extents)  # every chunk has a separate extent
    for name, item in described.items():
        if type(name) is not str:
            raise RefusedPickleError("an entry without a name")
        if type(item) is PickledCall and item.kind == _BYTES:
            objects[name] = _extent_of(extents, name, None)
            continue
        tensor = _tensor(name, item, extents, budget)
        budget -= len(tensor.chunks)
        tensors[name] = tensor
    sizes: dict[int, int] = {}
    for extent in extents.values():
        sizes[extent.rank] = max(sizes.get(extent.rank, 0), extent.start + extent.length)
    return CheckpointContents(tensors, objects, _paths(fields.get("planner_data")), sizes)


def _extents(stored: Mapping[Any, Any]) -> Iterator[tuple[tuple[str, tuple[int, ...] | None], BlobRange]]:
    for index, info in stored.items():
        key, where = _fields(index, _INDEX), _fields(info, _INFO)
        fqn, offset = key.get("fqn"), key.get("offset")
        if type(fqn) is not str:
            raise RefusedPickleError("an index without a name")
        rank, start = _integer(where.get("rank"), _MAX_RANKS), _integer(where.get("offset"), _MAX_VALUE)
        yield (
            (fqn, None if offset is None else _size(offset)),
            BlobRange(rank, start, _integer(where.get("length"), _MAX_VALUE)),
        )


def _extent_of(
    extents: Mapping[tuple[str, tuple[int, ...] | None], BlobRange], name: str, offset: tuple[int, ...] | None
) -> BlobRange:
    extent = extents.get((name, offset))
    if extent is None:
        raise RefusedPickleError(f"nothing says where {name[:200]!r} at {offset} is")
    return extent


def _tensor(
    name: str, item: Any, extents: Mapping[tuple[str, tuple[int, ...] | None], BlobRange], budget: int
) -> StoredTensor:
    fields = _fields(item, _TENSOR)
    properties = fields.get("properties")
    if type(properties) is not PickledCall or properties.kind != _PROPERTIES or type(properties.state) is not tuple:
        raise RefusedPickleError(f"{name[:200]!r} has no properties")
    dtype = (
        _metadata_dtypes().get(properties.state[0])
        if properties.state and type(properties.state[0]) is PickledName
        else None
    )
    if dtype is None or len(properties.state) != 5:
        raise RefusedPickleError(f"{name[:200]!r} has no element type")
    if _text_of(properties.state[1]) != "torch.strided":
        raise RefusedPickleError(f"{name[:200]!r} is sparse: load it with the library that wrote it, and save it here")
    if not _is_format(properties.state[3]):
        raise RefusedPickleError(f"{name[:200]!r} has no memory format")
    itemsize = dtype_from_name(dtype).itemsize
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
        extent = _extent_of(extents, name, box.offsets)
        if box.volume * itemsize > extent.length:
            raise RefusedPickleError(f"a chunk of {name[:200]!r} is longer than the bytes it is in")
        found.append(TensorChunk(box, extent))
    return StoredTensor(dtype, shape, tuple(found), requires_grad=properties.state[2] is True)


def _fields(value: Any, kind: PickledName) -> Mapping[str, Any]:
    """Return the fields of a pickled dataclass of that kind."""
    if (
        type(value) is not PickledCall
        or value.kind != kind
        or value.args
        or type(value.state) not in (dict, type(None))
    ):
        raise RefusedPickleError(f"where a {kind.name} belongs there is something else")
    return value.state or {}


def _mapping(value: Any, what: str) -> Mapping[Any, Any]:
    if type(value) is not dict:
        raise RefusedPickleError(f"{what} is not a dict")
    return value


def _integer(value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value < most:
        raise RefusedPickleError("a rank, an offset or a size is not an integer in its range")
    return value


def _size(value: Any) -> tuple[int, ...]:
    if (
        type(value) is not PickledCall
        or value.kind != _SIZE
        or len(value.args) != 1
        or type(value.args[0]) is not tuple
    ):
        raise RefusedPickleError("where a shape belongs there is something else")
    if len(value.args[0]) > _MAX_DIMENSIONS:
        raise RefusedPickleError("a shape that no tensor has")
    return tuple(_integer(number, _MAX_VALUE) for number in value.args[0])


def _text_of(value: Any) -> str:
    made = type(value) is PickledCall and value.kind == _LAYOUT and len(value.args) == 1
    return value.args[0] if made and type(value.args[0]) is str else ""


def _is_format(value: Any) -> bool:
    """Return whether the value is a memory format, pickled by value or by name."""
    if type(value) is not PickledCall:
        return False
    if value.kind in _GETATTR:
        return len(value.args) == 2 and value.args[0] == _FORMAT and type(value.args[1]) is str
    return value.kind == _FORMAT and len(value.args) == 1 and type(value.args[0]) is int


def _paths(value: Any) -> Mapping[str, tuple[str | int, ...]] | None:
    """Return each name's path in the nested state; None for other planners' data, which is not needed."""
    if type(value) is not dict:
        return None
    for name, path in value.items():
        if type(name) is not str or type(path) is not tuple or len(path) > _MAX_DIMENSIONS:
            return None
        if not all(type(key) in (str, int) for key in path):
            return None
    return value


_MAX_MEMBERS = 64
_MAX_PICKLE_BYTES = 1 << 20
_MAX_VALUES = 1 << 16
_LOCAL_HEADER_BYTES = 30
_REBUILD, _REBUILD_NEW = (
    PickledName("torch._utils", "_rebuild_tensor_v2"),
    PickledName("torch._utils", "_rebuild_tensor_v3"),
)
_ORDERED, _UNTYPED = PickledName("collections", "OrderedDict"), PickledName("torch.storage", "UntypedStorage")
_STORAGES = {
    PickledName("torch", f"{name}Storage"): dtype
    for name, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
        "ComplexDouble": torch.complex128,
        "ComplexFloat": torch.complex64,
    }.items()
}


@functools.cache
def _storage_dtypes() -> Mapping[PickledName, torch.dtype]:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return {PickledName("torch", dtype_name(dtype)): dtype for dtype in found}


@functools.cache
def _archive_names() -> frozenset[PickledName]:
    return frozenset({_REBUILD, _REBUILD_NEW, _ORDERED, _UNTYPED, *_STORAGES, *_storage_dtypes()})


def read_archived_tensor(data: memoryview, sizes: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
    """Return the tensor in ``data``.

    Raise :class:`CheckpointDamagedError` unless it has these sizes and this type.
    """
    try:
        return _read(data, sizes, dtype, name)
    except (RefusedPickleError, zipfile.BadZipFile, NotImplementedError, ValueError, LookupError) as error:
        raise CheckpointDamagedError(f"{name} is not the archive of a plain tensor: {error}") from error


def _read(data: memoryview, sizes: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
    members = _members(data)
    if bytes(members.get("byteorder", sys.byteorder.encode())).decode("ascii") != sys.byteorder:
        raise ValueError("it was written by a machine of the other byte order")
    pickle = members["data.pkl"]
    if len(pickle) > _MAX_PICKLE_BYTES:
        raise ValueError(f"the description of the tensor has {len(pickle)} bytes")
    size, found, tensor = _describe_tensor(parse_pickle(pickle, _archive_names(), most_values=_MAX_VALUES), members)
    if size != sizes or found != dtype:  # before the allocation: a few bytes can describe a huge tensor
        raise CheckpointDamagedError(f"{name} should be {dtype_name(dtype)} {sizes} and is {dtype_name(found)} {size}")
    return tensor()


def _members(data: memoryview) -> dict[str, memoryview]:
    """Return the archive's members, by their names without the archive's prefix."""
    found: dict[str, memoryview] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = archive.infolist()
    if len(infos) > _MAX_MEMBERS:
        raise ValueError(f"{len(infos)} members")
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise ValueError(f"{info.filename[:100]!r} is compressed")
        header = data[info.header_offset : info.header_offset + _LOCAL_HEADER_BYTES]
        if len(header) != _LOCAL_HEADER_BYTES or bytes(header[:4]) != b"PK\x03\x04":
            raise ValueError(f"{info.filename[:100]!r} is not where the archive says")
        start = info.header_offset + _LOCAL_HEADER_BYTES
        start += int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        member = data[start : start + info.file_size]
        # 0: checksums were disabled (torch.serialization.set_crc32_options).
        if len(member) != info.file_size or (info.CRC and zlib.crc32(member) != info.CRC):
            raise ValueError(f"{info.filename[:100]!r} is not what was saved")
        found[info.filename.partition("/")[2]] = member
    return found


def _describe_tensor(
    value: Any, members: Mapping[str, memoryview]
) -> tuple[tuple[int, ...], torch.dtype, Callable[[], torch.Tensor]]:
    """Return the size and type of the described tensor, and a function that creates it."""
    if type(value) is not PickledCall or value.kind not in (_REBUILD, _REBUILD_NEW) or len(value.args) < 6:
        raise ValueError("it holds something else")
    storage, offset, size, stride, _, _, *more = value.args
    dtype, data = _storage(storage, members)
    if value.kind == _REBUILD_NEW:
        dtype = _storage_dtypes().get(more.pop(0)) if more and type(more[0]) is PickledName else None
    if dtype is None:
        raise ValueError("its element type is not known")
    _check_view(offset, size, stride, len(data) // dtype.itemsize)
    return size, dtype, functools.partial(_build_tensor, data, dtype, (size, stride, offset), more)


def _build_tensor(
    data: memoryview, dtype: torch.dtype, view: tuple[tuple[int, ...], tuple[int, ...], int], more: list[Any]
) -> torch.Tensor:
    size, stride, offset = view
    if not data:
        return torch.empty(size, dtype=dtype)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    flat = flat[: len(data) // dtype.itemsize * dtype.itemsize].view(dtype)
    return _apply_marks(flat.as_strided(size, stride, offset), more)


def _storage(value: Any, members: Mapping[str, memoryview]) -> tuple[torch.dtype | None, memoryview]:
    if type(value) is not PersistentRef or type(value.name) is not tuple or len(value.name) != 5:
        raise ValueError("its bytes are not named")
    word, kind, key, _, count = value.name
    if word != "storage" or type(kind) is not PickledName or type(key) is not str or type(count) is not int:
        raise ValueError("its bytes are not named")
    dtype = _STORAGES.get(kind)
    if dtype is None and kind != _UNTYPED:
        raise ValueError(f"{kind} holds no tensor")
    data = members[f"data/{key}"]
    if len(data) != count * (1 if dtype is None else dtype.itemsize):
        raise ValueError(f"{len(data)} bytes where there should be {count} elements")
    return dtype, data


def _check_view(offset: Any, size: Any, stride: Any, count: int) -> None:
    if type(size) is not tuple or type(stride) is not tuple or len(size) != len(stride):
        raise ValueError("its shape is none")
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in (offset, *size, *stride)):
        raise ValueError("its shape is none")
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if 0 not in size and last >= count:
        raise ValueError(f"it reaches to element {last} of {count}")


def _apply_marks(tensor: torch.Tensor, more: list[Any]) -> torch.Tensor:
    """Apply the marks of lazily conjugated and negated tensors."""
    marks = more[0] if more and more[0] is not None else {}
    if type(marks) is not dict or not marks.keys() <= {"conj", "neg"}:
        raise ValueError("it has marks that are not known")
    tensor = tensor.conj().resolve_conj() if marks.get("conj") is True else tensor
    return tensor.neg() if marks.get("neg") is True else tensor
