"""Element types by name, and tensors that consist of type, shape and bytes only."""

from __future__ import annotations

import functools

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tieredckpt.errors import CheckpointDamagedError


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """Return the element type of this name; raise :class:`CheckpointDamagedError` if torch has none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointDamagedError(f"this torch ({torch.__version__}) has no element type {name!r}")
    return found


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Return whether the tensor consists of type, shape and bytes only."""
    return (
        tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested and not _is_wrapper(tensor)
    )


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's class holds its elements in other tensors or elsewhere."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return False
    is_traceable: bool = is_traceable_wrapper_subclass(tensor)
    if is_traceable or tensor.is_meta or _is_fake(tensor):
        return is_traceable
    return not has_ordinary_dispatch(tensor) and not _has_storage(tensor)


def has_ordinary_dispatch(tensor: torch.Tensor) -> bool:
    """Return whether operations on the tensor are torch's own."""
    kind = type(tensor)
    return kind is torch.Tensor or kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl


def _has_storage(tensor: torch.Tensor) -> bool:
    try:
        tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _is_fake(tensor: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor  # slow to import, and never needed for ordinary tensors

    return isinstance(tensor, FakeTensor)
