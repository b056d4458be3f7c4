"""Start the node agent where none answers: exactly once, whoever asks at the same instant."""

from __future__ import annotations

import fcntl
import os
import select
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from peerstore.client import connect
from peerstore.errors import AgentUnreachableError
from peerstore.server import private_directory
from peerstore.settings import AgentPlace

_LOG_TAIL_BYTES = 2000


def connect_or_launch(
    place: AgentPlace, command: Sequence[str], *, environ: Mapping[str, str] | None = None, timeout_s: float = 30.0
) -> socket.socket:
    """A connection to this place's agent; ``command`` is run first if nobody answers.

    ``command`` must detach itself (``--detach``): the agent outlives the process that asked for it and is not its
    child.
    """
    try:
        return connect(place.socket, named=place.named)
    except AgentUnreachableError:
        pass
    private_directory(place.directory)
    deadline = time.monotonic() + timeout_s
    fd = os.open(place.launch_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _lock(fd, place, deadline)
        try:
            return connect(place.socket, named=place.named)  # another process was faster
        except AgentUnreachableError:
            return _launch(place, command, environ, deadline)
    finally:
        os.close(fd)


def _lock(fd: int, place: AgentPlace, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise AgentUnreachableError(
                    f"another process has been starting the agent in {place.directory} for too long"
                ) from None
            time.sleep(0.01)
        else:
            return


def _launch(
    place: AgentPlace, command: Sequence[str], environ: Mapping[str, str] | None, deadline: float
) -> socket.socket:
    """Run ``command``, which detaches itself, and wait until it answers or ends.

    The agent inherits the write end of a pipe and never uses it: the pipe closes when the agent dies, which is how
    this process, no longer its parent, learns of that.
    """
    alive, inherited = os.pipe()
    try:
        with place.log.open("ab") as log:
            start = log.tell()
            subprocess.run(  # noqa: S603 - the command is this package's own
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
                env=dict(environ) if environ is not None else None,
                pass_fds=(inherited,),
                check=False,
                timeout=max(0.1, deadline - time.monotonic()),
            )
        os.close(inherited)
        inherited = -1
        while True:
            ended = bool(select.select([alive], [], [], 0.005)[0])
            try:
                return connect(place.socket, named=place.named)
            except AgentUnreachableError:
                if ended:
                    raise AgentUnreachableError(f"the agent ended at once: {_tail(place.log, start)}") from None
                if time.monotonic() > deadline:
                    raise AgentUnreachableError(f"the agent does not answer, see {place.log}") from None
    except subprocess.TimeoutExpired:
        raise AgentUnreachableError(f"the agent did not go to the background, see {place.log}") from None
    finally:
        os.close(alive)
        if inherited >= 0:
            os.close(inherited)


def _tail(path: Path, start: int) -> str:
    with path.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(start, size - _LOG_TAIL_BYTES))
        return log.read().decode(errors="replace").strip() or "it said nothing"
