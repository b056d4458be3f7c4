"""A tiered checkpoint, read out of the nearest good copies."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from elastic.reshard.forms import Form
from tieredckpt.boxes import Box
from tieredckpt.errors import UsageError
from tieredckpt.export.source import StepSource
from tieredckpt.tensors import dtype_named

_SHOWN = 5


class StoredSource:
    """One step of a job."""

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
            raise UsageError(refusal(packed))
        self.tensors: Mapping[str, Form] = {fqn: self._form(fqn) for fqn in sorted(step.tensors)}

    def _form(self, fqn: str) -> Form:
        places = self._source.step.tensors[fqn]
        entry = places[0].entry
        dtype_named(entry.dtype)
        pieces = tuple((place.part, place.entry.box) for place in places)
        return Form(entry.dtype, entry.shape, entry.itemsize, pieces, requires_grad=entry.requires_grad)

    def read(self, name: str, box: Box) -> torch.Tensor:
        return self._source.part(name, box)

    def object_bytes(self, name: str) -> bytes:
        return self._source.object_bytes(name)

    def close(self) -> None:
        self._source.close()


def refusal(names: list[str]) -> str:
    """Why a checkpoint with these tensors is not cut anew."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (
        f"{', '.join(names[:_SHOWN])}{more}: more than type, shape and bytes (sparse, quantized, a tensor subclass), "
        "so slices of it mean nothing; load it and save it at the other number of ranks"
    )
