"""Who is on the other end of a connection, and whether that process is still alive."""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path
from typing import NamedTuple


class Owner(NamedTuple):
    """A process, told apart from a later one that was given the same number."""

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        """Whether it still runs. One that cannot be seen counts as alive: of another namespace, or for now."""
        try:
            return self.pid <= 0 or started_at(self.pid) == self.started
        except OSError:
            return True


def owner_of(pid: int) -> Owner:
    return Owner(pid, started_at(pid) if pid > 0 else 0)


def myself() -> Owner:
    return owner_of(os.getpid())


def peer_of(sock: socket.socket) -> tuple[int, int]:
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


def started_at(pid: int) -> int:
    """Clock ticks after boot at which ``pid`` started, or -1 when it is gone or only a zombie.

    ``OSError`` when that cannot be seen for now: too many open files, say.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    fields = stat[stat.rindex(b")") + 2 :].split()
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])
