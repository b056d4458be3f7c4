"""Production code that waits for answers, in turns with the events: one thread at a time, so that a seed says all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class _Ended(BaseException):
    """The schedule is over."""


class SimulatedThreads:
    """The threads of one world."""

    def __init__(self) -> None:
        self._running: _Thread | None = None
        self._threads: list[_Thread] = []

    def start_streams(self, work: Callable[[], None]) -> None:
        """Do this on a thread of its own, until it waits for the first time."""
        thread = next((one for one in self._threads if one.idle), None)
        if thread is None:
            thread = _Thread(self)
            self._threads.append(thread)
        thread.work = work
        self._resume(thread)

    def wait_for_reply(self, begin: Callable[[Callable[[Any], None]], None]) -> Any:
        """Called by such work: what ``begin`` is answered. Meanwhile time passes, and others work."""
        thread, answers = self._running, list[Any]()
        assert thread is not None
        waits = False

        def answered(found: Any) -> None:
            if not answers:  # a message may come twice
                answers.append(found)
                if waits:
                    self._resume(thread)

        begin(answered)
        if not answers:
            waits = True
            thread.suspend()
        return answers[0]

    def _resume(self, thread: _Thread) -> None:
        before, self._running = self._running, thread
        thread.resume()
        self._running = before
        if thread.error is not None:
            error, thread.error = thread.error, None
            raise error

    def close(self) -> None:
        """Whoever still waits gets no answer."""
        for thread in self._threads:
            thread.end()


class _Thread:
    """Works while the events wait for it."""

    def __init__(self, turns: SimulatedThreads) -> None:
        self._turns = turns
        self.work: Callable[[], None] | None = None
        self.error: BaseException | None = None
        self._over = False
        self._mine, self._theirs = threading.Lock(), threading.Lock()
        self._mine.acquire()
        self._theirs.acquire()
        self._thread = threading.Thread(target=self._run, name="simulated", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        return self.work is None

    def resume(self) -> None:
        self._mine.release()
        self._theirs.acquire()

    def suspend(self) -> None:
        self._theirs.release()
        self._mine.acquire()
        if self._over:
            raise _Ended

    def end(self) -> None:
        self._over = True
        self._mine.release()
        self._thread.join()

    def _run(self) -> None:
        self._mine.acquire()
        while not self._over:
            assert self.work is not None
            try:
                self.work()
            except _Ended:
                return
            except BaseException as error:
                self.error = error
            self.work = None
            self._theirs.release()
            self._mine.acquire()
