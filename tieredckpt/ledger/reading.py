"""All that the processes of a run wrote down, in order of time, as far as it can be read."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tieredckpt.errors import LedgerNotFoundError, UsageError
from tieredckpt.ledger.events import VERSION, Event, Opened, Restored, Save, Stage, Step, when

_LATEST = 1e11
"""No clock shows this: the line is damaged."""


class Line(enum.Enum):
    """What a line is that is no event."""

    DAMAGED = "damaged"
    UNKNOWN = "unknown"


class Read(msgspec.Struct, frozen=True):
    """What was found in a ledger."""

    events: tuple[Event, ...] = ()
    """By the time they were over."""
    files: int = 0
    torn: int = 0
    """Last lines without an end: their process was killed as it wrote them, or is writing them now."""
    damaged: int = 0
    """Other lines that are no event."""
    unknown: int = 0
    """Lines of a kind that this release does not know."""
    missing: int = 0
    """Parts of a process's ledger that are there no more."""
    newer: int = 0
    """Files written by a newer release."""

    @property
    def complaints(self) -> tuple[str, ...]:
        """What is to be said of it, for people. Torn lines are normal."""
        said = (
            (self.damaged, "damaged lines were passed over"),
            (self.unknown, "lines are of a kind that this release does not know"),
            (self.missing, "files are missing: a process that writes very much gives up its oldest"),
            (self.newer, "files were written by a newer release"),
        )
        return tuple(f"{number} {words}" for number, words in said if number)


def read_ledger(directory: Path) -> Read:
    """All files of a ledger, also of one that is being written.

    ``LedgerNotFoundError`` where there is none, or nothing in it; ``OSError`` where it cannot be read.
    """
    if not directory.exists():
        raise LedgerNotFoundError(f"there is no ledger {directory}")
    if not directory.is_dir():
        raise UsageError(f"{directory} is a file, a ledger is a directory of them")
    files = {}
    for path in sorted(directory.iterdir()):
        if path.suffix == ".jsonl":
            with contextlib.suppress(FileNotFoundError):  # the oldest of a process that writes very much
                files[path.name] = path.read_bytes()
    if not any(files.values()):
        raise LedgerNotFoundError(f"nothing has been written to the ledger {directory} yet")
    return read_files(files)


def read_files(files: Mapping[str, bytes]) -> Read:
    """The same, of files that were read."""
    events: list[Event] = []
    counts = dict.fromkeys(Line, 0)
    torn = missing = newer = 0
    parts: dict[str, set[int]] = {}
    for name, data in sorted(files.items()):
        *lines, rest = data.split(b"\n")
        torn += bool(rest)
        for line in filter(None, lines):
            event = read_line(line)
            if isinstance(event, Line):
                counts[event] += 1
                continue
            if isinstance(event, Opened):
                newer += event.version > VERSION
                parts.setdefault(".".join(name.split(".")[:3]), set()).add(event.part)
            events.append(event)
    for found in parts.values():
        missing += max(found) + 1 - len(found)
    events.sort(key=when)
    return Read(tuple(events), len(files), torn, counts[Line.DAMAGED], counts[Line.UNKNOWN], missing, newer)


def read_line(line: bytes) -> Event | Line:
    """One event, or why it is none."""
    try:
        event: Event = _event(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _kind(line)
    lasted = event.seconds if isinstance(event, Stage | Step | Save | Restored) else 0.0
    return event if 0 <= when(event) < _LATEST and 0 <= lasted < _LATEST else Line.DAMAGED


def _kind(line: bytes) -> Line:
    try:
        return Line.DAMAGED if _tag(line).event in _KNOWN else Line.UNKNOWN
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Line.DAMAGED


class _Tag(msgspec.Struct):
    event: str


_event = msgspec.json.Decoder(Event).decode
_tag = msgspec.json.Decoder(_Tag).decode
_KNOWN = frozenset(str(kind.__struct_config__.tag) for kind in Event.__args__)
