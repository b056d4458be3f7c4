"""Reader of a run's event log: all files as one sequence, with a count of unreadable lines."""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tieredckpt.errors import EventLogNotFoundError, UsageError
from tieredckpt.event_log.event_types import (
    EVENT_LOG_VERSION,
    FileOpened,
    LogEvent,
    RestoreEvent,
    SaveEvent,
    StageEvent,
    StepEvent,
    event_time,
)
from tieredckpt.event_log.log_writer import EVENT_LOG_ENV

_LATEST = 1e11
"""Time in seconds that no clock shows: a line with a later time is damaged."""


class UnreadableLine(enum.Enum):
    """Reason why a line is not an event."""

    DAMAGED = "damaged"
    UNKNOWN = "unknown"


class EventLogContents(
    msgspec.Struct,
    frozen=True,
):
    """Contents of an event log."""

    events: tuple[LogEvent, ...] = ()
    """Events in order of the time at which they were over."""
    files: int = 0
    truncated_lines: int = 0
    """Last lines without a line end: their process was killed during the write, or is writing them now."""
    damaged_lines: int = 0
    """Other lines that are not an event."""
    unknown_events: int = 0
    """Lines of a kind that this release does not know."""
    missing_files: int = 0
    """Files of a process that no longer exist."""
    newer_files: int = 0
    """Files written by a newer release."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the user. Truncated lines are normal, so they cause none."""
        said = (
            (self.damaged_lines, "damaged lines were passed over"),
            (self.unknown_events, "lines are of a kind that this release does not know"),
            (self.missing_files, "files are missing: a process that writes very much gives up its oldest"),
            (self.newer_files, "files were written by a newer release"),
        )
        return tuple(f"{number} {words}" for number, words in said if number)


def read_event_log(directory: Path) -> EventLogContents:
    """Read all files of an event log. Processes may still be writing to it.

    Raise :class:`EventLogNotFoundError` if it does not exist or is empty, and ``OSError`` if it cannot be read.
    """
    if not directory.exists():
        raise EventLogNotFoundError(f"there is no event log {directory}")
    if not directory.is_dir():
        raise UsageError(f"{directory} is a file, an event log is a directory of them")
    files = {}
    for path in sorted(directory.iterdir()):
        if path.suffix == ".jsonl":
            with contextlib.suppress(FileNotFoundError):  # deleted by its process, which writes very much
                files[path.name] = path.read_bytes()
    if not any(files.values()):
        raise EventLogNotFoundError(f"nothing has been written to the event log {directory} yet")
    return parse_event_files(files)


def parse_event_files(files: Mapping[str, bytes]) -> EventLogContents:
    """Parse the files of an event log, by name."""
    events: list[LogEvent] = []
    counts = dict.fromkeys(UnreadableLine, 0)
    torn = missing = newer = 0
    parts: dict[str, set[int]] = {}
    for name, data in sorted(files.items()):
        *lines, rest = data.split(b"\n")
        torn += bool(rest)
        for line in filter(None, lines):
            event = parse_event_line(line)
            if isinstance(event, UnreadableLine):
                counts[event] += 1
                continue
            if isinstance(event, FileOpened):
                newer += event.version > EVENT_LOG_VERSION
                parts.setdefault(".".join(name.split(".")[:3]), set()).add(event.part)
            events.append(event)
    for found in parts.values():
        missing += max(found) + 1 - len(found)
    events.sort(key=event_time)
    return EventLogContents(
        tuple(events), len(files), torn, counts[UnreadableLine.DAMAGED], counts[UnreadableLine.UNKNOWN], missing, newer
    )


def parse_event_line(line: bytes) -> LogEvent | UnreadableLine:
    """Return the event of a line, or why it is not an event."""
    try:
        event: LogEvent = _event(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _kind(line)
    lasted = event.seconds if isinstance(event, StageEvent | StepEvent | SaveEvent | RestoreEvent) else 0.0
    return event if 0 <= event_time(event) < _LATEST and 0 <= lasted < _LATEST else UnreadableLine.DAMAGED


def _kind(line: bytes) -> UnreadableLine:
    try:
        return UnreadableLine.DAMAGED if _tag(line).event in _KNOWN else UnreadableLine.UNKNOWN
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return UnreadableLine.DAMAGED


class _Tag(msgspec.Struct):
    event: str


_event = msgspec.json.Decoder(LogEvent).decode
_tag = msgspec.json.Decoder(_Tag).decode
_KNOWN = frozenset(str(kind.__struct_config__.tag) for kind in LogEvent.__args__)


_LOGS = "elastic-logs"
_MAX_LISTED = 10


def find_event_log(where: str | None, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the event log directory of a job or directory.

    ``None``: ``$TIEREDCKPT_EVENT_LOG``. Raise :class:`EventLogNotFoundError` if it does not exist.
    """
    if where is None:
        if not environ.get(EVENT_LOG_ENV):
            raise UsageError(f"name a job or the directory of its event log: ${EVENT_LOG_ENV} is not set")
        return Path(environ[EVENT_LOG_ENV])
    given = Path(where)
    if any(given.glob("*.jsonl")):
        return given
    looked = [*dict.fromkeys((given / "event-log", Path(_LOGS) / where / "event-log"))]
    for path in looked:
        if path.is_dir():
            return path
    if given.is_dir():
        return given
    tried = " or ".join(str(path) for path in looked)
    jobs = sorted(path.parent.name for path in Path(_LOGS).glob("*/event-log"))
    more = f" and {len(jobs) - _MAX_LISTED} more" if len(jobs) > _MAX_LISTED else ""
    listed = f". {_LOGS} has event logs of {', '.join(jobs[:_MAX_LISTED])}{more}" if jobs else ""
    raise EventLogNotFoundError(f"{where} is not a directory with an event log, and neither is {tried}{listed}")
