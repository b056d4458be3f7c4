"""The batch cache compared with a ``DataLoader``: ``python -m benchmarks.prepared``.

A job reads batches that are tokenized in Python. It is killed and resumes from a checkpoint a few steps back. Every
contender runs in a new process in every round. All return the same batches, which are compared bit for bit. A step only
sleeps, because an accelerator's step leaves the cores free to prepare batches.

- *first*: seconds from creating the loader, after importing torch, to its first batch.
- *waited*: seconds that training waited for its batches after the restart, in total.
- *step*: seconds to receive a prepared batch and sum its tensors once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import facts
from peerstore.sizes_and_durations import show_seconds, show_size

_ROOT = Path(__file__).parent.parent
_PREFIX = "elastic-bench-"


@dataclasses.dataclass(frozen=True)
class Run:
    """Task of one process."""

    kind: str
    """``loader`` or ``cache``."""
    workers: int = 0
    start_method: str = "fork"
    directory: str = ""
    first: int = 0
    count: int = 32
    step_s: float = 0.02
    die: bool = False
    verify: bool = True
    batch_size: int = 4
    length: int = 2048
    ahead: int = 16


@contextlib.contextmanager
def _batches(run: Run) -> Iterator[Iterator[Any]]:
    """Yield an iterator over the batches from number ``first``; its setup and use are timed."""
    from benchmarks.tokenised import PackedRows, loader
    from elastic.batch_cache import BatchCache
    from elastic.batch_scaling.batch_plan import BatchPlan
    from elastic.samples import DataPosition, ElasticDataLoader

    total = run.first + run.count + run.ahead
    if run.kind == "loader":
        yield iter(loader(total, run.batch_size, run.length, first=run.first, workers=run.workers))
        return
    plan = BatchPlan(run.batch_size, 1, microbatch=run.batch_size).for_rank(0)
    options: dict[str, Any] = {}
    if run.workers:
        ahead = max(1, run.ahead // run.workers)
        options = {"prefetch_factor": ahead, "multiprocessing_context": run.start_method}
    with (
        BatchCache("bench", fingerprint="tokenised", directory=run.directory, verify=run.verify) as cache,
        ElasticDataLoader(
            PackedRows(total * run.batch_size, run.length),
            plan,
            seed=0,
            shuffle="none",
            epochs=1,
            seed_samples=False,
            num_workers=run.workers,
            cache=cache,
            **options,
        ) as data,
    ):
        data.set_share(plan, DataPosition(run.first, run.first * run.batch_size))
        yield _microbatches(data)


def _microbatches(data: Any) -> Iterator[Any]:
    for step in data:
        for microbatch in step:
            yield microbatch.data
        step.commit()


def trainer(run: Run) -> dict[str, Any]:
    """Run one job and return its times, without imports and tokenizer merges."""
    import xxhash

    import elastic.batch_cache
    import elastic.samples.data_loader  # noqa: F401
    from benchmarks import tokenised

    tokenised.merges()
    digests, waits = [], []
    began = time.perf_counter()
    with _batches(run) as batches:
        for number in range(run.count):
            asked = time.perf_counter()
            batch = next(batches)
            total = sum(int(tensor.sum()) for tensor in batch.values())
            waits.append(time.perf_counter() - asked)
            if number == 0:
                first = time.perf_counter() - began
            time.sleep(run.step_s)
            digests.append(xxhash.xxh3_64_hexdigest(b"".join(bytes(t.numpy()) for t in batch.values())) + f"-{total}")
        if run.die:
            os.kill(os.getpid(), signal.SIGKILL)
    size = sum(tensor.nbytes for tensor in batch.values())
    waits[0] = first
    return {
        "first": first,
        "waits": waits,
        "digests": digests,
        "batch_bytes": size,
    }


def _process(run: Run) -> dict[str, Any]:
    """Run in a new process and wait until it and its workers have closed their output."""
    command = [sys.executable, "-m", "benchmarks.prepared", "--trainer", json.dumps(dataclasses.asdict(run))]
    ran = subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, timeout=600)
    if ran.returncode != (-signal.SIGKILL if run.die else 0):
        raise RuntimeError(f"{run} ended with {ran.returncode}")
    return {} if run.die else json.loads(ran.stdout)


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix=_PREFIX, dir="/dev/shm")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


LOADERS = {"DataLoader, 2 workers": 2, "DataLoader, no workers": 0}
CACHES = {
    "cache, 2 workers (fork)": (2, "fork"),
    "cache, 2 workers (spawn)": (2, "spawn"),
    "cache, no workers": (0, ""),
}
OURS = next(iter(CACHES))


def restart(asked: argparse.Namespace, *, dead: bool) -> dict[str, dict[str, Any]]:
    """Measure one round of a start.

    With ``dead``, an earlier job filled the cache and was killed ``--back`` steps after its checkpoint.
    """
    first = asked.back if dead else 0
    shape = {"batch_size": asked.batch_size, "length": asked.length, "step_s": asked.step_ms / 1e3}
    found = {
        name: _process(Run("loader", workers, first=first, count=asked.count, **shape))
        for name, workers in LOADERS.items()
    }
    for name, (workers, method) in CACHES.items():
        with _folder() as folder:
            run = Run("cache", workers, method or "fork", folder, first, asked.count, **shape)
            if dead:
                _process(dataclasses.replace(run, first=0, count=2 * asked.back, start_method="fork", die=True))
            found[name] = _process(run)
    return found


def steady(asked: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measure one round in which every batch is ready before training needs it."""
    shape = {"batch_size": asked.batch_size, "length": asked.length, "count": asked.count}
    slow = {**shape, "step_s": asked.slow_step_ms / 1e3}
    found = {"DataLoader, 2 workers": _process(Run("loader", 2, **slow))}
    with _folder() as folder:
        _process(Run("cache", 2, "fork", folder, **{**shape, "step_s": 0.0}))
        found["cache, compared with its checksum"] = _process(Run("cache", 0, directory=folder, **slow))
        found["cache, not compared"] = _process(Run("cache", 0, directory=folder, verify=False, **slow))
    return found


