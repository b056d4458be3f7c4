"""Arena: slot files whose pages are memory, on tmpfs or memfd, with small metadata files next to them.

Two arenas have the same contract (``tests/contract/test_arena.py``):

- :class:`TmpfsArena` stores *named* files, so that a restarted agent finds them after this one was killed.
- :class:`MemfdArena` stores anonymous files that end with the process: for tests and single-process use.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import secrets
import shlex
import shutil
import signal
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Protocol

import xxhash

from peerstore.errors import (
    AgentBusyError,
    ArenaFullError,
    PeerStoreError,
    ShardDamagedError,
    UnavailableError,
    UnsupportedFormatError,
)
from peerstore.failpoints import failpoint
from peerstore.sizes_and_durations import show_size

_NOTE_MAGIC = b"PSN1"
_NOTES = "notes"
_NO_FILE = (errno.ELOOP, errno.ENXIO, errno.ENOTDIR)
_BUSY = (errno.EMFILE, errno.ENFILE, errno.EINTR, errno.EAGAIN)
_F_SETSIG = 10
_MAX_RESERVED_FDS = 256
_NOTE_BYTES = 128 << 20
"""Largest size of a metadata file; the arena did not write a larger file."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,250}")


class Arena(Protocol):
    """Slot files and small metadata files of one node.

    Every arena guarantees:

    - ``create`` makes a file of exactly ``size_bytes``, or leaves nothing behind and raises: :class:`ArenaFullError`,
      or :class:`UnavailableError` if the cause is not a lack of memory. Pages that are reserved for other slots and not
      allocated yet count as used. The file never changes its size.
    - A process that has mapped or opened a slot can use it after ``remove``. ``removed_in_use`` returns the sizes of
      removed slots that a process still uses, as far as the kernel reports it.
    - ``open`` returns a descriptor of a slot, read-only or writable; the caller closes it. ``path`` is valid
      in this process while the slot exists.
    - ``put_metadata`` is atomic, even with concurrent writers of the same name: a reader sees the old value or a new
      one.
    - ``get_metadata`` returns exactly the bytes that were put, or ``None`` without any. It raises
      :class:`ShardDamagedError` if the bytes have changed, :class:`UnsupportedFormatError` if another release wrote
      them, and :class:`UnavailableError` if they cannot be read.
    - ``list_slots`` and ``list_metadata`` return sorted names of this arena's files; files of other programs are
      neither listed nor changed. A name may have one folder in front (``folder/name``); ``list_metadata("folder/")``
      lists that folder.
    - All methods are thread-safe.
    """

    restart_command: str
    """Command that restarts the agent of this arena."""

    def create(self, name: str, size_bytes: int) -> None: ...
    def remove(self, name: str) -> None: ...
    def open(self, name: str, *, writable: bool = False) -> int: ...
    def path(self, name: str) -> str: ...
    def size(self, name: str) -> int: ...
    def list_slots(self) -> list[str]: ...
    def removed_in_use(self) -> dict[str, int]: ...
    def put_metadata(self, name: str, data: bytes) -> None: ...
    def get_metadata(self, name: str) -> bytes | None: ...
    def remove_metadata(self, name: str) -> None: ...
    def list_metadata(self, prefix: str) -> list[str]: ...
    def purge(self, *, keep: str = "") -> None:
        """Remove everything except metadata whose names begin with ``keep``."""

    def close(self) -> None: ...


