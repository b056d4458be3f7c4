"""Retries of reads end when their store is interrupted or closed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from peerstore.rate_limiter import RateLimiter
from tests.support.local_nodes import wait_until
from tieredckpt.durable.filesystem_backends import DirectoryBackend
from tieredckpt.durable.object_backend import RetryPolicy
from tieredckpt.durable.object_store import StopSignal, UploadCancelledError
from tieredckpt.durable.retrying_store import MAX_GAP_BYTES, RetryingStore

FAR = MAX_GAP_BYTES + 2
RANGES = {"one request": [(0, 1)], "several requests": [(0, 1), (FAR, FAR + 1)]}


class AwayBackend(DirectoryBackend):
    """A directory whose objects cannot be read."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.was_read = threading.Event()

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        self.was_read.set()
        raise ConnectionResetError(f"{name} [{start}, {stop})")


def open_store(backend: DirectoryBackend, *, fetch_threads: int = 2) -> RetryingStore:
    return RetryingStore(
        backend,
        retry=RetryPolicy(retry_s=20.0),
        bandwidth=RateLimiter(0),
        fetch_bytes=1 << 20,
        fetch_threads=fetch_threads,
    )


@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
@pytest.mark.parametrize("end", [RetryingStore.interrupt, RetryingStore.close], ids=["interrupt", "close"])
def test_get_ranges_ends_its_retries_when_the_store_ends(
    tmp_path: Path, ranges: list[tuple[int, int]], end: Callable[[RetryingStore], None]
):
    backend = AwayBackend(tmp_path)
    store = open_store(backend)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(store.get_ranges, "job/x", ranges)
        assert backend.was_read.wait(30)
        end(store)
        with pytest.raises(UploadCancelledError):
            reading.result(60)
    store.close()


def test_get_ranges_after_an_interrupt_does_not_retry(tmp_path: Path):
    store = open_store(AwayBackend(tmp_path))
    store.interrupt()
    with pytest.raises(UploadCancelledError):
        store.get_ranges("job/x", RANGES["several requests"])
    store.close()


def test_get_ranges_of_a_closed_store_is_cancelled(tmp_path: Path):
    store = open_store(AwayBackend(tmp_path))
    store.close()
    with pytest.raises(UploadCancelledError):
        store.get_ranges("job/x", RANGES["several requests"])


class SlowBackend(DirectoryBackend):
    """A directory whose reads end when ``may_end`` is set."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.was_read, self.may_end = threading.Event(), threading.Event()

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        self.was_read.set()
        assert self.may_end.wait(60)
        return bytes(stop - start)


def is_shut_down(pool: ThreadPoolExecutor) -> bool:
    with pool._shutdown_lock:
        return pool._shutdown


def test_request_that_had_not_begun_when_the_store_closed_is_cancelled(tmp_path: Path):
    backend = SlowBackend(tmp_path)
    store = open_store(backend, fetch_threads=1)
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(store.get_ranges, "job/x", RANGES["several requests"])
        assert backend.was_read.wait(30)
        closing = pool.submit(store.close)
        wait_until(lambda: is_shut_down(store._readers))
        backend.may_end.set()
        with pytest.raises(UploadCancelledError):
            reading.result(60)
        closing.result(60)


def test_get_ranges_leaves_nothing_behind_in_the_store(tmp_path: Path):
    backend = DirectoryBackend(tmp_path)
    backend.put("job/x", bytes(FAR + 1), create_only=False)
    store = open_store(backend)
    for _ in range(3):
        assert [bytes(one) for one in store.get_ranges("job/x", RANGES["several requests"])] == [b"\0", b"\0"]
    assert len(store._stop._children) == 0
    store.close()


def test_parent_keeps_no_child_that_nothing_uses():
    stop = StopSignal()
    child = stop.child()
    stop.child()
    assert list(stop._children) == [child]
