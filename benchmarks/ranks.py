"""Rank processes that are reused between scenes, because importing torch takes seconds."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import tempfile
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_TIMEOUT_S = 1800.0


class RankFailedError(RuntimeError):
    """A rank raised or died; the message has its traceback."""


class Ranks:
    def __init__(self) -> None:
        self._context = mp.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``function(rank, *args)`` on ``world`` ranks and return the results.

        Several ranks form a gloo group.
        """
        while len(self._workers) < world:
            here, there = self._context.Pipe()
            process = self._context.Process(target=_work, args=(there,))
            process.start()
            there.close()
            self._workers.append((process, here))
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / uuid.uuid4().hex)
            for rank in range(world):
                self._workers[rank][1].send((function, rank, world, store, args))
            return self._answers(world)

    def _answers(self, world: int) -> list[Any]:
        """Return the results in rank order. If a rank fails, kill all: they may wait in a collective."""
        waiting = {self._workers[rank][1]: rank for rank in range(world)}
        answers: dict[int, Any] = {}
        problem = ""
        while waiting and not problem:
            ready = wait(list(waiting), _TIMEOUT_S)
            problem = "" if ready else f"ranks {sorted(waiting.values())} did not answer within {_TIMEOUT_S:.0f} s"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    ok, answers[rank] = pipe.recv()
                    problem = problem if ok else answers[rank]
                except EOFError:
                    problem = f"rank {rank} died"
        if problem:
            self._end()
            raise RankFailedError(problem)
        return [answers[rank] for rank in range(world)]

    def _end(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers.clear()

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


@contextlib.contextmanager
def rank_processes() -> Iterator[Ranks]:
    ranks = Ranks()
    try:
        yield ranks
    finally:
        ranks.close()


def _work(pipe: Connection) -> None:
    warnings.simplefilter("ignore")  # DCP warns on every call without a process group
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        if task is None:
            return
        function, rank, world, store, args = task
        try:
            pipe.send((True, _as_rank(function, rank, world, store, args)))
        except BaseException as error:  # the parent reports it with the traceback
            pipe.send((False, f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}"))


def _as_rank(function: Callable[..., Any], rank: int, world: int, store: str, args: tuple[Any, ...]) -> Any:
    import torch.distributed as dist

    from tieredckpt.session.session import close_sessions

    if world > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    try:
        return function(rank, *args)
    finally:
        close_sessions()
        if dist.is_initialized():
            dist.destroy_process_group()
