"""The state to be saved, seen the way DCP's default planner sees it, but fast enough for every step."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from tieredckpt.errors import UsageError
from tieredckpt.layout import TensorEntry
from tieredckpt.safe_objects import warn_before_saving
from tieredckpt.tensors import compact, require_memory, shards_of

Fingerprint = tuple[Any, ...]


def flatten(state: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves by their dotted names: the same names and leaves as ``dcp``'s ``flatten_state_dict``."""
    flat: dict[str, Any] = {}

    def visit(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                visit(f"{prefix}.{key}", inner)
        elif isinstance(value, list) and not _is_leaf(value):
            for index, inner in enumerate(value):
                visit(f"{prefix}.{index}", inner)
        elif prefix in flat:
            raise UsageError(f"two values of the state are called {prefix!r} once their keys are joined by dots")
        else:
            flat[prefix] = value

    for key, value in state.items():
        visit(str(key), value)
    return flat


def _is_leaf(values: list[Any]) -> bool:
    """A list is taken apart only when a tensor or a mapping is somewhere in it."""
    for value in values:
        if isinstance(value, torch.Tensor | Mapping):
            return False
        if isinstance(value, list) and not _is_leaf(value):
            return False
    return True


def as_plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` with ``Stateful`` objects replaced by their state dicts."""
    return {key: value.state_dict() if _is_stateful(value) else value for key, value in state.items()}


def _is_stateful(value: Any) -> TypeGuard[Stateful]:
    # Asking a protocol takes 10 µs; thousands of tensors at the top of a state are asked at every step.
    return not isinstance(value, torch.Tensor) and isinstance(value, Stateful)


def fingerprint(flat: Mapping[str, Any]) -> list[Fingerprint]:
    """What a save plan depends on: equal fingerprints give equal plans."""
    return [(name, *_shape_of(value)) for name, value in flat.items()]


def _shape_of(value: Any) -> Fingerprint:
    if type(value) is DTensor:
        local = value._local_tensor
        return value.shape, value.dtype, local.shape, value.placements, value.device_mesh
    if isinstance(value, torch.Tensor):
        kind = None if type(value) in (torch.Tensor, torch.nn.Parameter) else type(value)
        return value.shape, value.dtype, kind, value.layout, shards_of(value)
    return ()


def local_tensor(flat: Mapping[str, Any], entry: TensorEntry) -> torch.Tensor:
    """The tensor of ``entry`` that this process holds; refuses one whose elements are nowhere."""
    value = flat[entry.fqn]
    found: Any = value._local_tensor if type(value) is DTensor else value
    if type(found) not in (torch.Tensor, torch.nn.Parameter) or found.shape != entry.box.sizes:
        found = find_state_dict_object({entry.fqn: value}, MetadataIndex(entry.fqn, torch.Size(entry.box.offsets)))
        if not isinstance(found, torch.Tensor):
            raise UsageError(f"{entry.fqn} was a tensor when the save was planned and is a {type(found).__name__} now")
        if found.numel() != entry.box.volume:
            raise UsageError(
                f"{entry.fqn} was planned with {entry.box.sizes} elements and has {tuple(found.shape)} now"
            )
    require_memory(entry.fqn, found)
    return found


class ObjectArchives:
    """``torch.save`` archives of Python objects, kept while the objects stay the same.

    Most of a state's objects (hyper-parameters, counters) do not change from step to step, and an archive costs
    far more than a comparison.
    """

    def __init__(self, *, trusted: bool = False) -> None:
        self._trusted = trusted
        self._kept: dict[str, tuple[bytes, bytes]] = {}

    def archive(self, name: str, value: Any) -> bytes:
        token = _token(value)
        kept = self._kept.get(name)
        if kept is not None and token is not None and kept[0] == token:
            return kept[1]
        try:
            data = archive(value)
        except Exception as error:  # whatever the object's own pickling raises
            raise UsageError(f"{name} is a {type(value).__name__} that cannot be pickled: {error}") from error
        if token is not None:
            self._kept[name] = (token, data)
        elif not self._trusted:
            warn_before_saving(name, data)
        return data


def archive(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        value = compact(value)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _token(value: Any) -> bytes | None:
    """Bytes that change when a small plain value changes; ``None`` for everything that cannot be compared so."""
    if not _is_plain(value, 100):
        return None
    return pickle.dumps(value, protocol=4)


def _is_plain(value: Any, budget: int) -> bool:
    if value is None or type(value) in (bool, int, float, complex):
        return True
    if type(value) in (str, bytes):
        return len(value) <= 4096
    if type(value) in (list, tuple) and len(value) <= budget:
        return all(_is_plain(inner, budget // 4) for inner in value)
    if type(value) is dict and len(value) <= budget:
        return all(_is_plain(k, 0) and _is_plain(v, budget // 4) for k, v in value.items())
    return False
