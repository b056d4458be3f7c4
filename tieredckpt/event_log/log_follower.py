"""Reader of an event log that grows: each read returns only the lines written since the last one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tieredckpt.event_log.event_types import LogEvent
from tieredckpt.event_log.log_reader import UnreadableLine, parse_event_line

_READ_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 20


class EventLogFollower:
    """Position in all files of an event log. The directory may not exist yet.

    Each read begins with the files of the process name ``first``.
    """

    def __init__(self, directory: Path, *, first: str = "") -> None:
        self._directory, self._first = directory, first
        self._offsets: dict[str, int] = {}

    def read_new(self) -> Iterator[LogEvent]:
        """Yield the events of all complete lines that are new. Unreadable lines are skipped.

        Raise ``OSError`` if the directory cannot be read. Files that their process has deleted are skipped.
        """
        if not self._directory.is_dir():
            return
        found = sorted(
            (path for path in self._directory.iterdir() if path.suffix == ".jsonl"),
            key=lambda path: (path.name.partition(".")[0] != self._first, path.name),
        )
        names = {path.name for path in found}
        self._offsets = {name: offset for name, offset in self._offsets.items() if name in names}
        for path in found:
            with contextlib.suppress(FileNotFoundError):
                yield from self._new_events(path)

    def _new_events(self, path: Path) -> Iterator[LogEvent]:
        offset = self._offsets.get(path.name, 0)
        if path.stat().st_size <= offset:
            return
        with path.open("rb") as file:
            file.seek(offset)
            while data := file.read(_READ_BYTES):
                end = data.rfind(b"\n") + 1
                if not end and len(data) < _MAX_LINE_BYTES:
                    return
                end = end or len(data)
                self._offsets[path.name] = offset = offset + end
                file.seek(offset)
                for line in data[:end].split(b"\n"):
                    event = parse_event_line(line) if line else UnreadableLine.DAMAGED
                    if not isinstance(event, UnreadableLine):
                        yield event
