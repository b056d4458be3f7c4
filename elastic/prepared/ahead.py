"""Batches made before they are asked for, in order, never more than so many ahead.

::

    indices ──> [ 12 done | 13 done | 14 being made | 15 being made ]      at most ``ahead`` of them
                   └──> next()

A thread looks into the cache first: what is there is mapped, and no process is started for it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from elastic.errors import PolicyError
from elastic.prepared.cache import BatchCache, Prepare
from elastic.prepared.errors import PrepareError
from elastic.prepared.workers import Worker


@dataclass
class _Slot:
    """One batch that was begun."""

    index: int
    reading: int
    done: bool = False
    batch: Any = None
    error: Exception | None = None


class Prefetched(Iterator[Any]):
    """The batches of ``indices``, in their order.

    ``workers=0`` prepares in a thread of this process; with more, in as many processes, which are started when the
    first batch has to be prepared. Those need a ``prepare`` that can be pickled, and a script that guards its main part
    (``if __name__ == "__main__"``). Until they are up, which takes as long as their imports, a thread prepares.

    What ``prepare`` raises comes when its batch would have come, as :class:`~elastic.prepared.errors.PrepareError`
    that names it; from then on, that is all that comes: no batch is skipped in silence.
    """

    def __init__(
        self,
        cache: BatchCache,
        indices: Iterable[int],
        prepare: Prepare,
        *,
        ahead: int = 8,
        workers: int = 0,
        start_method: str = "spawn",
    ) -> None:
        if ahead < 1 or workers < 0:
            raise PolicyError(
                f"ahead={ahead}, workers={workers}: at least one batch ahead, and no fewer than 0 workers"
            )
        self._cache = cache
        self._prepare = prepare
        self._indices = iter(indices)
        self._ahead = ahead
        self._start_method = start_method if workers else None
        self._changed = threading.Condition()
        self._here = threading.Lock()
        self._slots: deque[_Slot] = deque()
        self._workers: list[Worker] = []
        self._exhausted = self._stopped = False
        self._failure: PrepareError | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"elastic-ahead-{number}", daemon=True)
            for number in range(max(1, workers))
        ]
        for thread in self._threads:
            thread.start()

    def __next__(self) -> Any:
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._changed.wait_for(self._has_next)
            if self._stopped or not self._slots:
                raise StopIteration
            slot = self._slots.popleft()
            self._changed.notify_all()
            if slot.error is None:
                return slot.batch
            self._exhausted = True
            what = type(slot.error).__name__ if slot.index >= 0 else "the next index is not known"
            self._failure = PrepareError(slot.index, f"{what}: {slot.error}")
            raise self._failure from slot.error

    def close(self) -> None:
        """Idempotent. Waits for what a thread is preparing; a process that is preparing is killed."""
        with self._changed:
            self._stopped = True
            self._slots.clear()
            for worker in self._workers:
                worker.kill()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Prefetched:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _has_next(self) -> bool:
        return self._stopped or (self._slots[0].done if self._slots else self._exhausted)

    def _work(self) -> None:
        hired: list[Worker] = []
        try:
            while (slot := self._begin()) is not None:
                try:
                    slot.batch = self._obtain(slot, hired)
                except Exception as error:  # noqa: BLE001 - the user's; raised where the batch is asked for
                    slot.error = error
                with self._changed:
                    slot.done = True
                    self._changed.notify_all()
        finally:
            for worker in hired:
                self._dismiss(worker)

    def _obtain(self, slot: _Slot, hired: list[Worker]) -> Any:
        if slot.error is not None:
            raise slot.error
        if self._start_method is not None:
            found = self._cache.look(slot.index)
            if found.there:
                return found.batch
            if not hired:
                hired.append(self._hire(self._start_method))
            # A forked process shares open files with this one: they must not be read from on both sides.
            if self._start_method == "fork" or hired[0].is_up():
                made = hired[0].make(slot.index, slot.reading)
                if not made.there:
                    return made.batch
        with self._here:  # prepare need not know of threads
            return self._cache.get(slot.index, self._prepare, reading=slot.reading, stop=self._is_stopped)

    def _begin(self) -> _Slot | None:
        """The next batch to be made, when it is time; ``None`` at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._exhausted or len(self._slots) < self._ahead)
            if self._stopped or self._exhausted:
                return None
            try:
                index = next(self._indices)
            except StopIteration:
                self._exhausted = True
                self._changed.notify_all()
                return None
            except Exception as error:  # noqa: BLE001 - the user's, as above
                self._exhausted = True
                slot = _Slot(-1, -1, error=error)
            else:
                slot = _Slot(index, self._slots[0].index if self._slots else index)
            self._slots.append(slot)
            return slot

    def _is_stopped(self) -> bool:
        return self._stopped

    def _hire(self, start_method: str) -> Worker:
        worker = Worker(self._cache, self._prepare, start_method)
        with self._changed:
            self._workers.append(worker)
            if self._stopped:
                worker.kill()
        return worker

    def _dismiss(self, worker: Worker) -> None:
        with self._changed:
            self._workers.remove(worker)
        worker.close()
