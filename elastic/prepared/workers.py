"""Processes that prepare batches beside the trainer; what they make is in the cache before they say so.

A worker ends when its trainer does, after the batch it is at. That its pipe is closed does not say so where processes
are forked: others have the trainer's end too. Killed in the middle, a worker leaves nothing that counts.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from elastic.prepared.batches import decode, encode
from elastic.prepared.cache import BatchCache, Kept, Prepare

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

_GRACE_S = 5.0
_LOOK_S = 1.0
"""How often an idle worker looks whether its trainer is there."""
_UP, _KEPT, _BATCH, _FAILED = b"u", b"k", b"b", b"f"


class WorkerLostError(Exception):
    """The process ended while it prepared a batch."""


class Worker:
    """One process, one batch at a time. Only :meth:`kill` may be called while another call is under way."""

    def __init__(self, cache: BatchCache, prepare: Prepare, start_method: str) -> None:
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
        """Whether it has started, which takes as long as its imports; or has ended, which :meth:`make` will say."""
        if not self._up and self._pipe.poll():
            self._wait_up()
        return self._up

    def _wait_up(self) -> None:
        self._up = True
        with contextlib.suppress(EOFError, OSError):
            self._pipe.recv_bytes()

    def make(self, index: int, reading: int) -> Kept:
        """As :meth:`~elastic.prepared.cache.BatchCache.make`, over there. What ``prepare`` raised is raised."""
        if not self._up:
            self._wait_up()
        try:
            self._pipe.send((index, reading))
            said = bytearray(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            self._process.join(_GRACE_S)
            code = self._process.exitcode
            how = f"signal {-code}" if code is not None and code < 0 else f"status {code}"
            raise WorkerLostError(f"the process that prepared it ended with {how}") from error
        kind = bytes(said[-1:])
        del said[-1:]  # at the end: tensors stay where they are aligned
        if kind == _FAILED:
            raised, text = pickle.loads(said)  # noqa: S301 - from our own process, over a pipe nobody else has
            raise raised from RuntimeError(f"in the process that prepared it:\n{text}")
        if kind == _BATCH:
            return Kept(there=False, batch=decode(said, self._fingerprint, index, verify=False))
        return Kept(there=True)

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
    pipe: Connection, inherited: Connection | None, parent: int | None, cache: BatchCache, prepare: Prepare
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer's to decide
    if inherited is not None:
        inherited.close()
        cache = cache.again()
    with cache, contextlib.suppress(EOFError, ConnectionError):  # the trainer's end is closed, perhaps in mid-word
        pipe.send_bytes(_UP)
        while parent is None or os.getppid() == parent:
            if not pipe.poll(_LOOK_S):
                continue
            asked = pipe.recv()
            if asked is None:
                return
            pipe.send_bytes(_made(cache, prepare, *asked))


def _made(cache: BatchCache, prepare: Prepare, index: int, reading: int) -> bytes:
    try:
        made = cache.make(index, prepare, reading=reading)
        return _KEPT if made.there else bytes(encode(cache.fingerprint, index, made.batch).to_bytes() + _BATCH)
    except Exception as error:  # noqa: BLE001 - the user's own, raised again over there
        return _pickled(error, traceback.format_exc()) + _FAILED


def _pickled(error: Exception, text: str) -> bytes:
    try:
        data = pickle.dumps((error, text))
        pickle.loads(data)  # noqa: S301 - some can be written and not read
    except Exception:  # noqa: BLE001 - the user's error may be anything
        return pickle.dumps((RuntimeError(f"{type(error).__qualname__}: {error}"), text))
    return data
