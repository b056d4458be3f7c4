"""How the agent that started this process restarts it."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Mapping
from pathlib import Path

from elastic.errors import PolicyError

SOCKET = "HYPERPOD_ELASTICAGENT_SOCKET_SERVER_PATH"
MODE = "ELASTIC_HYPERPOD_MODE"
"""For agents that are started in a way of their own, on machines where nobody may look at other processes."""

_PID = re.compile(r"_(\d+)\.sock$")
_PROC = Path("/proc")


class Mode(enum.Enum):
    IN_PROCESS = "in-process"
    """It lives on, and is told its next place over the agent's socket."""
    PROCESS = "process"
    """It is ended and started again, with its place in the environment."""
    NONE = "none"
    """No agent started it."""


def mode_of(environ: Mapping[str, str] = os.environ, proc: Path = _PROC) -> Mode:
    """Read from the environment as far as it says so.

    Before the first start there is no rank, and -1 in its place, only where ranks are told over the socket. A process
    that such an agent had to start again finds the place of the one before it, like one in the other mode: then what
    the agent was started with tells.
    """
    path = environ.get(SOCKET, "")
    if not path:
        return Mode.NONE
    said = environ.get(MODE, "")
    if said:
        try:
            return Mode(said)
        except ValueError:
            raise PolicyError(f"${MODE}={said!r}: one of {', '.join(mode.value for mode in Mode)}") from None
    if environ.get("RANK", "-1").startswith("-") or not environ.get("MASTER_ADDR"):
        return Mode.IN_PROCESS
    return Mode.IN_PROCESS if _restarts_in_process(path, proc) else Mode.PROCESS


def _restarts_in_process(path: str, proc: Path) -> bool:
    """The socket is named for the agent's process; where it is not, the agent is this process's parent."""
    named = _PID.search(path)
    pid = named.group(1) if named else str(os.getppid())
    try:
        words = (proc / pid / "cmdline").read_bytes().split(b"\0")
    except OSError as error:
        raise PolicyError(f"how the agent restarts cannot be read ({error}): set ${MODE}") from error
    return any(re.match(rb"--inprocess[-_]r", word) for word in words)
