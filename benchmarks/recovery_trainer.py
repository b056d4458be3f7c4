"""The training script of P9, shared by ``elastic run``, ``torchrun`` and torchft.

Each contender imports only its own packages, so that none pays for another's imports. The argument is a
:class:`Task`. A file ``raise`` in its folder makes the last rank fail once.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # otherwise the first optimizer of a process imports it
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from benchmarks.diary import Diary, began

LAYERS, ROWS = 8, 4
_ADAM = 12
"""Bytes of state per parameter: its value and two moments."""
_KEPT = 3
LOOKED_AT = 3
"""Steps after a start until the state is compared, outside the measured time."""


@dataclasses.dataclass(frozen=True)
class Task:
    way: str
    folder: str
    model: str
    """``DDP`` or ``FSDP2``."""
    size_bytes: int
    device: str = "cpu"
    compared: tuple[int, ...] = ()
    """Steps after which an undisturbed run records its state; it ends after the last one."""
    options: tuple[str, ...] = ()

    def words(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @property
    def place(self) -> Path:
        return Path(self.folder)

    @property
    def width(self) -> int:
        return max(16, int((self.size_bytes / _ADAM / LAYERS) ** 0.5) // 16 * 16)

    @property
    def backend(self) -> str:
        return "gloo" if self.device == "cpu" else "cpu:gloo,cuda:nccl"


class Rows(Dataset[torch.Tensor]):
    """Training data: each row is a function of its number."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.randn(self._width, generator=torch.Generator().manual_seed(number))


def made(task: Task) -> torch.nn.Module:
    """Return the initial model, the same in every process."""
    torch.manual_seed(3)
    return torch.nn.Sequential(*(torch.nn.Linear(task.width, task.width) for _ in range(LAYERS)))


