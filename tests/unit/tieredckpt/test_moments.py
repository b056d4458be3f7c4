"""Moments made without a step are those that DCP's step with zero gradients makes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tieredckpt.moments import make_moments


class Mine(torch.optim.AdamW):
    """Who knows what it keeps."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state["seen"] = torch.ones(3)


KINDS = {
    "adam": torch.optim.Adam,
    "adamw": lambda params: torch.optim.AdamW(params, foreach=True),
    "amsgrad": lambda params: torch.optim.AdamW(params, amsgrad=True),
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1),
    "its own": Mine,
}


def parameters():
    torch.manual_seed(1)
    shapes = [(5, 3), (4,), (), (0, 2)]
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    params.append(torch.nn.Parameter(torch.randn(6, 4).t()))
    params.append(torch.nn.Parameter(torch.randn(3, dtype=torch.bfloat16)))
    params.append(torch.nn.Parameter(torch.randn(3), requires_grad=False))
    return params


def made(kind, params, make):
    optimizer = KINDS[kind](params)
    make(optimizer)
    return optimizer


def described(optimizer):
    """All but how many steps were done: that is loaded."""
    return [
        {name: (value.shape, value.stride(), value.dtype, value.device, type(value)) for name, value in state.items()}
        for state in optimizer.state.values()
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_as_by_a_step(kind):
    mine, theirs = made(kind, parameters(), make_moments), made(kind, parameters(), _init_optim_state)
    assert described(mine) == described(theirs)
    assert [place for place, param in enumerate(mine.param_groups[0]["params"]) if param in mine.state] == [
        place for place, param in enumerate(theirs.param_groups[0]["params"]) if param in theirs.state
    ]
    for param, before in zip(mine.param_groups[0]["params"], parameters(), strict=True):
        assert param.grad is None
        assert torch.equal(param, before)


def test_nothing_is_computed():
    """A hook of the optimizer's sees no step, and a schedule of its rate counts none."""
    optimizer = torch.optim.AdamW(parameters())
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    make_moments(optimizer)
    assert not seen
    assert optimizer.state


def test_gradients_that_are_there_stay():
    params = parameters()[:2]
    optimizer = torch.optim.AdamW(params)
    params[0].grad = torch.ones_like(params[0])
    make_moments(optimizer)
    assert torch.equal(params[0].grad, torch.ones_like(params[0]))
    assert not optimizer.state


def test_what_is_there_stays():
    params = parameters()[:2]
    optimizer = torch.optim.AdamW(params)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    moment = optimizer.state[params[0]]["exp_avg"]
    optimizer.zero_grad()
    make_moments(optimizer)
    assert optimizer.state[params[0]]["exp_avg"] is moment
    assert len(optimizer.state) == 1


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_of_sharded_parameters(mesh):
    model = torch.nn.Linear(6, 5)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    make_moments(optimizer)
    for param in model.parameters():
        state = optimizer.state[param]
        assert isinstance(state["exp_avg"], DTensor)
        assert state["exp_avg"].placements == param.placements
        assert state["exp_avg"].shape == param.shape
        assert not torch.count_nonzero(state["exp_avg"].to_local())
        assert param.grad is None
