"""Writers of safetensors files, a torch.save file and a DCP folder, each tensor by tensor.

``torch.save`` pickles first and writes the storages afterwards. It requests the CPU copy of each storage just before
writing it. Storages that read their bytes only then allow files of any size with one tensor in memory.
"""

from __future__ import annotations

import io
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tieredckpt.errors import UsageError
from tieredckpt.export.step_source import StepSource, tensor_raw_bytes, without_torch_warnings
from tieredckpt.format.saved_directory import DIRECTORY_ENTRY, ROOT_NAME, check_file_name
from tieredckpt.format.shard_layout import SAFETENSORS_DTYPES
from tieredckpt.format.slice_boxes import full_box
from tieredckpt.tensors.nested_state import nested_state
from tieredckpt.tensors.plain_tensors import dtype_from_name

SAFETENSORS_INDEX_NAME = "model.safetensors.index.json"
_SHOWN = 8


@dataclass(frozen=True)
class SafetensorsEntry:
    """A tensor of the file to write."""

    source: str
    """Name in the checkpoint."""
    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


def safetensors_entries(source: StepSource, names: Mapping[str, str]) -> list[SafetensorsEntry]:
    """Return the tensors of ``names`` in file order.

    Raise :class:`UsageError` for all that the format cannot hold.
    """
    found = []
    for name, shown in names.items():
        if name in source.step.tensors:
            entry = source.entry(name)
            size = full_box(entry.shape).volume * entry.itemsize
            found.append(SafetensorsEntry(name, shown, entry.dtype, entry.shape, size))
    _check_entries(source, found)
    # The order from wide to narrow types aligns every tensor to its elements.
    width = {one.source: source.entry(one.source).itemsize for one in found}
    return sorted(found, key=lambda one: (-width[one.source], one.name))


def _check_entries(source: StepSource, tensors: Sequence[SafetensorsEntry]) -> None:
    unsupported = [f"{one.source} ({one.dtype})" for one in tensors if one.dtype not in SAFETENSORS_DTYPES]
    unsupported += [
        f"{one.source} (not a plain tensor)"
        for one in tensors
        if one.dtype in SAFETENSORS_DTYPES and any(place.item >= 0 for place in source.step.tensors[one.source])
    ]
    if unsupported:
        more = f" and {len(unsupported) - _SHOWN} more" if len(unsupported) > _SHOWN else ""
        raise UsageError(
            f"safetensors has no type for {', '.join(unsupported[:_SHOWN])}{more}: use --format torch or dcp, or leave "
            "them out with --exclude"
        )
    if not tensors:
        raise UsageError("none of the selected names is a tensor, and safetensors holds nothing else")


