"""Deterministic training for :mod:`tests.gpu.golden`, with faults at chosen places of chosen steps.

Arguments: the folder of the events, the device type, the wall-clock time of the last possible fault, and a
file with the :class:`tests.gpu.golden_jobs.GoldenJob`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["NCCL_HOSTID"] = f"rank-{os.getpid()}"  # else NCCL accepts no two ranks on one device
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
os.environ.setdefault("NCCL_IB_DISABLE", "1")
os.environ.setdefault("NCCL_ALGO", "Ring")
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from elastic import BatchPlan, ExactGradients, World, recoverable
from elastic.fault_injection.fault_actions import RANK_ACTIONS
from elastic.fault_injection.fault_spec import InjectionKind
from elastic.workers.train_loop import RecoveryPolicy
from tests.gpu.golden_jobs import FIRST_STEP, Fault, GoldenJob
from tests.support import nccl_like
from tieredckpt import Checkpointer

WIDTH, BATCH, MICROBATCH = 256, 16, 4
PARTITION_S = 5.0
LATE = "late"
"""The file by which all ranks end the run before the same step."""
_POLL_S = 0.02
_NAN = float("nan")


class Events:
    """One JSON line per event, in a file of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def write(self, what: str, **values: Any) -> None:
        self._file.write(json.dumps({"what": what, "at": time.time(), "pid": os.getpid(), **values}) + "\n")

    def is_first(self, name: str) -> bool:
        try:
            (self.folder / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class Strike:
    """The fault of one step, in the rank to which it happens."""

    def __init__(self, fault: Fault, world: World, events: Events) -> None:
        self.fault, self._world, self._events = fault, world, events

    def at(self, place: str) -> bool:
        """Carry the fault out if this is its place; return whether values are to become NaN."""
        if place != self.fault.place or not self._events.is_first(self.fault.file):
            return False
        world, kind = self._world, self.fault.kind
        self._events.write(
            "fault", name=self.fault.file, kind=kind, step=self.fault.step, epoch=world.epoch, rank=world.rank,
            node=os.environ["ELASTIC_NODE"],
        )  # fmt: skip
        if kind == "partition":
            plane: Any = world._plane
            plane.request_partition(PARTITION_S)
        elif kind != "nan":
            RANK_ACTIONS[InjectionKind(kind)]()
        return kind == "nan"


class Training:
    """Model, optimizer and steps of one parallelism."""

    def __init__(self, how: str, world: World, kind: str) -> None:
        torch.manual_seed(0)
        self._world = world
        self._device = torch.device("cpu") if kind == "cpu" else world.device
        layers = [one for _ in range(4) for one in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())]
        self.model = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1)).to(self._device)
        self._net = self._wrapped(how, kind)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.state = {"model": self.model, "optim": self.optimizer}
        self._exact = ExactGradients(self.model, tree=True) if how == "tree" else None

    def _wrapped(self, how: str, kind: str) -> torch.nn.Module:
        if how == "ddp":
            # Else DDP changes its buckets after the first step, and a ring of four ranks then adds in another order.
            return DistributedDataParallel(self.model, find_unused_parameters=True)
        if how == "hsdp":
            mesh = self._world.mesh((-1, 2), ("replicas", "shards"), device_type=kind)
        else:
            mesh = self._world.mesh(device_type=kind)
        for one in self.model:
            if isinstance(one, torch.nn.Linear):
                fully_shard(one, mesh=mesh)
        return fully_shard(self.model, mesh=mesh)

    def step(self, step: int, strike: Strike | None) -> str:
        """Train one step; return the bits of its loss and of its gradients' sum."""
        at = strike.at if strike is not None else lambda _place: False
        if self._exact is not None:
            return self._exact_step(self._exact, step, at)
        x = self._sample(step * 100 + self._world.rank)
        middle = None
        if strike is not None and strike.fault.place == "inside":
            middle = self.model[4].register_forward_hook(lambda _module, _given, out: _spoilt_in_backward(out, at))
        loss = (self._net(x) - x.sum(1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        if at("before"):
            loss = loss * _NAN
        loss.backward()
        if middle is not None:
            middle.remove()
        gradients = [local(one.grad) for one in self.model.parameters() if one.grad is not None]
        if at("after"):
            for one in gradients:
                one.mul_(_NAN)
        sums = torch.stack([loss.detach(), torch.stack([one.sum() for one in gradients]).sum()])
        dist.all_reduce(sums)
        self._world.check_finite(sums)
        self.optimizer.step()
        return ", ".join(float(one).hex() for one in sums)

    def _exact_step(self, exact: ExactGradients, step: int, at: Callable[[str], bool]) -> str:
        plan = BatchPlan(BATCH, self._world.size, microbatch=MICROBATCH).for_rank(self._world.rank)
        at("before")
        for turn in exact.step(plan):
            x = self._sample(step * 100 + turn.id)[:MICROBATCH]
            turn.backward((self._net(x) - x.sum(1, keepdim=True)).square().sum(), weight=MICROBATCH)
        total = exact.finish(clip=1.0)
        self.optimizer.step()
        return f"{total.loss.hex()}, {(total.norm or 0.0).hex()}"

    def _sample(self, seed: int) -> torch.Tensor:
        return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed)).to(self._device)

    def checksum(self) -> int:
        """Return a checksum over the bits of this rank's parameters."""
        found = 0
        for one in self.model.parameters():
            bits = local(one.detach()).contiguous().view(torch.int32).to(torch.int64)
            found = (found * 1_000_003 + int(bits.sum())) & 0xFFFF_FFFF_FFFF
        return found


