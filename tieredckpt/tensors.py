"""What a tensor is made of, as far as its bytes are concerned."""

from __future__ import annotations

import functools
import importlib.util
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tieredckpt.errors import CheckpointDamagedError, UsageError


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The type of that name, or :class:`CheckpointDamagedError` when this torch has none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointDamagedError(f"this torch ({torch.__version__}) has no element type {name!r}")
    return found


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether type, shape and bytes are all there is to it."""
    return (
        tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested and not _is_wrapper(tensor)
    )


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether it is a subclass that keeps its elements somewhere else, be it one that says where or not."""
    says: bool = is_traceable_wrapper_subclass(tensor)
    if says or tensor.is_meta or isinstance(tensor, FakeTensor):
        return says
    return not has_ordinary_dispatch(tensor) and not _has_storage(tensor)


def has_ordinary_dispatch(tensor: torch.Tensor) -> bool:
    """Whether operations on it are torch's own."""
    kind = type(tensor)
    return kind is torch.Tensor or kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl


def is_flat(tensor: torch.Tensor) -> bool:
    """Whether its bytes lie in this process's memory, in order, as they are to be saved."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def is_writable_at_its_address(target: torch.Tensor) -> bool:
    """Whether writing bytes to where it lies is all that its ``copy_`` would do, but for the version it counts."""
    return (
        has_ordinary_dispatch(target) and target.layout is torch.strided and not target.is_quantized and is_flat(target)
    )


def require_memory(name: str, tensor: torch.Tensor) -> None:
    """Refuse a plain tensor whose elements are not in memory: to read from or write to there would end the process."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and isinstance(tensor, FakeTensor):
        raise UsageError(f"{name} is a fake tensor, a shape without elements: use the real one")
    try:
        address, has = tensor.data_ptr(), tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):  # kept by a device's own means, or by a subclass
        address = has = 0
    if address and has >= (needs := _last_byte(tensor)):
        return
    if not tensor.numel() or (tensor.device.type != "cpu" and has_ordinary_dispatch(tensor)):
        return
    if tensor._is_zerotensor():
        why = "is a zero tensor of autograd's, without elements: use a real one (torch.zeros)"
    elif address:
        why = f"has {has} bytes of memory and needs {needs}: some of it was freed (untyped_storage().resize_)"
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


def _has_storage(tensor: torch.Tensor) -> bool:
    try:
        tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a copy where its storage holds more than its own elements (a pickle takes storages whole)."""
    try:
        larger = tensor.untyped_storage().nbytes() != tensor.nbytes
    except (RuntimeError, NotImplementedError):  # a sparse one has several; a wrapper has none
        return tensor
    return tensor.clone() if larger else tensor


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in this process's memory, of the same kind, that shares nothing with ``tensor``."""
    shards, tensor = shards_of(tensor), tensor.detach()
    if is_plain(tensor):
        tensor = tensor.to(device="cpu", memory_format=torch.contiguous_format, copy=True)
    else:
        tensor = tensor.clone().cpu()
    return with_shards(tensor, shards)


class Shards(NamedTuple):
    """What a tensor says of the larger one that it has slices of (``CheckpointableTensor``, from torch 2.14 on)."""

    global_shape: tuple[int, ...]
    global_offsets: tuple[tuple[int, ...], ...]
    local_offsets: tuple[tuple[int, ...], ...]
    local_sizes: tuple[tuple[int, ...], ...]


_HAS_SHARDS = importlib.util.find_spec("torch.distributed.checkpoint.protocol") is not None


def shards_of(tensor: torch.Tensor) -> Shards | None:
    """Its shards, where this torch asks tensors for them and this one answers."""
    if not _HAS_SHARDS or not all(hasattr(tensor, name) for name in Shards._fields):
        return None
    return Shards(*(getattr(tensor, name) for name in Shards._fields))


def with_shards(tensor: torch.Tensor, shards: Shards | None) -> torch.Tensor:
    """``tensor``, saying so of itself."""
    if shards is not None:
        for name, value in shards._asdict().items():
            setattr(tensor, name, value)
    return tensor
