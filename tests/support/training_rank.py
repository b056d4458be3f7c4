"""A training rank under ``elastic run``: ``python training_rank.py FOLDER``.

It reports events as JSON lines. The file ``finish`` in FOLDER ends the training after the next step.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elastic.workers.train_loop import run
from tests.support.launched import build_state
from tieredckpt import Checkpointer


def report(what: str, **more: object) -> None:
    os.write(1, f"{json.dumps({'what': what, 'pid': os.getpid(), **more})}\n".encode())


def train(world: Any) -> int:
    model, optimizer, state = build_state()
    with Checkpointer("tiered://trained") as ckpt:
        restored = step = ckpt.restore(state)
        tiers = sorted(ckpt.last_restore.bytes_by_tier) if ckpt.last_restore is not None else []
        report("in", epoch=world.epoch, rank=world.rank, size=world.size, restored=restored, tiers=tiers)
        for step in world.steps(restored + 1, checkpoint=(ckpt, state)):
            loss = model(torch.full((2, 16), float(step % 8))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.save(state, step)
            report("step", epoch=world.epoch, rank=world.rank, step=step)
            ended = torch.tensor(float((Path(sys.argv[1]) / "finish").exists()))
            dist.all_reduce(ended, op=dist.ReduceOp.MAX)
            if ended:
                break
        return step


if __name__ == "__main__":
    torch.set_num_threads(1)
    end = run(train)
    report("ended", how=end.outcome.value, worlds=end.worlds)
