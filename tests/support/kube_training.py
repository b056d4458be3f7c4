"""Training of a job on the test cluster: one all-reduce a step, resuming where the last world stopped.

The test controls it by files in the folder given as argument. ``crash-RANK`` exits that rank with status 9, once.
``finish`` ends the job at the next step. Every rank writes a line when it begins and one when it stops.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

_FINISH, _STOP = 1.0, 1000.0


def main(folder: Path) -> None:
    asked: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: asked.append(number))
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    kept = folder / "step"
    step = int(kept.read_text()) if kept.exists() else 0
    _note(folder, rank, "begins", step, world)
    while True:
        crash = folder / f"crash-{rank}"
        if crash.exists():
            crash.unlink()
            os._exit(9)
        said = torch.tensor([1.0, _STOP * bool(asked), _FINISH * (folder / "finish").exists()])
        dist.all_reduce(said)
        assert said[0].item() == world
        step += 1
        if rank == 0:
            kept.with_suffix(".new").write_text(str(step))
            kept.with_suffix(".new").replace(kept)
        if said[1] or said[2]:
            break
        time.sleep(0.05)
    _note(folder, rank, "stops", step, world)
    dist.destroy_process_group()


def _note(folder: Path, rank: int, what: str, step: int, world: int) -> None:
    line = {
        "what": what, "rank": rank, "step": step, "world": world, "pid": os.getpid(),
        "restart": int(os.environ["JOB_RESTART_COUNT"]), "pod": os.environ["POD_NAME"],
    }  # fmt: skip
    with (folder / "notes").open("a") as notes:
        notes.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
