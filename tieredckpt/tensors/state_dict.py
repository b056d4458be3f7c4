"""State dicts in DCP's form: flattened names, fingerprints, local tensors and their bytes."""

from __future__ import annotations

import importlib.util
import io
import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from peerstore.sizes_and_durations import show_size
from tieredckpt.errors import UntrustedObjectError, UsageError
from tieredckpt.format.shard_layout import TensorEntry
from tieredckpt.tensors.plain_tensors import has_ordinary_dispatch, is_plain_tensor
from tieredckpt.tensors.safe_objects import check_safe_object, warn_unsafe_object

UNPICKLABLE_ADVICE = "Leave it out of the state, or save the numbers, strings and tensors that it is made of"
_ORDINARY = (torch.Tensor, torch.nn.Parameter)


def is_contiguous_in_memory(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's bytes are in this process's memory, in the order of a save."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def is_writable_in_place(target: torch.Tensor) -> bool:
    """Return whether ``copy_`` only writes the bytes to its memory and counts the version."""
    return (
        has_ordinary_dispatch(target)
        and target.layout is torch.strided
        and not target.is_quantized
        and is_contiguous_in_memory(target)
    )


def require_materialized(name: str, tensor: torch.Tensor) -> None:
    """Raise :class:`UsageError` for a plain tensor without its memory, which would crash the process."""
    if type(tensor) not in _ORDINARY and isinstance(tensor, FakeTensor):
        raise UsageError(f"{name} is a fake tensor, a shape without elements: use the real one")
    try:
        address, available = tensor.data_ptr(), tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):  # stored by a device or by a subclass
        address = available = 0
    if address and available >= (needed := _last_byte(tensor)):
        return
    if not tensor.numel() or (tensor.device.type != "cpu" and has_ordinary_dispatch(tensor)):
        return
    if tensor._is_zerotensor():
        why = "is a zero tensor of autograd's, without elements: use a real one (torch.zeros)"
    elif address:
        sizes = f"has {show_size(available)} of memory and needs {show_size(needed)}"
        why = f"{sizes}: some of it was freed (untyped_storage().resize_)"
    else:
        why = "has no memory: it was freed (untyped_storage().resize_(0)), or its class keeps its elements elsewhere"
    raise UsageError(f"{name} {why}")


