"""One tensor out of the archive ``torch.save`` made of it, without ``torch.load``.

``torch.load`` believes what an archive says of its sizes and compares no checksum. Here an archive may only hold what a
plain tensor needs, uncompressed; its checksums are compared, and what the tensor says of itself has to fit its bytes.
"""

from __future__ import annotations

import functools
import io
import sys
import zipfile
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from integration.sagemaker.pickled import Made, Name, Persistent, RefusedPickleError, parse
from tieredckpt.errors import CheckpointDamagedError
from tieredckpt.tensors import dtype_name

_MOST_MEMBERS = 64
_MOST_PICKLE_BYTES = 1 << 20
_MOST_VALUES = 1 << 16
_LOCAL_HEADER_BYTES = 30
_REBUILD, _REBUILD_NEW = Name("torch._utils", "_rebuild_tensor_v2"), Name("torch._utils", "_rebuild_tensor_v3")
_ORDERED, _UNTYPED = Name("collections", "OrderedDict"), Name("torch.storage", "UntypedStorage")
_STORAGES = {
    Name("torch", f"{name}Storage"): dtype
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
def _dtypes() -> Mapping[Name, torch.dtype]:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return {Name("torch", dtype_name(dtype)): dtype for dtype in found}


@functools.cache
def _names() -> frozenset[Name]:
    return frozenset({_REBUILD, _REBUILD_NEW, _ORDERED, _UNTYPED, *_STORAGES, *_dtypes()})


def read_tensor(data: memoryview, sizes: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
    """The tensor in ``data``, which has to be of these sizes and this type, or :class:`CheckpointDamagedError`."""
    try:
        return _read(data, sizes, dtype, name)
    except (RefusedPickleError, zipfile.BadZipFile, NotImplementedError, ValueError, LookupError) as error:
        raise CheckpointDamagedError(f"{name} is no plain tensor's archive: {error}") from error


def _read(data: memoryview, sizes: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
    members = _members(data)
    if bytes(members.get("byteorder", sys.byteorder.encode())).decode("ascii") != sys.byteorder:
        raise ValueError("it was written by a machine of the other byte order")
    pickle = members["data.pkl"]
    if len(pickle) > _MOST_PICKLE_BYTES:
        raise ValueError(f"the description of the tensor has {len(pickle)} bytes")
    size, found, tensor = _rebuilt(parse(pickle, _names(), most_values=_MOST_VALUES), members)
    if size != sizes or found != dtype:  # before there is a tensor: a few bytes can say that they are very many
        raise CheckpointDamagedError(f"{name} should be {dtype_name(dtype)} {sizes} and is {dtype_name(found)} {size}")
    return tensor()


def _members(data: memoryview) -> dict[str, memoryview]:
    """What is in the archive, by its name below the archive's own."""
    found: dict[str, memoryview] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = archive.infolist()
    if len(infos) > _MOST_MEMBERS:
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
        # 0: checksums were switched off (torch.serialization.set_crc32_options).
        if len(member) != info.file_size or (info.CRC and zlib.crc32(member) != info.CRC):
            raise ValueError(f"{info.filename[:100]!r} is not what was saved")
        found[info.filename.partition("/")[2]] = member
    return found


def _rebuilt(
    value: Any, members: Mapping[str, memoryview]
) -> tuple[tuple[int, ...], torch.dtype, Callable[[], torch.Tensor]]:
    """What the tensor says it is, and how it is made."""
    if type(value) is not Made or value.kind not in (_REBUILD, _REBUILD_NEW) or len(value.args) < 6:
        raise ValueError("it holds something else")
    storage, offset, size, stride, _, _, *more = value.args
    dtype, data = _storage(storage, members)
    if value.kind == _REBUILD_NEW:
        dtype = _dtypes().get(more.pop(0)) if more and type(more[0]) is Name else None
    if dtype is None:
        raise ValueError("its element type is not known")
    _check_view(offset, size, stride, len(data) // dtype.itemsize)
    return size, dtype, functools.partial(_made, data, dtype, (size, stride, offset), more)


def _made(
    data: memoryview, dtype: torch.dtype, view: tuple[tuple[int, ...], tuple[int, ...], int], more: list[Any]
) -> torch.Tensor:
    size, stride, offset = view
    if not data:
        return torch.empty(size, dtype=dtype)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    flat = flat[: len(data) // dtype.itemsize * dtype.itemsize].view(dtype)
    return _marked(flat.as_strided(size, stride, offset), more)


def _storage(value: Any, members: Mapping[str, memoryview]) -> tuple[torch.dtype | None, memoryview]:
    if type(value) is not Persistent or type(value.name) is not tuple or len(value.name) != 5:
        raise ValueError("its bytes are not named")
    word, kind, key, _, count = value.name
    if word != "storage" or type(kind) is not Name or type(key) is not str or type(count) is not int:
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


def _marked(tensor: torch.Tensor, more: list[Any]) -> torch.Tensor:
    """With the marks of lazily conjugated and negated tensors made good."""
    marks = more[0] if more and more[0] is not None else {}
    if type(marks) is not dict or not marks.keys() <= {"conj", "neg"}:
        raise ValueError("it has marks that are not known")
    tensor = tensor.conj().resolve_conj() if marks.get("conj") is True else tensor
    return tensor.neg() if marks.get("neg") is True else tensor
