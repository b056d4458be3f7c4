"""A training script with everything: elastic worlds, FSDP2, exact batches, fixed tree, sample cursor.

Each rank appends a JSON line per world and per step to its own file. From these a test checks which samples the job
used and where it resumed. Arguments: the output folder, the number of steps, and ``tree``, ``plain`` or ``loop``
(the tree in :class:`elastic.Loop`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.distributed.fsdp import fully_shard

from elastic import BatchPlan, ElasticDataLoader, ExactGradients, Loop, World, recoverable, run, seeded
from elastic.reshard.state_checksum import state_checksum
from tieredckpt import Checkpointer

SEED, SAMPLES, BATCH, MICROBATCH, WIDTH = 7, 101, 16, 2, 24


class NumberDataset:
    """A dataset: each sample depends on its index alone."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.Generator().manual_seed(index)
        x = torch.randn(WIDTH, generator=made)
        return x, torch.stack([x.sum(), x.square().mean()])


def build_model(world: World) -> torch.nn.Module:
    torch.manual_seed(SEED)
    first, last = torch.nn.Linear(WIDTH, 50), torch.nn.Linear(50, 2)
    model = torch.nn.Sequential(first, torch.nn.LayerNorm(50), torch.nn.GELU(), torch.nn.Dropout(0.1), last)
    mesh = world.mesh()
    for layer in (first, last):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class RankLog:
    """This rank's log of JSON lines."""

    def __init__(self, folder: Path) -> None:
        self._file: TextIO = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def write(self, what: str, **values: Any) -> None:
        line = {"what": what, "at": time.time(), "pid": os.getpid(), **values}
        self._file.write(json.dumps(line) + "\n")


def main(folder: str, total: int, how: str) -> None:
    diary = RankLog(Path(folder))
    limit = Path(folder) / "limit"

    @recoverable
    def train(world: World) -> None:
        model = build_model(world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        plan = BatchPlan(BATCH, world.size, microbatch=MICROBATCH).for_rank(world.rank)
        sums = ExactGradients(model, tree=how == "tree")
        place = {"epoch": world.epoch, "rank": world.rank, "size": world.size}
        loader = ElasticDataLoader(NumberDataset(), plan, seed=SEED)
        state = {"model": model, "optim": optimizer, "data": loader}
        with Checkpointer("tiered://whole", every=1) as ckpt, loader:
            first = ckpt.restore(state) + 1
            found = ckpt.last_restore
            diary.write("world", first=first, tiers=found.bytes_by_tier if found else {}, reason=world.reason, **place)
            for step in world.steps(first, total, checkpoint=(ckpt, state)):
                while step >= int(limit.read_text()):  # the test sets the limit, so that its next action hits this step
                    time.sleep(0.01)
                work = next(iter(loader))
                mine = [batch.data for batch in work]
                for turn in sums.step(plan):
                    x, y = mine[turn.position]
                    with seeded(SEED, step, turn.id):
                        turn.backward((model(x) - y).square().sum(), weight=len(x))
                result = sums.finish(clip=1.0)
                optimizer.step()
                work.commit()
                ckpt.save(state, step)
                diary.write(
                    "step",
                    step=step,
                    loss=result.loss.hex(),
                    norm=(result.norm or 0.0).hex(),
                    samples=work.indices().tolist(),
                    sum=f"{state_checksum({'model': model, 'optim': optimizer}).all_reduced().tensors_only.value:016x}",
                    **place,
                )

    def train_with_loop(world: World) -> None:
        model = build_model(world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        place = {"epoch": world.epoch, "rank": world.rank, "size": world.size}
        options = {"global_batch": BATCH, "microbatch": MICROBATCH, "clip": 1.0, "seed": SEED}
        loop = Loop(world, model, optimizer, NumberDataset(), checkpoint="tiered://whole", every=1, **options)
        found = loop.checkpointer.last_restore
        diary.write("world", first=loop.first, tiers=found.bytes_by_tier if found else {}, reason=world.reason, **place)
        for step in loop.until(total):
            while step.number >= int(limit.read_text()):
                time.sleep(0.01)
            for x, y in step:
                step.backward((model(x) - y).square().sum(), weight=len(x))
            diary.write(
                "step",
                step=step.number,
                loss=step.loss.hex(),
                norm=(step.finish().norm or 0.0).hex(),
                samples=step.data.indices().tolist(),
                sum=f"{state_checksum({'model': model, 'optim': optimizer}).all_reduced().tensors_only.value:016x}",
                **place,
            )

    print(run(train_with_loop) if how == "loop" else train(), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
