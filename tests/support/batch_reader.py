"""A trainer that only reads batches, for processes that tests kill."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic.batch_cache import BatchCache
from elastic.batch_scaling.batch_plan import BatchPlan
from elastic.samples import ElasticDataLoader

FINGERPRINT = "preparing"


def batch_of(index: int) -> dict[str, object]:
    return {"index": index, "data": index.to_bytes(8, "little") * 1000}


class LoggedPrepare:
    """Batch preparation that logs each batch's index and the preparing process's pid."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def __call__(self, index: int) -> dict[str, object]:
        with self._log.open("a") as file:
            file.write(f"{index} {os.getpid()}\n")
        return batch_of(index)


def prepare_counts(log: Path) -> Counter[int]:
    """Return the number of times each batch was prepared."""
    return Counter(int(line.split()[0]) for line in log.read_text().splitlines()) if log.exists() else Counter()


def preparer_pids(log: Path) -> set[int]:
    return {int(line.split()[1]) for line in log.read_text().splitlines()}


def open_cache(directory: Path, *, max_bytes: int = 1 << 30) -> BatchCache:
    return BatchCache("job", fingerprint=FINGERPRINT, directory=directory, max_bytes=max_bytes, required=True)


def file_names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def read_batches(say: Callable[[str], None], directory: Path, log: Path, end: int, max_bytes: int = 1 << 30) -> None:
    """Read all batches up to ``end`` and check them."""
    with open_cache(directory, max_bytes=max_bytes) as cache:
        for index in range(end):
            assert cache.get(index, LoggedPrepare(log)) == batch_of(index)


def hang_in_prepare(say: Callable[[str], None], directory: Path, log: Path) -> None:
    def prepare(index: int) -> None:
        LoggedPrepare(log)(index)
        say("preparing")
        signal.pause()

    with open_cache(directory) as cache:
        cache.get(0, prepare)


class LoggedBatches:
    """Dataset of prepared batches: it logs each read."""

    def __init__(self, log: Path, end: int) -> None:
        self._prepare, self._end = LoggedPrepare(log), end

    def __len__(self) -> int:
        return self._end

    def __getitem__(self, index: int) -> dict[str, object]:
        return self._prepare(index)


def only_batch(samples: list[Any]) -> Any:
    (batch,) = samples
    return batch


def read_ahead(
    say: Callable[[str], None], directory: Path, log: Path, end: int, workers: int, hang_after: int = -1
) -> int:
    """Read the batches with a loader, prefetching six; return the number of its workers at the end."""
    options = {"num_workers": workers, "prefetch_factor": 3, "multiprocessing_context": "fork"} if workers else {}
    with (
        open_cache(directory) as cache,
        ElasticDataLoader(
            LoggedBatches(log, end), BatchPlan(1, 1).for_rank(0), seed=0, shuffle="none", epochs=1, cache=cache,
            collate_fn=only_batch, **options
        ) as loader,
    ):  # fmt: skip
        for index, step in enumerate(loader):
            (microbatch,) = step
            assert microbatch.data == batch_of(index)
            step.commit()
            if index == hang_after:
                say("read")
                signal.pause()
        return len(multiprocessing.active_children())