def safetensors_header(tensors: Sequence[SafetensorsEntry]) -> bytes:
    """Return the header: length and JSON, padded so that the data starts at a multiple of 8 bytes."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for one in tensors:
        fields[one.name] = {
            "dtype": SAFETENSORS_DTYPES[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [at, at + one.size_bytes],
        }
        at += one.size_bytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


def write_safetensors(
    path: Path, source: StepSource, tensors: Sequence[SafetensorsEntry], advance: Callable[[int], None]
) -> None:
    with path.open("xb") as file:
        file.write(safetensors_header(tensors))
        for one in tensors:
            file.write(tensor_raw_bytes(source.tensor(one.source)))
            advance(one.size_bytes)


def split_by_size(tensors: Sequence[SafetensorsEntry], most_bytes: int) -> list[list[SafetensorsEntry]]:
    """Group tensors into files of at most ``most_bytes``, in order of names.

    A larger tensor has its own file.
    """
    files: list[list[SafetensorsEntry]] = []
    size = 0
    for one in sorted(tensors, key=lambda one: one.name):
        if not files or size + one.size_bytes > most_bytes:
            files.append([])
            size = 0
        files[-1].append(one)
        size += one.size_bytes
    return files


def write_files(folder: Path, source: StepSource, names: Mapping[str, str], advance: Callable[[int], None]) -> int:
    """Write the files of a saved directory; return their number."""
    prefix = f"{DIRECTORY_ENTRY}."
    if f"{prefix}{ROOT_NAME}" not in source.step.tensors:
        raise UsageError("--format directory: the step is not a directory, but a state: use another format")
    files = 0
    for name in sorted(names):
        relative = name.removeprefix(prefix)
        check_file_name(relative)
        place = folder / relative
        if relative.endswith("/"):
            place.mkdir(parents=True, exist_ok=True)
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        data = tensor_raw_bytes(source.tensor(name))
        with place.open("xb") as file:
            file.write(data)
        advance(len(data))
        files += 1
    return files


def write_safetensors_folder(
    folder: Path,
    source: StepSource,
    tensors: Sequence[SafetensorsEntry],
    most_bytes: int,
    advance: Callable[[int], None],
) -> int:
    """Write one file, or several and their index, for ``from_pretrained``.

    Return the number of tensor files.
    """
    order = {one.name: number for number, one in enumerate(tensors)}
    files = split_by_size(tensors, most_bytes)
    if len(files) == 1:
        write_safetensors(folder / "model.safetensors", source, tensors, advance)
        return 1
    where = {}
    for number, group in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_safetensors(folder / name, source, sorted(group, key=lambda one: order[one.name]), advance)
        where.update({one.name: name for one in group})
    total = sum(one.size_bytes for one in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": {name: where[name] for name in sorted(where)}}
    (folder / SAFETENSORS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    return len(files)


class _DeferredStorage(torch.UntypedStorage):
    """Storage of known size that reads its bytes on :meth:`cpu`."""

    read: Callable[[], torch.Tensor]

    def cpu(self) -> torch.UntypedStorage:
        return self.read().contiguous().untyped_storage()


class _DeferredTensor:
    """Object that pickles as a tensor and reads its elements later."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], torch.Tensor]) -> None:
        self._shape = shape
        self._dtype = dtype
        self._read = read

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        size = math.prod(self._shape) * self._dtype.itemsize
        later = _DeferredStorage(size, device="meta")  # type: ignore[no-untyped-call]
        later.read = self._read
        new = self._dtype in torch.storage._new_dtypes()  # types without a typed storage
        typed = torch.storage.TypedStorage(
            wrap_storage=later, dtype=torch.uint8 if new else self._dtype, _internal=True
        )
        typed._fake_device = torch.device("cpu")  # the device that a load sees
        strides = tuple(math.prod(self._shape[axis + 1 :]) for axis in range(len(self._shape)))
        arguments: tuple[Any, ...] = (typed, 0, self._shape, strides, False, OrderedDict())
        if new:
            return torch._utils._rebuild_tensor_v3, (*arguments, self._dtype)
        return torch._utils._rebuild_tensor_v2, arguments


def deferred_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> object:
    """Return an object that pickles as a tensor of that shape. The caller writes the elements separately."""
    return _DeferredTensor(shape, dtype, lambda: torch.empty(0))


def write_torch(
    path: Path,
    source: StepSource,
    names: Mapping[str, str],
    advance: Callable[[int], None],
    *,
    allow_pickle: bool,
) -> None:
    """Write the nested state that was saved. It is flat if names were changed or it was saved flat."""
    values: dict[str, Any] = {}
    for name in names:
        if name in source.step.tensors:
            values[name] = _tensor(source, name, advance)
    values.update(_objects(source, [name for name in names if name in source.step.objects], allow_pickle=allow_pickle))
    paths = source.step.paths
    if paths is not None and all(name == shown for name, shown in names.items()):
        state = nested_state(values, paths)
    else:
        state = {names[name]: value for name, value in values.items()}
    with without_torch_warnings():
        torch.save(state, path)  # by path: for a file object torch.save would copy all bytes again


