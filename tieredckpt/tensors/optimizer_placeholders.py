"""Placeholders for optimizer state before the optimizer's first step."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.tensor import DTensor


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Create an optimizer's moments, unless it has some.

    DCP creates them by a step with zero gradients and a learning rate of zero. Such a step can take most of the time of
    a load, because it computes on every element and on new pages. Adam can create the same moments without it.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if optimizer.state:
        return
    adam: Any = optimizer if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) else None
    if adam is None or any(param.grad is not None for param in params):
        _init_optim_state(optimizer)
        return
    try:
        for param in params:
            if param.requires_grad:
                param.grad = _zero_gradient(param)
        for group in optimizer.param_groups:
            adam._init_group(group, [], [], [], [], [], [])
    finally:
        optimizer.zero_grad(set_to_none=True)


def _zero_gradient(param: torch.Tensor) -> torch.Tensor:
    """Return a zero gradient that takes no memory, because all its elements share one."""
    if not isinstance(param, DTensor):
        return _expanded_zero(param)
    local: Any = _expanded_zero(param._local_tensor)
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def _expanded_zero(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)
