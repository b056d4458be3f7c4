"""Tensors that were verified while a load filled them, and the check that they are unchanged since.

Such a tensor is not read again after the load if all of this holds:

- The load wrote all of its bytes through its own memory and compared them with the seal there.
- No other target shares that memory.
- Only torch's own code loaded the state.
- The live tensor has the same address, shape, strides, type and version counter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from tieredckpt.tensors.plain_tensors import has_ordinary_dispatch
from tieredckpt.tensors.state_dict import is_contiguous_in_memory

_LOADING = (
    "load_state_dict",
    "state_dict",
    "_load_from_state_dict",
    "_save_to_state_dict",
    "get_extra_state",
    "set_extra_state",
)
_MODULE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_OPTIMIZER_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class FilledTensors:
    """Targets of one load, by the numbers of their read items."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int, int]] = []
        """Start and end address of each target in this process's memory, and its number."""
        self._verified: dict[int, tuple[torch.Tensor, int]] = {}
        """Targets that were verified while they were filled, with their versions before that."""

    def add_target(self, number: int, target: torch.Tensor) -> None:
        """Record the memory of a target, however it is filled."""
        if target.layout is torch.strided and target.is_cpu and target.numel() and has_ordinary_dispatch(target):
            self._spans.append((target.data_ptr(), target.data_ptr() + _extent_bytes(target), number))

    def add_verified(self, number: int, target: torch.Tensor) -> None:
        """Record that a target is compared with the seal while it is filled."""
        if not target.is_inference():
            self._verified[number] = target, target._version

    def discard(self, number: int) -> None:
        """Discard a target that was not compared with the seal after all."""
        self._verified.pop(number, None)

    def drop_shared(self) -> None:
        """Discard targets that share memory, because the later load overwrites the earlier one."""
        end, last = 0, -1
        for start, stop, number in sorted(self._spans):
            if start < end:
                self._verified.pop(number, None)
                self._verified.pop(last, None)
            if stop > end:
                end, last = stop, number
        self._spans.clear()

    def is_unchanged(self, number: int, live: torch.Tensor) -> bool:
        """Return whether ``live`` is the target and still holds the verified bytes."""
        target, version = self._verified.get(number, (None, -1))
        return (
            target is not None
            and has_ordinary_dispatch(live)
            and is_contiguous_in_memory(live)
            and (live.data_ptr(), live.shape, live.dtype) == (target.data_ptr(), target.shape, target.dtype)
            and not live.is_inference()
            and live._version == target._version == version
        )


def takes_over_in_place(value: object) -> bool:
    """Return whether only torch's own code, without hooks, loads a state into ``value``."""
    if isinstance(value, torch.nn.Module):
        return all(map(_is_ordinary_module, value.modules()))
    if isinstance(value, Optimizer):
        kind: Any = type(value)
        return kind.__module__.startswith("torch.optim.") and not any(getattr(value, name) for name in _OPTIMIZER_HOOKS)
    return isinstance(value, torch.Tensor) or not isinstance(value, Stateful)


def _is_ordinary_module(module: torch.nn.Module) -> bool:
    own = vars(module)
    return (
        _has_torch_loading(type(module))
        and not any(own[name] for name in _MODULE_HOOKS)
        and not any(name in own for name in _LOADING)
    )


def _has_torch_loading(kind: Any) -> bool:
    return all(str(getattr(kind, name).__module__).startswith("torch.nn.") for name in _LOADING)


def _extent_bytes(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize
