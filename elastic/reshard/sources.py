"""Checkpoints to read: a tiered step, a plain DCP folder.

Only ``.metadata`` describes a plain folder. It is a pickle, but only data is read from it. Objects remain bytes.
"""

from __future__ import annotations

import errno
import io
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from elastic.reshard.offline import CheckpointTensor
from tieredckpt.errors import (
    CheckpointDamagedError,
    CheckpointDeletedError,
    CheckpointNotFoundError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.export.step_source import StepSource, without_torch_warnings
from tieredckpt.format.slice_boxes import Box, Tiling, relative_box
from tieredckpt.restore.fingerprint import CARRIER_DTYPES
from tieredckpt.tensors.plain_tensors import dtype_from_name, dtype_name, is_plain_tensor

_SHOWN = 5


class TieredSource:
    """A source that reads one step of a job."""

    def __init__(self, name: str, source: StepSource) -> None:
        self.name = name
        self._source = source
        step = source.step
        self.step: int | None = step.group.version
        self.parts = step.manifest.parts
        self.objects: tuple[str, ...] = tuple(sorted(step.objects))
        self.paths: Mapping[str, tuple[str | int, ...]] | None = step.paths
        packed = sorted(fqn for fqn, places in step.tensors.items() if any(place.item >= 0 for place in places))
        if packed:
            raise UsageError(unsupported_tensors(packed))
        self.tensors: Mapping[str, CheckpointTensor] = {fqn: self._form(fqn) for fqn in sorted(step.tensors)}

    def _form(self, fqn: str) -> CheckpointTensor:
        places = self._source.step.tensors[fqn]
        entry = places[0].entry
        dtype_from_name(entry.dtype)
        pieces = tuple((place.part, place.entry.box) for place in places)
        return CheckpointTensor(entry.dtype, entry.shape, entry.itemsize, pieces, requires_grad=entry.requires_grad)

    def read(self, name: str, box: Box) -> torch.Tensor:
        return self._source.part(name, box)

    def object_bytes(self, name: str) -> bytes:
        return self._source.object_bytes(name)

    def close(self) -> None:
        self._source.close()


def unsupported_tensors(names: list[str]) -> str:
    """Return the message that these tensors cannot be resharded."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (
        f"{', '.join(names[:_SHOWN])}{more}: more than type, shape and bytes (sparse, quantized, a tensor subclass), "
        "so slices of it mean nothing; load it and save it at the other number of ranks"
    )


_FILE = re.compile(r"__([0-9]+)_[0-9]+\.distcp")
_CACHE_BYTES = 16 << 20
"""Bytes of recent chunks in memory, but at least one chunk: DCP's archives are read as a whole."""


class PlainSource:
    """A source that reads a folder of ``FileSystemWriter`` or ``FsspecWriter``."""

    def __init__(self, name: str, reader: StorageReader, step: int | None = None) -> None:
        self.name = name
        self.step = step
        self._reader = reader
        _verify_archives(reader)
        with _converted_errors(
            name, absent=lambda: CheckpointNotFoundError(f"{name} is no whole DCP checkpoint: no .metadata")
        ):
            metadata = reader.read_metadata()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError(f".metadata holds a {type(metadata).__name__}")
            reader.set_up_storage_reader(metadata, is_coordinator=True)
            stored: Mapping[Any, Any] = metadata.storage_data
            self._parts = {(index.fqn, index.offset): _part(info) for index, info in stored.items()}
            described = metadata.state_dict_metadata
            tensors = {fqn: item for fqn, item in described.items() if isinstance(item, TensorStorageMetadata)}
            sparse = sorted(fqn for fqn, item in tensors.items() if item.properties.layout is not torch.strided)
            self.tensors: Mapping[str, CheckpointTensor] = {
                fqn: self._form(fqn, tensors[fqn]) for fqn in sorted(tensors)
            }
            paths = metadata.planner_data
        if sparse:
            raise UsageError(unsupported_tensors(sparse))
        self.parts = 1 + max(self._parts.values(), default=0)
        self.objects: tuple[str, ...] = tuple(sorted(fqn for fqn in described if fqn not in tensors))
        self.paths: Mapping[str, tuple[str | int, ...]] | None = paths if isinstance(paths, Mapping) else None
        self._cached: dict[tuple[str, Box], torch.Tensor] = {}

    def _form(self, fqn: str, item: TensorStorageMetadata) -> CheckpointTensor:
        pieces = []
        for chunk in item.chunks:
            part = self._parts.get((fqn, chunk.offsets), 0)
            pieces.append((part, Box(tuple(chunk.offsets), tuple(chunk.sizes))))
        properties = item.properties
        return CheckpointTensor(
            dtype_name(properties.dtype),
            tuple(item.size),
            properties.dtype.itemsize,
            tuple(pieces),
            requires_grad=bool(properties.requires_grad),
        )

    def read(self, name: str, box: Box) -> torch.Tensor:
        form = self.tensors[name]
        if not box.volume:
            return torch.empty(box.sizes, dtype=dtype_from_name(form.dtype))
        out: torch.Tensor | None = None
        tiling = Tiling(box)
        for _, stored in form.pieces:
            if not tiling.missing:
                break
            for common in tiling.add(stored):
                found = _narrowed(self._chunk(name, stored), relative_box(common, stored))
                if common == box:
                    return found.contiguous()
                out = torch.empty(box.sizes, dtype=found.dtype) if out is None else out
                _narrowed(_carrier_view(out), relative_box(common, box)).copy_(_carrier_view(found))
        if out is None or tiling.missing:
            raise CheckpointDamagedError(f"{self.name}: nothing holds {box} of {name}")
        return out

    def object_bytes(self, name: str) -> bytes:
        return self._load(name, None)

    def close(self) -> None:
        self._cached.clear()

    def _chunk(self, name: str, box: Box) -> torch.Tensor:
        key = (name, box)
        if key not in self._cached:
            found = self._load(name, box)
            if tuple(found.shape) != box.sizes or dtype_name(found.dtype) != self.tensors[name].dtype:
                raise CheckpointDamagedError(
                    f"{self.name}: {name} at {box.offsets} should be {self.tensors[name].dtype} {box.sizes} and is "
                    f"{dtype_name(found.dtype)} {tuple(found.shape)}"
                )
            while self._cached and sum(chunk.nbytes for chunk in self._cached.values()) + found.nbytes > _CACHE_BYTES:
                self._cached.pop(next(iter(self._cached)))
            self._cached[key] = found
        return self._cached[key]

    def _load(self, name: str, box: Box | None) -> Any:
        where = None if box is None else torch.Size(box.offsets)
        sizes = torch.Size(() if box is None else box.sizes)
        start = torch.Size([0] * len(sizes))
        kind = LoadItemType.BYTE_IO if box is None else LoadItemType.TENSOR
        index = MetadataIndex(name, where)
        item = ReadItem(kind, index, start, index, start, sizes)
        planner = _CapturePlanner(sizes)
        with _converted_errors(
            self.name, absent=lambda: CheckpointDamagedError(f"{self.name}: a file with some of {name} is gone")
        ):
            self._reader.read_data(LoadPlan([item]), planner).wait()
        if isinstance(planner.found, torch.Tensor) and not is_plain_tensor(planner.found):
            raise UsageError(unsupported_tensors([name]))
        return planner.found


def _verify_archives(reader: Any) -> None:
    """Make ``reader`` verify the checksums in every archive, which ``torch.load`` ignores.

    Checksums of 0 are skipped: ``torch.serialization.set_crc32_options`` had disabled them.
    """
    cut_out = reader._slice_file

    def checked(file: Any, info: Any) -> Any:
        view = _FileRange(file, info.offset, info.length)
        if zipfile.is_zipfile(view):
            with zipfile.ZipFile(view) as archive:
                for member in archive.infolist():
                    if member.CRC:
                        with archive.open(member) as data:
                            while data.read(1 << 20):
                                pass
        return cut_out(file, info)

    reader._slice_file = checked


class _FileRange(io.RawIOBase):
    """A range of a file as a file. Unlike DCP's own, it supports a seek back from its end."""

    def __init__(self, file: Any, start: int, size: int) -> None:
        super().__init__()
        self._file = file
        self._start = start
        self._size = size
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if origin + offset < 0:
            raise OSError(errno.EINVAL, "before the beginning")
        self._at = origin + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        self._file.seek(self._start + self._at)
        found: bytes = self._file.read(left if size < 0 else min(size, left))
        self._at += len(found)
        return found


class _CapturePlanner(DefaultLoadPlanner):
    """A planner that takes the loaded object itself instead of a copy."""

    def __init__(self, sizes: torch.Size) -> None:
        super().__init__()
        self.found: Any = None
        self._sizes = sizes

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return _CaptureTensor(self, self._sizes)  # type: ignore[return-value]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.found = value.getvalue()


class _CaptureTensor:
    """A stand-in for the tensor that a reader fills. It takes a stored tensor of any type."""

    def __init__(self, planner: _CapturePlanner, sizes: torch.Size) -> None:
        self._planner = planner
        self._sizes = sizes

    def detach(self) -> _CaptureTensor:
        return self

    def size(self) -> torch.Size:
        return self._sizes

    def copy_(self, tensor: torch.Tensor) -> None:
        self._planner.found = tensor.detach()


def _part(info: Any) -> int:
    match = _FILE.fullmatch(str(info.relative_path).rpartition("/")[2])
    return int(match[1]) if match else 0


def _narrowed(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for axis, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(axis, start, size)
    return tensor


def _carrier_view(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor with a basic element type: torch cannot compute with some types, only store them."""
    return tensor.view(CARRIER_DTYPES[tensor.dtype.itemsize])


@contextmanager
def _converted_errors(name: str, *, absent: Callable[[], Exception]) -> Iterator[None]:
    """Convert exceptions of DCP's readers to errors for absent, unreachable and damaged checkpoints."""
    try:
        with without_torch_warnings():
            yield
    except (FileNotFoundError, NotADirectoryError, CheckpointDeletedError) as error:
        raise absent() from error
    except OSError as error:
        raise TierUnavailableError(f"{name} cannot be read: {error}") from error
    except (
        RuntimeError,
        ValueError,
        EOFError,
        KeyError,
        IndexError,
        AttributeError,
        TypeError,
        AssertionError,
    ) as error:
        raise CheckpointDamagedError(f"{name}: {_summary(error)}") from error
    except (pickle.UnpicklingError, zipfile.BadZipFile, ImportError, MemoryError) as error:
        raise CheckpointDamagedError(f"{name}: {_summary(error)}") from error


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no more is known'}"
