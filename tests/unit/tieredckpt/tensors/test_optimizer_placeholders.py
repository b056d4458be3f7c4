"""An optimizer without a step gets the state that its first step would create."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.state_dict import _init_optim_state

from tieredckpt.tensors.optimizer_placeholders import init_optimizer_state


class Mine(torch.optim.AdamW):
    """An optimizer with state that AdamW does not have."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state["seen"] = torch.ones(3)


OPTIMIZERS = {
    "Adam": torch.optim.Adam,
    "AdamW": lambda of: torch.optim.AdamW(of, lr=0.1),
    "amsgrad": lambda of: torch.optim.AdamW(of, amsgrad=True),
    "fused": lambda of: torch.optim.AdamW(of, fused=True),
    "foreach": lambda of: torch.optim.Adam(of, foreach=True),
    "SGD": lambda of: torch.optim.SGD(of, momentum=0.9),
    "RMSprop": lambda of: torch.optim.RMSprop(of, lr=0.1),
    "its own": Mine,
}


def parameters():
    torch.manual_seed(1)
    shapes = [(4, 3), (5,), (2, 3, 4)]
    made = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    made.append(torch.nn.Parameter(torch.randn(6, 2).t().contiguous().t()))  # unusual strides
    made.append(torch.nn.Parameter(torch.randn(3, dtype=torch.float64)))
    made.append(torch.nn.Parameter(torch.randn(3), requires_grad=False))
    return made


def kept(optimizer):
    """Return the names of the state with the properties of its values."""
    return [
        {
            name: (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
            if isinstance(value, torch.Tensor)
            else value
            for name, value in optimizer.state[one].items()
        }
        for group in optimizer.param_groups
        for one in group["params"]
        if one in optimizer.state
    ]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_placeholder_state_equals_a_first_step(make):
    ours, theirs = make(parameters()), make(parameters())
    before = [one.clone() for group in ours.param_groups for one in group["params"]]
    init_optimizer_state(ours)
    _init_optim_state(theirs)
    assert kept(ours) == kept(theirs)
    assert kept(ours)
    for old, new in zip(before, (one for group in ours.param_groups for one in group["params"]), strict=True):
        assert torch.equal(old, new)
        assert new.grad is None


def test_existing_optimizer_state_stays():
    of = parameters()
    optimizer = torch.optim.AdamW(of)
    of[0].grad = torch.ones_like(of[0])
    init_optimizer_state(optimizer)
    assert not optimizer.state
    optimizer.step()
    moment = optimizer.state[of[0]]["exp_avg"]
    init_optimizer_state(optimizer)
    assert optimizer.state[of[0]]["exp_avg"] is moment
    assert len(optimizer.state) == 1