class TmpfsArena:
    """An arena in a directory, meant to be on tmpfs, private to this user."""

    def __init__(self, directory: Path) -> None:
        self.restart_command = f"tieredckpt agent restart --dir {shlex.quote(str(directory))}"
        self._slots = directory / "slots"
        self._notes = directory / _NOTES
        self._folders = directory / "folders"
        self._fresh = directory / "fresh"
        """Metadata files that are being written; a complete file is renamed to its final path."""
        self._removed: dict[str, tuple[int, int]] = {}
        """Descriptor and size of removed slots that another process used at the last check."""
        self._removed_lock = threading.Lock()
        for path in self._directories:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for leftover in os.scandir(self._fresh):
            if leftover.is_file(follow_symlinks=False):
                Path(leftover.path).unlink()

    def create(self, name: str, size_bytes: int) -> None:
        path = self._slots / _validate_name(name)
        try:
            self._require_space(size_bytes)
            with closing_fd(_create_file(path)) as fd:
                os.ftruncate(fd, size_bytes)
        except FileExistsError:
            raise
        except (OSError, OverflowError) as error:
            path.unlink(missing_ok=True)
            raise _write_error(error, size_bytes, self._slots) from error

    def remove(self, name: str) -> None:
        path = self._slots / _validate_name(name)
        try:
            size_bytes = path.stat().st_size
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # it does not exist, or its users cannot be detected
            path.unlink(missing_ok=True)
            return
        try:
            path.unlink(missing_ok=True)
        except BaseException:
            os.close(fd)
            raise
        with self._removed_lock:
            self._removed[name] = fd, size_bytes
        self.removed_in_use()

    def open(self, name: str, *, writable: bool = False) -> int:
        access = os.O_RDWR if writable else os.O_RDONLY
        return os.open(self._slots / _validate_name(name), access | os.O_CLOEXEC | os.O_NOFOLLOW)

    def path(self, name: str) -> str:
        return str(self._slots / _validate_name(name))

    def size(self, name: str) -> int:
        return (self._slots / _validate_name(name)).stat().st_size

    def list_slots(self) -> list[str]:
        return sorted(entry.name for entry in _own_files(self._slots))

    def removed_in_use(self) -> dict[str, int]:
        with self._removed_lock:
            for name, (fd, _) in list(self._removed.items()):
                if not _has_other_users(fd):
                    del self._removed[name]
                    os.close(fd)
            return {name: size_bytes for name, (_, size_bytes) in self._removed.items()}

    def put_metadata(self, name: str, data: bytes) -> None:
        self._note(name)
        fresh = self._fresh / secrets.token_hex(8)
        try:
            with closing_fd(_create_file(fresh)) as fd, os.fdopen(fd, "wb", closefd=False) as file:
                file.write(_framed(data))
            failpoint("agent.metadata")
            self._move(fresh, name)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            raise _write_error(error, len(data), self._notes) from error

    def _move(self, fresh: Path, name: str) -> None:
        final = self._note(name)
        while True:
            try:
                fresh.rename(final)
            except FileNotFoundError:
                if not fresh.exists() or "/" not in name:
                    raise
                with contextlib.suppress(FileExistsError):  # removal of the last file removes the folder, so retry
                    final.parent.mkdir(mode=0o700)
            else:
                return

    def get_metadata(self, name: str) -> bytes | None:
        path = self._note(name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in _NO_FILE:
                raise ShardDamagedError(f"{path} is not a metadata file: {error}") from error
            raise UnavailableError(f"metadata file {path} cannot be opened: {error}") from error
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size > _NOTE_BYTES:
                raise ShardDamagedError(
                    f"{path} is not a regular file of at most {_NOTE_BYTES} bytes: it has {found.st_size} bytes"
                )
            with os.fdopen(fd, "rb", closefd=False) as file:
                return _unframed(file.read(_NOTE_BYTES), str(path))
        except OSError as error:
            raise UnavailableError(f"metadata file {path} cannot be read: {error}") from error
        finally:
            os.close(fd)

    def remove_metadata(self, name: str) -> None:
        path = self._note(name)
        with contextlib.suppress(IsADirectoryError, NotADirectoryError):
            path.unlink(missing_ok=True)
        if "/" in name:
            with contextlib.suppress(OSError):  # the folder still contains other files
                path.parent.rmdir()

    def list_metadata(self, prefix: str) -> list[str]:
        folder, slash, start = prefix.rpartition("/")
        try:
            found = _own_files(self._folders / _validate_name(folder) if slash else self._notes)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(folder + slash + entry.name for entry in found if entry.name.startswith(start))

    def purge(self, *, keep: str = "") -> None:
        self.close()
        kept = self.list_metadata(keep) if keep else []
        for path in self._directories:
            if path != self._notes or not kept:
                shutil.rmtree(path, ignore_errors=True)
        for name in self.list_metadata("") if kept else ():
            if name not in kept:
                self.remove_metadata(name)

    def close(self) -> None:
        with self._removed_lock:
            while self._removed:
                os.close(self._removed.popitem()[1][0])

    @property
    def _directories(self) -> tuple[Path, ...]:
        return self._slots, self._notes, self._folders, self._fresh

    def _note(self, name: str) -> Path:
        parts = [_validate_name(part) for part in _split(name)]
        return (self._folders if len(parts) == 2 else self._notes).joinpath(*parts)

    def _require_space(self, size_bytes: int) -> None:
        try:
            usage = os.statvfs(self._slots)
        except FileNotFoundError:
            raise UnavailableError(f"{self._slots} was removed: run `{self.restart_command}`") from None
        reserved = sum(_unallocated_bytes(entry) for entry in _own_files(self._slots))
        free = usage.f_bavail * usage.f_frsize - reserved
        if size_bytes > free:
            raise ArenaFullError(
                f"{show_size(size_bytes)} does not fit into {self._slots}: {show_size(max(free, 0))} of its "
                f"{show_size(usage.f_blocks * usage.f_frsize)} is free, and {show_size(reserved)} more is reserved "
                "for other slots. Enlarge it (in Kubernetes: an emptyDir "
                "with medium Memory and a sizeLimit; with Docker: --shm-size) or choose another directory"
            )


def _create_file(path: Path) -> int:
    """Create a file and return its descriptor; raise :class:`FileExistsError` if the path exists."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def metadata_in_directory(directory: Path) -> list[str]:
    """Return the metadata names in another process's :class:`TmpfsArena` without opening it."""
    try:
        return sorted(entry.name for entry in _own_files(directory / _NOTES))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _own_files(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return [entry for entry in entries if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)]


def _has_other_users(fd: int) -> bool:
    """Return whether another process has the file open or mapped.

    The kernel grants a write lease on a file only if this process is its only user. On file systems without leases the
    answer is unknown, and the function returns ``False``.
    """
    try:
        fcntl.fcntl(fd, _F_SETSIG, signal.SIGURG)  # SIGURG is ignored by default, if another open breaks the lease
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return error.errno in (*_BUSY, errno.EIO, errno.ENOMEM)
    return False


def _unallocated_bytes(entry: os.DirEntry[str]) -> int:
    """Return the number of the file's bytes that have no page yet."""
    try:
        found = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return 0
    return max(0, found.st_size - found.st_blocks * 512)


class MemfdArena:
    """An arena of anonymous memory files, which end with their process."""

    restart_command = "tieredckpt agent restart"

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}
        self._metadata: dict[str, bytes] = {}
        self._reserved_fds: deque[int] = deque()
        """Descriptor numbers of removed slots.

        A slot's path ends with its descriptor number. The arena does not reuse the number at once, so that an old path
        leads to an empty file and not to another slot.
        """

    def create(self, name: str, size_bytes: int) -> None:
        if name in self._fds:
            raise FileExistsError(errno.EEXIST, "slot exists", name)
        fd = os.memfd_create(_validate_name(name), os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size_bytes)
        except (OSError, OverflowError) as error:
            os.close(fd)
            raise _write_error(error, size_bytes, Path("memory")) from error
        self._fds[name] = fd

    def remove(self, name: str) -> None:
        fd = self._fds.pop(_validate_name(name), None)
        if fd is None:
            return
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(nothing, fd, inheritable=False)
        os.close(nothing)
        self._reserved_fds.append(fd)
        if len(self._reserved_fds) > _MAX_RESERVED_FDS:
            os.close(self._reserved_fds.popleft())

    def open(self, name: str, *, writable: bool = False) -> int:
        return os.open(self.path(name), (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)

    def path(self, name: str) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd(name)}"

    def size(self, name: str) -> int:
        return os.fstat(self._fd(name)).st_size

    def list_slots(self) -> list[str]:
        return sorted(self._fds)

    def removed_in_use(self) -> dict[str, int]:
        return {}

    def put_metadata(self, name: str, data: bytes) -> None:
        self._metadata["/".join(map(_validate_name, _split(name)))] = _framed(data)

    def get_metadata(self, name: str) -> bytes | None:
        raw = self._metadata.get("/".join(map(_validate_name, _split(name))))
        return None if raw is None else _unframed(raw, name)

    def remove_metadata(self, name: str) -> None:
        self._metadata.pop("/".join(map(_validate_name, _split(name))), None)

    def list_metadata(self, prefix: str) -> list[str]:
        depth = prefix.count("/")
        return sorted(name for name in list(self._metadata) if name.startswith(prefix) and name.count("/") == depth)

    def purge(self, *, keep: str = "") -> None:
        for name in list(self._fds):
            self.remove(name)
        self._metadata = {name: data for name, data in self._metadata.items() if keep and name.startswith(keep)}
        while self._reserved_fds:
            os.close(self._reserved_fds.popleft())

    def close(self) -> None:
        """Do nothing: the contents stay until they are purged."""

    def _fd(self, name: str) -> int:
        fd = self._fds.get(_validate_name(name))
        if fd is None:
            raise FileNotFoundError(errno.ENOENT, "no such slot", name)
        return fd


