"""One model with AdamW state in every layout and mesh, with values computable without sharding."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import Net, get_state

_TP = {"up": ColwiseParallel, "down": RowwiseParallel}
SEED = 11


class Variant(NamedTuple):
    """A layout on a mesh."""

    kind: str
    mesh: tuple[int, ...]

    @property
    def world(self) -> int:
        return torch.Size(self.mesh).numel()

    def __str__(self) -> str:
        return f"{self.kind}-{'x'.join(map(str, self.mesh))}"


def variants(most: int) -> list[Variant]:
    """Return every layout for every world of up to ``most`` ranks, 2D layouts on every possible mesh."""
    found = [Variant(kind, (world,)) for kind in ("ddp", "fsdp", "tp") for world in range(1, most + 1)]
    for world in range(1, most + 1):
        meshes = [(rows, world // rows) for rows in range(2, world) if world % rows == 0] or [(1, world)]
        found += [Variant(kind, mesh) for kind in ("hsdp", "2d") for mesh in meshes]
    return found


def build_variant(variant: Variant, *, blank: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build the model with the expected values, or with others if ``blank``."""
    torch.manual_seed(SEED + blank)
    model: nn.Module = Net()
    kind, mesh = variant
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", mesh))
    elif kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")))
    elif kind == "tp":
        parallelize_module(model, init_device_mesh("cpu", mesh), {name: how() for name, how in _TP.items()})
    else:
        both = init_device_mesh("cpu", mesh, mesh_dim_names=("dp", "tp"))
        parallelize_module(model, both["tp"], {name: how() for name, how in _TP.items()})
        fully_shard(model, mesh=both["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0 if blank else 1e-2)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rate, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], 0.0
    optimizer.step()
    optimizer.param_groups[0]["lr"] = rate
    optimizer.zero_grad()
    if not blank:
        _fill(model, optimizer)
    return model, optimizer


@torch.no_grad()
def _fill(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Derive optimizer state from the parameters by powers of two, exact in any sharding."""
    for parameter in model.parameters():
        moments = optimizer.state[parameter]
        moments["step"].fill_(7)
        moments["exp_avg"].copy_(parameter * -0.5)
        moments["exp_avg_sq"].copy_(parameter.abs() * 0.25)
    for buffer in model.buffers():
        buffer.fill_(5)


def expected_state() -> dict[str, Any]:
    """Compute the whole state without sharding."""
    torch.manual_seed(SEED)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    _fill(model, optimizer)
    return get_state(model, optimizer)


def fill_with_poison(state: Any) -> None:
    """Overwrite all values, so that a test notices values that a load did not write."""
    if isinstance(state, torch.Tensor):
        local = state.to_local() if isinstance(state, DTensor) else state
        with torch.no_grad():
            local.fill_(-3)
    elif isinstance(state, dict):
        for value in state.values():
            fill_with_poison(value)
