"""A rank that trains trivially and prints events: ``python event_log_training.py FOLDER STEPS``.

At the step in FOLDER/limit it waits until a test raises that number.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import elastic
from tieredckpt import Checkpointer


def report(what: str, **more: object) -> None:
    os.write(1, f"{json.dumps({'what': what, 'pid': os.getpid(), **more})}\n".encode())


def main(folder: Path, total: int) -> None:
    @elastic.recoverable
    def train(world: elastic.World) -> None:
        state = {"sum": torch.zeros(8)}
        with Checkpointer("tiered://told") as ckpt:
            first = ckpt.restore(state) + 1
            report("in", epoch=world.epoch, rank=world.rank, size=world.size, first=first)
            for step in world.steps(first, total, checkpoint=(ckpt, state)):
                report("step", epoch=world.epoch, rank=world.rank, step=step)
                while step >= int((folder / "limit").read_text() or 0):  # empty while it is written
                    time.sleep(0.01)
                one = torch.full((8,), float(step))
                dist.all_reduce(one)
                state["sum"] += one
                world.report(loss=one.sum(), tokens=16 * world.size)
                ckpt.save(state, step)

    train()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
