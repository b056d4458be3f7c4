"""One rank of the demo: a small transformer under FSDP2.

It trains until the scenario names the last step, and writes its events to its own file, one JSON line each.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from elastic.batch_scaling.batch_plan import BatchPlan
from elastic.demo.scenario import ELASTIC_DEMO_JOB, LAST_STEP_FILE
from elastic.gradients.exact_gradients import ExactGradients
from elastic.reshard.state_checksum import state_checksum
from elastic.samples.data_loader import ElasticDataLoader
from elastic.samples.rng import seeded
from elastic.settings import is_supervised
from elastic.workers.train_loop import run
from elastic.workers.world_handle import World
from tieredckpt import Checkpointer
from tieredckpt.demo.training_script import CONTEXT, Transformer, demo_corpus
from tieredckpt.tensors.device import accelerator

ELASTIC_DEMO_BATCH, ELASTIC_DEMO_MICROBATCH, SEED = 8, 2, 0
_READ_EVERY = 5
"""Steps between two reads of the file.

All ranks read it after the same steps, and it names a step that none has begun.
"""


class TextDataset(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pieces of a text that every Python installation has."""

    def __init__(self) -> None:
        self._text = demo_corpus()

    def __len__(self) -> int:
        return len(self._text) - CONTEXT - 1

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = self._text[index : index + CONTEXT + 1]
        return row[:-1], row[1:]


class DemoEventWriter:
    """Writer of this process's event lines."""

    def __init__(self, folder: Path) -> None:
        self._out = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def __call__(self, event: str, **values: Any) -> None:
        self._out.write(json.dumps({"event": event, "at": time.time(), "pid": os.getpid(), **values}) + "\n")


class DemoTraining:
    """Model, optimizer and samples of one process: for one world, or for a single process without a world."""

    def __init__(self, world: World | None = None) -> None:
        torch.manual_seed(SEED)
        self._device = world.device if world is not None else _only_device()
        self.model = Transformer().to(self._device)
        if world is not None:
            mesh = world.mesh()
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        size, rank = (world.size, world.rank) if world is not None else (1, 0)
        self._plan = BatchPlan(ELASTIC_DEMO_BATCH, size, microbatch=ELASTIC_DEMO_MICROBATCH).for_rank(rank)
        self._gradients = ExactGradients(self.model, tree=True)
        self.data = ElasticDataLoader(TextDataset(), self._plan, seed=SEED)
        self.state = {"model": self.model, "optim": self.optimizer, "data": self.data}

    def step(self, step: int) -> float:
        """Do one step, and return the loss of the whole batch, which is the same on every rank of any world."""
        work = next(iter(self.data))
        mine = [batch.data for batch in work]
        for microbatch in self._gradients.step(self._plan):
            letters, following = (one.to(self._device) for one in mine[microbatch.position])
            with seeded(SEED, step, microbatch.id):
                found = self.model(letters).flatten(0, 1)
                loss = nn.functional.cross_entropy(found, following.flatten(), reduction="sum")
                microbatch.backward(loss, weight=following.numel())
        total = self._gradients.finish(clip=1.0)
        self.optimizer.step()
        work.commit()
        return total.loss

    def checksum(self) -> str:
        """Return the checksum of all parameters and moments, independent of the sharding."""
        return f"{state_checksum({'model': self.model, 'optim': self.optimizer}).all_reduced().tensors_only.value:016x}"


def train_fsdp_demo(world: World, folder: Path, write_event: DemoEventWriter) -> None:
    epoch = (
        world.epoch if is_supervised() else world.epoch + world.restarts
    )  # other launchers number the worlds of new processes from 0
    place = {"epoch": epoch, "rank": world.rank, "size": world.size, "node": os.environ["ELASTIC_NODE"]}
    training = DemoTraining(world)
    state = training.state
    with Checkpointer(f"tiered://{ELASTIC_DEMO_JOB}", every=1, durable_every=50) as ckpt, training.data:
        first = ckpt.restore(state) + 1
        write_event("world", first=first, tiers=_tiers(ckpt), ppid=os.getppid(), **place)
        last = _read_last_step(folder)
        for step in world.steps(first, checkpoint=(ckpt, state)):
            loss = training.step(step)
            world.report(loss=loss, tokens=ELASTIC_DEMO_BATCH * CONTEXT, samples=ELASTIC_DEMO_BATCH)
            ckpt.save(state, step)
            write_event("step", step=step, loss=loss.hex(), **place)
            if step % _READ_EVERY == 0:
                last = _read_last_step(folder)
            if step == last:
                ckpt.seal(state, step, durable=True)
                write_event("sum", step=step, sum=training.checksum(), **place)
                break


def _tiers(ckpt: Checkpointer) -> dict[str, int]:
    return {} if ckpt.last_restore is None else dict(ckpt.last_restore.bytes_by_tier)


def _read_last_step(folder: Path) -> int | None:
    try:
        return int((folder / LAST_STEP_FILE).read_text())
    except FileNotFoundError:
        return None


def train_reference(steps: int, write_event: DemoEventWriter) -> None:
    """Train on one process without worlds and checkpoints, then restore from the bucket alone."""
    training = DemoTraining()
    with training.data:
        for step in range(steps):
            write_event("step", step=step, loss=training.step(step).hex())
    write_event("sum", step=steps - 1, sum=training.checksum())
    training = DemoTraining()
    with Checkpointer(f"tiered://{ELASTIC_DEMO_JOB}") as ckpt, training.data:
        step = ckpt.restore(training.state)
        write_event("bucket", step=step, sum=training.checksum(), tiers=_tiers(ckpt))


def _only_device() -> torch.device:
    device = accelerator()
    return device.current() if device.device_count() else torch.device("cpu")


def _share_device() -> None:
    """Let the ranks of all simulated nodes use one GPU, with deterministic kernels."""
    if not accelerator().device_count():
        return
    os.environ["NCCL_HOSTID"] = f"rank-{os.getpid()}"  # NCCL rejects two ranks of one host on one device
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_IB_DISABLE", "1")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    _share_device()
    write_event = DemoEventWriter(folder)
    if len(sys.argv) > 2:
        train_reference(int(sys.argv[2]), write_event)
    else:
        run(lambda world: train_fsdp_demo(world, folder, write_event))


if __name__ == "__main__":
    main()