def _split(name: str) -> list[str]:
    return name.split("/", 1)


def _validate_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a valid name of a slot or a metadata file")
    return name


def _framed(data: bytes) -> bytes:
    return _NOTE_MAGIC + xxhash.xxh3_64_digest(data) + data


def _unframed(raw: bytes, name: str) -> bytes:
    data = raw[12:]
    if len(raw) >= 12 and raw[:3] == _NOTE_MAGIC[:3] and raw[:4] != _NOTE_MAGIC:
        raise UnsupportedFormatError(f"metadata {name} begins with {raw[:4]!r}, this version writes {_NOTE_MAGIC!r}")
    if raw[:4] != _NOTE_MAGIC or raw[4:12] != xxhash.xxh3_64_digest(data):
        raise ShardDamagedError(f"metadata {name} is damaged ({len(raw)} bytes)")
    return data


def _write_error(error: Exception, size_bytes: int, path: Path) -> PeerStoreError:
    """Return the error for a failed write: busy, unavailable, or (by default) full."""
    message = f"{show_size(size_bytes)} could not be written to {path}: {error}"
    code = getattr(error, "errno", None)
    if code in _BUSY:
        return AgentBusyError(message)
    return UnavailableError(message) if code == errno.EIO else ArenaFullError(message)


_POPULATE_WRITE = 23
_STEP_BYTES = 32 << 20
_MAP_NORESERVE = 0x4000  # Linux: a private mapping of a large file reserves no memory

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.restype = ctypes.c_int


