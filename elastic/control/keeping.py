"""The job's ``TCPStore``: in a process of its own, because it must live in no rank, and this package knows no torch."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from elastic.control.processes import Running, importable, module

MODULE = "elastic.storing"
_AGAIN_S = 1.0
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
