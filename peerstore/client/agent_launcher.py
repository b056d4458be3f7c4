"""Launch of one agent per directory, replacement of a hung agent, and a watchdog while ranks run."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from peerstore import deadlines
from peerstore.client.store_client import AgentConnector, Client
from peerstore.daemon_process import ensure_private_directory, peer_credentials
from peerstore.errors import AgentUnreachableError, PeerStoreError
from peerstore.settings import AgentPaths
from peerstore.transport.authentication import MAX_HANDSHAKE_BYTES, encode_hello
from peerstore.transport.framing import encode_frame
from peerstore.transport.unix import UnixChannel, connect_to_agent

log = logging.getLogger(__name__)

_LOG_TAIL_BYTES = 2000
_PROBE_S = 3.0
_KILL_S = 10.0
_SOCKET_S = 10.0
"""Seconds in which a running agent makes a new socket in place of a deleted one, or ends."""
_RETRY_S = 0.02
MAX_IDLE_S = 1.0
_GREETING_S = 10.0


def connect_or_launch_agent(
    place: AgentPaths, command: Sequence[str], *, environ: Mapping[str, str] | None = None, timeout_s: float = 30.0
) -> socket.socket:
    """Return a connection to the agent of ``place``; run ``command`` first if no agent answers.

    ``command`` must detach itself (``--detach``): the agent outlives this process and is not its child.
    """
    try:
        return connect_to_agent(place.socket, named=place.explicit)
    except AgentUnreachableError:
        pass
    ensure_private_directory(place.directory)
    deadline = time.monotonic() + deadlines.remaining_s(timeout_s)
    fd = os.open(place.launch_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _lock(fd, place, deadline)
        try:
            return connect_to_agent(place.socket, named=place.explicit)  # another process was faster
        except AgentUnreachableError:
            return _await_running(place, deadline) or _launch(place, command, environ, deadline)
    finally:
        os.close(fd)


def replace_hung_agent(place: AgentPaths, *, within_s: float = _PROBE_S) -> bool:
    """Kill the agent if it hangs; return whether it was killed.

    Another agent can then take over its memory. An agent hangs if it answers no greeting for ``within_s`` seconds and
    holds the lock of its directory. In addition, none of its threads may have run, been runnable, or waited for a disk
    meanwhile. A slow agent on a busy machine is not killed.
    """
    with _hung_agent(place, within_s) as (pid, agent):
        if not pid:
            return False
        log.warning(
            "the agent in %s (process %d) hangs: killing it, so that another agent can take over", place.directory, pid
        )
        try:
            signal.pidfd_send_signal(agent, signal.SIGKILL)
            return bool(select.select([agent], [], [], _KILL_S)[0])
        except OSError:  # it has exited
            return False


def raise_if_agent_hangs(place: AgentPaths, *, within_s: float = _PROBE_S) -> bool:
    """Raise :class:`AgentUnreachableError` if the agent hangs; return ``False`` otherwise."""
    with _hung_agent(place, within_s) as (pid, _):
        if pid:
            raise AgentUnreachableError(
                f"the agent in {place.directory} (process {pid}) hangs or was stopped, and this process may not "
                f"replace it. Resume it (kill -CONT {pid}), or run `tieredckpt agent restart --dir "
                f"{shlex.quote(str(place.directory))}`"
            )
    return False


def silence_of_agent(place: AgentPaths, *, still_s: float = MAX_IDLE_S, within_s: float = _GREETING_S) -> str:
    """Return why the agent of ``place`` does not answer, or "" if it greets.

    An agent that did not run at all for ``still_s`` seconds counts as silent; a busy one has ``within_s`` seconds.
    Raise :class:`AgentUnreachableError` if none listens.
    """
    began = time.monotonic()
    with connect_to_agent(place.socket, timeout_s=still_s, named=place.explicit) as sock:
        pid = peer_credentials(sock)[0]
        sock.settimeout(still_s)
        try:
            sock.sendall(encode_frame(encode_hello("")))
            while not select.select([sock], [], [], 0)[0]:
                before = _cpu_ticks_at_rest(pid)
                if select.select([sock], [], [], still_s)[0]:
                    break
                waited_s = time.monotonic() - began
                if 0 <= before == _cpu_ticks_at_rest(pid) or waited_s > within_s:
                    return (
                        f"the agent in {place.directory} (process {pid}) does not answer: no greeting within "
                        f"{waited_s:.1f} s. It hangs or was stopped (kill -CONT {pid})"
                    )
            sock.recv(MAX_HANDSHAKE_BYTES)  # an unread greeting would reset the connection
        except OSError as error:  # it has exited
            raise AgentUnreachableError(f"no agent answers on {place.socket}: {error}") from error
    return ""


def signal_agent(place: AgentPaths, number: int) -> bool:
    """Send a signal to the agent of ``place``; return whether it runs.

    Another process that reused its pid never receives the signal.
    """
    try:
        pid = int(place.lock.read_text())
        agent = os.pidfd_open(pid)
    except (OSError, ValueError, OverflowError):
        return False
    try:
        if not _holds_lock(place, pid):
            return False
        signal.pidfd_send_signal(agent, number)
    except (OSError, ValueError):
        return False
    finally:
        os.close(agent)
    return True


def stop_agent(place: AgentPaths, *, timeout_s: float) -> bool:
    """Send SIGTERM to the agent of ``place`` and wait until it has exited; return ``False`` if none runs.

    Raise :class:`AgentUnreachableError` if it does not exit within ``timeout_s`` seconds.
    """
    try:
        pid = int(place.lock.read_text())
        agent = os.pidfd_open(pid)
    except (OSError, ValueError, OverflowError):
        return False
    try:
        if not signal_agent(place, signal.SIGTERM):
            return False
        if not select.select([agent], [], [], timeout_s)[0]:
            raise AgentUnreachableError(
                f"the agent in {place.directory} (process {pid}) did not exit within {timeout_s:g} s, see {place.log}"
            )
    finally:
        os.close(agent)
    return True


@contextlib.contextmanager
def _hung_agent(place: AgentPaths, within_s: float) -> Iterator[tuple[int, int]]:
    """Yield the pid and an open pidfd of the agent if it hangs, else (0, -1)."""
    with contextlib.ExitStack() as cleanup:
        found = (0, -1)
        try:
            sock = cleanup.enter_context(connect_to_agent(place.socket, named=place.explicit))
            pid = peer_credentials(sock)[0]
            agent = os.pidfd_open(pid)
            cleanup.callback(os.close, agent)
            before = _idle_cpu_ticks(pid)
            hangs = before >= 0 and not _greets(sock, within_s) and _idle_cpu_ticks(pid) == before
            if hangs and _holds_lock(place, pid):
                found = pid, agent
        except (PeerStoreError, OSError, ValueError):  # it has exited, or belongs to another user
            pass
        yield found


def _greets(sock: socket.socket, within_s: float) -> bool:
    """Return whether the agent answers a greeting, in whatever way."""
    channel = UnixChannel(sock)
    channel.send(encode_hello(""))
    return channel.wait_readable(within_s)


def _idle_cpu_ticks(pid: int) -> int:
    """Return the CPU ticks of a process, or -1 while a thread runs or waits for a disk."""
    computed = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        fields = task.joinpath("stat").read_text().rpartition(")")[2].split()
        if fields[0] in "RD":
            return -1
        computed += int(fields[11]) + int(fields[12])
    return computed


def _cpu_ticks_at_rest(pid: int) -> int:
    """Return the same, or -1 if a thread starts or ends meanwhile, which counts as running."""
    try:
        return _idle_cpu_ticks(pid)
    except (OSError, ValueError):
        return -1


def _holds_lock(place: AgentPaths, pid: int) -> bool:
    """Return whether the process holds the lock of the directory.

    The holder writes its pid into the lock file.
    """
    with place.lock.open("r") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(lock.read()) == pid
    return False


def _lock(fd: int, place: AgentPaths, deadline: float) -> None:
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


def _await_running(place: AgentPaths, deadline: float) -> socket.socket | None:
    """Connect to a running agent after it has recreated its socket; return ``None`` if none runs."""
    try:
        pid = int(place.lock.read_text())
        agent = os.pidfd_open(pid)
    except (OSError, ValueError, OverflowError):
        return None
    try:
        if not _holds_lock(place, pid):
            return None
        deadline = min(deadline, time.monotonic() + _SOCKET_S)
        while not select.select([agent], [], [], _RETRY_S)[0]:
            with contextlib.suppress(AgentUnreachableError):
                return connect_to_agent(place.socket, named=place.explicit)
            if time.monotonic() > deadline:
                raise AgentUnreachableError(
                    f"the agent in {place.directory} (process {pid}) runs without a socket. Another one cannot "
                    f"start. Wait until it has exited, or end it (kill {pid})."
                )
    except (OSError, ValueError):  # the lock file was deleted
        return None
    finally:
        os.close(agent)
    return None


def _launch(
    place: AgentPaths, command: Sequence[str], environ: Mapping[str, str] | None, deadline: float
) -> socket.socket:
    """Run ``command``, which detaches itself, and wait until the agent answers or exits.

    The agent inherits the write end of a pipe and never uses it. The pipe closes when the agent exits, so that this
    process, which is not its parent, notices that.
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
                return connect_to_agent(place.socket, named=place.explicit)
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


