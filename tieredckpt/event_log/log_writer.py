"""Writer of the event log: rotating files and stdout lines. Never raises into training.

::

    DIRECTORY/NAME.PID.START.jsonl      then NAME.PID.START.1.jsonl, ...

One ``write`` to a file in append mode writes a whole line, so a killed process truncates at most its last line. On a
full disk or a deleted directory the writer logs one warning and counts the lost events.

The lines on stdout are a public interface: platforms have log rules that match them. Each begins with the same word,
at the start of a line; numbers are plain::

    tieredckpt step=120 seconds=0.412 loss=2.3051
    tieredckpt save step=120 state=staged blocked_seconds=0.009
    tieredckpt restore step=120 mode=live seconds=0.211
    tieredckpt first-step epoch=2 seconds=1.902
    tieredckpt broken epoch=2
    tieredckpt ended how=finished
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
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from tieredckpt.event_log import event_types
from tieredckpt.event_log.event_types import FileOpened, LogEvent

log = logging.getLogger(__name__)

EVENT_LOG_ENV = "TIEREDCKPT_EVENT_LOG"
"""Directory of the event log. Default: none; under ``elastic run`` a directory in its logs."""

_PART_BYTES = 8 << 20
_PARTS = 32
_CHECK_EVERY = 64
"""Lines between two checks that the file still exists."""
_RETRY_S = 1.0
_ENCODE = msgspec.json.Encoder().encode
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL | os.O_CLOEXEC


class EventLog(Protocol):
    """Sink for events.

    ``write`` takes a few microseconds and never raises, in any thread and any forked child.
    """

    @property
    def position(self) -> RunPosition:
        """Position of this process in the run, for writers that do not know it."""

    def write(self, event: LogEvent) -> None:
        """Write ``event``, or count it as lost."""

    def close(self) -> None:
        """Close the file. A later ``write`` opens a new one."""


class NullEventLog:
    """Event log that discards events."""

    def __init__(self) -> None:
        self.position = RunPosition()

    def write(self, event: LogEvent) -> None:
        pass

    def close(self) -> None:
        pass


class EventLogWriter:
    """Event log that writes this process's files into ``directory``, which it creates."""

    def __init__(
        self, directory: str | os.PathLike[str], *, name: str = "", part_bytes: int = _PART_BYTES, parts: int = _PARTS
    ) -> None:
        self.directory = Path(directory).absolute()
        self.position = RunPosition()
        self.lost = 0
        """Events that could not be written."""
        self._name = re.sub(r"[^A-Za-z0-9_-]", "-", name or socket.gethostname())[:100]
        self._part_bytes, self._parts = part_bytes, parts
        self._warned = False
        self._file = _File()

    def write(self, event: LogEvent) -> None:
        file = self._file
        if file.pid != os.getpid():  # forked: the file belongs to the parent
            file.close_fd()
            file = self._file = _File()
        try:
            with file.lock:
                self._append(file, _ENCODE(event) + b"\n")
        except (OSError, TypeError, ValueError, OverflowError) as error:
            self.lost += 1
            if not self._warned:
                self._warned = True
                log.warning("the event log in %s is not written to: %s", self.directory, error)

    def close(self) -> None:
        with self._file.lock:
            self._file.close_fd()

    def _append(self, file: _File, line: bytes) -> None:
        if file.fd >= 0 and file.lines % _CHECK_EVERY == 0 and os.fstat(file.fd).st_nlink == 0:
            file.close_fd()
        if file.fd < 0 or file.size + len(line) > self._part_bytes:
            self._open_next_file(file)
        if file.torn:
            line = b"\n" + line
        written = os.write(file.fd, line)
        file.lines += 1
        file.size += written
        file.torn = written < len(line)
        if file.torn:
            raise OSError(f"{written} of {len(line)} bytes were written")

    def _open_next_file(self, file: _File) -> None:
        """Open the next file of this process, and delete its oldest above ``self._parts`` files."""
        now = time.monotonic()
        if now < file.again_at:
            raise OSError("it could not be opened")
        file.again_at = now + _RETRY_S
        file.close_fd()
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self._part(file, file.part)
        file.fd = os.open(path, _FLAGS, 0o644)
        header = FileOpened(time.time(), file.pid, socket.gethostname(), part=file.part)
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
    """Open file of one process, with its state."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.start = time.time_ns()
        self.lock = threading.RLock()  # a signal handler may interrupt a write of its thread
        self.fd = -1
        self.part = 0
        self.size = self.lines = 0
        self.torn = False
        self.again_at = 0.0

    def close_fd(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


class StdoutEventLog:
    """Event log that also prints its public lines to standard output."""

    def __init__(self, event_log: EventLog) -> None:
        self._event_log = event_log

    @property
    def position(self) -> RunPosition:
        return self._event_log.position

    def write(self, event: LogEvent) -> None:
        self._event_log.write(event)
        print_event(event)

    def close(self) -> None:
        self._event_log.close()


_writers: dict[str, EventLogWriter] = {}
_stdout_logs: dict[str, StdoutEventLog] = {}


def event_log_from_environ(environ: Mapping[str, str] = os.environ) -> EventLog:
    """Return the event log of this process, shared by all callers. Without a directory it discards events."""
    directory = environ.get(EVENT_LOG_ENV, "")
    event_log: EventLog = NullEventLog()
    if directory:
        event_log = _writers.setdefault(directory, EventLogWriter(directory, name=environ.get("ELASTIC_NODE", "")))
    return (
        _stdout_logs.setdefault(directory, StdoutEventLog(event_log)) if stdout_events_enabled(environ) else event_log
    )


@dataclass
class RunPosition:
    """Position of a process in its run. The recovery loop updates it; without one it does not change."""

    epoch: int = -1
    rank: int = -1
    stage_began_at: float | None = None
    """Start of the current stage, before the first step of this world. ``None``: no such stage."""
    newest_ended_step: int = -1
    """Newest step that it has completed. -1: none."""
    next_step: int = 0
    """Step after the one that was restored in this world."""


STDOUT_EVENTS_ENV = "TIEREDCKPT_STDOUT_EVENTS"
"""1: the first rank of every node prints its events to standard output."""
_STDOUT = 1


def stdout_events_enabled(environ: Mapping[str, str]) -> bool:
    return environ.get(STDOUT_EVENTS_ENV, "") == "1" and environ.get("LOCAL_RANK", "0") == "0"


def stdout_line(event: event_types.LogEvent) -> str:
    """Return the public line of an event, without line end. Empty: the event has none."""
    if isinstance(event, event_types.StepEvent):
        loss = "" if event.loss is None else f" loss={event.loss:g}"
        return f"tieredckpt step={event.step} seconds={event.seconds:.3f}{loss}"
    if isinstance(event, event_types.SaveEvent):
        return f"tieredckpt save step={event.step} state={event.state} blocked_seconds={event.seconds:.3f}"
    if isinstance(event, event_types.RestoreEvent):
        return f"tieredckpt restore step={event.step} mode={event.mode} seconds={event.seconds:.3f}"
    if isinstance(event, event_types.StageEvent) and event.name == event_types.STAGE_FIRST_STEP:
        return f"tieredckpt first-step epoch={event.epoch} seconds={event.seconds:.3f}"
    if isinstance(event, event_types.StageEvent) and event.name == event_types.STAGE_DETECT:
        return f"tieredckpt broken epoch={event.epoch}"
    if isinstance(event, event_types.ProcessEnded) and event.who == "rank":
        words = " ".join(event.words.split())
        return f"tieredckpt ended how={event.how.replace(' ', '-')}" + (f" {words}" if words else "")
    return ""


def print_event(event: event_types.LogEvent) -> None:
    """Print the public line of an event in one system call, so that lines do not mix. Errors are ignored."""
    words = stdout_line(event)
    if words:
        with contextlib.suppress(OSError):
            os.write(_STDOUT, f"{words}\n".encode())
