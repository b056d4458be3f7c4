"""A deterministic training for :mod:`tests.gpu.golden`: one rank is killed at one point of one step.

Arguments: the folder of the events, ``ddp`` or ``fsdp``, the device type, the number of steps, the step of the fault.
Then its place: ``none``, ``before``, ``inside`` or ``after`` the backward pass. The last one is the number of
processes that must be warm before the fault.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

os.environ["NCCL_HOSTID"] = f"rank-{os.getpid()}"  # else NCCL accepts no two ranks on one device
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
os.environ.setdefault("NCCL_IB_DISABLE", "1")
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from elastic import World, recoverable
from elastic.workers.train_loop import RecoveryPolicy
from tests.support import nccl_like
from tieredckpt import Checkpointer

WIDTH, BATCH = 256, 16
_POLL_S = 0.02


class Events:
    """One JSON line per event, in a file of this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def write(self, what: str, **values: Any) -> None:
        self._file.write(json.dumps({"what": what, "at": time.time(), "pid": os.getpid(), **values}) + "\n")

    def is_first(self, name: str) -> bool:
        try:
            (self._folder / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def wait_for_processes(self, count: int) -> None:
        """Return once ``count`` processes are warm, spares included."""
        while len(list(self._folder.glob("*.warm"))) < count:
            time.sleep(_POLL_S)


def model_on(device: torch.device) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [one for _ in range(4) for one in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1)).to(device)


def wrapped(model: torch.nn.Sequential, how: str, world: World, kind: str) -> torch.nn.Module:
    if how == "ddp":
        return DistributedDataParallel(model)
    mesh = world.mesh(device_type=kind)
    for one in model:
        if isinstance(one, torch.nn.Linear):
            fully_shard(one, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main(folder: Path, how: str, kind: str, total: int, fault_step: int, when: str, processes: int) -> None:
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    events = Events(folder)
    is_fake = kind == "cpu"
    if is_fake:
        nccl_like.register()

    def warm() -> None:
        torch.ones(8, device=kind).sum().item()
        (folder / f"{os.getpid()}.warm").touch()

    def die() -> None:
        events.write("fault")
        os.kill(os.getpid(), signal.SIGKILL)

    def at_gradient(_module: torch.nn.Module, _given: Any, out: torch.Tensor) -> None:
        out.register_hook(lambda _gradient: die())

    @recoverable(policy=RecoveryPolicy(backend=nccl_like.NAME if is_fake else None), warmup=warm)
    def train(world: World) -> None:
        named = {"epoch": world.epoch, "rank": world.rank}
        events.write("entered", **named)
        world.add_cleanup(lambda: events.write("leaves", **named))
        device = torch.device("cpu") if is_fake else world.device
        model = model_on(device)
        net = wrapped(model, how, world, kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        state = {"model": model, "optim": optimizer}
        with Checkpointer("tiered://golden", every=1, on_busy="wait") as ckpt:
            first = ckpt.restore(state) + 1
            events.write("restored", first=first, **named)
            for step in world.steps(first, total, checkpoint=(ckpt, state)):
                made = torch.Generator().manual_seed(step * 100 + world.rank)
                x = torch.randn(BATCH, WIDTH, generator=made).to(device)
                now = when if step == fault_step and world.rank == 1 and when != "none" else ""
                if now:
                    events.wait_for_processes(processes)
                    now = now if events.is_first("faulted") else ""
                if now == "inside":
                    middle = model[4].register_forward_hook(at_gradient)
                loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                if now == "before":
                    die()
                loss.backward()
                if now == "inside":
                    middle.remove()
                if now == "after":
                    die()
                sum_of = loss.detach().clone()
                dist.all_reduce(sum_of)
                world.check_finite(sum_of)
                optimizer.step()
                ckpt.save(state, step)
                events.write("step", step=step, loss=float(sum_of).hex(), **named)
            events.write("done", sum=sum_of_parameters(model), **named)

    print(train(), flush=True)


def sum_of_parameters(model: torch.nn.Module) -> int:
    """Return a checksum over the bits of this rank's parameters."""
    found = 0
    for one in model.parameters():
        own = one.to_local() if hasattr(one, "to_local") else one
        bits = own.detach().contiguous().view(torch.int32).to(torch.int64)
        found = (found * 1_000_003 + int(bits.sum())) & 0xFFFF_FFFF_FFFF
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6], int(sys.argv[7]))
