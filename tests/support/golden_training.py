"""A training script in which every step has a distinct result.

It uses DDP, FSDP2 or HSDP, AdamW, dropout, a learning rate schedule and numbered samples. In mode ``plain`` ranks sum
the gradients without inspecting them, as many scripts do, so its result depends on the number of ranks.

Each rank appends a JSON line per world and per step to its own file. The line of a step has this rank's share of the
state checksum, which needs no collective. Arguments:

- output folder
- number of steps
- ``ddp``, ``fsdp``, ``hsdp`` or ``plain``
- seconds that an error waits for the report of a lost rank
- save interval in steps
- backend
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from elastic import BatchPlan, ElasticDataLoader, ExactGradients, World, recoverable, seeded
from elastic.reshard.state_checksum import OBJECT_DTYPE, state_checksum
from elastic.workers.train_loop import RecoveryPolicy
from tests.support import nccl_like
from tests.support.async_cpu import run_ahead
from tieredckpt import Checkpointer
from tieredckpt.tensors.state_dict import flatten_state

AHEAD = f"{nccl_like.NAME}, ahead"
"""Backend argument: ``nccl_like`` with asynchronous operations on the training thread."""
DEVICE = "device"
"""Backend argument: train on the machine's devices with their default backend."""
SEED, SAMPLES, BATCH, MICROBATCH, WIDTH = 7, 101, 8, 2, 16


class NumberDataset:
    """A dataset: each sample depends on its index alone."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.Generator().manual_seed(index)
        x = torch.randn(WIDTH, generator=made)
        return x, torch.stack([x.sum(), x.square().mean()])


def bare_model() -> torch.nn.Module:
    torch.manual_seed(SEED)
    first, last = torch.nn.Linear(WIDTH, 24), torch.nn.Linear(24, 2)
    return torch.nn.Sequential(first, torch.nn.LayerNorm(24), torch.nn.GELU(), torch.nn.Dropout(0.1), last)


def wrap_model(model: torch.nn.Module, how: str, world: World) -> torch.nn.Module:
    if how == "plain":
        return model
    if how == "ddp":
        return DistributedDataParallel(model)
    mesh = world.mesh((-1, 2), ("replicas", "shards")) if how == "hsdp" else world.mesh()
    for layer in (model[0], model[-1]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def learning_rate_factor(step: int) -> float:
    return min(1.0, (step + 1) / 5) * (0.6 + 0.4 * math.cos(step / 50))


class RankLog:
    """This rank's log of JSON lines."""

    def __init__(self, folder: Path) -> None:
        self._file: TextIO = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def write(self, what: str, **values: Any) -> None:
        line = {"what": what, "at": time.time(), "pid": os.getpid(), **values}
        self._file.write(json.dumps(line) + "\n")


class ProcessSize:
    """A process's resource use: descriptors, threads and resident bytes."""

    @staticmethod
    def measure(pid: int | str) -> dict[str, int]:
        folder = Path(f"/proc/{pid}")
        return {
            "descriptors": len(list((folder / "fd").iterdir())),
            "threads": len(list((folder / "task").iterdir())),
            "rss": int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE"),
        }


def refuse_step(total: Any) -> None:
    raise ArithmeticError(f"the loss is {total.loss}, the norm {total.norm}: this step does not count")


def checksum_share(bare: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return this rank's share of the checksum of model and optimizer."""
    share = state_checksum({"model": bare, "optim": optimizer})
    return msgspec.to_builtins({name: part for name, part in share.parts.items() if part.dtype != OBJECT_DTYPE})


def plain_step(model: torch.nn.Module, mine: list[Any], step: int, place: torch.device) -> None:
    """Sum the gradients of all ranks without reading a value on the host."""
    model.zero_grad()
    for number, (x, y) in enumerate(mine):
        with seeded(SEED, step, dist.get_rank() * len(mine) + number):
            (model(x.to(place)) - y.to(place)).square().sum().backward()
    for one in model.parameters():
        dist.all_reduce(one.grad)


def main(folder: str, total: int, how: str, settle_s: float, every: int, backend: str | None) -> None:
    diary = RankLog(Path(folder))
    is_on_device = backend == DEVICE
    if is_on_device:
        backend = None
        os.environ["NCCL_HOSTID"] = f"rank-{os.getpid()}"  # NCCL otherwise refuses two ranks on one device
    is_ahead = backend == AHEAD
    if is_ahead:
        backend = nccl_like.NAME
    if backend == nccl_like.NAME:
        nccl_like.register()

    @recoverable(policy=RecoveryPolicy(peer_loss_wait_s=settle_s, backend=backend))
    def train(world: World) -> None:
        carried = ProcessSize.measure("self")  # left over from earlier worlds, before this one allocates
        place = world.device if is_on_device else torch.device("cpu")
        bare = bare_model().to(place)
        model = wrap_model(bare, how, world)
        optimizer = torch.optim.AdamW(bare.parameters(), lr=3e-3, fused=how == "plain")
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor)
        plan = BatchPlan(BATCH, world.size, microbatch=MICROBATCH).for_rank(world.rank)
        sums = None if how == "plain" else ExactGradients(model, tree=True, on_nonfinite=refuse_step)
        named = {"epoch": world.epoch, "rank": world.rank, "size": world.size}
        loader = ElasticDataLoader(NumberDataset(), plan, seed=SEED)
        state = {"model": bare, "optim": optimizer, "data": loader, "rate": schedule}
        with Checkpointer("tiered://golden", every=every, on_busy="wait") as ckpt, loader, ExitStack() as stack:
            # Busy saves wait: every save must happen, since a fault may target it.
            first = ckpt.restore(state) + 1
            found = ckpt.last_restore
            tiers = found.bytes_by_tier if found else {}
            diary.write("world", first=first, tiers=tiers, reason=world.reason, **named, **carried)
            own = [*bare.parameters(), *flatten_state({"": optimizer.state_dict()["state"]}).values()]
            stream = stack.enter_context(run_ahead(own)) if is_ahead else None
            for step in world.steps(first, total, checkpoint=(ckpt, state)):
                work = next(iter(loader))
                mine = [batch.data for batch in work]
                bits = {}
                if sums is None:
                    plain_step(model, mine, step, place)
                else:
                    for turn in sums.step(plan):
                        x, y = mine[turn.position]
                        with seeded(SEED, step, turn.id):
                            turn.backward((model(x) - y).square().sum(), weight=len(x))
                    result = sums.finish(clip=1.0)
                    bits = {"loss": result.loss.hex(), "norm": (result.norm or 0.0).hex()}
                optimizer.step()
                schedule.step()
                work.commit()
                # Log before the save: a fault may kill the rank in it, and a sealed step needs its line.
                bits |= {"step": step, "rate": schedule.get_last_lr()[0].hex(), "samples": work.indices().tolist()}

                def write(bits: dict[str, Any] = bits) -> None:
                    diary.write("step", share=checksum_share(bare, optimizer), **bits, **named)

                write() if stream is None else stream.enqueue(write)
                ckpt.save(state, step)

    print(train(), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
