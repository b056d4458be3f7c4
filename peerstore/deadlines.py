"""One time budget for a call and everything done on its behalf, carried across threads and processes.

The caller sets it. A request to an agent carries the remaining time, and so do the agent's own requests for it.
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
    """Limit all waits in the block to ``seconds`` from now; ``None`` adds no limit to the outer one."""
    ends = _ends.get() if seconds is None else min(_ends.get(), time.monotonic() + max(0.0, seconds))
    before = _ends.set(ends)
    try:
        yield
    finally:
        _ends.reset(before)


@contextlib.contextmanager
def no_deadline() -> Iterator[None]:
    """Ignore outer deadlines in the block."""
    before = _ends.set(math.inf)
    try:
        yield
    finally:
        _ends.reset(before)


def remaining_s(at_most: float = math.inf) -> float:
    """Return the seconds to wait: the rest of the deadline, at most ``at_most``."""
    return min(at_most, max(0.0, _ends.get() - time.monotonic()))


def expired() -> bool:
    return remaining_s() <= 0


def inherit_deadline(work: Callable[..., T]) -> Callable[..., T]:
    """Return ``work`` bound to the current deadline, for use in another thread."""
    ends = _ends.get()

    def run(*args: Any) -> T:
        before = _ends.set(ends)
        try:
            return work(*args)
        finally:
            _ends.reset(before)

    return run


def run_within_deadline(work: Callable[[], T], late: Callable[[], Exception]) -> T:
    """Return the result of ``work``, or raise ``late()`` at the deadline.

    After the deadline, ``work`` continues in its thread.
    """
    if math.isinf(_ends.get()):
        return work()
    done: Future[T] = Future()
    work = inherit_deadline(work)

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            done.set_exception(error)

    threading.Thread(target=run, name="peerstore-in-time", daemon=True).start()
    try:
        return done.result(remaining_s())
    except FutureTimeoutError:
        if done.done():  # work itself raised this error
            raise
        raise late() from None
