"""Pool of gloo ranks as real processes, shared by tests because importing torch is slow."""

from __future__ import annotations

import contextlib
import os
import tempfile
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import pytest

from tests.support.zygote import RunningProcess, Zygote, has_ended

_TIMEOUT_S = 200.0
_OURS = ("TIEREDCKPT_", "AWS_")
"""Prefixes of environment variables that tests set for their ranks."""
_MAX_THREADS = 12
"""Threads above which a rank is replaced.

Torch's caches keep old meshes, and each of their gloo threads wakes 100 times a second.
"""


def _worker(_say: Callable[[str], None], address: str) -> None:
    pipe = Client(address)
    plain = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        if task is None:
            return
        function, rank, world, store, environ, args = task
        os.environ.clear()  # also removes variables of an earlier test
        os.environ.update(plain | environ)
        try:
            pipe.send((True, _run(function, rank, world, store, args)))
        except BaseException as error:
            pipe.send((False, f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}"))


def _run(function: Callable[..., Any], rank: int, world: int, store: str, args: Sequence[Any]) -> Any:
    import torch.distributed as dist

    from tieredckpt.session.session import close_sessions

    if world:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    try:
        return function(*args)
    finally:
        close_sessions()
        if dist.is_initialized():
            dist.destroy_process_group()


class RankPool:
    """Processes that run module-level functions as ranks, forked by ``zygote`` or its own zygote."""

    def __init__(self, zygote: Zygote | None = None) -> None:
        self._zygote, self._owned = zygote, None if zygote is not None else Zygote()
        self._workers: list[tuple[RunningProcess, Connection]] = []

    def run(
        self, world: int, function: Callable[..., Any], *args: Any, environ: dict[str, str] | None = None
    ) -> list[Any]:
        """Run ``function(*args)`` on ``world`` ranks; return all results or fail with all tracebacks."""
        self._grow(world)
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / uuid.uuid4().hex)
            inherited = {k: v for k, v in os.environ.items() if k.startswith(_OURS)} | (environ or {})
            for rank in range(world):
                self._workers[rank][1].send((function, rank, world, store, inherited, args))
            answers = [self._receive_result(rank) for rank in range(world)]
        failed = [text for ok, text in answers if not ok]
        if failed:
            raise AssertionError("\n".join(failed))
        return [value for _, value in answers]

    def _receive_result(self, rank: int) -> tuple[bool, Any]:
        process, pipe = self._workers[rank]
        try:
            if pipe.poll(_TIMEOUT_S):
                result = pipe.recv()
                with contextlib.suppress(OSError):  # it has ended
                    if len(os.listdir(f"/proc/{process.pid}/task")) > _MAX_THREADS:  # noqa: PTH208 - names do
                        pipe.send(None)
                        has_ended(process.pid, _TIMEOUT_S)
                return result
            _end(process)
            return False, f"rank {rank} did not answer within {_TIMEOUT_S} s"
        except EOFError:
            return False, f"rank {rank} died with status {_end(process)}"

    def _grow(self, count: int) -> None:
        """Start missing workers. Live ones keep their rank, as DTensor caches the rank of a process."""
        for rank, (process, pipe) in enumerate(self._workers):
            if process.has_ended:
                _end(process)
                pipe.close()
                self._workers[rank] = self._start_worker()
        while len(self._workers) < count:
            self._workers.append(self._start_worker())

    def _start_worker(self) -> tuple[RunningProcess, Connection]:
        zygote = self._zygote or self._owned
        with Listener() as listener:
            process = zygote.start(_worker, listener.address)
            return process, listener.accept()

    def close(self) -> None:
        for process, pipe in self._workers:
            with contextlib.suppress(OSError):
                pipe.send(None)
            pipe.close()
            _end(process, patience_s=10)
        self._workers.clear()
        if self._owned is not None:
            self._owned.close()


def _end(process: RunningProcess, patience_s: float = 0.0) -> int:
    """Wait for the process to end, else kill it; return its status."""
    has_ended(process.pid, patience_s)
    process.kill_if_alive()
    with contextlib.suppress(AssertionError):
        return process.wait().status
    return 1


@pytest.fixture(scope="session")
def ranks(zygote: Zygote) -> Iterator[RankPool]:
    pool = RankPool(zygote)
    yield pool
    pool.close()
