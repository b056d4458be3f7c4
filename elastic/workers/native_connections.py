"""Connections of torch's native code in this process: gloo's and those to a store.

Gloo's groups have no abort, but they notice the end of a connection within milliseconds. This module finds gloo's
connections by the waiting thread: each gloo device has a thread named ``gloo_tcp_loop`` in ``epoll_wait``, and the
kernel lists the descriptors.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from elastic.rendezvous.store_server_client import SocketAddress

log = logging.getLogger(__name__)

_HELD_S = 1.0
"""Seconds for which the sockets of aborted connections stay open."""
_TASKS = Path("/proc/self/task")
_LOOP = "gloo_tcp_loop"
_TRIES = 50
_WATCHED = re.compile(r"^tfd:\s*(\d+).*\bino:([0-9a-f]+)", re.MULTILINE)


class _HeldSockets:
    """Sockets that stay open for a second, or until :meth:`release`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._timer: threading.Timer | None = None

    def hold(self, sockets: Sequence[socket.socket]) -> None:
        with self._lock:
            self._sockets += sockets
            if self._timer is None:
                self._timer = threading.Timer(_HELD_S, self.release)
                self._timer.daemon = True
                self._timer.start()

    def release(self) -> None:
        with self._lock:
            held, self._sockets = self._sockets, []
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
        for one in held:
            one.close()


_held = _HeldSockets()


def abort_gloo_connections() -> int:
    """End gloo's connections so that waiting collectives raise, and return their number.

    Gloo does not wake a send in its queue, so an operation whose write fails waits for the group's timeout. Therefore
    only the receiving side ends at once, which gloo sees. The sockets stay open until
    :func:`release_aborted_connections`, a second at most. Writes succeed here and at the peers, which abort meanwhile.
    """
    sockets = [one for number, inode in _gloo_sockets() if (one := _end_receiving(number, inode)) is not None]
    if sockets:
        _held.hold(sockets)
    return len(sockets)


def release_aborted_connections() -> None:
    """Close the sockets of aborted connections: all ranks have left that world."""
    _held.release()


def close_gloo_connections() -> int:
    """Shut down every connection of gloo at once, as the loss of a network does, and return their number."""
    return sum(
        _shut_down_socket(number, lambda one, inode=inode: _inode(one) == inode)  # type: ignore[misc]
        for number, inode in _gloo_sockets()
    )


def close_store_connections(addresses: Collection[SocketAddress]) -> int:
    """Shut down this process's connections to a store at ``addresses``, and return their number.

    The store's client would otherwise wait.
    """
    numbers = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    return sum(_shut_down_socket(number, lambda one: _remote(one) in addresses) for number in numbers)


def _gloo_sockets() -> list[tuple[int, int]]:
    return [each for poll in _polls() for each in _watched(poll)]


def _polls() -> Iterator[int]:
    """Yield the epoll descriptors of gloo's loops."""
    loops = _tasks()
    if not loops:
        yield from _unnamed_polls()
    for task in loops:
        for _ in range(_TRIES):  # a loop that handles an event waits again soon
            if (number := _poll_of(task)) is not None:
                yield number
                break
            time.sleep(0.001)
        else:
            log.warning("a loop of gloo's was always busy; a collective that hangs there waits for its timeout")


def _unnamed_polls() -> Iterator[int]:
    """Yield the epoll descriptors of native threads without a name of their own.

    Before torch 2.13 gloo's loops are among them: they inherit the name of the Python thread that created the group.
    """
    python = {str(thread.native_id) for thread in threading.enumerate()}
    names = {task: _read(task / "comm").strip() for task in _thread_directories()}
    inherited = {name for task, name in names.items() if task.name in python}
    unseen = [task for task, name in names.items() if name in inherited and task.name not in python]
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(0.001)
        busy = []
        for task in unseen:
            number = _poll_of(task)
            if number is None:
                busy.append(task)  # a busy loop, or a thread of another library
            else:
                yield number
        unseen = busy
        if not unseen:
            return


def _poll_of(task: Path) -> int | None:
    """Return the epoll descriptor that the thread waits on; ``None`` if it does not wait."""
    call = _read(task / "syscall").split()
    return number if len(call) > 1 and call[0] != "-1" and _is_poll(number := int(call[1], 16)) else None


def _thread_directories() -> list[Path]:
    with contextlib.suppress(OSError):
        return list(_TASKS.iterdir())
    return []


def _tasks() -> list[Path]:
    return [task for task in _thread_directories() if _read(task / "comm").strip() == _LOOP]


def _is_poll(number: int) -> bool:
    """Return whether descriptor ``number`` is an epoll.

    Other system calls of a loop have another first argument, or none.
    """
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/self/fd/{number}").readlink()) == "anon_inode:[eventpoll]"
    return False


def _watched(poll: int) -> list[tuple[int, int]]:
    """Return the watched descriptors with the inodes of their sockets.

    A descriptor number may be reused a moment later.
    """
    return [
        (int(number), int(inode, 16)) for number, inode in _WATCHED.findall(_read(Path(f"/proc/self/fdinfo/{poll}")))
    ]


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):  # the thread or the descriptor no longer exists
        return path.read_text()
    return ""


def _end_receiving(number: int, inode: int) -> socket.socket | None:
    """Shut down the receiving side of a connection, and return another descriptor of it."""
    with contextlib.suppress(OSError), _borrowed(number) as one:
        if _inode(one) == inode and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            one.shutdown(socket.SHUT_RD)
            return one.dup()
    return None


def _shut_down_socket(number: int, is_meant: Callable[[socket.socket], bool]) -> bool:
    with contextlib.suppress(OSError), _borrowed(number) as one:
        if is_meant(one) and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            one.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _inode(one: socket.socket) -> int:
    return os.fstat(one.fileno()).st_ino


def _remote(one: socket.socket) -> SocketAddress | None:
    if one.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    name = one.getpeername()
    return name[0].removeprefix("::ffff:"), name[1]


@contextlib.contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """Yield a socket for a descriptor that another object owns.

    Closing the socket leaves that descriptor open.
    """
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        raise OSError(f"descriptor {number} is not a socket")
    with socket.socket(fileno=os.dup(number)) as one:
        yield one
