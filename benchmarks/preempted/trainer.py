"""What the job trains: a small language model, on a device that is simulated by waiting.

Every microbatch takes ``DEVICE_S`` however many ranks share this machine's cores: forward and backward are computed,
and the rest of that time is waited for, as one waits for a device. Each rank writes down what it does: a line when it
enters a world and one for each step, and every sample in a journal. Arguments: where to write, how many steps (0: until
the job is stopped), seconds a microbatch.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from elastic import BatchPlan, ElasticDataLoader, ExactGradients, RankShare, World, recoverable, seeded
from elastic.samples.sample_audit import SampleLog
from tieredckpt import Checkpointer

SEED, SAMPLES, BATCH, MICROBATCH = 11, 4096, 24, 2
"""Twelve microbatches: as many for each rank, be there 1, 2, 3 or 4."""
LENGTH, WORDS, WIDTH = 128, 256, 64
DEVICE_S = 0.1
TOKENS = BATCH * LENGTH
"""Of a step, whatever the world."""


class Sentences:
    """Each word follows from the one before by one rule, but for one in ten, which is any word."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        made = torch.Generator().manual_seed(index)
        words = torch.randint(WORDS, (LENGTH + 1,), generator=made)
        strays = torch.rand(LENGTH + 1, generator=made) < 0.1
        for at in range(1, LENGTH + 1):
            if not strays[at]:
                words[at] = (words[at - 1] * 5 + 3) % WORDS
        return words


def model_of(world: World) -> torch.nn.Module:
    torch.manual_seed(SEED)
    model = torch.nn.Sequential(
        torch.nn.Embedding(WORDS, WIDTH),
        torch.nn.Linear(WIDTH, 2 * WIDTH),
        torch.nn.GELU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(2 * WIDTH, WORDS),
    )
    return fully_shard(model, mesh=world.mesh())


class Records:
    """This process's lines and its journal."""

    def __init__(self, folder: Path) -> None:
        self.journal = SampleLog(folder / f"{os.getpid()}.samples.jsonl")
        self._file = (folder / f"{os.getpid()}.steps.jsonl").open("a", buffering=1)

    def write(self, what: str, world: World, **values: Any) -> None:
        place = {"epoch": world.epoch, "rank": world.rank, "size": world.size}
        self._file.write(json.dumps({"what": what, "at": time.time(), **place, **values}) + "\n")


def main(folder: str, total: int | None, device_s: float) -> None:
    records = Records(Path(folder))

    @recoverable
    def train(world: World) -> None:
        model = model_of(world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        plan = BatchPlan(BATCH, world.size, microbatch=MICROBATCH)
        sums = ExactGradients(model, tree=True)
        loader = ElasticDataLoader(Sentences(), RankShare(plan, world.rank), seed=SEED)
        state = {"model": model, "optim": optimizer, "data": loader}
        with Checkpointer("tiered://preempted", every=1) as ckpt, loader:
            first = ckpt.restore(state) + 1
            found = ckpt.last_restore
            records.write("world", world, first=first, tiers=found.bytes_by_tier if found else {}, reason=world.reason)
            for step in world.steps(first, total, checkpoint=(ckpt, state)):
                work = next(iter(loader))
                mine = [batch.data for batch in work]
                for turn in sums.step(plan):
                    began = time.monotonic()
                    words = mine[turn.position]
                    with seeded(SEED, step, turn.id):
                        guessed = model(words[:, :-1])
                        loss = torch.nn.functional.cross_entropy(
                            guessed.flatten(0, 1), words[:, 1:].flatten(), reduction="sum"
                        )
                        turn.backward(loss, weight=words[:, 1:].numel())
                    time.sleep(max(0.0, began + device_s - time.monotonic()))
                result = sums.finish(clip=1.0)
                records.journal.record(world.epoch, step, work.epochs(), work.indices())
                optimizer.step()
                work.commit()
                ckpt.save(state, step)
                records.write("step", world, step=step, tokens=int(result.weight), loss=result.loss.hex())
                if not math.isfinite(result.loss):
                    raise ArithmeticError(f"step {step}: the loss is {result.loss}")

    print(train(), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]) or None, float(sys.argv[3]))