def _last_byte(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous():
        last = tensor.nbytes
    else:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()
    before = tensor.storage_offset()
    return int(before * tensor.element_size() + last) if before else int(last)


def compact_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or a copy if its storage is larger, because a pickle contains whole storages."""
    try:
        larger = tensor.untyped_storage().nbytes() != tensor.nbytes
    except (RuntimeError, NotImplementedError):  # a sparse tensor has several storages, a wrapper none
        return tensor
    return tensor.clone() if larger else tensor


def private_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in this process's memory, of the same kind and without shared storage."""
    shards, tensor = tensor_shards(tensor), tensor.detach()
    if is_plain_tensor(tensor):
        tensor = tensor.to(device="cpu", memory_format=torch.contiguous_format, copy=True)
    else:
        tensor = tensor.clone().cpu()
    return with_shards(tensor, shards)


class TensorShards(NamedTuple):
    """Position of a tensor's slices in a larger tensor (``CheckpointableTensor``, from torch 2.14 on)."""

    global_shape: tuple[int, ...]
    global_offsets: tuple[tuple[int, ...], ...]
    local_offsets: tuple[tuple[int, ...], ...]
    local_sizes: tuple[tuple[int, ...], ...]


_HAS_SHARDS = importlib.util.find_spec("torch.distributed.checkpoint.protocol") is not None


def tensor_shards(tensor: torch.Tensor) -> TensorShards | None:
    """Return the tensor's shards, or ``None`` if it or this torch does not support them."""
    if not _HAS_SHARDS or not all(hasattr(tensor, name) for name in TensorShards._fields):
        return None
    return TensorShards(*(getattr(tensor, name) for name in TensorShards._fields))


def with_shards(tensor: torch.Tensor, shards: TensorShards | None) -> torch.Tensor:
    """Return ``tensor`` with these shards as its attributes."""
    if shards is not None:
        for name, value in shards._asdict().items():
            setattr(tensor, name, value)
    return tensor


Fingerprint = tuple[Any, ...]


def flatten_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves by their dotted names, the same as in DCP's ``flatten_state_dict``."""
    flat: dict[str, Any] = {}

    def visit(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                visit(f"{prefix}.{key}", inner)
        elif isinstance(value, list) and not is_leaf_list(value):
            for index, inner in enumerate(value):
                visit(f"{prefix}.{index}", inner)
        elif prefix in flat:
            raise UsageError(f"two values of the state are called {prefix!r} once their keys are joined by dots")
        else:
            flat[prefix] = value

    for key, value in state.items():
        visit(str(key), value)
    return flat


def is_leaf_list(values: list[Any]) -> bool:
    """Return whether a list has neither a tensor nor a mapping, so that DCP saves it as one object."""
    for value in values:
        if isinstance(value, torch.Tensor | Mapping):
            return False
        if isinstance(value, list) and not is_leaf_list(value):
            return False
    return True


def resolve_stateful(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` with ``Stateful`` objects replaced by their state dicts."""
    return {key: value.state_dict() if is_stateful(value) else value for key, value in state.items()}


def is_stateful(value: Any) -> TypeGuard[Stateful]:
    """Return whether a value has its own state dict."""
    # A check of a protocol takes 10 µs, and a state may have thousands of tensors at the top level.
    return not isinstance(value, torch.Tensor) and isinstance(value, Stateful)


def state_fingerprint(flat: Mapping[str, Any]) -> list[Fingerprint]:
    """Return the fingerprint of a state: equal fingerprints mean equal save plans."""
    return [(name, *_shape_of(value)) for name, value in flat.items()]


def _shape_of(value: Any) -> Fingerprint:
    if type(value) is DTensor:
        local = value._local_tensor
        return value.shape, value.dtype, local.shape, value.placements, value.device_mesh
    if isinstance(value, torch.Tensor):
        kind = None if type(value) in _ORDINARY else type(value)
        return value.shape, value.dtype, kind, value.layout, tensor_shards(value) if _HAS_SHARDS else None
    return ()


def local_tensor(flat: Mapping[str, Any], entry: TensorEntry) -> torch.Tensor:
    """Return this process's tensor of ``entry``; raise :class:`UsageError` if it has no memory."""
    value = flat[entry.fqn]
    found: Any = value._local_tensor if type(value) is DTensor else value
    if type(found) not in _ORDINARY or found.shape != entry.box.sizes:
        found = find_state_dict_object({entry.fqn: value}, MetadataIndex(entry.fqn, torch.Size(entry.box.offsets)))
        if not isinstance(found, torch.Tensor):
            raise UsageError(f"{entry.fqn} was a tensor when the save was planned and is a {type(found).__name__} now")
        if found.numel() != entry.box.volume:
            raise UsageError(
                f"{entry.fqn} was planned with {entry.box.sizes} elements and has {tuple(found.shape)} now"
            )
    require_materialized(entry.fqn, found)
    return found


class ObjectArchiveCache:
    """Cache of ``torch.save`` archives of Python objects, valid while the objects are unchanged.

    Most of a state's objects (hyper-parameters, counters) do not change between steps, and an archive costs far more
    than a comparison.
    """

    def __init__(self, *, trusted: bool = False) -> None:
        self._trusted = trusted
        self._archives: dict[str, tuple[bytes, bytes]] = {}

    def archive(self, name: str, value: Any) -> bytes:
        token = _token(value)
        cached = self._archives.get(name)
        if cached is not None and token is not None and cached[0] == token:
            return cached[1]
        try:
            data = archive_object(value)
        except Exception as error:  # the object's own pickling may raise any exception
            raise UsageError(
                f"{name} is a {type(value).__name__} that cannot be pickled: {error}. {UNPICKLABLE_ADVICE}"
            ) from error
        if token is not None:
            self._archives[name] = (token, data)
        elif not self._trusted:
            warn_unsafe_object(name, data)
        return data


def check_safe_value(name: str, value: object) -> None:
    """Raise :class:`UntrustedObjectError` for a value that a load would refuse as more than data."""
    try:
        data = archive_object(value)
    except Exception as error:  # the object's own pickling may raise any exception
        raise UntrustedObjectError(f"{name}: a {type(value).__name__} cannot be pickled: {error}") from error
    check_safe_object(name, data)


def archive_object(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        value = compact_storage(value)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _token(value: Any) -> bytes | None:
    """Return bytes that change with a small plain value; ``None`` for other values."""
    if not _is_plain_value(value, 100):
        return None
    return pickle.dumps(value, protocol=4)


def _is_plain_value(value: Any, budget: int) -> bool:
    if value is None or type(value) in (bool, int, float, complex):
        return True
    if type(value) in (str, bytes):
        return len(value) <= 4096
    if type(value) in (list, tuple) and len(value) <= budget:
        return all(_is_plain_value(inner, budget // 4) for inner in value)
    if type(value) is dict and len(value) <= budget:
        return all(_is_plain_value(k, 0) and _is_plain_value(v, budget // 4) for k, v in value.items())
    return False


StateDict = dict[str, Any]