def _tensor(source: StepSource, name: str, advance: Callable[[int], None]) -> Any:
    entry = source.entry(name)
    if any(place.item >= 0 for place in source.step.tensors[name]):
        return source.tensor(name)  # an archived tensor has more than type, shape and bytes

    def read() -> torch.Tensor:
        found = source.tensor(name)
        advance(found.nbytes)
        return found

    return _DeferredTensor(entry.shape, dtype_from_name(entry.dtype), read)


def _objects(source: StepSource, names: list[str], *, allow_pickle: bool) -> dict[str, Any]:
    found, refused = {}, []
    for name in names:
        data = source.object_bytes(name)
        try:
            found[name] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception:  # noqa: BLE001 - any error means: not a type that is safe to unpickle
            if allow_pickle:
                found[name] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
            else:
                refused.append(name)
    if refused:
        more = f" and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
        raise UsageError(
            f"{', '.join(refused[:_SHOWN])}{more}: reading would run pickled code. Use --allow-pickle if you trust the "
            "writer of the step, --exclude to skip these names, or --format dcp"
        )
    return found


_FILE = "__0_0.distcp"


class _StoredObject:
    """Placeholder for an object that is copied as bytes."""


class _Planner(DefaultSavePlanner):
    """Save planner that plans on shapes and reads the data of the stored step at write time."""

    def __init__(self, source: StepSource, stored: Mapping[str, str], *, flatten: bool) -> None:
        super().__init__(flatten_state_dict=flatten)
        self._source = source
        self._stored = stored

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name = self._stored[write_item.index.fqn]
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(self._source.object_bytes(name))
        return self._source.tensor(name)


class _Writer(FileSystemWriter):
    """File writer with one tensor in memory. DCP's writer holds all tensors of a file until it is written."""

    def __init__(self, path: Path, advance: Callable[[int], None]) -> None:
        super().__init__(path)
        self._advance = advance

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        with self.fs.create_stream(self.fs.concat_path(self.path, _FILE), "wb") as stream:
            for item in plan.items:
                start = stream.tell()
                data = planner.resolve_data(item)
                if isinstance(data, torch.Tensor):
                    torch.save(data, stream)  # type: ignore[arg-type]
                    self._advance(data.nbytes)
                else:
                    stream.write(data.getvalue())
                size = stream.tell() - start
                results.append(WriteResult(item.index, size, _StorageInfo(_FILE, start, size)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def _refuse_sparse_tensors(source: StepSource, names: Mapping[str, str]) -> None:
    """Raise :class:`UsageError` for sparse tensors, which DCP would not load as sparse."""
    archived = [
        name
        for name in names
        if name in source.step.tensors and any(place.item >= 0 for place in source.step.tensors[name])
    ]
    sparse = [f"'{name}'" for name in archived if source.tensor(name).layout is not torch.strided]
    if sparse:
        more = f" and {len(sparse) - _SHOWN} more" if len(sparse) > _SHOWN else ""
        raise UsageError(
            f"Cannot export {', '.join(sparse[:_SHOWN])}{more} in DCP format: DCP does not load sparse tensors. Use "
            "--format torch, or leave them out with --exclude."
        )


def write_dcp(folder: Path, source: StepSource, names: Mapping[str, str], advance: Callable[[int], None]) -> None:
    _refuse_sparse_tensors(source, names)
    values: dict[str, Any] = {}
    for name in names:
        if name in source.step.tensors:
            entry = source.entry(name)
            values[name] = torch.empty(entry.shape, dtype=dtype_from_name(entry.dtype), device="meta")
        else:
            values[name] = _StoredObject()
    paths = source.step.paths
    nested = paths is not None and all(name == shown for name, shown in names.items())
    if nested and paths is not None:
        state = unflatten_state_dict(values, {name: paths[name] for name in values})
    else:
        state = {names[name]: value for name, value in values.items()}
    planner = _Planner(source, {shown: name for name, shown in names.items()}, flatten=nested)
    with without_torch_warnings():
        dcp.save(state, storage_writer=_Writer(folder, advance), planner=planner, no_dist=True)
