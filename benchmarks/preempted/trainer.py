"""The job's training script: a small language model on a device that is simulated by sleeping.

A microbatch takes ``DEVICE_S`` for any number of ranks on this machine's cores: the rank computes forward and backward,
then sleeps for the rest. Each rank records the worlds it enters and its steps, and logs every sample. Arguments: the
folder of the records, the number of steps (0: until the job is stopped), seconds per microbatch.
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

from elastic import BatchPlan, ElasticDataLoader, ExactGradients, World, recoverable, seeded
from elastic.samples.sample_audit import SampleLog
from tieredckpt import Checkpointer

SEED, SAMPLES, BATCH, MICROBATCH = 11, 4096, 24, 2
"""Twelve microbatches divide evenly among 1, 2, 3 or 4 ranks."""
LENGTH, WORDS, WIDTH = 128, 256, 64
DEVICE_S = 0.1
TOKENS = BATCH * LENGTH
"""Tokens per step, for any world size."""


class Sentences:
    """Sentences in which nine of ten words follow from the previous word and the tenth is random."""

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
    """This process's records and sample log."""

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
        plan = BatchPlan(BATCH, world.size, microbatch=MICROBATCH).for_rank(world.rank)
        sums = ExactGradients(model, tree=True)
        loader = ElasticDataLoader(Sentences(), plan, seed=SEED)
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
