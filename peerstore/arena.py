"""Where slots live: files whose pages are memory, and small notes beside them.

Two arenas keep one contract (``tests/contract/test_arena.py``):

- :class:`TmpfsArena` keeps *named* files, so that the next agent finds them after this one was killed.
- :class:`MemfdArena` keeps nameless ones that end with the process: for tests and single-process use.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import xxhash

from peerstore.errors import ArenaFullError, ShardDamagedError, UnavailableError

_NOTE_MAGIC = b"PSN1"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,250}")


class Arena(Protocol):
    """Slot files and notes under one roof.

    Promises every arena makes:

    - ``create`` gives a file of exactly ``size_bytes`` or raises :class:`ArenaFullError` and leaves nothing behind.
      ``promised`` is how many bytes of other slots have no page yet and must find room too.
    - ``path`` names a file any process of this user can map while this arena lives.
    - ``put_note`` is all or nothing: a reader sees the old note or the new one.
    - ``get_note`` returns exactly what was put, ``None`` when nothing was, and raises
      :class:`ShardDamagedError` when the bytes are not what was put.
    """

    def create(self, name: str, size_bytes: int, *, promised: int = 0) -> None: ...
    def resize(self, name: str, size_bytes: int, *, promised: int = 0) -> None: ...
    def remove(self, name: str) -> None: ...
    def path(self, name: str) -> str: ...
    def size(self, name: str) -> int: ...
    def slots(self) -> list[str]: ...
    def put_note(self, name: str, data: bytes) -> None: ...
    def get_note(self, name: str) -> bytes | None: ...
    def remove_note(self, name: str) -> None: ...
    def notes(self, prefix: str) -> list[str]: ...
    def purge(self) -> None: ...


class TmpfsArena:
    """An arena in a directory, meant to be on tmpfs, private to this user."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._slots = directory / "slots"
        self._notes = directory / "notes"
        for place in (self._slots, self._notes):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        for leftover in self._notes.glob(".*.new"):
            leftover.unlink(missing_ok=True)

    def create(self, name: str, size_bytes: int, *, promised: int = 0) -> None:
        path = self._slots / _checked(name)
        self._require_space(size_bytes, promised)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(fd, size_bytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise _full(error, size_bytes, self._slots) from error
        finally:
            os.close(fd)

    def resize(self, name: str, size_bytes: int, *, promised: int = 0) -> None:
        path = self._slots / _checked(name)
        grow = size_bytes - path.stat().st_size
        if grow > 0:
            self._require_space(grow, promised)
        if grow:
            try:
                os.truncate(path, size_bytes)
            except OSError as error:
                raise _full(error, size_bytes, self._slots) from error

    def remove(self, name: str) -> None:
        (self._slots / _checked(name)).unlink(missing_ok=True)

    def path(self, name: str) -> str:
        return str(self._slots / _checked(name))

    def size(self, name: str) -> int:
        return (self._slots / _checked(name)).stat().st_size

    def slots(self) -> list[str]:
        return sorted(entry.name for entry in os.scandir(self._slots))

    def put_note(self, name: str, data: bytes) -> None:
        final = self._notes / _checked(name)
        fresh = self._notes / f".{name}.new"
        try:
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(_framed(data))
            fresh.rename(final)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            raise _full(error, len(data), self._notes) from error

    def get_note(self, name: str) -> bytes | None:
        path = self._notes / _checked(name)
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UnavailableError(f"note {path} cannot be read: {error}") from error
        return _unframed(raw, str(path))

    def remove_note(self, name: str) -> None:
        (self._notes / _checked(name)).unlink(missing_ok=True)

    def notes(self, prefix: str) -> list[str]:
        return sorted(
            entry.name
            for entry in os.scandir(self._notes)
            if entry.name.startswith(prefix) and not entry.name.startswith(".")
        )

    def purge(self) -> None:
        shutil.rmtree(self._slots, ignore_errors=True)
        shutil.rmtree(self._notes, ignore_errors=True)

    def _require_space(self, size_bytes: int, promised: int) -> None:
        place = os.statvfs(self._slots)
        free = place.f_bavail * place.f_frsize - promised
        if size_bytes > free:
            raise ArenaFullError(
                f"{size_bytes} bytes do not fit {self._slots}: of its {place.f_blocks * place.f_frsize} bytes "
                f"{max(free, 0)} are free ({promised} promised to other slots). Enlarge it (in Kubernetes: an emptyDir "
                "with medium Memory and a sizeLimit; with Docker: --shm-size) or choose another directory"
            )


class MemfdArena:
    """An arena of anonymous memory files; it ends with its process."""

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}
        self._kept: dict[str, bytes] = {}

    def create(self, name: str, size_bytes: int, *, promised: int = 0) -> None:
        del promised
        if name in self._fds:
            raise FileExistsError(errno.EEXIST, "slot exists", name)
        fd = os.memfd_create(_checked(name), os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size_bytes)
        except (OSError, OverflowError) as error:
            os.close(fd)
            raise _full(error, size_bytes, Path("memory")) from error
        self._fds[name] = fd

    def resize(self, name: str, size_bytes: int, *, promised: int = 0) -> None:
        del promised
        os.ftruncate(self._fds[name], size_bytes)

    def remove(self, name: str) -> None:
        fd = self._fds.pop(name, None)
        if fd is not None:
            os.close(fd)

    def path(self, name: str) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fds[name]}"

    def size(self, name: str) -> int:
        return os.fstat(self._fds[name]).st_size

    def slots(self) -> list[str]:
        return sorted(self._fds)

    def put_note(self, name: str, data: bytes) -> None:
        self._kept[_checked(name)] = _framed(data)

    def get_note(self, name: str) -> bytes | None:
        raw = self._kept.get(_checked(name))
        return None if raw is None else _unframed(raw, name)

    def remove_note(self, name: str) -> None:
        self._kept.pop(_checked(name), None)

    def notes(self, prefix: str) -> list[str]:
        return sorted(name for name in self._kept if name.startswith(prefix))

    def purge(self) -> None:
        for name in list(self._fds):
            self.remove(name)
        self._kept.clear()


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a name for a slot or a note")
    return name


def _framed(data: bytes) -> bytes:
    return _NOTE_MAGIC + xxhash.xxh3_64_digest(data) + data


def _unframed(raw: bytes, name: str) -> bytes:
    data = raw[12:]
    if raw[:4] != _NOTE_MAGIC or raw[4:12] != xxhash.xxh3_64_digest(data):
        raise ShardDamagedError(f"note {name} is damaged ({len(raw)} bytes)")
    return data


def _full(error: Exception, size_bytes: int, place: Path) -> ArenaFullError:
    return ArenaFullError(f"{size_bytes} bytes could not be kept in {place}: {error}")


@contextlib.contextmanager
def purged(arena: Arena) -> Iterator[Arena]:
    """``arena``, emptied when the block ends."""
    try:
        yield arena
    finally:
        arena.purge()
