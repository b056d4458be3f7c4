"""Process identity and peer credentials, the open-file limit, and signals delivered to a thread.

Python runs a signal handler between two steps of the main thread, also inside another handler. A handler that takes a
lock (``Event.set``, ``Condition.notify``) would deadlock if the interrupted step holds that lock.
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

from peerstore.errors import AgentBusyError, RequestError

log = logging.getLogger(__name__)


class ProcessIdentity(NamedTuple):
    """A process, distinguished from a later process with the same pid."""

    pid: int
    start_time: int

    @property
    def is_alive(self) -> bool:
        """Whether the process runs.

        A process that cannot be checked counts as alive, for example a process of another namespace.
        """
        try:
            return self.pid <= 0 or process_start_time(self.pid) == self.start_time
        except OSError:
            return True


def process_identity(pid: int) -> ProcessIdentity:
    return ProcessIdentity(pid, process_start_time(pid) if pid > 0 else 0)


def current_process() -> ProcessIdentity:
    return process_identity(os.getpid())


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return the pid and user id of the process on the other end of a Unix socket, as of its connection."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def trusted_users(directory: Path, *, named: bool = False, setting: str = "agent.directory") -> frozenset[int]:
    """Return the users whose processes may serve this one from ``directory``: this user and root.

    With ``named``, an operator chose the directory. Then root also trusts the directory's owner, whose agent was meant.
    Other users do not, because an agent serves only its own user and root.

    Raise ``FileNotFoundError`` if the directory does not exist, and ``PermissionError`` if it cannot be trusted,
    because another user owns it or can write to it.
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
            f"or root that no other user can write to. Remove it, or choose another directory ({setting})"
        )
    return frozenset(trusted)


def ensure_private_directory(path: Path) -> None:
    """Create ``path`` as a private directory of this user, or check that it is one.

    Raise :class:`RequestError` if another user owns it or can enter it. Created parent directories are private as well,
    because another agent may use one of them later. A private directory without access for its owner, as after ``chmod
    000``, gets mode 0700 again.
    """
    for folder in reversed([path, *path.parents]):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        mode = stat.S_IMODE(found.st_mode)
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not mode & 0o077 and mode & 0o700 != 0o700:
            folder.chmod(0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise RequestError(
            f"{path} must be a directory of user {os.getuid()} with mode 0700, it belongs to {found.st_uid} with "
            f"mode {stat.S_IMODE(found.st_mode):04o}: remove it or choose another directory"
        )


def is_same_file(path: Path, expected: os.stat_result) -> bool:
    """Return whether ``path`` is still the same file."""
    try:
        return os.path.samestat(path.lstat(), expected)
    except FileNotFoundError:
        return False


def process_start_time(pid: int) -> int:
    """Return the clock ticks after boot at which ``pid`` started, or -1 if it has exited or is a zombie.

    Raise ``OSError`` if that cannot be read, for example because of too many open files.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    fields = stat[stat.rindex(b")") + 2 :].split()
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])


_RESERVED_FILES = 48
"""File descriptors reserved for work in progress: a seal, its metadata, a response."""
_CACHE_S = 0.05


def raise_open_file_limit() -> int:
    """Raise the soft limit to the hard limit and return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            log.warning("the limit of %d open files could not be raised to %d: %s", soft, hard, error)
    return open_file_limit()


def open_file_limit() -> int:
    """Return the largest number of open files."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if soft != resource.RLIM_INFINITY else 1 << 30


def open_file_count() -> int:
    """Return the number of open files, or the limit if no descriptor remains to count them."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # noqa: PTH208 - names are enough
    except OSError:
        return open_file_limit()


class OpenFileGuard:
    """Refusal of new work while few file descriptors remain."""

    def __init__(self, count: Callable[[], int] = open_file_count, limit: Callable[[], int] = open_file_limit) -> None:
        self._count = count
        self._limit = limit
        self._lock = threading.Lock()
        self._known = (-1.0, 0)
        self.rejected = 0

    def counters(self) -> dict[str, float]:
        return {"files_open": self._count(), "files_limit": self._limit(), "rejected_busy": self.rejected}

    def check(self, what: str) -> None:
        """Raise :class:`AgentBusyError` if too few file descriptors remain for ``what``."""
        with self._lock:
            most = self._limit()
            enough = most - min(_RESERVED_FILES, most // 4)
            now = time.monotonic()
            if now - self._known[0] <= _CACHE_S and self._known[1] < enough:
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
    """Call the functions in a thread on their signals; return a function that restores the handlers.

    Only the main thread may call it. A process need not restore the handlers before it exits. The exiting
    interpreter ignores these signals, so a late signal does not change the exit status.
    """
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(write_end, False)

    def handler(number: int, frame: FrameType | None) -> None:
        del frame
        with contextlib.suppress(BlockingIOError):  # the pipe is full of pending signals
            os.write(write_end, bytes([number]))

    before: dict[int, Any] = {number: signal.signal(number, handler) for number in calls}
    thread = threading.Thread(target=_listen, args=(read_end, calls), name="peerstore-signals", daemon=True)
    thread.start()

    def ignore() -> None:
        for number in calls:
            signal.signal(number, signal.SIG_IGN)

    atexit.register(ignore)

    def undo() -> None:
        atexit.unregister(ignore)
        for number, earlier in before.items():
            signal.signal(number, earlier if earlier is not None else signal.SIG_DFL)
        os.set_blocking(write_end, True)
        os.write(write_end, _END)
        thread.join()
        os.close(write_end)
        os.close(read_end)

    return undo


def _listen(read_end: int, calls: Mapping[int, Callable[[], None]]) -> None:
    while (received := os.read(read_end, 1)) not in (_END, b""):
        try:
            calls[received[0]]()
        except Exception:  # later signals must still be handled
            log.exception("%s could not be acted upon", signal.Signals(received[0]).name)
