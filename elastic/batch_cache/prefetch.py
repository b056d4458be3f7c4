"""Batches prepared ahead of their reader, in a thread or in worker processes.

::

    indices ──> [ 12 done | 13 done | 14 being made | 15 being made ]      at most ``ahead`` of them
                   └──> next()

A thread looks into the cache first: what is there is mapped, and no process is started for it.

A worker ends when its trainer does, after the batch it is at. That its pipe is closed does not say so where processes
are forked: others have the trainer's end too. Killed in the middle, a worker leaves nothing that counts.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, Any

from elastic.batch_cache.batch_format import decode_batch, encode_batch
from elastic.batch_cache.cache import BatchCache, CacheResult, PrepareFunction
from elastic.errors import PolicyError, PrepareError

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess


@dataclass
class _Slot:
    """One batch that was begun."""

    index: int
    reading: int
    done: bool = False
    batch: Any = None
    error: Exception | None = None


class PrefetchIterator(Iterator[Any]):
    """The batches of ``indices``, in their order.

    ``workers=0`` prepares in a thread of this process; with more, in as many processes, which are started when the
    first batch has to be prepared. Those need a ``prepare`` that can be pickled, and a script that guards its main part
    (``if __name__ == "__main__"``). Until they are up, which takes as long as their imports, a thread prepares.

    What ``prepare`` raises comes when its batch would have come, as :class:`~elastic.errors.PrepareError`
    that names it; from then on, that is all that comes: no batch is skipped in silence.
    """

    def __init__(
        self,
        cache: BatchCache,
        indices: Iterable[int],
        prepare: PrepareFunction,
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
        self._workers: list[PrepareWorker] = []
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

    def __enter__(self) -> PrefetchIterator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _has_next(self) -> bool:
        return self._stopped or (self._slots[0].done if self._slots else self._exhausted)

    def _work(self) -> None:
        hired: list[PrepareWorker] = []
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

    def _obtain(self, slot: _Slot, hired: list[PrepareWorker]) -> Any:
        if slot.error is not None:
            raise slot.error
        if self._start_method is not None:
            found = self._cache.lookup(slot.index)
            if found.is_cached:
                return found.batch
            if not hired:
                hired.append(self._hire(self._start_method))
            # A forked process shares open files with this one: they must not be read from on both sides.
            if self._start_method == "fork" or hired[0].is_up():
                made = hired[0].prepare(slot.index, slot.reading)
                if not made.is_cached:
                    return made.batch
        with self._here:  # prepare need not know of threads
            return self._cache.get(slot.index, self._prepare, position=slot.reading, should_stop=self._is_stopped)

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

    def _hire(self, start_method: str) -> PrepareWorker:
        worker = PrepareWorker(self._cache, self._prepare, start_method)
        with self._changed:
            self._workers.append(worker)
            if self._stopped:
                worker.kill()
        return worker

    def _dismiss(self, worker: PrepareWorker) -> None:
        with self._changed:
            self._workers.remove(worker)
        worker.close()


_GRACE_S = 5.0
_LOOK_S = 1.0
"""How often an idle worker looks whether its trainer is there."""
_UP, _KEPT, _BATCH, _FAILED = b"u", b"k", b"b", b"f"


class PrepareWorkerLostError(Exception):
    """The process ended while it prepared a batch."""


class PrepareWorker:
    """One process, one batch at a time. Only :meth:`kill` may be called while another call is under way."""

    def __init__(self, cache: BatchCache, prepare: PrepareFunction, start_method: str) -> None:
        context = multiprocessing.get_context(start_method)
        self._fingerprint = cache.fingerprint
        self._up = False
        self._pipe, theirs = context.Pipe()
        inherited = self._pipe if start_method == "fork" else None
        parent = None if start_method == "forkserver" else os.getpid()
        # The stubs know no Process of a context of any kind.
        self._process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=_serve, args=(theirs, inherited, parent, cache, prepare), name="elastic-prepare", daemon=True
        )
        try:
            self._process.start()
        except BaseException:
            self._pipe.close()
            raise
        finally:
            theirs.close()

    def is_up(self) -> bool:
        """Whether it has started, which takes as long as its imports; or has ended, which :meth:`prepare` will say."""
        if not self._up and self._pipe.poll():
            self._wait_up()
        return self._up

    def _wait_up(self) -> None:
        self._up = True
        with contextlib.suppress(EOFError, OSError):
            self._pipe.recv_bytes()

    def prepare(self, index: int, reading: int) -> CacheResult:
        """As :meth:`~elastic.batch_cache.cache.BatchCache.prepare`, over there. What ``prepare`` raised is raised."""
        if not self._up:
            self._wait_up()
        try:
            self._pipe.send((index, reading))
            said = bytearray(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            self._process.join(_GRACE_S)
            code = self._process.exitcode
            how = f"signal {-code}" if code is not None and code < 0 else f"status {code}"
            raise PrepareWorkerLostError(f"the process that prepared it ended with {how}") from error
        kind = bytes(said[-1:])
        del said[-1:]  # at the end: tensors stay where they are aligned
        if kind == _FAILED:
            raised, text = pickle.loads(said)  # noqa: S301 - from our own process, over a pipe nobody else has
            raise raised from RuntimeError(f"in the process that prepared it:\n{text}")
        if kind == _BATCH:
            return CacheResult(is_cached=False, batch=decode_batch(said, self._fingerprint, index, verify=False))
        return CacheResult(is_cached=True)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._pipe.close()
        self._process.join(_GRACE_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._process.close()


def _serve(
    pipe: Connection, inherited: Connection | None, parent: int | None, cache: BatchCache, prepare: PrepareFunction
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer's to decide
    if inherited is not None:
        inherited.close()
        cache = cache.reopen()
    with cache, contextlib.suppress(EOFError, ConnectionError):  # the trainer's end is closed, perhaps in mid-word
        pipe.send_bytes(_UP)
        while parent is None or os.getppid() == parent:
            if not pipe.poll(_LOOK_S):
                continue
            asked = pipe.recv()
            if asked is None:
                return
            pipe.send_bytes(_made(cache, prepare, *asked))


def _made(cache: BatchCache, prepare: PrepareFunction, index: int, reading: int) -> bytes:
    try:
        made = cache.prepare(index, prepare, position=reading)
        return (
            _KEPT if made.is_cached else bytes(encode_batch(cache.fingerprint, index, made.batch).to_bytes() + _BATCH)
        )
    except Exception as error:  # noqa: BLE001 - the user's own, raised again over there
        return _pickled(error, traceback.format_exc()) + _FAILED


def _pickled(error: Exception, text: str) -> bytes:
    try:
        data = pickle.dumps((error, text))
        pickle.loads(data)  # noqa: S301 - some can be written and not read
    except Exception:  # noqa: BLE001 - the user's error may be anything
        return pickle.dumps((RuntimeError(f"{type(error).__qualname__}: {error}"), text))
    return data
