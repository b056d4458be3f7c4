"""The time that a double goes by: the real one, or one that a test moves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """What is waited for has a condition, which is held in every call that is given one."""

    def now(self) -> float: ...

    def wait(self, condition: threading.Condition, until: float | None) -> None:
        """Wait until somebody notifies, or the time is ``until``. May return early."""

    def notify(self, condition: threading.Condition) -> None:
        """Wake all who wait."""

    def on_change(self, wake: Callable[[], None]) -> None:
        """``wake`` whenever the time has moved and nobody's wait ended by itself."""


class RealClock:
    def now(self) -> float:
        return time.monotonic()

    def wait(self, condition: threading.Condition, until: float | None) -> None:
        condition.wait(None if until is None else max(0.0, until - time.monotonic()))

    def notify(self, condition: threading.Condition) -> None:
        condition.notify_all()

    def on_change(self, wake: Callable[[], None]) -> None:
        """Real waits end by themselves."""


class StepClock:
    """Stands still until it is told to move."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._wakes: list[Callable[[], None]] = []
        self._waiting: dict[threading.Condition, int] = {}
        self._changed = threading.Condition()

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds
        for wake in list(self._wakes):
            wake()

    def until_waiting(self, threads: int = 1, *, patience_s: float = 20.0) -> None:
        """Return once so many threads wait: only then is it certain what moving the time does."""
        with self._changed:
            if not self._changed.wait_for(lambda: sum(self._waiting.values()) >= threads, patience_s):
                waiting = sum(self._waiting.values())
                raise TimeoutError(f"{waiting} of {threads} threads wait for the time after {patience_s:g} s")

    def wait(self, condition: threading.Condition, until: float | None) -> None:
        with self._changed:
            self._waiting[condition] = self._waiting.get(condition, 0) + 1
            self._changed.notify_all()
        condition.wait()

    def notify(self, condition: threading.Condition) -> None:
        with self._changed:
            self._waiting.pop(condition, None)
        condition.notify_all()

    def on_change(self, wake: Callable[[], None]) -> None:
        self._wakes.append(wake)
