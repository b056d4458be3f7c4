"""A small sharded model, trained elastically, and its expected losses without faults."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

BATCH = 12
"""Samples of a step over all ranks: 1, 2, 3 and 4 ranks share them evenly."""


def build_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step))


def optimizer_of(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def expected_losses(steps: int, ranks: int) -> list[float]:
    """Return each step's loss, summed in ``ranks`` pieces as that many ranks do."""
    model = build_model()
    optimizer = optimizer_of(model)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        parts = [model(part).square().mean() / ranks for part in batch_of(step).chunk(ranks)]
        for part in parts:
            part.backward()
        optimizer.step()
        losses.append(sum(part.item() for part in parts))
    return losses


def train(say: Callable[[str], None], address: str, job: str, total: int, limit: str) -> str:
    """Train until the job ends; report every world, restore and saved step."""
    from elastic.workers.train_loop import run
    from tests.support.socket_control_plane import SocketControlPlane

    return str(
        run(lambda world: _train(say, world, job, total, Path(limit)), plane=SocketControlPlane(address)).outcome.value
    )


def _train(say: Callable[[str], None], world: Any, job: str, total: int, limit: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from tieredckpt import Checkpointer

    say(f"world {world.epoch} {world.size} {world.rank}")
    model = build_model()
    fully_shard(model, mesh=world.mesh())
    optimizer = optimizer_of(model)
    state = {"model": model, "optim": optimizer}
    with Checkpointer(job, every=1) as ckpt:
        first = ckpt.restore(state) + 1
        tiers = ckpt.last_restore.bytes_by_tier if ckpt.last_restore is not None else {}
        say(f"restored {world.epoch} {first - 1} {','.join(sorted(tiers))}")
        for step in world.steps(first, total, checkpoint=(ckpt, state)):
            wait_until(lambda step=step: step < int(limit.read_text() or 0))
            part = batch_of(step).chunk(world.size)[world.rank]
            loss = model(part).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            whole = loss.detach().clone()
            dist.all_reduce(whole)
            ckpt.save(state, step)
            say(f"step {world.epoch} {step} {whole.item() / world.size!r}")


def wait_until(happened: Callable[[], bool]) -> None:
    """Block within a step until the test permits it."""
    while not happened():
        time.sleep(0.002)
