"""Processes that a supervisor keeps beside its ranks.

The job's ``TCPStore`` must live in no rank, and this package knows no torch; a coordinator must not stop with what the
supervisor does.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from elastic.control.processes import Running, importable, module

MODULE = "elastic.storing"
_AGAIN_S = 1.0
_CANDIDATE_AGAIN_S = 2.0
_RELEASE_S = 10.0
_PREFIX = b"store "
_NAMES = {"RES_OPTIONS": "timeout:1 attempts:1"}
"""The thread that serves all ranks asks for the name of each that connects: where no name server answers, they all wait
for a second, and not for the ten that are usual."""


class StoreKeeper:
    """Keeps one while it is wanted; ``told`` hears where it is, and "" when it is no more."""

    def __init__(self, host: str, told: Callable[[str], None], *, spawn: Callable[..., Any] = Running) -> None:
        self._host, self._told, self._spawn = host, told, spawn
        self._running: Any = None
        self._ended_at: float | None = None

    def keep(self, *, wanted: bool) -> None:
        """To be called now and then, by a thread that lasts."""
        if self._running is not None and not self._running.is_running:
            self._running = None
            self._ended_at = time.monotonic()
            self._told("")
        if not wanted:
            self.close()
        elif self._running is None and (self._ended_at is None or time.monotonic() - self._ended_at > _AGAIN_S):
            self._running = self._spawn(
                module(MODULE, self._host),
                environ=_NAMES | importable(os.environ),
                sink=self._printed,
                ended=lambda _: None,
                name="store",
            )

    def close(self) -> None:
        if self._running is not None:
            self._running.signal(signal.SIGKILL)
            self._running.join()
            self._running = None
            self._told("")

    def _printed(self, line: bytes) -> None:
        if line.startswith(_PREFIX):
            self._told(line[len(_PREFIX) :].decode().strip())
        else:
            sys.stderr.buffer.write(b"[store] " + line)


class CoordinatorKeeper:
    """Starts a candidate where nobody leads the job. It ends by itself when another one does."""

    def __init__(self, command: Callable[[int], Sequence[str]], *, spawn: Callable[..., Any] = Running) -> None:
        """``command``: of the latest term in which a coordinator was obeyed here."""
        self._command, self._spawn = command, spawn
        self._running: Any = None
        self._again_at = float("-inf")

    def keep(self, *, wanted: bool, term: int, now: float) -> None:
        """To be called now and then, by a thread that lasts."""
        if self._running is not None and not self._running.is_running:
            self._running = None
            self._again_at = now + _CANDIDATE_AGAIN_S
        if wanted and self._running is None and now >= self._again_at:
            self._running = self._spawn(
                self._command(term), environ=importable(os.environ), sink=None, ended=lambda _: None, name="coordinator"
            )

    def dismiss(self) -> None:
        """Another one leads."""
        if self._running is not None:
            self._running.signal(signal.SIGTERM)

    def close(self, *, within_s: float) -> None:
        """It may have others to tell of a job's end, and so long for it; then it gives up its lead, and ends."""
        if self._running is None:
            return
        if not self._running.join(within_s):
            self._running.signal(signal.SIGTERM)
        if not self._running.join(_RELEASE_S):
            self._running.signal(signal.SIGKILL)
            self._running.join()
        self._running = None
