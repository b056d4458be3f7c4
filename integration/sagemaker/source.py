"""A checkpoint that AWS's library wrote, as something that can be read box by box."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock

import torch
from typing_extensions import Buffer

from elastic.reshard.forms import Form
from integration.sagemaker.archive import read_tensor
from integration.sagemaker.metadata import Chunk, Extent
from integration.sagemaker.places import Checkpoint
from tieredckpt.boxes import Box, Tiling, relative, uncovered
from tieredckpt.errors import CheckpointDamagedError, UntrustedObjectError
from tieredckpt.export.source import quiet
from tieredckpt.tensors import dtype_named

_KEPT_BYTES = 64 << 20
"""Of the chunks that were read last; at least one is kept."""


class WrittenSource:
    """Implements :class:`elastic.reshard.forms.Source`. Any thread may read.

    Objects go on as bytes, to be unpickled by whoever loads them. Unless ``trust_objects``, only those are given that
    ``torch.load(weights_only=True)`` can read: numbers, strings, tensors and containers of them.
    """

    def __init__(self, checkpoint: Checkpoint, *, trust_objects: bool = False) -> None:
        self.checkpoint = checkpoint
        self.name = checkpoint.name
        self.step: int | None = checkpoint.step
        self.parts = checkpoint.world
        written = checkpoint.written
        self.objects: tuple[str, ...] = tuple(sorted(written.objects))
        self.paths: Mapping[str, tuple[str | int, ...]] | None = written.paths
        self.tensors: Mapping[str, Form] = {
            name: Form(
                tensor.dtype,
                tensor.shape,
                dtype_named(tensor.dtype).itemsize,
                tuple((chunk.extent.rank, chunk.box) for chunk in tensor.chunks),
                requires_grad=tensor.requires_grad,
            )
            for name, tensor in sorted(written.tensors.items())
        }
        self._trust = trust_objects
        self._kept: OrderedDict[tuple[str, Box], torch.Tensor] = OrderedDict()
        self._lock = Lock()

    def read(self, name: str, box: Box) -> torch.Tensor:
        tensor = self.checkpoint.written.tensors[name]
        dtype = dtype_named(tensor.dtype)
        if not box.volume:
            return torch.empty(box.sizes, dtype=dtype)
        missing = uncovered(box, (chunk.box for chunk in tensor.chunks))
        if missing:
            raise CheckpointDamagedError(f"{self.name}: nothing holds {missing[0]} of {name}")
        out: torch.Tensor | None = None
        tiling = Tiling(box)
        for chunk in tensor.chunks:
            for common in tiling.lay(chunk.box):
                found = _cut(self._chunk(name, chunk, dtype), relative(common, chunk.box))
                if common == box:
                    return found.contiguous()
                out = torch.empty(box.sizes, dtype=dtype) if out is None else out
                _cut(out, relative(common, box)).copy_(found)
        assert out is not None  # noqa: S101 - nothing was missing
        return out

    def object_bytes(self, name: str) -> bytes:
        data = bytes(self._bytes(self.checkpoint.written.objects[name]))
        if not self._trust:
            _check_object(data, f"{name} of {self.name}")
        return data

    def close(self) -> None:
        self._kept.clear()
        self.checkpoint.let_go()

    # -- inside -----------------------------------------------------------------------------------------------

    def _chunk(self, name: str, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        key = name, chunk.box
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        where = f"{self.name}: {name} at {chunk.box.offsets}"
        found = read_tensor(memoryview(self._bytes(chunk.extent)), chunk.box.sizes, dtype, where)
        with self._lock:
            while self._kept and sum(kept.nbytes for kept in self._kept.values()) + found.nbytes > _KEPT_BYTES:
                self._kept.popitem(last=False)
            self._kept[key] = found
        return found

    def _bytes(self, extent: Extent) -> Buffer:
        with self._lock:  # a blob of the memory service is fetched once
            blob = self.checkpoint.blob(extent.rank)
        return blob.read([(extent.start, extent.start + extent.length)])[0]


def _cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for axis, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(axis, start, size)
    return tensor


def _check_object(data: bytes, name: str) -> None:
    try:
        with quiet():
            torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        said = str(error).strip().splitlines()
        raise UntrustedObjectError(
            f"{name} is not data alone, so loading it could run anything: {said[-1] if said else error}. If you trust "
            "whoever could write to that place, say trust_objects=True (--trust-objects)"
        ) from error
    except (RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointDamagedError(f"{name} cannot be read: {type(error).__name__}: {str(error)[:200]}") from error
