"""Ends calls that take longer than they may: a client of a ``TCPStore`` whose server is stopped waits for ever."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_LOOK_S = 0.2


@dataclass(eq=False)
class Call:
    """One that is looked after."""

    until: float
    end: Callable[[], object]
    was_ended: bool = False
    """Also when it was through a moment before: what it used is not to be used again."""
    is_being_ended: bool = False


class Guard:
    """Looks after the calls of a process; its thread sleeps while there are none."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: set[Call] = set()
        self._thread: threading.Thread | None = None
        self._next = float("inf")
        """When the thread looks by itself."""
        self._closed = False

    @contextlib.contextmanager
    def over(self, within_s: float, end: Callable[[], object]) -> Iterator[Call]:
        """Have ``end`` called when the block takes longer: by another thread, again and again until it is left.

        Once is not enough: a client that is being connected connects anew. After the block it is not called.
        """
        call = Call(time.monotonic() + within_s, end)
        with self._changed:
            self._calls.add(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="elastic-guard", daemon=True)
                self._thread.start()
            elif call.until < self._next:
                self._changed.notify_all()
        try:
            yield call
        finally:
            with self._changed:
                self._calls.discard(call)
                while call.is_being_ended:
                    self._changed.wait()

    def hurry(self) -> None:
        """No call may take any longer."""
        with self._changed:
            for call in self._calls:
                call.until = 0.0
            self._changed.notify_all()

    def forget(self) -> None:
        """Calls that still run are ended by nobody from now on, once this is closed."""
        with self._changed:
            self._calls.clear()

    def close(self) -> None:
        """Calls that still run are looked after until they are through."""
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
                self._next = min((call.until for call in self._calls), default=float("inf"))
                left_s = self._next - time.monotonic()
                if self._closed or left_s <= 0:
                    left_s = _LOOK_S
                self._changed.wait(None if left_s == float("inf") else left_s)
                now = time.monotonic()
                late = [call for call in self._calls if call.until <= now]
            for call in late:
                self._end(call)

    def _end(self, call: Call) -> None:
        with self._changed:
            if call not in self._calls:  # it was left while another one was ended
                return
            call.is_being_ended = call.was_ended = True
        try:
            call.end()
        finally:
            with self._changed:
                call.is_being_ended = False
                self._changed.notify_all()