_CHECK_S = 1.0
_ANSWER_S = 10.0
_JOIN_S = 1.0
_LAUNCH_S = 35.0
"""Seconds after which a launch in progress has ended, successful or not."""


class AgentWatchdog:
    """Thread that restarts a dead agent and replaces a hung one within seconds.

    The agent's memory outlives it, but other nodes cannot read it until another agent runs. On nodes that a job has
    left, or that wait outside of its world, no other process would notice. The connection also shows the agent that it
    is needed.
    """

    def __init__(
        self,
        connector: AgentConnector,
        replace: Callable[[], bool],
        *,
        its_turn: Callable[[], bool] = lambda: True,
    ) -> None:
        """Start the thread.

        ``connector`` launches an agent if none answers, ``replace`` kills a hung one, and ``its_turn`` returns whether
        this process is responsible for the agent.
        """
        self._client = Client(connector, retry_s=0.0, replace=replace)
        self._its_turn = its_turn
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peerstore-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        missing = False
        while not self._stop.wait(_CHECK_S):
            try:
                if not self._its_turn():
                    continue
                self._client.ping(timeout_s=_ANSWER_S)
                missing = False
            except (PeerStoreError, OSError) as error:
                level = logging.DEBUG if missing or self._stop.is_set() else logging.WARNING
                log.log(
                    level,
                    "the agent of this node does not answer: %s. If it has ended, another one starts and takes over "
                    "the checkpoints in memory",
                    error,
                )
                missing = True

    def close(self) -> None:
        """Stop the watchdog; a check or launch in progress may still finish."""
        self._stop.set()
        self._client.close()
        self._thread.join(_JOIN_S)


