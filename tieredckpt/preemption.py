"""SIGTERM means: a little time is left. Use it for one last step, then go as the signal says."""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)
_others: list[None] = []


@contextmanager
def left_to_others() -> Iterator[None]:
    """While the block runs, whoever entered it decides what SIGTERM means: no :class:`Preemption` takes it."""
    _others.append(None)
    try:
        yield
    finally:
        _others.pop()


class Preemption:
    """Takes SIGTERM until it is closed; the handler before it is called when the last save is done.

    When no further save comes (a long step, a loop that has ended), half of the grace period passes without one:
    then what is staged already is flushed, and the signal is delivered all the same.
    """

    def __init__(self, flush: Callable[[float], None], grace_s: float) -> None:
        self._flush = flush
        self._grace_s = grace_s
        self._pid = os.getpid()
        self._deadline: float | None = None
        self._flushed = False
        self._steps: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """What a handler may put into, whomever it has interrupted: that it came, and later that all is done."""
        self._before: Any = signal.SIG_DFL
        self._active = not _others and threading.current_thread() is threading.main_thread()
        self._waiting = threading.Thread(target=self._wait, name="tieredckpt-sigterm", daemon=True)
        if self._active:
            self._waiting.start()
            self._before = signal.signal(signal.SIGTERM, self._received)

    @property
    def active(self) -> bool:
        """Whether SIGTERM comes here."""
        return self._active

    @property
    def requested(self) -> bool:
        return self._deadline is not None

    def finish(self) -> None:
        """The last save is staged: flush it, and go."""
        self._steps.put(False)
        self._flush_now()
        self._go()

    def close(self) -> None:
        """Give SIGTERM back to whoever had it; one that is waiting for its last save is delivered."""
        self._steps.put(False)
        if self._waiting.is_alive():
            self._waiting.join()
        if self._active and threading.current_thread() is threading.main_thread():
            if self.requested:
                self._flush_now()
                self._go()
            else:
                self._give_back()

    def _received(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._flushed or os.getpid() != self._pid:  # a forked process has no step to save
            self._go()
        elif self._deadline is None:
            self._deadline = time.monotonic() + self._grace_s
            self._steps.put(True)

    def _wait(self) -> None:
        """When no save comes: only the main thread can change handlers, so it is told by the same signal again."""
        if not self._steps.get():
            return
        log.warning("SIGTERM: the next save is the last one, %.0f s are left", self._grace_s)
        try:
            self._steps.get(timeout=self._grace_s / 2)
        except queue.Empty:
            self._flush_now()
            os.kill(os.getpid(), signal.SIGTERM)

    def _flush_now(self) -> None:
        if not self._flushed:
            try:
                self._flush(max(0.0, (self._deadline or 0.0) - time.monotonic()))
            except Exception:
                log.exception("the last save was not flushed")
            self._flushed = True

    def _go(self) -> None:
        self._deadline = None  # whoever gets the signal now may go on: what it saves is not its last step any more
        self._give_back()
        signal.raise_signal(signal.SIGTERM)

    def _give_back(self) -> None:
        if self._active:
            self._active = False
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)
