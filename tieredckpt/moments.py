"""Moments of an optimizer that has made no step, so that there is something to fill.

torch's own way is a step with gradients of zeros. For Adam, which nearly everybody has, that allocates the gradients
and computes an update that nobody wants: a third of what a restore of 64 MiB took. Its moments are known.
"""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.optim.optimizer import _get_scalar_dtype

_ADAM = (torch.optim.Adam, torch.optim.AdamW)


def make_moments(optimizer: torch.optim.Optimizer) -> None:
    """What the first step of ``optimizer`` would make; nothing where it is there, or gradients are waiting."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    if optimizer.state or any(one.grad is not None for one in parameters):
        return
    if type(optimizer) not in _ADAM:
        _init_optim_state(optimizer)
        return
    for group in optimizer.param_groups:
        for one in group["params"]:
            if one.requires_grad:
                _of_adam(optimizer, group, one)


def _of_adam(optimizer: torch.optim.Optimizer, group: dict[str, object], one: torch.nn.Parameter) -> None:
    on_device = bool(group["capturable"] or group["fused"])
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")
    dtype = _get_scalar_dtype(is_fused=bool(group["fused"]))
    optimizer.state[one] = {
        "step": torch.zeros((), dtype=dtype, device=one.device if on_device else "cpu"),
        **{name: torch.zeros_like(one.detach(), memory_format=torch.preserve_format) for name in names},
    }
