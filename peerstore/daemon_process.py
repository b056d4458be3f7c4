"""Process identity and peer credentials, the open-file limit, and signals delivered to a thread.

Python runs a handler between any two steps of the main thread, also inside another handler. One that takes a lock
(``Event.set``, ``Condition.notify``) waits for itself when the step it interrupted has that lock.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import resource
import signal
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from peerstore.errors import AgentBusyError

log = logging.getLogger(__name__)


class ProcessIdentity(NamedTuple):
    """A process, told apart from a later one that was given the same number."""

    pid: int
    start_time: int

    @property
    def is_alive(self) -> bool:
        """Whether it still runs. One that cannot be seen counts as alive: of another namespace, or for now."""
        try:
            return self.pid <= 0 or process_start_time(self.pid) == self.start_time
        except OSError:
            return True


def process_identity(pid: int) -> ProcessIdentity:
    return ProcessIdentity(pid, process_start_time(pid) if pid > 0 else 0)


def current_process() -> ProcessIdentity:
    return process_identity(os.getpid())


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """The process on the other end of a Unix socket and its user, as the kernel noted them when it was made."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def trusted_users(directory: Path, *, named: bool = False, setting: str = "agent.directory") -> frozenset[int]:
    """The users whose processes may serve this one from ``directory``: this one and root, and no other can change it.

    ``named``: an operator has named the directory. Then root also trusts the user it belongs to: that is whose agent
    was meant. Nobody else does, because an agent serves its own user and root alone.

    Raises ``FileNotFoundError`` when there is no such directory, ``PermissionError`` when it is not to be trusted.
    """
    found = directory.lstat()
    trusted = {os.getuid(), 0}
    if named and os.getuid() == 0:
        trusted.add(found.st_uid)
    mode = stat.S_IMODE(found.st_mode)
    folder = stat.S_ISDIR(found.st_mode)
    if not folder or found.st_uid not in trusted or mode & 0o022:
        what = f"a directory with mode {mode:04o}" if folder else "no directory (a link is none)"
        raise PermissionError(
            f"{directory} is {what} that belongs to user {found.st_uid}: it must be a directory of user {os.getuid()} "
            f"or root that nobody else can write to. Remove it, or choose another directory ({setting})"
        )
    return frozenset(trusted)


def process_start_time(pid: int) -> int:
    """Clock ticks after boot at which ``pid`` started, or -1 when it is gone or only a zombie.

    ``OSError`` when that cannot be seen for now: too many open files, say.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    fields = stat[stat.rindex(b")") + 2 :].split()
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])


_KEPT_BACK = 48
"""For work that has begun: a seal, a note, an answer, each of which needs one or two for a moment."""
_KNOWN_S = 0.05


def raise_open_file_limit() -> int:
    """As many as this process may have without asking anybody; the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            log.warning("the limit of %d open files could not be raised to %d: %s", soft, hard, error)
    return open_file_limit()


def open_file_limit() -> int:
    """How many it may have."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if soft != resource.RLIM_INFINITY else 1 << 30


def open_file_count() -> int:
    """How many this process has open; its limit, where not even one is left to count them."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # noqa: PTH208 - names are enough
    except OSError:
        return open_file_limit()


class OpenFileGuard:
    """Refuses new work while too few are left for what has begun."""

    def __init__(self, count: Callable[[], int] = open_file_count, limit: Callable[[], int] = open_file_limit) -> None:
        self._count = count
        self._limit = limit
        self._lock = threading.Lock()
        self._known = (-1.0, 0)
        self.rejected = 0

    def counters(self) -> dict[str, float]:
        return {"files_open": self._count(), "files_limit": self._limit(), "rejected_busy": self.rejected}

    def check(self, what: str) -> None:
        """:class:`AgentBusyError` when ``what`` had better come again."""
        with self._lock:
            most = self._limit()
            enough = most - min(_KEPT_BACK, most // 4)
            now = time.monotonic()
            if now - self._known[0] <= _KNOWN_S and self._known[1] < enough:
                return
            self._known = now, self._count()
            used = self._known[1]
            if used < enough:
                return
            self.rejected += 1
        raise AgentBusyError(
            f"{what}: this agent has {used} of {most} files open and takes on nothing more for now. Ask again; if it "
            "lasts, raise its limit (ulimit -Hn, LimitNOFILE=) or look for who holds connections to it"
        )


_END = b"\0"


def handle_signals(calls: Mapping[int, Callable[[], None]]) -> Callable[[], None]:
    """Have these signals call their functions, in a thread, from now on; the answer gives the signals back.

    Only the main thread can. A process that ends with its work may leave them as they are: the interpreter's own end
    ignores them, so that none that comes late changes the exit status.
    """
    heard, written = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(written, False)

    def handler(number: int, frame: FrameType | None) -> None:
        del frame
        with contextlib.suppress(BlockingIOError):  # as many are waiting already
            os.write(written, bytes([number]))

    before: dict[int, Any] = {number: signal.signal(number, handler) for number in calls}
    thread = threading.Thread(target=_listen, args=(heard, calls), name="peerstore-signals", daemon=True)
    thread.start()

    def ignore() -> None:
        for number in calls:
            signal.signal(number, signal.SIG_IGN)

    atexit.register(ignore)

    def undo() -> None:
        atexit.unregister(ignore)
        for number, earlier in before.items():
            signal.signal(number, earlier if earlier is not None else signal.SIG_DFL)
        os.set_blocking(written, True)
        os.write(written, _END)
        thread.join()
        os.close(written)
        os.close(heard)

    return undo


def _listen(heard: int, calls: Mapping[int, Callable[[], None]]) -> None:
    while (said := os.read(heard, 1)) not in (_END, b""):
        try:
            calls[said[0]]()
        except Exception:  # the next signal is heard all the same
            log.exception("%s could not be acted upon", signal.Signals(said[0]).name)
