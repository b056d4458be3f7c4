"""Ends calls that take longer than they may: a client of a ``TCPStore`` whose server is stopped waits for ever."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator

_LOOK_S = 0.2


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
        """Have ``end`` called when the block takes longer: by another thread, again and again until it is left.

        Once is not enough: a client that is being connected connects anew.
        """
        number = next(self._numbers)
        with self._changed:
            self._calls[number] = (time.monotonic() + within_s, end)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="elastic-guard", daemon=True)
                self._thread.start()
            elif self._idle:
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._calls.pop(number, None)

    def hurry(self) -> None:
        """No call may take any longer."""
        with self._changed:
            self._calls = {number: (0.0, end) for number, (_, end) in self._calls.items()}
            self._changed.notify_all()

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
                self._idle = not self._calls and not self._closed
                if not self._closed or self._calls:
                    self._changed.wait(None if self._idle else _LOOK_S)
                self._idle = False
                if self._closed and not self._calls:
                    return
                now = time.monotonic()
                ends = [end for until, end in self._calls.values() if until <= now]
            for end in ends:
                end()