class ElectedWatchdog:
    """Watchdog of a node's agent in one of the processes that use it.

    The process that holds the lock next to the socket watches. An agent that exits in order removes its socket and is
    not restarted. An agent that died leaves its socket behind.
    """

    def __init__(self, place: AgentPaths, launch: AgentConnector, replace: Callable[[], bool]) -> None:
        self._place = place
        self._launch = launch
        self._replace = replace
        self._ended = False
        self._action_lock = threading.Lock()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with contextlib.ExitStack() as undo:
            self._lock = undo.enter_context(os.fdopen(os.open(place.watchdog_lock, flags, 0o600), "r+"))
            self._has_lock()  # later processes leave the agent to this one
            self._watch = AgentWatchdog(self._connect, self._replaced, its_turn=self._has_lock)
            undo.pop_all()

    def _has_lock(self) -> bool:
        """Acquire the lock of this process and return whether it is held; forked children do not inherit it."""
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError, ValueError):  # another process has it, or the file is closed
            return False
        return True

    def _connect(self) -> socket.socket:
        try:
            return connect_to_agent(self._place.socket, named=self._place.explicit)
        except AgentUnreachableError:
            with self._action_lock:
                if self._ended or not self._place.socket.exists():
                    raise
                return self._launch()

    def _replaced(self) -> bool:
        with self._action_lock:
            return not self._ended and self._replace()

    def close(self) -> None:
        """Stop the watchdog, and wait for a launch or a kill in progress."""
        self._ended = True
        self._watch.close()
        if self._action_lock.acquire(timeout=_LAUNCH_S):
            self._action_lock.release()
        self._lock.close()


class WatchdogRegistry:
    """The watchdogs of this process: one for each agent, while a user has acquired it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watchdogs: dict[Path, tuple[ElectedWatchdog, int]] = {}
        os.register_at_fork(after_in_child=self._forked)

    def acquire(self, place: AgentPaths, launch: AgentConnector, replace: Callable[[], bool]) -> None:
        with self._lock:
            watchdog, users = self._watchdogs.get(place.directory) or (ElectedWatchdog(place, launch, replace), 0)
            self._watchdogs[place.directory] = watchdog, users + 1

    def release(self, place: AgentPaths) -> None:
        with self._lock:
            watchdog, users = self._watchdogs.pop(place.directory, (None, 0))
            if watchdog is not None and users > 1:
                self._watchdogs[place.directory] = watchdog, users - 1
        if watchdog is not None and users == 1:
            watchdog.close()

    def _forked(self) -> None:
        """Forget the parent's watchdogs in a forked child."""
        self._lock, self._watchdogs = threading.Lock(), {}
