"""Waking a rank that hangs in a collective because another one does not answer.

NCCL's groups can be aborted. Gloo's cannot: ``abort``, ``shutdown`` and ``destroy_process_group`` return at once, and
the collective goes on waiting until its timeout (30 minutes). What it does notice is the end of a connection, within
milliseconds; so its connections are ended from this side. They are found by who waits for them: each of gloo's devices
has a thread named ``gloo_tcp_loop`` that sits in ``epoll_wait``, and the kernel tells on which descriptors.
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
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from elastic.rootless.holders import Address

log = logging.getLogger(__name__)

_TASKS = Path("/proc/self/task")
_LOOP = "gloo_tcp_loop"
_TRIES = 50
_WATCHED = re.compile(r"^tfd:\s*(\d+).*\bino:([0-9a-f]+)", re.MULTILINE)


def cut_gloo() -> int:
    """End every connection that gloo has; returns how many. Whoever waits for one gets an error, here and elsewhere."""
    watched = [each for poll in _polls() for each in _watched(poll)]
    return sum(_cut(number, lambda one, inode=inode: _inode(one) == inode) for number, inode in watched)  # type: ignore[misc]


def cut_store(addresses: Collection[Address]) -> int:
    """End this process's connections to a store at these addresses: its client waits without looking up."""
    numbers = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    return sum(_cut(number, lambda one: _remote(one) in addresses) for number in numbers)


def _polls() -> Iterator[int]:
    """The epoll descriptors of gloo's loops."""
    loops = _tasks()
    if not loops:
        yield from _polls_of_unnamed()
    for task in loops:
        for _ in range(_TRIES):  # a loop that is just handling something waits again in a moment
            if (number := _poll_of(task)) is not None:
                yield number
                break
            time.sleep(0.001)
        else:
            log.warning("a loop of gloo's was always busy; a collective that hangs there goes on until its timeout")


def _polls_of_unnamed() -> Iterator[int]:
    """Epoll descriptors of native threads without a name of their own.

    Before torch 2.13 gloo's loops are among them: they inherit the name of the Python thread that made the group.
    """
    python = {str(thread.native_id) for thread in threading.enumerate()}
    names = {task: _read(task / "comm").strip() for task in _listed()}
    inherited = {name for task, name in names.items() if task.name in python}
    unseen = [task for task, name in names.items() if name in inherited and task.name not in python]
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(0.001)
        busy = []
        for task in unseen:
            number = _poll_of(task)
            if number is None:
                busy.append(task)  # a loop at work, or a thread of another library
            else:
                yield number
        unseen = busy
        if not unseen:
            return


def _poll_of(task: Path) -> int | None:
    """The epoll descriptor that the thread waits on."""
    call = _read(task / "syscall").split()
    return number if len(call) > 1 and call[0] != "-1" and _is_poll(number := int(call[1], 16)) else None


def _listed() -> list[Path]:
    with contextlib.suppress(OSError):
        return list(_TASKS.iterdir())
    return []


def _tasks() -> list[Path]:
    return [task for task in _listed() if _read(task / "comm").strip() == _LOOP]


def _is_poll(number: int) -> bool:
    """Whatever else a loop calls has another number first, or none."""
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/self/fd/{number}").readlink()) == "anon_inode:[eventpoll]"
    return False


def _watched(poll: int) -> list[tuple[int, int]]:
    """The descriptors, and the inodes of their sockets: a number may be somebody else's a moment later."""
    return [
        (int(number), int(inode, 16)) for number, inode in _WATCHED.findall(_read(Path(f"/proc/self/fdinfo/{poll}")))
    ]


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):  # the thread or the descriptor has gone meanwhile
        return path.read_text()
    return ""


def _cut(number: int, is_meant: Callable[[socket.socket], bool]) -> bool:
    with contextlib.suppress(OSError), _borrowed(number) as one:
        if is_meant(one) and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            one.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _inode(one: socket.socket) -> int:
    return os.fstat(one.fileno()).st_ino


def _remote(one: socket.socket) -> Address | None:
    if one.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    name = one.getpeername()
    return name[0].removeprefix("::ffff:"), name[1]


@contextlib.contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """Somebody else's descriptor as a socket; closing this one leaves the other open."""
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        raise OSError(f"descriptor {number} is no socket")
    with socket.socket(fileno=os.dup(number)) as one:
        yield one
