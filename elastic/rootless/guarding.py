"""Ends calls that take longer than they may: a client of a ``TCPStore`` whose server is stopped waits for ever."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator

_LOOK_S = 0.5


class Guard:
    """Looks after the calls of a process; its thread sleeps while there are none."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: dict[int, tuple[float, Callable[[], object]]] = {}
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._idle = False
        self._closed = False

    @contextlib.contextmanager
    def over(self, within_s: float, end: Callable[[], object]) -> Iterator[None]:
        """Have ``end`` called when the block takes longer; by another thread, and once."""
        number = next(self._numbers)
        with self._changed:
            self._calls[number] = (time.monotonic() + within_s, end)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="elastic-guard", daemon=True)
                self._thread.start()
            elif self._idle:
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._calls.pop(number, None)

    def close(self) -> None:
        """Calls that still run are ended by nobody any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle = not self._calls
                self._changed.wait(None if self._idle else _LOOK_S)
                self._idle = False
                if self._closed:
                    return
                now = time.monotonic()
                late = [number for number, (until, _) in self._calls.items() if until <= now]
                ends = [self._calls.pop(number)[1] for number in late]
            for end in ends:
                end()