class Training:
    """Model, optimizer, loader and steps in one world, the same for all contenders.

    The model is uninitialized until its state is restored or :meth:`fill` sets it.
    """

    def __init__(self, task: Task, diary: Diary, rank: int, size: int) -> None:
        self.task, self.rank, self.size = task, rank, size
        self._diary = diary
        with torch.device("meta"):
            self.model = made(task)
        self.first = -1
        self._batches: Iterator[torch.Tensor] = iter(())
        self._next = -1

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self.task.device == "cuda" else torch.device("cpu")

    def spread(self, mesh: DeviceMesh | None) -> None:
        """Distribute the model over the ranks with DDP or FSDP2."""
        if self.task.model == "FSDP2":
            self.shard(mesh)
        self.model.to_empty(device=self.device)
        if self.task.model == "DDP":
            # Without init_sync, because every rank restores the state or creates the same one. With
            # find_unused_parameters, because DDP then never rebuilds its buckets after a process's first step.
            # Rebuilt buckets add in another order, so a restarted process would differ. torchft never rebuilds.
            self.model = DistributedDataParallel(self.model, find_unused_parameters=True, init_sync=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    @torch.no_grad()
    def fill(self) -> None:
        """Set the initial state, if none was restored."""
        for mine, whole in zip(self.model.parameters(), made(self.task).to(self.device).parameters(), strict=True):
            mine.copy_(
                distribute_tensor(whole, mine.device_mesh, mine.placements) if isinstance(mine, DTensor) else whole
            )

    def shard(self, mesh: DeviceMesh | None) -> None:
        for layer in self.model.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def say(self, what: str, **values: Any) -> None:
        self._diary.write(what, size=self.size, rank=self.rank, **values)

    def feed(self, first: int) -> None:
        """Create the loader from this step on and load its first batch."""
        per_step = ROWS * self.size
        numbers = (range(step * per_step + self.rank * ROWS, step * per_step + (self.rank + 1) * ROWS)
                   for step in itertools.count(first))  # fmt: skip
        loader = DataLoader(Rows(self.task.width), batch_sampler=numbers)
        ahead = iter(loader)
        self._batches = itertools.chain([next(ahead)], ahead)
        self.first = self._next = first

    def batch(self, step: int) -> torch.Tensor:
        if step != self._next:  # a repeated step
            self.feed(step)
        self._next = step + 1
        return next(self._batches).to(self.device)

    def step(self, step: int) -> None:
        self.fail_if_told()
        self.model(self.batch(step)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.stepped(step)
        if step - self.first == LOOKED_AT - 1 or step in self.task.compared:
            self.look(step)

    def stepped(self, step: int, **values: Any) -> None:
        if self.task.device == "cuda":
            torch.cuda.synchronize()
        self.say("stepped", step=step, **values)

    def fail_if_told(self) -> None:
        told = self.task.place / "raise"
        if self.rank == self.size - 1 and told.exists():
            told.unlink()
            self.say("fault")
            raise ArithmeticError("told to fail")

    def look(self, step: int) -> None:
        """Record a checksum of this rank's state after a step."""
        found = xxhash.xxh3_128()
        for tensor in self.tensors():
            plain = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            found.update(plain.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        self.say("looked", step=step, sum=found.hexdigest())

    def tensors(self) -> Iterator[torch.Tensor]:
        for parameter in self.model.parameters():
            yield parameter
            for _, value in sorted(self.optimizer.state[parameter].items()):
                yield value


# -- under elastic run ------------------------------------------------------------------------------------------------


def elastic(task: Task, diary: Diary) -> None:
    from elastic.control.control_plane import ControlNotice, RankAssignment
    from elastic.workers.launch_environment import detect_control_plane
    from elastic.workers.train_loop import RecoveryPolicy, recoverable
    from elastic.workers.world_handle import World
    from tieredckpt import Checkpointer

    diary.write("imported", began=began(), node=os.environ["ELASTIC_NODE"])

    class Stamped:
        """A rank's control plane that also records its events."""

        def __init__(self) -> None:
            self._plane = detect_control_plane()

        def wait_for_assignment(self, *, timeout_s: float | None = None) -> RankAssignment:
            diary.write("ready")
            place = self._plane.wait_for_assignment(timeout_s=timeout_s)
            diary.write("assigned", size=place.world_size, rank=place.rank)
            return place

        def on_broken(self, call: Callable[[ControlNotice], None]) -> None:
            def told(notice: ControlNotice) -> None:
                diary.write("heard")
                call(notice)

            self._plane.on_broken(told)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._plane, name)

    plane: Any = Stamped()
    initialize = dist.init_process_group

    def initialized(*args: Any, **named: Any) -> None:
        initialize(*args, **named)
        diary.write("grouped")

    dist.init_process_group = initialized

    @recoverable(plane=plane, policy=RecoveryPolicy(backend=task.backend))
    def train(world: World) -> None:
        diary.write("entered", size=world.size, rank=world.rank)
        training = Training(task, diary, world.rank, world.size)
        training.spread(world.mesh(device_type=task.device))
        state = {"model": training.model, "optim": training.optimizer}
        training.say("built")
        with Checkpointer("tiered://recovery", every=1) as ckpt:
            first = ckpt.restore(state) + 1
            if first == 0:
                training.fill()
            training.say("loaded", step=first - 1)
            training.feed(first)
            training.say("fed")
            for step in world.steps(first):
                training.step(step)
                ckpt.save(state, step)

    train()


# -- under torchrun ---------------------------------------------------------------------------------------------------


def restarted(task: Task, diary: Diary) -> None:
    """Train with ``dcp.save`` to tmpfs after every step, and resume from the newest complete save."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    diary.write("imported", began=began())
    try:
        training = _under_torchrun(task, diary)
        whole = sorted((path.parent for path in task.place.glob("dcp/*/.metadata")), key=_step_of)
        first = _step_of(whole[-1]) + 1 if whole else 0
        if whole:
            model, optim = get_state_dict(training.model, training.optimizer)
            dcp.load({"model": model, "optim": optim}, checkpoint_id=whole[-1])
            set_state_dict(training.model, training.optimizer, model_state_dict=model, optim_state_dict=optim)
        else:
            training.fill()
        training.say("loaded", step=first - 1)
        training.feed(first)
        training.say("fed")
        for step in itertools.count(first):
            training.step(step)
            model, optim = get_state_dict(training.model, training.optimizer)
            dcp.save({"model": model, "optim": optim}, checkpoint_id=task.place / "dcp" / str(step))
            if training.rank == 0:
                shutil.rmtree(task.place / "dcp" / str(step - _KEPT), ignore_errors=True)
    except Exception as error:
        diary.write("heard", error=f"{type(error).__name__}: {error}")
        raise


def undisturbed(task: Task, diary: Diary) -> None:
    """Train without a fault, for the state that disturbed runs must reach."""
    training = _under_torchrun(task, diary)
    training.fill()
    training.feed(0)
    for step in range(max(task.compared) + 1):
        training.step(step)
    dist.destroy_process_group()


def _under_torchrun(task: Task, diary: Diary) -> Training:
    if task.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(task.backend)
    diary.write("grouped")
    size = dist.get_world_size()
    diary.write("entered", size=size, rank=dist.get_rank())
    training = Training(task, diary, dist.get_rank(), size)
    training.spread(init_device_mesh(task.device, (size,)) if task.model != "DDP" else None)
    training.say("built")
    return training


def _step_of(path: Path) -> int:
    return int(path.name)


def main(words: str) -> None:
    task = Task(**json.loads(words))
    torch.set_num_threads(1)
    if task.device == "cuda":
        # NCCL refuses two ranks of one host on one device, so each rank claims its own host.
        os.environ["NCCL_HOSTID"] = f"rank-{os.getpid()}"
    diary = Diary(task.place / "diary")
    if task.way == "torchft":
        from benchmarks.recovery_torchft import fault_tolerant

        fault_tolerant(task, diary)
    else:
        {"elastic": elastic, "torchrun": restarted, "undisturbed": undisturbed}[task.way](task, diary)


if __name__ == "__main__":
    main(*sys.argv[1:])
