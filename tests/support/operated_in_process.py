"""A rank of an in-process agent that uses the agent package's own client.

Its last argument is a folder: ``crash`` there makes rank 1 report a fault once, ``finish`` ends all ranks.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from pathlib import Path


def main(folder: Path) -> None:
    from hyperpod_elastic_agent.ipc import TrainingManager

    client = TrainingManager().InProcessRestart
    _, told = client.hyperpod_wait_rank_info()
    (folder / f"told-{told['worker_envs']['RANK']}-{os.getpid()}").touch()
    faults: queue.SimpleQueue[object] = queue.SimpleQueue()

    def listen() -> None:
        while True:
            faults.put(client.hyperpod_wait_fault())

    threading.Thread(target=listen, daemon=True).start()
    while True:
        _, begun = client.hyperpod_barrier()
        place = begun["worker_envs"]
        client.hyperpod_past_rcb_barrier()
        rank, count = int(place["RANK"]), int(place["JOB_RESTART_COUNT"])
        (folder / f"in-{count}-{place['WORLD_SIZE']}-{rank}").write_text(str(os.getpid()))
        while faults.empty():
            if (folder / "finish").exists():
                os._exit(0)
            if rank == 1 and (folder / "crash").exists():
                (folder / "crash").unlink()
                client.hyperpod_send_fault(rank, reason="Broken", message="the test says so")
            time.sleep(0.02)
        faults.get()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
