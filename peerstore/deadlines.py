"""One time budget for a call and everything done on its behalf, carried across threads and processes.

Who asks sets it; a request to an agent carries what is left of it, and so does what that agent does for it.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

_ends: ContextVar[float] = ContextVar("peerstore-deadline", default=math.inf)


@contextlib.contextmanager
def timeout_scope(seconds: float | None) -> Iterator[None]:
    """While the block runs, nobody waits beyond so many seconds from now; ``None`` sets no limit of its own."""
    ends = _ends.get() if seconds is None else min(_ends.get(), time.monotonic() + max(0.0, seconds))
    before = _ends.set(ends)
    try:
        yield
    finally:
        _ends.reset(before)


@contextlib.contextmanager
def no_deadline() -> Iterator[None]:
    """While the block runs, what was set outside of it does not count."""
    before = _ends.set(math.inf)
    try:
        yield
    finally:
        _ends.reset(before)


def remaining_s(at_most: float = math.inf) -> float:
    """How long to wait, where nobody would wait longer than ``at_most``."""
    return min(at_most, max(0.0, _ends.get() - time.monotonic()))


def expired() -> bool:
    return remaining_s() <= 0


def inherit_deadline(work: Callable[..., T]) -> Callable[..., T]:
    """``work``, for other threads to do it within the same time."""
    ends = _ends.get()

    def run(*args: Any) -> T:
        before = _ends.set(ends)
        try:
            return work(*args)
        finally:
            _ends.reset(before)

    return run


def run_within_deadline(work: Callable[[], T], late: Callable[[], Exception]) -> T:
    """What ``work`` gives. Where the time is over first ``late`` is raised, and ``work`` comes to its end by itself."""
    if math.isinf(_ends.get()):
        return work()
    done: Future[T] = Future()
    work = inherit_deadline(work)

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the caller's, whatever it is
            done.set_exception(error)

    threading.Thread(target=run, name="peerstore-in-time", daemon=True).start()
    try:
        return done.result(remaining_s())
    except FutureTimeoutError:
        if done.done():  # it is the work's own
            raise
        raise late() from None
