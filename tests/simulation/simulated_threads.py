"""Threads for blocking production code. One runs at a time, so that a seed determines the whole run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class _Ended(BaseException):
    """Ends a thread when the schedule has ended."""


class SimulatedThreads:
    """The threads of one world."""

    def __init__(self) -> None:
        self._running: _Thread | None = None
        self._threads: list[_Thread] = []

    def start_streams(self, work: Callable[[], None]) -> None:
        """Run ``work`` on its own thread until it first waits."""
        thread = next((one for one in self._threads if one.idle), None)
        if thread is None:
            thread = _Thread(self)
            self._threads.append(thread)
        thread.work = work
        self._resume(thread)

    def wait_for_reply(self, begin: Callable[[Callable[[Any], None]], None]) -> Any:
        """Return the reply to ``begin``. The calling thread waits while other events run."""
        thread, answers = self._running, list[Any]()
        assert thread is not None
        waits = False

        def answered(found: Any) -> None:
            if not answers:  # a reply may arrive twice
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
        """End all threads. Pending waits fail."""
        for thread in self._threads:
            thread.end()


class _Thread:
    """A thread that runs while the event loop waits for it."""

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
