"""Time limits for blocking calls, which another thread ends."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_POLL_S = 0.2


@dataclass(eq=False)
class Call:
    """A call with a time limit."""

    until: float
    """Monotonic time at which the limit passes."""
    end: Callable[[], object]
    was_ended: bool = False
    """Whether ``end`` was called, perhaps just after the call returned: do not reuse its connection."""
    is_being_ended: bool = False


class CallWatchdog:
    """Time limits for the calls of a process. Its thread sleeps while no call runs."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: set[Call] = set()
        self._thread: threading.Thread | None = None
        self._next_check = float("inf")
        """Monotonic time at which the thread checks the calls without a notification."""
        self._closed = False

    @contextlib.contextmanager
    def limit(self, within_s: float, end: Callable[[], object]) -> Iterator[Call]:
        """Call ``end`` if the block runs longer than ``within_s`` seconds.

        Another thread repeats the call until the block ends, because a connecting client reconnects after one call.
        After the block, ``end`` is not called.
        """
        call = Call(time.monotonic() + within_s, end)
        with self._changed:
            self._calls.add(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="elastic-guard", daemon=True)
                self._thread.start()
            elif call.until < self._next_check:
                self._changed.notify_all()
        try:
            yield call
        finally:
            with self._changed:
                self._calls.discard(call)
                while call.is_being_ended:
                    self._changed.wait()

    def expire_all(self) -> None:
        """Expire the limits of all running calls now."""
        with self._changed:
            for call in self._calls:
                call.until = 0.0
            self._changed.notify_all()

    def forget(self) -> None:
        """Drop the running calls: their limits no longer apply, and the thread can stop."""
        with self._changed:
            self._calls.clear()

    def close(self) -> None:
        """Stop the thread. If calls still run, it enforces their limits until they return."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            is_busy = bool(self._calls)
        if self._thread is not None and self._thread is not threading.current_thread() and not is_busy:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed and not self._calls:
                    return
                self._next_check = min((call.until for call in self._calls), default=float("inf"))
                left_s = self._next_check - time.monotonic()
                if self._closed or left_s <= 0:
                    left_s = _POLL_S
                self._changed.wait(None if left_s == float("inf") else left_s)
                now = time.monotonic()
                late = [call for call in self._calls if call.until <= now]
            for call in late:
                self._end(call)

    def _end(self, call: Call) -> None:
        with self._changed:
            if call not in self._calls:  # it returned while another call was ended
                return
            call.is_being_ended = call.was_ended = True
        try:
            call.end()
        finally:
            with self._changed:
                call.is_being_ended = False
                self._changed.notify_all()
