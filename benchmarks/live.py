"""Cost of ``live``: recording a step boundary, and hydrating from survivors instead of a saved step.

    python -m benchmarks.live --output benchmarks/results/DATE-live.json

``noting`` records a module of small layers with AdamW, a scheduler and a cursor, so that only the number of tensors
matters. It is compared with the state dicts that :mod:`tieredckpt.live.boundary_recorder` makes unnecessary.
``giving`` has two ranks on one node with a replicated state. One rank is new and the other sends its state.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import tempfile
import time
import timeit
import uuid
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.machine import facts
from elastic.workers.in_process_restart import reset_process_state
from tieredckpt import Checkpointer
from tieredckpt.checkpointer.hydrate_from_survivors import hydrate_from_survivors
from tieredckpt.live.boundary_recorder import BoundaryRecorder
from tieredckpt.live.survivor_state import track_step_boundaries
from tieredckpt.session.session import close_sessions
from tieredckpt.settings import load_settings
from tieredckpt.tensors.state_dict import flatten_state, resolve_stateful

WIDTH = 1024


class Cursor:
    def __init__(self):
        self.position = 0

    def state_dict(self):
        return {"place": self.position}

    def load_state_dict(self, state):
        self.position = state["place"]


def state_of(layers: int, width: int):
    model = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _step: 1.0)
    return {"model": model, "optim": optimizer, "rates": rates, "data": Cursor()}


def step_of(state) -> None:
    for one in state["model"].parameters():
        one.grad = torch.zeros_like(one)
    state["optim"].step()


def noting(tensors: int) -> dict[str, float]:
    """Return times in milliseconds.

    A parameter counts as four tensors: itself, two moments and a step count.
    """
    state = state_of(max(1, round(tensors / 8)), 4)
    with track_step_boundaries() as held:
        step_of(state)
        noter, steps = BoundaryRecorder("job", load_settings()), iter(range(1 << 30))
        noter.record(state, next(steps))

        def note() -> None:
            held.optimizer_stepped = True
            noter.record(state, next(steps))

        count = sum(isinstance(one, torch.Tensor) for one in flatten_state(resolve_stateful(state)).values())
        note_s = [timeit.timeit(note, number=5) / 5 for _ in range(20)]
        dicts_s = [timeit.timeit(lambda: flatten_state(resolve_stateful(state)), number=2) / 2 for _ in range(10)]
    return {"tensors": count, "note_ms": 1e3 * min(note_s), "state_dicts_ms": 1e3 * min(dicts_s)}


_worlds = itertools.count()


def _enter(folder: str, rank: int) -> None:
    name = Path(folder) / "worlds" / str(next(_worlds))
    dist.init_process_group("gloo", store=dist.FileStore(str(name), 2), rank=rank, world_size=2)


def _leave() -> None:
    dist.barrier()
    dist.destroy_process_group()
    reset_process_state()


def _rank(rank: int, folder: str, mib: int, rounds: int) -> None:
    torch.set_num_threads(1)
    layers = max(1, round(mib * 2**20 / (3 * 4 * WIDTH * WIDTH)))
    found = []
    with track_step_boundaries() as held:
        for turn in range(2 * rounds):
            lives = turn % 2 == 0
            job, seconds = f"tiered://job-{turn}", {"live": lives}
            _enter(folder, rank)
            state = state_of(layers, WIDTH)
            with Checkpointer(job, every=1000) as ckpt:
                ckpt.restore(state)
                step_of(state)
                ckpt.save(state, 0).wait()
                step_of(state)
                ckpt.save(state, 1)
                dist.barrier()
            held.retain_after_fault()
            if not lives or rank == 1:
                held.clear()
            del state
            _leave()
            _enter(folder, rank)
            dist.barrier()
            began = time.perf_counter()
            hydrate_from_survivors(held, dist.distributed_c10d._get_default_store(), rank, 2)
            seconds["give"] = time.perf_counter() - began
            held.enter_world(turn)
            state = state_of(layers, WIDTH)
            with Checkpointer(job, every=1000) as ckpt:
                dist.barrier()
                began = time.perf_counter()
                step = ckpt.restore(state)
                seconds["restore"] = time.perf_counter() - began
            assert step == (1 if lives else 0), step
            seconds["size_bytes"] = sum(
                one.nbytes for one in flatten_state(resolve_stateful(state)).values() if isinstance(one, torch.Tensor)
            )
            found.append(seconds)
            _leave()
            held.end_world()
    close_sessions()
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))


def giving(mib: int, rounds: int) -> dict[str, object]:
    directory = Path("/dev/shm") / f"live-bench-{uuid.uuid4().hex[:8]}"
    os.environ["TIEREDCKPT_AGENT_DIRECTORY"] = str(directory)
    os.environ["TIEREDCKPT_AGENT_BUDGET"] = "6GiB"
    os.environ["TIEREDCKPT_AGENT_LINGER_S"] = os.environ["TIEREDCKPT_AGENT_JOB_TTL_S"] = "2"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "worlds").mkdir()
        try:
            mp.spawn(_rank, args=(folder, mib, rounds), nprocs=2)
            found = json.loads((Path(folder) / "found.json").read_text())
        finally:
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((directory / "agent.lock").read_text()), signal.SIGTERM)
            shutil.rmtree(directory, ignore_errors=True)
    found = found[2:]  # the first round pays for one-time work of the process

    def median(name: str, *, lives: bool) -> float:
        return statistics.median(one[name] for one in found if one["live"] == lives)

    return {
        "mib": mib,
        "size_bytes": found[0]["size_bytes"],
        "give_s": median("give", lives=True),
        "restore_after_s": median("restore", lives=True),
        "nothing_to_give_s": median("give", lives=False),
        "restore_snapshot_s": median("restore", lives=False),
        "rounds": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, nargs="*", default=[64, 512])
    parser.add_argument("--tensors", type=int, nargs="*", default=[229, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    result = {
        "machine": facts(),
        "noting": [noting(tensors) for tensors in options.tensors],
        "giving": [giving(mib, options.rounds) for mib in options.mib],
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
