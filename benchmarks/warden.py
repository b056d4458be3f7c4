"""Run a command and kill all its descendants at the end: ``python -I -S warden.py COMMAND...``.

The end is the end of the command or of standard input, which the starting process closes or leaves by dying. The kill
includes descendants in other sessions and orphans, because the kernel makes this process their parent. The exit status
is the command's. SIGTERM is forwarded to the command.
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the command as well
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
    """Yield ended children with their status. Without WNOHANG, wait for the next one."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, flags))[0]:
            yield found


def _descendants() -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # the process has ended meanwhile
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
