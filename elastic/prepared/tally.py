"""How much a folder holds, and from where on it is still needed: told by one process to all others of the node.

The number of bytes may only be too high (a process died between saying and doing). Whoever would have to give something
up because of it counts the files first, and so does whoever opens the folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from elastic.prepared.folder import TALLY
from elastic.prepared.locks import acquire, released

_MAGIC = b"TCTALLY1"
_BODY = struct.Struct("<8sqq")
_LOCK_S = 10.0
UNKNOWN = -1


@dataclass
class Tally:
    """As it stands while its lock is held; written when the lock is let go."""

    used_bytes: int = UNKNOWN
    """Of all batches, also those being made."""
    committed: int = UNKNOWN
    """The first index that training may still need."""


@contextlib.contextmanager
def tallied(folder_fd: int) -> Iterator[Tally]:
    """The tally, for this thread alone. ``TimeoutError`` when somebody else has it for longer than it can take."""
    fd = _open(folder_fd)
    try:
        if not acquire(fd, wait_s=_LOCK_S):
            raise TimeoutError(f"the tally of prepared batches is locked for more than {_LOCK_S:.0f} s")
        with released(fd):
            before = os.pread(fd, _BODY.size + 8, 0)
            tally = _read(before)
            yield tally
            body = _BODY.pack(_MAGIC, tally.used_bytes, tally.committed)
            after = body + xxhash.xxh3_64_digest(body)
            if after != before:
                os.pwrite(fd, after, 0)
    finally:
        os.close(fd)


def _open(folder_fd: int) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    for _ in range(2):
        with contextlib.suppress(OSError):
            fd = os.open(TALLY, flags, 0o600, dir_fd=folder_fd)
            found = os.fstat(fd)
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.getuid():
                return fd
            os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(TALLY, dir_fd=folder_fd)
    raise FileExistsError(
        errno.EEXIST, "something that is no file has the name of the tally of prepared batches", TALLY
    )


def _read(data: bytes) -> Tally:
    if len(data) != _BODY.size + 8 or xxhash.xxh3_64_digest(data[: _BODY.size]) != data[_BODY.size :]:
        return Tally()
    magic, used, committed = _BODY.unpack(data[: _BODY.size])
    return Tally(max(used, UNKNOWN), max(committed, UNKNOWN)) if magic == _MAGIC else Tally()
