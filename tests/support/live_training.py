"""Small model with rare saves; a rank dies at a chosen place. Also runs undisturbed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.resizable_training import digest, full_tensor

EVERY = 5
Death = tuple[int, str, set[int]]
JOB = "tiered://live"


class DataCursor:
    """Position of the training in its data."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["place"]


class Training:
    """A model, wrapped according to ``kind``, with its optimizer, scheduler and data."""

    def __init__(self, kind: str, optimizer: str, size: int, rank: int) -> None:
        torch.manual_seed(0)
        self.rank, self.kind = rank, kind
        layers = [nn.Linear(12, 20), nn.BatchNorm1d(20) if kind == "norm" else nn.GELU(), nn.Linear(20, 4)]
        model: nn.Module = nn.Sequential(*layers)
        if kind in ("ddp", "norm"):
            model = nn.parallel.DistributedDataParallel(model)
        else:
            self._sharded(model, kind, size)
        self.model = model
        made: dict[str, Callable[..., torch.optim.Optimizer]] = {
            "adamw": lambda own: torch.optim.AdamW(own, lr=1e-2, foreach=True),
            "fused": lambda own: torch.optim.AdamW(own, lr=1e-2, fused=True),
            "sgd": lambda own: torch.optim.SGD(own, lr=1e-2, momentum=0.9, fused=True),
        }
        self.optimizer = made[optimizer](model.parameters())
        self.rates = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.97**step)
        self.cursor = DataCursor()
        self.state = {"model": model, "optim": self.optimizer, "rates": self.rates, "data": self.cursor}

    def _sharded(self, model: nn.Module, kind: str, size: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        shape, names = ((size,), ("shards",)) if kind == "fsdp" else ((2, size // 2), ("replicas", "shards"))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        fully_shard(model[0], mesh=mesh)  # type: ignore[index]
        fully_shard(model, mesh=mesh)

    def step(self, step: int, die: Callable[[str], None]) -> str:
        """Train one step and return the exact loss."""
        assert self.cursor.position == step
        mine = 0 if self.kind == "norm" else self.rank  # DDP trains with the first rank's statistics
        batch = torch.randn(6, 12, generator=torch.Generator().manual_seed(100 * step + mine))
        self.optimizer.zero_grad()
        loss = self.model(batch).square().mean()
        die("forward")
        loss.backward()
        die("backward")
        dist.all_reduce(loss := loss.detach())
        # Inside the optimizer's step: its parameters are half changed.
        hook = self.optimizer.register_step_post_hook(lambda *_: die("optimizer"))
        self.optimizer.step()
        hook.remove()
        self.rates.step()
        self.cursor.position += 1
        return loss.item().hex()

    def bits(self) -> str:
        """Return a digest of all parameters, buffers and moments."""
        tensors = [*self.model.state_dict().values()]
        tensors += [one for state in self.optimizer.state.values() for one in state.values()]
        return digest([full_tensor(one) if isinstance(one, DTensor) else one.detach() for one in tensors])


def reference_steps(_say: Callable[[str], None], kind: str, optimizer: str, total: int) -> list[str]:
    training = Training(kind, optimizer, dist.get_world_size(), dist.get_rank())
    return [f"{training.step(step, lambda _place: None)} {training.bits()}" for step in range(total)]


def train(say: Callable[[str], None], address: str, kind: str, optimizer: str, total: int, at: str) -> str:
    """Train; ranks die where ``at`` says.

    ``STEP PLACE`` kills rank 1 of the first world, ``STEP PLACE 1,2`` kills ranks 1 and 2. Entries after ``;`` apply to
    the following worlds.
    """
    from elastic.workers.train_loop import run
    from tests.support.socket_control_plane import SocketControlPlane

    deaths = [_death(*one.split()) for one in at.split(";")]
    return str(
        run(
            lambda world: _train(say, world, kind, optimizer, total, deaths), plane=SocketControlPlane(address)
        ).outcome.value
    )


def _death(step: str, place: str, ranks: str = "1") -> Death:
    return int(step), place, {int(rank) for rank in ranks.split(",")}


def _wait_for_all(ranks: set[int], rank: int) -> None:
    """Wait until all of these ranks of a world have called this function."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"dying/{rank}", "")
    store.wait([f"dying/{one}" for one in ranks])


def _train(say: Any, world: Any, kind: str, optimizer: str, total: int, deaths: list[Death]) -> None:
    from tieredckpt import Checkpointer

    training = Training(kind, optimizer, world.size, world.rank)
    with Checkpointer(JOB, every=EVERY) as ckpt:
        first = ckpt.restore(training.state) + 1
        found = ckpt.last_restore
        said = (found.mode, found.steps_redone) if found is not None else ("nothing", None)
        of_world = world.hydration.mode if world.hydration is not None else "none"
        say(f"world {world.epoch} {first - 1} {said[0]} {said[1]} {of_world}")
        for step in world.steps(first, total, checkpoint=(ckpt, training.state)):

            def die(place: str, step: int = step) -> None:
                dying = (
                    ranks for at, where, ranks in deaths[world.epoch : world.epoch + 1] if (at, where) == (step, place)
                )
                ranks = next(dying, set[int]())
                if world.rank in ranks:
                    _wait_for_all(ranks, world.rank)  # a rank that sees another one die does not come here
                    os.kill(os.getpid(), signal.SIGKILL)

            loss = training.step(step, die)
            ckpt.save(training.state, step)
            say(f"step {step} {loss} {training.bits()}")