class FileMapping:
    """A file mapped into this process, as a memoryview and as an address.

    A mapping that is not writable is private: a stray write through its address does not reach the file. ``close``
    raises ``BufferError`` while a view is in use, because its address would become invalid.
    """

    def __init__(self, fd: int, size_bytes: int, *, writable: bool = False) -> None:
        """Map the first ``size_bytes`` of an open file; the caller may close the descriptor afterwards."""
        have = os.fstat(fd).st_size
        if have < size_bytes:
            raise ValueError(f"cannot map {size_bytes} bytes: the file has {have} bytes")
        flags = mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE | _MAP_NORESERVE
        self._map = mmap.mmap(fd, size_bytes, flags, mmap.PROT_READ | mmap.PROT_WRITE) if size_bytes else None
        self.size_bytes = size_bytes
        self._writable = writable
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) if self._map is not None else 0

    @property
    def view(self) -> memoryview:
        if self._map is None:
            return memoryview(b"")
        return memoryview(self._map) if self._writable else memoryview(self._map).toreadonly()

    def close(self) -> None:
        if self._map is not None:
            self._map.close()

    def __enter__(self) -> FileMapping:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def prefault_address(address: int, size_bytes: int) -> None:
    """Allocate the pages of a writable shared mapping, or raise :class:`ArenaFullError`.

    Without this a full tmpfs would end the process with SIGBUS in the middle of a copy.
    """
    if size_bytes and _libc.madvise(address, size_bytes, _POPULATE_WRITE):
        code = ctypes.get_errno()
        if code == errno.EINVAL:  # a kernel before 5.14: the copy faults the pages in
            return
        why = "" if code == errno.EFAULT else f" ({os.strerror(code)})"
        raise ArenaFullError(
            f"no memory for {show_size(size_bytes)} of the arena{why}: its file system or the container's memory limit "
            "is full. Make the budget smaller than both, or enlarge them"
        )


def copy_file_data(source: int, target: int) -> None:
    """Copy the data of one open file to another one that is at least as large; holes are skipped."""
    buffer = memoryview(bytearray(8 << 20))
    at, size = 0, os.fstat(source).st_size
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only holes remain
                return
            raise
        count = os.preadv(source, [buffer], at)
        done = 0
        while done < count:
            done += os.pwrite(target, buffer[done:count], at + done)
        at += count


@contextlib.contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """Yield the descriptor and close it when the block ends."""
    try:
        yield fd
    finally:
        os.close(fd)


def prefault_file(fd: int, size_bytes: int, stop: Callable[[], bool], *, start: int = 0) -> int:
    """Allocate the pages of an open file in steps, until ``stop()``; return the position reached."""
    size_bytes = min(size_bytes, os.fstat(fd).st_size)
    done = start - start % mmap.ALLOCATIONGRANULARITY
    while done < size_bytes and not stop():
        step = min(_STEP_BYTES, size_bytes - done)
        with mmap.mmap(fd, step, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=done) as window:
            anchor = ctypes.c_char.from_buffer(window)
            try:
                prefault_address(ctypes.addressof(anchor), step)
            finally:
                del anchor
        done += step
    return done
