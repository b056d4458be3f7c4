"""Prefetch of batches ahead of their reader, in a thread or in worker processes.

::

    indices ──> [ 12 ready | 13 ready | 14 in progress | 15 in progress ]      at most ``ahead`` of them
                   └──> next()

A thread looks into the cache first: it maps an existing batch, without starting a process.

A worker exits after its current batch if its trainer has exited. A closed pipe is not a reliable sign: other forked
processes may hold the trainer's end. A worker that is killed leaves no incomplete batch in the cache.
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
    """A batch whose preparation has begun."""

    index: int
    reading: int
    done: bool = False
    batch: Any = None
    error: Exception | None = None


class PrefetchIterator(Iterator[Any]):
    """Iterator over the batches of ``indices``, in their order.

    ``workers=0`` prepares in a thread of this process. More workers are processes, which start when the first batch has
    to be prepared. They need a ``prepare`` that can be pickled, and a script with a guarded main part (``if __name__ ==
    "__main__"``). Until they have started, which takes as long as their imports, a thread prepares.

    An exception of ``prepare`` is raised in place of its batch, as :class:`~elastic.errors.PrepareError` with the
    batch's index. All later calls raise it again: no batch is skipped silently.
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
        self._prepare_lock = threading.Lock()
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
        """Stop prefetching. Idempotent. Waits for a preparing thread, and kills preparing processes."""
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
        own_workers: list[PrepareWorker] = []
        try:
            while (slot := self._begin()) is not None:
                try:
                    slot.batch = self._prepare_slot(slot, own_workers)
                except Exception as error:  # noqa: BLE001 - the user's; raised when its batch is requested
                    slot.error = error
                with self._changed:
                    slot.done = True
                    self._changed.notify_all()
        finally:
            for worker in own_workers:
                self._close_worker(worker)

    def _prepare_slot(self, slot: _Slot, own_workers: list[PrepareWorker]) -> Any:
        if slot.error is not None:
            raise slot.error
        if self._start_method is not None:
            found = self._cache.lookup(slot.index)
            if found.is_cached:
                return found.batch
            if not own_workers:
                own_workers.append(self._start_worker(self._start_method))
            # A forked process shares open files with this one, so only one side may read them.
            if self._start_method == "fork" or own_workers[0].is_up():
                result = own_workers[0].prepare(slot.index, slot.reading)
                if not result.is_cached:
                    return result.batch
        with self._prepare_lock:  # prepare does not have to be thread-safe
            return self._cache.get(slot.index, self._prepare, position=slot.reading, should_stop=self._is_stopped)

    def _begin(self) -> _Slot | None:
        """Return the next batch to prepare, once fewer than ``ahead`` are pending; ``None`` at the end."""
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

    def _start_worker(self, start_method: str) -> PrepareWorker:
        worker = PrepareWorker(self._cache, self._prepare, start_method)
        with self._changed:
            self._workers.append(worker)
            if self._stopped:
                worker.kill()
        return worker

    def _close_worker(self, worker: PrepareWorker) -> None:
        with self._changed:
            self._workers.remove(worker)
        worker.close()


_GRACE_S = 5.0
_PARENT_CHECK_S = 1.0
"""Seconds between two checks of an idle worker for its trainer."""
_STARTED, _CACHED, _BATCH, _FAILED = b"u", b"k", b"b", b"f"


class PrepareWorkerLostError(Exception):
    """Raised if a worker process ended while it prepared a batch."""


class PrepareWorker:
    """One worker process, which prepares one batch at a time.

    Only :meth:`kill` may be called during another call.
    """

    def __init__(self, cache: BatchCache, prepare: PrepareFunction, start_method: str) -> None:
        context = multiprocessing.get_context(start_method)
        self._fingerprint = cache.fingerprint
        self._is_started = False
        self._pipe, child_pipe = context.Pipe()
        inherited = self._pipe if start_method == "fork" else None
        parent = None if start_method == "forkserver" else os.getpid()
        # The type stubs do not declare Process for contexts.
        self._process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=_serve, args=(child_pipe, inherited, parent, cache, prepare), name="elastic-prepare", daemon=True
        )
        try:
            self._process.start()
        except BaseException:
            self._pipe.close()
            raise
        finally:
            child_pipe.close()

    def is_up(self) -> bool:
        """Return whether the process has started or has ended; :meth:`prepare` then raises."""
        if not self._is_started and self._pipe.poll():
            self._wait_started()
        return self._is_started

    def _wait_started(self) -> None:
        self._is_started = True
        with contextlib.suppress(EOFError, OSError):
            self._pipe.recv_bytes()

    def prepare(self, index: int, reading: int) -> CacheResult:
        """Call :meth:`~elastic.batch_cache.cache.BatchCache.prepare` in the process.

        Exceptions of ``prepare`` propagate.
        """
        if not self._is_started:
            self._wait_started()
        try:
            self._pipe.send((index, reading))
            reply = bytearray(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            self._process.join(_GRACE_S)
            code = self._process.exitcode
            end = f"signal {-code}" if code is not None and code < 0 else f"status {code}"
            raise PrepareWorkerLostError(f"the process that prepared it ended with {end}") from error
        kind = bytes(reply[-1:])
        del reply[-1:]  # at the end: keeps the tensors aligned
        if kind == _FAILED:
            raised, text = pickle.loads(reply)  # noqa: S301 - from our own process, over a private pipe
            raise raised from RuntimeError(f"in the process that prepared it:\n{text}")
        if kind == _BATCH:
            return CacheResult(is_cached=False, batch=decode_batch(reply, self._fingerprint, index, verify=False))
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles it
    if inherited is not None:
        inherited.close()
        cache = cache.reopen()
    with (
        cache,
        contextlib.suppress(EOFError, ConnectionError),
    ):  # the trainer has closed its end, perhaps within a message
        pipe.send_bytes(_STARTED)
        while parent is None or os.getppid() == parent:
            if not pipe.poll(_PARENT_CHECK_S):
                continue
            request = pipe.recv()
            if request is None:
                return
            pipe.send_bytes(_prepare_reply(cache, prepare, *request))


def _prepare_reply(cache: BatchCache, prepare: PrepareFunction, index: int, reading: int) -> bytes:
    try:
        result = cache.prepare(index, prepare, position=reading)
        return (
            _CACHED
            if result.is_cached
            else bytes(encode_batch(cache.fingerprint, index, result.batch).to_bytes() + _BATCH)
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
