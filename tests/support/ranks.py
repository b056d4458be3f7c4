"""Several gloo ranks as real processes, kept warm between tests: importing torch costs more than most tests."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import tempfile
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

_TIMEOUT_S = 120.0
_OURS = ("TIEREDCKPT_", "AWS_")
"""Environment that tests set for their ranks."""


def _worker(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    plain = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        if task is None:
            return
        function, rank, world, store, environ, args = task
        os.environ.clear()  # of what an earlier test had set too
        os.environ.update(plain | environ)
        try:
            pipe.send((True, _run(function, rank, world, store, args)))
        except BaseException as error:
            pipe.send((False, f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}"))


def _run(function: Callable[..., Any], rank: int, world: int, store: str, args: Sequence[Any]) -> Any:
    import torch.distributed as dist

    from tieredckpt.session import close_sessions

    if world:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    try:
        return function(*args)
    finally:
        close_sessions()
        if dist.is_initialized():
            dist.destroy_process_group()


class RankPool:
    """Processes that run module-level functions as the ranks of a world."""

    def __init__(self) -> None:
        self._context = mp.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []

    def run(
        self, world: int, function: Callable[..., Any], *args: Any, environ: dict[str, str] | None = None
    ) -> list[Any]:
        """``function(*args)`` on ``world`` ranks; what each returned. Fails with every rank's traceback."""
        self._grow(world)
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / uuid.uuid4().hex)
            inherited = {k: v for k, v in os.environ.items() if k.startswith(_OURS)} | (environ or {})
            for rank in range(world):
                self._workers[rank][1].send((function, rank, world, store, inherited, args))
            answers = [self._answer(rank) for rank in range(world)]
        failed = [text for ok, text in answers if not ok]
        if failed:
            raise AssertionError("\n".join(failed))
        return [value for _, value in answers]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        process, pipe = self._workers[rank]
        try:
            if pipe.poll(_TIMEOUT_S):
                return pipe.recv()
            process.kill()
            process.join()
            return False, f"rank {rank} did not answer within {_TIMEOUT_S} s"
        except EOFError:
            process.join()
            return False, f"rank {rank} died with status {process.exitcode}"

    def _grow(self, count: int) -> None:
        """Who is there keeps its rank: DTensor would take it for the one that it was before."""
        for rank, (process, pipe) in enumerate(self._workers):
            if not process.is_alive():
                process.join()
                pipe.close()
                self._workers[rank] = self._another()
        while len(self._workers) < count:
            self._workers.append(self._another())

    def _another(self) -> tuple[Any, Connection]:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_worker, args=(there,))
        process.start()
        there.close()
        return process, here

    def close(self) -> None:
        for process, pipe in self._workers:
            with contextlib.suppress(OSError):
                pipe.send(None)
            pipe.close()
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._workers.clear()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()
