"""A plain DCP checkpoint, as ``FileSystemWriter`` would have written it, item by item."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
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

from tieredckpt.export.source import StepSource, quiet
from tieredckpt.tensors import dtype_named

_FILE = "__0_0.distcp"


class _Stored:
    """Stands for an object, whose bytes are not looked into."""


class _Planner(DefaultSavePlanner):
    """Plans on shapes; the data comes out of the stored step when it is written."""

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
    """DCP's own keeps every tensor of a file until the file is written."""

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
                    self._advance(data.nbytes if data.layout is torch.strided else stream.tell() - start)
                else:
                    stream.write(data.getvalue())
                size = stream.tell() - start
                results.append(WriteResult(item.index, size, _StorageInfo(_FILE, start, size)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def write_dcp(folder: Path, source: StepSource, names: Mapping[str, str], advance: Callable[[int], None]) -> None:
    values: dict[str, Any] = {}
    for name in names:
        if name in source.step.tensors:
            entry = source.entry(name)
            values[name] = torch.empty(entry.shape, dtype=dtype_named(entry.dtype), device="meta")
        else:
            values[name] = _Stored()
    paths = source.step.paths
    nested = paths is not None and all(name == shown for name, shown in names.items())
    if nested and paths is not None:
        state = unflatten_state_dict(values, {name: paths[name] for name in values})
    else:
        state = {names[name]: value for name, value in values.items()}
    planner = _Planner(source, {shown: name for name, shown in names.items()}, flatten=nested)
    with quiet():
        dcp.save(state, storage_writer=_Writer(folder, advance), planner=planner, no_dist=True)
