"""Small models in every distribution PyTorch has, with optimizer state, for any world size."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WIDTH = 24


class Net(nn.Module):
    """One layer pair that tensor parallelism can split, and one layer that no world size splits evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 36)
        self.down = nn.Linear(36, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.odd = nn.Linear(WIDTH, 13)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.odd(self.norm(self.down(torch.relu(self.up(x)))))


def build_model(kind: str, world: int, *, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a model with the same values for the same seed in every distribution."""
    torch.manual_seed(seed)
    model: nn.Module = Net()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif kind == "hsdp":
        fully_shard(
            model,
            mesh=init_device_mesh("cpu", (max(1, world // 2), min(2, world)), mesh_dim_names=("replicate", "shard")),
        )
    elif kind == "tp":
        parallelize_module(
            model, init_device_mesh("cpu", (world,)), {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
    elif kind == "2d":
        mesh = init_device_mesh("cpu", (max(1, world // 2), min(2, world)), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer


def train_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(4, WIDTH, generator=generator)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def get_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optim": moments}


def set_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def full_state(state: Any) -> Any:
    """Return the whole state on every rank, equal for two distributions of the same values."""
    if isinstance(state, DTensor):
        return state.full_tensor().detach().clone()
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: full_state(value) for key, value in state.items()}
    if isinstance(state, list):
        return [full_state(value) for value in state]
    return state
