"""Lower bounds: one plain copy of the bytes, and DCP with a storage that does nothing."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from benchmarks.states import State, raw, tensors
from tieredckpt.tensors.device import accelerator


class WarmMapping:
    """A populated shared mapping with room for a state, and single-threaded copies into and out of it."""

    def __init__(self, path: Path, state: State, *, align: int = 64) -> None:
        self.path = path
        self._spans: list[tuple[str, int, int]] = []
        self._sources = list(tensors(state).values())
        self._addresses = [one.data_ptr() for one in self._sources]
        self._on_cpu = all(one.is_cpu for one in self._sources)
        at = 0
        for name, tensor in tensors(state).items():
            self._spans.append((name, at, tensor.nbytes))
            at += -(-tensor.nbytes // align) * align
        with path.open("w+b") as file:
            file.truncate(at)
            self._map = mmap.mmap(file.fileno(), at)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._bytes.fill_(1)
        self._address = self._bytes.data_ptr()
        self.size_bytes = at

    @property
    def view(self) -> memoryview:
        return memoryview(self._map)

    def copy_in(self) -> None:
        if self._on_cpu:
            for (_, start, size), address in zip(self._spans, self._addresses, strict=True):
                ctypes.memmove(self._address + start, address, size)
            return
        for (_, start, size), source in zip(self._spans, self._sources, strict=True):
            self._bytes[start : start + size].copy_(raw(source))

    def copier_out(self, target: State) -> Callable[[], None]:
        """Return a function that copies everything to ``target``; all preparation is done here."""
        targets = list(tensors(target).values())
        addresses = [one.data_ptr() for one in targets]

        def copy() -> None:
            for (_, start, size), address in zip(self._spans, addresses, strict=True):
                ctypes.memmove(address, self._address + start, size)

        def copy_to_device() -> None:
            device = accelerator()
            for (_, start, size), one in zip(self._spans, targets, strict=True):
                raw(one).copy_(self._bytes[start : start + size])
            device.synchronize(device.current())

        return copy if all(one.is_cpu for one in targets) else copy_to_device

    def checksum(self) -> int:
        """Read all bytes once, as a verification does."""
        return xxhash.xxh3_64_intdigest(self._map)

    def as_state(self, like: State) -> dict[str, torch.Tensor]:
        shapes = tensors(like)
        return {
            name: self._bytes[start : start + size].view(shapes[name].dtype).view(shapes[name].shape)
            for name, start, size in self._spans
        }


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class NullWriter(StorageWriter):
    """A storage writer that writes nothing: only DCP's planning and exchanges remain."""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        return _done([])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class NullReader(StorageReader):
    """A storage reader that reads nothing and has its metadata from the start."""

    def __init__(self, metadata: Metadata) -> None:
        super().__init__()
        self._metadata = metadata

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True
