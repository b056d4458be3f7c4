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
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from elastic.rootless.holders import Address

log = logging.getLogger(__name__)

_TASKS = Path("/proc/self/task")
_LOOP = "gloo_tcp_loop"
_TRIES = 50
_WATCHED = re.compile(r"^tfd:\s*(\d+)", re.MULTILINE)


def cut_gloo() -> int:
    """End every connection that gloo has; returns how many. Whoever waits for one gets an error, here and elsewhere."""
    return sum(_cut(number) for poll in _polls() for number in _watched(poll))


def cut_store(addresses: Collection[Address]) -> int:
    """End this process's connections to a store at these addresses: its client waits without looking up."""
    numbers = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    return sum(_cut(number) for number in numbers if _remote(number) in addresses)


def _polls() -> Iterator[int]:
    """The epoll descriptors of gloo's loops."""
    for task in _tasks():
        for _ in range(_TRIES):  # a loop that is just handling something waits again in a moment
            call = _read(task / "syscall").split()
            if len(call) > 1 and call[0] != "-1":
                yield int(call[1], 16)
                break
            time.sleep(0.001)
        else:
            log.warning("a loop of gloo's was always busy; a collective that hangs there goes on until its timeout")


def _tasks() -> list[Path]:
    with contextlib.suppress(OSError):
        return [task for task in _TASKS.iterdir() if _read(task / "comm").strip() == _LOOP]
    return []


def _watched(poll: int) -> list[int]:
    return [int(number) for number in _WATCHED.findall(_read(Path(f"/proc/self/fdinfo/{poll}")))]


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):  # the thread or the descriptor has gone meanwhile
        return path.read_text()
    return ""


def _cut(number: int) -> bool:
    with contextlib.suppress(OSError), _borrowed(number) as one:
        if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            one.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _remote(number: int) -> Address | None:
    with contextlib.suppress(OSError), _borrowed(number) as one:
        if one.family in (socket.AF_INET, socket.AF_INET6):
            name = one.getpeername()
            return name[0].removeprefix("::ffff:"), name[1]
    return None


@contextlib.contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """Somebody else's descriptor as a socket; closing this one leaves the other open."""
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        raise OSError(f"descriptor {number} is no socket")
    with socket.socket(fileno=os.dup(number)) as one:
        yield one
