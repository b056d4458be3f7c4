"""A rank under a HyperPod agent: all-reduces over gloo until SIGUSR1 or ``finish``.

Its last argument is a folder: ``crash`` there ends rank 1 once, ``finish`` ends all ranks.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

ENDS, LEAVES = 1000.0, 1.0


def main(folder: Path) -> None:
    asked: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: asked.append(number))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size, restarts = dist.get_rank(), dist.get_world_size(), int(os.environ["JOB_RESTART_COUNT"])
    print(f"world rank={rank} size={size} restarts={restarts}", flush=True)
    (folder / f"in-{restarts}-{size}-{rank}").touch()
    while True:
        mine = ENDS if (folder / "finish").exists() else LEAVES if asked else 0.0
        flag = torch.tensor([mine])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if rank == 1 and (folder / "crash").exists():
            (folder / "crash").unlink()
            os._exit(9)
        if flag.item():
            print(f"leaves rank={rank} because {'finished' if flag.item() == ENDS else 'asked'}", flush=True)
            break
        time.sleep(0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
