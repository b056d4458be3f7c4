"""Training of a job with in-process agents, which restart it without new processes.

The file ``raise-RANK`` in its folder makes that rank raise once in the middle of a step; ``finish`` ends the job.
Otherwise the training is like :mod:`tests.support.kube_training`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def _train(world: Any, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    kept = folder / "step"
    first = torch.tensor([int(kept.read_text()) if kept.exists() else 0])
    dist.broadcast(first, 0)
    line = {
        "what": "begins", "rank": world.rank, "step": int(first), "world": world.size, "pid": os.getpid(),
        "restart": world.restarts, "pod": os.environ["POD_NAME"],
    }  # fmt: skip
    with (folder / "notes").open("a") as notes:
        notes.write(json.dumps(line) + "\n")
    for step in world.steps(int(first)):
        broken = folder / f"raise-{world.rank}"
        if broken.exists():
            broken.unlink()
            raise ZeroDivisionError("in the middle of a step")
        said = torch.tensor([1.0, float((folder / "finish").exists())])
        dist.all_reduce(said)
        assert said[0].item() == world.size
        if world.rank == 0:
            kept.with_suffix(".new").write_text(str(step + 1))
            kept.with_suffix(".new").replace(kept)
        if said[1]:
            return
        time.sleep(0.05)


def main(folder: Path) -> None:
    import elastic

    elastic.run(lambda world: _train(world, folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
