"""Run a command of which nothing is left: ``python -I -S warden.py COMMAND...``, to be run as a file.

When standard input ends (whoever started it has closed it, or is no more), all that came of the command is ended: also
what is in a session of its own, or whose parent has gone, because the kernel gives orphans to this process. The same
when the command ends by itself; then its status is this process's, too. SIGTERM is passed on.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    command = os.posix_spawnp(
        sys.argv[1],
        sys.argv[1:],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
        setsigdef=[signal.SIGINT],
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the command hears it, too
    signal.signal(signal.SIGTERM, lambda *_: _send(command, signal.SIGTERM))
    status: int | None = None
    while status is None:
        ready, _, _ = select.select([0, woken], [], [])
        if 0 in ready and not os.read(0, 1 << 16):
            break
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 1 << 16)
        status = dict(_reaped(os.WNOHANG)).get(command)
    while True:
        for pid in _descendants():
            _send(pid, signal.SIGKILL)
        for pid, ended in _reaped(0):
            status = ended if pid == command and status is None else status
            break
        else:
            break
    code = os.waitstatus_to_exitcode(status or 0)
    return code if code >= 0 else 128 - code


def _reaped(flags: int) -> Iterator[tuple[int, int]]:
    """Those that have ended; without a flag it waits for one, while there are any."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, flags))[0]:
            yield found


def _descendants() -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has gone meanwhile
                parents[int(entry.name)] = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
    found = {os.getpid()}
    while new := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= new
    return sorted(found - {os.getpid()})


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main())
