"""Torch's ``DataLoader`` as lines along which tasks go out and microbatches come back in the same order."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from elastic.samples.errors import WorkersLostError
from elastic.samples.source import Fetched, Source, Task, as_it_is

_DIED = ("exited unexpectedly", "killed by signal")


class Lines:
    """Processes that read what ``tasks`` has, or this one where there are to be none; started at the first ``next``."""

    def __init__(self, source: Source, tasks: Iterator[Task], **options: Any) -> None:
        self._tasks = tasks
        self._out: deque[Task] = deque()
        # A generator of its own: otherwise torch draws the workers' first seed from the one of the training.
        self._loader: DataLoader[Any] = DataLoader(
            source,  # type: ignore[arg-type] # __getitems__ is all that is asked of it
            batch_sampler=_Noted(tasks, self._out),  # type: ignore[arg-type] # nor is it ever asked for lists
            collate_fn=as_it_is,  # type: ignore[arg-type] # nor does it ask what comes back
            generator=torch.Generator(),
            **options,
        )
        self._running: Any = None

    def next(self) -> tuple[Task, Fetched]:
        """The oldest task that has not come back, and what became of it. Whatever is raised has ended the lines."""
        try:
            if self._running is None:
                self._running = iter(self._loader)
            fetched = next(self._running)
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError) and any(words in str(error) for words in _DIED):
                raise WorkersLostError(
                    f"{error}. The loader is where its last committed step left it: iterate again to go on with new"
                    " workers. If they were killed for memory, use fewer of them or a smaller prefetch_factor"
                ) from error
            raise
        return self._out.popleft(), fetched

    def close(self) -> None:
        """No process is left, nor what they had read. Idempotent."""
        running, self._running = self._running, None
        self._out.clear()
        shutdown: Callable[[], None] | None = getattr(running, "_shutdown_workers", None)
        if shutdown is not None:
            with contextlib.suppress(RuntimeError):  # that one of them had died: it is over anyway
                shutdown()


class _Noted:
    """Tasks, noted down as they go out."""

    def __init__(self, tasks: Iterator[Task], out: deque[Task]) -> None:
        self._tasks, self._out = tasks, out

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        task = next(self._tasks)
        self._out.append(task)
        return task
