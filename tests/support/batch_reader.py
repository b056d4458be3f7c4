"""A trainer that only reads batches, for processes that tests kill."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic.batch_cache import BatchCache, PrefetchIterator
from elastic.batch_cache.prefetch import PrepareWorker

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


def prepare_or_raise(index: int) -> int:
    if index == 3:
        raise ZeroDivisionError("three")
    return index


def prepare_or_exit(index: int) -> int:
    if index == 3:
        os._exit(9)
    return index


class UnpicklableError(Exception):
    """An exception that cannot be unpickled."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


def raise_unpicklable(index: int) -> None:
    raise UnpicklableError("quite", "strange")


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


def make_tensors(index: int) -> dict[str, Any]:
    import torch

    return {"ids": torch.arange(10) + index, "pid": os.getpid()}


def read_tensors(say: Callable[[str], None], directory: Path, end: int, max_bytes: int) -> dict[str, Any]:
    """Read tensors prepared by a worker, in a cache smaller than all batches need."""
    with BatchCache("job", fingerprint=FINGERPRINT, directory=directory, max_bytes=max_bytes) as cache:
        cache.mark_committed(0)
        with PrefetchIterator(cache, range(end), make_tensors, workers=1, start_method="fork") as batches:
            found = list(batches)
        assert os.getpid() not in {batch["pid"] for batch in found}
        assert cache.counts.prepared == 0
        return {"first": [batch["ids"].add_(1)[0].item() for batch in found], "mapped": cache.counts.hits}


def work_beside_another_child(say: Callable[[str], None], directory: Path) -> None:
    """Fork a worker and an unrelated child that inherits the worker's pipes; report both pids and hang."""
    with open_cache(directory) as cache:
        worker = PrepareWorker(cache, batch_of, "fork")
        worker.prepare(0, 0)
        (pid,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        other = os.fork()
        if not other:
            signal.pause()
        say(f"{pid} {other}")
        signal.pause()


def read_ahead(
    say: Callable[[str], None], directory: Path, log: Path, end: int, workers: int, hang_after: int = -1
) -> list[str]:
    """Read the batches, prefetching six; return the child pids that remain at the end."""
    with (
        open_cache(directory) as cache,
        PrefetchIterator(
            cache, range(end), LoggedPrepare(log), ahead=6, workers=workers, start_method="fork"
        ) as batches,
    ):
        for index, batch in enumerate(batches):
            assert batch == batch_of(index)
            if index == hang_after:
                say("read")
                signal.pause()
        return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
