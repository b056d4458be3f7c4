"""Start the node agent where none answers: exactly once, whoever asks at the same instant."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from peerstore import deadlines, frames
from peerstore.client import connect
from peerstore.errors import AgentUnreachableError, PeerStoreError
from peerstore.frames import PROTOCOL, Greeting
from peerstore.owners import peer_of
from peerstore.server import private_directory
from peerstore.settings import AgentPlace

log = logging.getLogger(__name__)

_LOG_TAIL_BYTES = 2000
_PROBE_S = 3.0
_END_S = 10.0


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
    deadline = time.monotonic() + deadlines.left(timeout_s)
    fd = os.open(place.launch_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _lock(fd, place, deadline)
        try:
            return connect(place.socket, named=place.named)  # another process was faster
        except AgentUnreachableError:
            return _launch(place, command, environ, deadline)
    finally:
        os.close(fd)


def replace_hung(place: AgentPlace, *, within_s: float = _PROBE_S) -> bool:
    """End the agent if it hangs, so that another one can take over what it keeps; whether it did and is gone.

    The proof: it accepts nobody's greeting for ``within_s``, holds the lock of its directory, and meanwhile none of its
    threads ran, was about to, or waited for a disk. One that is only slow on a busy machine is left alone.
    """
    with _hung(place, within_s) as (pid, agent):
        if not pid:
            return False
        log.warning("the agent in %s (process %d) hangs: it is ended, and another one takes over", place.directory, pid)
        try:
            signal.pidfd_send_signal(agent, signal.SIGKILL)
            return bool(select.select([agent], [], [], _END_S)[0])
        except OSError:  # it is gone
            return False


def refuse_hung(place: AgentPlace, *, within_s: float = _PROBE_S) -> bool:
    """Raise :class:`AgentUnreachableError` if the agent hangs: whoever manages it has to end it. Else false."""
    with _hung(place, within_s) as (pid, _):
        if pid:
            raise AgentUnreachableError(
                f"the agent in {place.directory} (process {pid}) hangs, or was stopped, and this process may not "
                f"replace it: have it go on (kill -CONT {pid}), or end it and start another one"
            )
    return False


def signal_agent(place: AgentPlace, number: int) -> bool:
    """Send a signal to this place's agent; False where it does not run. Nobody who was given its number gets one."""
    try:
        pid = int(place.lock.read_text())
        agent = os.pidfd_open(pid)
    except (OSError, ValueError, OverflowError):
        return False
    try:
        if not _holds(place, pid):
            return False
        signal.pidfd_send_signal(agent, number)
    except (OSError, ValueError):
        return False
    finally:
        os.close(agent)
    return True


@contextlib.contextmanager
def _hung(place: AgentPlace, within_s: float) -> Iterator[tuple[int, int]]:
    """The agent's process and an open descriptor of it, where it hangs; else (0, -1)."""
    with contextlib.ExitStack() as cleanup:
        found = (0, -1)
        try:
            sock = cleanup.enter_context(connect(place.socket, named=place.named))
            pid = peer_of(sock)[0]
            agent = os.pidfd_open(pid)
            cleanup.callback(os.close, agent)
            before = _stands_still(pid)
            still = before >= 0 and not _greets(sock, within_s) and _stands_still(pid) == before
            if still and _holds(place, pid):
                found = pid, agent
        except (PeerStoreError, OSError, ValueError):  # it is gone, or somebody else's
            pass
        yield found


def _greets(sock: socket.socket, within_s: float) -> bool:
    sock.settimeout(within_s)
    try:
        frames.send(sock, Greeting(PROTOCOL, ""))
        frames.receive(sock, Greeting, limit_bytes=frames.MAX_GREETING_BYTES)
    except TimeoutError:
        return False
    except PeerStoreError:  # it says something
        return True
    return True


def _stands_still(pid: int) -> int:
    """The time that a process has computed so far, or -1 while any of its threads runs, or waits for a disk."""
    computed = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        fields = task.joinpath("stat").read_text().rpartition(")")[2].split()
        if fields[0] in "RD":
            return -1
        computed += int(fields[11]) + int(fields[12])
    return computed


def _holds(place: AgentPlace, pid: int) -> bool:
    """Whether it is the agent of this directory: who has locked it wrote its number there."""
    with place.lock.open("r") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(lock.read()) == pid
    return False


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
