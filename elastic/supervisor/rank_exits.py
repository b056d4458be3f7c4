"""The exit of a rank that never joined, described for its user."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from elastic.control.child_processes import last_line

_TAIL_BYTES = 4096


def describe_unjoined_exit(command: Sequence[str], status: int, printed: Path) -> str:
    """Describe the exit of a script that never called ``elastic.run``.

    If the script failed, include its last printed line. ``command`` starts the script, and ``printed`` is the log file
    of the process.
    """
    script = Path(script_name(command)).name
    if status == 0:
        return (
            f"{script} exited without calling elastic.run / @elastic.recoverable; not retried. "
            "To run an unmodified script use torchrun"
        )
    last = last_printed_line(printed)
    return (
        f"{script} exited with status {status} before it called elastic.run / @elastic.recoverable; not retried"
        f"{': ' if last else ''}{last} (see {printed})"
    )


def script_name(command: Sequence[str]) -> str:
    """Return the script, module or program of a rank's command."""
    words = [word for word in command[1:] if word not in ("-u", "-m")] if command[0] == sys.executable else command
    return next(iter(words), command[0])


def last_printed_line(printed: Path) -> str:
    """Return the last line of a log file that is not blank, or ""."""
    return last_line(end_of_file(printed, _TAIL_BYTES))


def end_of_file(path: Path, size: int) -> str:
    """Return the last ``size`` bytes of a file as text, or "" if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
