"""What a tensor is made of, as far as its bytes are concerned."""

from __future__ import annotations

import functools

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tieredckpt.errors import CheckpointDamagedError


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
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not is_traceable_wrapper_subclass(tensor)
    )


def is_flat(tensor: torch.Tensor) -> bool:
    """Whether its bytes lie in this process's memory, in order, as they are to be saved."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
