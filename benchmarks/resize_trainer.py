"""The training script of P13, shared by ``elastic run`` and ``torchrun``.

Each rank appends timed events to its own file. Arguments: the contender, the folder, bytes of state.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # otherwise the first optimizer imports it after the rank's assignment
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.diary import Diary, began
from elastic.control.control_plane import RankAssignment
from elastic.reshard.state_checksum import state_checksum
from elastic.workers.launch_environment import detect_control_plane
from elastic.workers.train_loop import recoverable
from elastic.workers.world_handle import World
from tieredckpt import Checkpointer

LAYERS, ROWS = 8, 4
DURABLE_EVERY = 25
_ADAM = 12
"""Bytes of state per parameter: its value and two moments."""
_KEPT = 3
_SEAL_S = 600.0


class Training:
    """Model, optimizer and steps in one world, the same for all contenders."""

    def __init__(self, mesh: DeviceMesh, size_bytes: int, diary: Diary) -> None:
        self.width = max(16, int((size_bytes / _ADAM / LAYERS) ** 0.5) // 16 * 16)
        with torch.device("meta"):  # otherwise every rank creates the whole model, only to replace it
            self.model = torch.nn.Sequential(*(torch.nn.Linear(self.width, self.width) for _ in range(LAYERS)))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.model.to_empty(device="cpu")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._diary = diary
        self.size = dist.get_world_size()

    def begin(self) -> None:
        """Set the initial state, if none was restored."""
        chance = torch.Generator().manual_seed(dist.get_rank())
        with torch.no_grad():
            for parameter in self.model.parameters():
                bound = self.width**-0.5
                parameter.to_local().uniform_(-bound, bound, generator=chance)  # type: ignore[attr-defined]

    def say(self, what: str, **values: Any) -> None:
        self._diary.write(what, size=self.size, **values)

    def check(self, before: str, after: str, step: int, **values: Any) -> None:
        """Record a checksum of the state between two events, whose time does not count."""
        self.say(before, step=step, **values)
        dist.barrier()
        found = state_checksum({"model": self.model, "optim": self.optimizer}).all_reduced()
        dist.barrier()
        self.say(after, step=step, sum=str(found.tensors_only))

    def step(self, step: int) -> None:
        chance = torch.Generator().manual_seed(step * 1000 + dist.get_rank())
        self.model(torch.randn(ROWS, self.width, generator=chance)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.say("stepped", step=step)


# -- under elastic run ------------------------------------------------------------------------------------------------


class Stamped:
    """A rank's control plane that also records its events."""

    def __init__(self, diary: Diary) -> None:
        self._plane = detect_control_plane()
        self._diary = diary
        self._size = 0

    def wait_for_assignment(self, *, timeout_s: float | None = None) -> RankAssignment:
        self._diary.write("ready", size=self._size)
        place = self._plane.wait_for_assignment(timeout_s=timeout_s)
        self._size = place.world_size
        self._diary.write("assigned", size=place.world_size)
        return place

    def agree_on_step(self, step: int, *, timeout_s: float | None = None) -> int:
        self._diary.write("heard", size=self._size)
        target = self._plane.agree_on_step(step, timeout_s=timeout_s)
        self._diary.write("agreed", size=self._size)
        return target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plane, name)


def elastic(folder: Path, size_bytes: int, diary: Diary) -> None:
    plane: Any = Stamped(diary)

    @recoverable(plane=plane)
    def train(world: World) -> None:
        diary.write("entered", size=world.size)
        training = Training(world.mesh(), size_bytes, diary)
        state = {"model": training.model, "optim": training.optimizer}
        training.say("built")
        with Checkpointer(
            "tiered://resize", durable=str(folder / "durable"), every=1, durable_every=DURABLE_EVERY
        ) as ckpt:
            restored = ckpt.restore(state)
            if restored >= 0:
                tiers = ckpt.last_restore.bytes_by_tier if ckpt.last_restore else {}
                training.check("loaded", "checked", restored, tiers=tiers)
            else:
                training.begin()

            def seal(step: int) -> None:
                training.check("stopped", "sealing", step)
                ckpt.seal(state, step, timeout_s=_SEAL_S)
                training.say("sealed", step=step)

            for step in world.steps(restored + 1, seal=seal):
                training.step(step)
                ckpt.save(state, step)

    train()


# -- under torchrun ---------------------------------------------------------------------------------------------------


def restarted(folder: Path, size_bytes: int, diary: Diary) -> None:
    """Train with ``dcp.save`` to tmpfs after every step, and resume from the newest complete save."""
    dist.init_process_group("gloo")
    diary.write("entered", size=dist.get_world_size())
    training = Training(init_device_mesh("cpu", (dist.get_world_size(),)), size_bytes, diary)
    training.say("built")
    whole = sorted((path.parent for path in folder.glob("dcp/*/.metadata")), key=_step_of)
    first = 0
    if whole:
        first = _step_of(whole[-1]) + 1
        model, optim = get_state_dict(training.model, training.optimizer)
        dcp.load({"model": model, "optim": optim}, checkpoint_id=whole[-1])
        set_state_dict(training.model, training.optimizer, model_state_dict=model, optim_state_dict=optim)
        training.check("loaded", "checked", first - 1)
    else:
        training.begin()
    step = first
    while True:
        training.step(step)
        training.check("stopped", "sealing", step)
        model, optim = get_state_dict(training.model, training.optimizer)
        dcp.save({"model": model, "optim": optim}, checkpoint_id=folder / "dcp" / str(step))
        if dist.get_rank() == 0:
            shutil.rmtree(folder / "dcp" / str(step - _KEPT), ignore_errors=True)
        training.say("sealed", step=step)
        step += 1


def _step_of(path: Path) -> int:
    return int(path.name)


WAYS: dict[str, Callable[[Path, int, Diary], None]] = {"elastic": elastic, "torchrun": restarted}


def main(way: str, folder: str, size: str) -> None:
    torch.set_num_threads(1)
    diary = Diary(Path(folder) / "diary")
    diary.write("imported", began=began())
    WAYS[way](Path(folder), int(size), diary)


if __name__ == "__main__":
    main(*sys.argv[1:])
