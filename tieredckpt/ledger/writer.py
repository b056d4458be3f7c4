"""Writes the ledger of one process: one file, one system call a line, and never an error into the training.

::

    DIRECTORY/NAME.PID.START.jsonl      then NAME.PID.START.1.jsonl, ...

A line is written whole by one ``write`` to a file opened to append, so that of a process that is killed at most the
last line is torn. A disk that is full or a directory that is gone costs one warning, and is counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from tieredckpt.ledger.events import Event, Opened
from tieredckpt.ledger.place import Place
from tieredckpt.ledger.said import say, says

log = logging.getLogger(__name__)

LEDGER = "TIEREDCKPT_LEDGER"
"""The directory; where it is not set nothing is written."""

_PART_BYTES = 8 << 20
_PARTS = 32
_LOOK_EVERY = 64
"""Lines between two looks whether the file is still there."""
_AGAIN_S = 1.0
_ENCODE = msgspec.json.Encoder().encode
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL | os.O_CLOEXEC


class Ledger(Protocol):
    """Promises: ``write`` takes a few microseconds, comes back, and raises nothing; any thread, any forked child."""

    @property
    def place(self) -> Place:
        """Where this process is, for whoever writes without knowing."""

    def write(self, event: Event) -> None:
        """Write it down."""

    def close(self) -> None:
        """Let go of the file; a later ``write`` begins a new one."""


class NullLedger:
    """Nothing is written."""

    def __init__(self) -> None:
        self.place = Place()

    def write(self, event: Event) -> None:
        pass

    def close(self) -> None:
        pass


class LedgerWriter:
    """Writes files of its own into ``directory``, which it makes where it can."""

    def __init__(
        self, directory: str | os.PathLike[str], *, name: str = "", part_bytes: int = _PART_BYTES, parts: int = _PARTS
    ) -> None:
        self.directory = Path(directory).absolute()
        self.place = Place()
        self.lost = 0
        """Events that could not be written."""
        self._name = re.sub(r"[^A-Za-z0-9_-]", "-", name or socket.gethostname())[:100]
        self._part_bytes, self._parts = part_bytes, parts
        self._warned = False
        self._file = _File()

    def write(self, event: Event) -> None:
        file = self._file
        if file.pid != os.getpid():  # forked: the file is the parent's
            file.let_go()
            file = self._file = _File()
        try:
            with file.lock:
                self._append(file, _ENCODE(event) + b"\n")
        except (OSError, TypeError, ValueError, OverflowError) as error:
            self.lost += 1
            if not self._warned:
                self._warned = True
                log.warning("the ledger in %s is not written to: %s", self.directory, error)

    def close(self) -> None:
        with self._file.lock:
            self._file.let_go()

    def _append(self, file: _File, line: bytes) -> None:
        if file.fd >= 0 and file.lines % _LOOK_EVERY == 0 and os.fstat(file.fd).st_nlink == 0:
            file.let_go()
        if file.fd < 0 or file.size + len(line) > self._part_bytes:
            self._open(file)
        if file.torn:
            line = b"\n" + line
        written = os.write(file.fd, line)
        file.lines += 1
        file.size += written
        file.torn = written < len(line)
        if file.torn:
            raise OSError(f"{written} of {len(line)} bytes were written")

    def _open(self, file: _File) -> None:
        """The next part of this process's ledger; the oldest goes when there are too many."""
        now = time.monotonic()
        if now < file.again_at:
            raise OSError("it could not be opened")
        file.again_at = now + _AGAIN_S
        file.let_go()
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self._part(file, file.part)
        file.fd = os.open(path, _FLAGS, 0o644)
        header = Opened(time.time(), file.pid, socket.gethostname(), part=file.part)
        file.part += 1
        file.again_at = 0.0
        file.size, file.lines, file.torn = 0, 0, False
        self._append(file, _ENCODE(header) + b"\n")
        if file.part > self._parts:
            with contextlib.suppress(FileNotFoundError):
                self._part(file, file.part - self._parts - 1).unlink()

    def _part(self, file: _File, part: int) -> Path:
        return self.directory / f"{self._name}.{file.pid}.{file.start}{f'.{part}' if part else ''}.jsonl"


class _File:
    """What one process has open."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.start = time.time_ns()
        self.lock = threading.RLock()  # a signal handler may write while its thread does
        self.fd = -1
        self.part = 0
        self.size = self.lines = 0
        self.torn = False
        self.again_at = 0.0

    def let_go(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


class SayingLedger:
    """Writes into another ledger, and says on standard output what is said of it."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @property
    def place(self) -> Place:
        return self._ledger.place

    def write(self, event: Event) -> None:
        self._ledger.write(event)
        say(event)

    def close(self) -> None:
        self._ledger.close()


_open: dict[str, LedgerWriter] = {}
_saying: dict[str, SayingLedger] = {}


def ledger_from_environ(environ: Mapping[str, str] = os.environ) -> Ledger:
    """The ledger of this process, the same one for all who ask, or one that writes nothing."""
    directory = environ.get(LEDGER, "")
    ledger: Ledger = NullLedger()
    if directory:
        ledger = _open.setdefault(directory, LedgerWriter(directory, name=environ.get("ELASTIC_NODE", "")))
    return _saying.setdefault(directory, SayingLedger(ledger)) if says(environ) else ledger