def local(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    own: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own


def _spoilt_in_backward(out: torch.Tensor, at: Callable[[str], bool]) -> None:
    out.register_hook(lambda gradient: gradient * _NAN if at("inside") else None)


class Run:
    """One process's way through the job."""

    def __init__(self, job: GoldenJob, kind: str, until: float, events: Events) -> None:
        self._job, self._kind, self._until, self._events = job, kind, until, events
        self._faults = {one.step: one for one in job.faults}

    def train(self, world: World) -> None:
        named = {"epoch": world.epoch, "rank": world.rank, "size": world.size}
        self._events.write("entered", **named)
        world.add_cleanup(lambda: self._events.write("leaves", **named))
        if not self._faults:
            for how in self._job.how:
                training = Training(how, world, self._kind)
                for step in range(self._job.totals[how]):
                    self._one_step(training, how, step, None, named)
            return
        (how,) = self._job.how
        training = Training(how, world, self._kind)
        with Checkpointer("tiered://golden", every=1, on_busy="wait") as ckpt:
            first = ckpt.restore(training.state) + 1
            self._events.write("restored", first=first, **named)
            for step in world.steps(first, self._job.total, checkpoint=(ckpt, training.state)):
                strike = self._strike(world, step)
                if (self._events.folder / LATE).exists():
                    break
                # Before it is saved: a rank that ends in the save has written its loss.
                self._one_step(training, how, step, strike, named)
                ckpt.save(training.state, step)

    def _one_step(self, training: Training, how: str, step: int, strike: Strike | None, named: dict[str, Any]) -> None:
        loss = training.step(step, strike)
        self._events.write("step", how=how, step=step, loss=loss, sum=training.checksum(), **named)

    def _strike(self, world: World, step: int) -> Strike | None:
        """Wait until all ranks are in the step and the spare is warm; return this rank's fault."""
        if self._job.resizes and step == FIRST_STEP - 1 and world.size < self._job.ranks:
            self._wait_for_notice(world)  # the second node was late, and joins now
        fault = self._faults.get(step)
        if fault is None or (self._events.folder / fault.file).exists():
            return None
        if fault.kind == "resize":
            if world.size != (fault.nodes or self._job.nodes) * self._job.nproc:
                self._events.write("holds", name=fault.file, epoch=world.epoch, step=step, rank=world.rank)
                self._wait_for_notice(world)
            return None
        with world.pause_watchdog():
            (self._events.folder / f"{step}-{world.epoch}-{world.rank}.there").touch()
            ready = f"{step}-{world.epoch}-*.there"
            self._wait(world, lambda: len(list(self._events.folder.glob(ready))) == world.size)
            self._wait(world, lambda: self._is_late() or self._warm_processes() >= fault.processes)
            decided, is_mine = f"{fault.file}.decided", world.rank == fault.rank % world.size
            if is_mine:
                if self._is_late():
                    self._events.write("skipped", name=fault.file, step=step)
                    (self._events.folder / LATE).touch()
                (self._events.folder / decided).touch()
            self._wait(world, (self._events.folder / decided).exists)
        return Strike(fault, world, self._events) if is_mine else None

    def _is_late(self) -> bool:
        return time.time() > self._until

    def _warm_processes(self) -> int:
        return len(list(self._events.folder.glob("*.warm")))

    def _wait_for_notice(self, world: World) -> None:
        """Stay in this step until this rank knows of the resize: then all ranks stop after this step."""
        plane: Any = world._plane
        self._wait(world, lambda: plane.notice() is not None)

    def _wait(self, world: World, there: Callable[[], bool]) -> None:
        while not there():
            world.raise_if_broken()
            time.sleep(_POLL_S)


def main(folder: Path, kind: str, until: float, job: GoldenJob) -> None:
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    run, is_fake = Run(job, kind, until, Events(folder)), kind == "cpu"
    if is_fake:
        nccl_like.register()

    def warm() -> None:
        torch.ones(8, device=kind).sum().item()
        (folder / f"{os.getpid()}.warm").touch()

    policy = RecoveryPolicy(backend=nccl_like.NAME if is_fake else None)
    print(recoverable(policy=policy, warmup=warm)(run.train)(), flush=True)


if __name__ == "__main__":
    given = msgspec.json.decode(Path(sys.argv[4]).read_bytes(), type=GoldenJob)
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), given)