def same(found: dict[str, dict[str, Any]]) -> bool:
    return len({tuple(one["digests"]) for one in found.values()}) == 1


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    machine = facts()
    scenes: dict[str, list[dict[str, dict[str, Any]]]] = {"after a death": [], "from nothing": [], "ready": []}
    for number in range(asked.rounds):
        print(f"round {number + 1} of {asked.rounds} ...", file=sys.stderr, flush=True)
        scenes["after a death"].append(restart(asked, dead=True))
        scenes["from nothing"].append(restart(asked, dead=False))
        scenes["ready"].append(steady(asked))
    rounds = [one for scene in scenes.values() for one in scene]
    sizes = {one["batch_bytes"] for found in rounds for one in found.values()}
    equal = all(map(same, rounds))
    for one in (one for found in rounds for one in found.values()):
        del one["digests"]
    return {
        "machine": machine,
        "parameters": {key: value for key, value in vars(asked).items() if key not in ("out", "trainer")},
        "batch_bytes": max(sizes),
        "equal": equal,
        "scenes": scenes,
    }


_VALUES = {
    "first": lambda one: one["first"],
    "waited": lambda one: sum(one["waits"]),
    "step": lambda one: statistics.median(one["waits"][len(one["waits"]) // 4 :]),
}


def rows(raw: dict[str, Any]) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield scene, quantity, contender, median, and median ratio to ours within each round."""
    for scene, rounds in raw["scenes"].items():
        ours = OURS if OURS in rounds[0] else "cache, compared with its checksum"
        for what in ("step",) if scene == "ready" else ("first", "waited"):
            for name in rounds[0]:
                values = [_VALUES[what](one[name]) for one in rounds]
                ratio = statistics.median(
                    value / _VALUES[what](one[ours]) for value, one in zip(values, rounds, strict=True)
                )
                spread = f"{show_seconds(min(values))} - {show_seconds(max(values))}"
                yield scene, what, name, f"{show_seconds(statistics.median(values))} ({spread})", f"{ratio:.2f}"


def show(raw: dict[str, Any]) -> None:
    table = Table("", "", "", "median (least - most)", "x ours", title=f"batches of {show_size(raw['batch_bytes'])}")
    for cells in rows(raw):
        table.add_row(*cells)
    Console(width=140).print(table)
    print("all batches are identical, bit for bit" if raw["equal"] else "FAILED: batches differ")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prepared", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=32, help="number of batches to read (default: 32)")
    parser.add_argument("--back", type=int, default=8, help="steps between the checkpoint and the kill (default: 8)")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument(
        "--slow-step-ms",
        type=float,
        default=200.0,
        help="step time that leaves every batch ready in advance (default: 200)",
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trainer", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.trainer:
        os.environ["OMP_NUM_THREADS"] = "1"
        print(json.dumps(trainer(Run(**json.loads(asked.trainer)))))
        return 0
    raw = measure(asked)
    if asked.out:
        asked.out.write_text(json.dumps(raw, indent=1) + "\n")
    show(raw)
    return 0 if raw["equal"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
