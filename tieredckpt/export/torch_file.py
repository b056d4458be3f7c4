"""One ``torch.save`` file, written tensor by tensor.

``torch.save`` pickles first and writes the storages afterwards, each just after asking it for its copy on the CPU. A
storage that reads its bytes only then makes the file as large as disks are, with one tensor in memory.
"""

from __future__ import annotations

import io
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

from tieredckpt.errors import UsageError
from tieredckpt.export.source import StepSource, quiet
from tieredckpt.tensors import dtype_named

_SHOWN = 8


class _LaterStorage(torch.UntypedStorage):
    """A storage of known size without bytes, until it is asked for them."""

    read: Callable[[], torch.Tensor]

    def cpu(self) -> torch.UntypedStorage:
        return self.read().contiguous().untyped_storage()


class _Later:
    """Pickles as a tensor."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], torch.Tensor]) -> None:
        self._shape = shape
        self._dtype = dtype
        self._read = read

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        size = math.prod(self._shape) * self._dtype.itemsize
        later = _LaterStorage(size, device="meta")  # type: ignore[no-untyped-call]
        later.read = self._read
        new = self._dtype in torch.storage._new_dtypes()  # types younger than typed storages
        typed = torch.storage.TypedStorage(
            wrap_storage=later, dtype=torch.uint8 if new else self._dtype, _internal=True
        )
        typed._fake_device = torch.device("cpu")  # what a reader is told
        strides = tuple(math.prod(self._shape[axis + 1 :]) for axis in range(len(self._shape)))
        arguments: tuple[Any, ...] = (typed, 0, self._shape, strides, False, OrderedDict())
        if new:
            return torch._utils._rebuild_tensor_v3, (*arguments, self._dtype)
        return torch._utils._rebuild_tensor_v2, arguments


def unread_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> object:
    """What pickles as a tensor of that shape, for who writes its elements elsewhere."""
    return _Later(shape, dtype, lambda: torch.empty(0))


def write_torch(
    path: Path,
    source: StepSource,
    names: Mapping[str, str],
    advance: Callable[[int], None],
    *,
    allow_pickle: bool,
) -> None:
    """The nested state that was saved; flat where names were changed or it was saved so."""
    values: dict[str, Any] = {}
    for name in names:
        if name in source.step.tensors:
            values[name] = _tensor(source, name, advance)
    values.update(_objects(source, [name for name in names if name in source.step.objects], allow_pickle=allow_pickle))
    paths = source.step.paths
    if paths is not None and all(name == shown for name, shown in names.items()):
        state = unflatten_state_dict(values, {name: paths[name] for name in values})
    else:
        state = {names[name]: value for name, value in values.items()}
    with quiet():
        torch.save(state, path)  # by name: into a file object it would copy everything once more


def _tensor(source: StepSource, name: str, advance: Callable[[int], None]) -> Any:
    entry = source.entry(name)
    if any(place.item >= 0 for place in source.step.tensors[name]):
        return source.tensor(name)  # more than type, shape and bytes: kept as the archive has it

    def read() -> torch.Tensor:
        found = source.tensor(name)
        advance(found.nbytes)
        return found

    return _Later(entry.shape, dtype_named(entry.dtype), read)


def _objects(source: StepSource, names: list[str], *, allow_pickle: bool) -> dict[str, Any]:
    found, refused = {}, []
    for name in names:
        data = source.object_bytes(name)
        try:
            found[name] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception:  # noqa: BLE001 - whatever it says: this is not one of the types that are safe to unpickle
            if allow_pickle:
                found[name] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
            else:
                refused.append(name)
    if refused:
        more = f" and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
        raise UsageError(
            f"{', '.join(refused[:_SHOWN])}{more} can only be read by running what was pickled: use --allow-pickle "
            "where you trust who saved it, leave them out with --exclude, or use --format dcp"
        )
    return found
