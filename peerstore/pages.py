"""Files in memory, mapped: the few system calls this package makes on pages."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from types import TracebackType

from peerstore.errors import ArenaFullError

_POPULATE_WRITE = 23
_STEP_BYTES = 32 << 20
_MAP_NORESERVE = 0x4000  # Linux: a private mapping of a large file needs no memory of its own

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.restype = ctypes.c_int


class Mapping:
    """A file mapped into this process, as a memoryview and as an address.

    A mapping that is not writable is private: a stray write through its address changes nothing but itself.
    Closing it while a view is still in use raises ``BufferError`` rather than leaving a pointer into nothing.
    """

    def __init__(self, path: str, size_bytes: int, *, writable: bool = False) -> None:
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            have = os.fstat(fd).st_size
            if have < size_bytes:
                raise ValueError(f"{path} has {have} bytes, {size_bytes} were expected")
            flags = mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE | _MAP_NORESERVE
            self._map = mmap.mmap(fd, size_bytes, flags, mmap.PROT_READ | mmap.PROT_WRITE) if size_bytes else None
        finally:
            os.close(fd)
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

    def __enter__(self) -> Mapping:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def populate_address(address: int, size_bytes: int) -> None:
    """Put a page behind every byte of a writable shared mapping, or say that there is no memory for it.

    Without this a full tmpfs would be noticed as SIGBUS in the middle of a copy.
    """
    if size_bytes and _libc.madvise(address, size_bytes, _POPULATE_WRITE):
        code = ctypes.get_errno()
        if code == errno.EINVAL:  # a kernel before 5.14: the copy itself will fault the pages in
            return
        why = "" if code == errno.EFAULT else f" ({os.strerror(code)})"
        raise ArenaFullError(
            f"no memory for {size_bytes} bytes of the arena{why}: its file system or the container's memory limit is "
            "full. Make the budget smaller than both, or enlarge them"
        )


def copy_file(source: str, target: str) -> None:
    """Write what one file holds into another one that is at least as large."""
    buffer = memoryview(bytearray(8 << 20))
    with open(source, "rb", buffering=0) as old, open(target, "r+b", buffering=0) as new:  # noqa: PTH123 - a path of
        # this process's own descriptors, where the arena has no files
        at, size = 0, os.fstat(old.fileno()).st_size
        while at < size:
            try:
                at = os.lseek(old.fileno(), at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but holes is left
                    return
                raise
            count = os.preadv(old.fileno(), [buffer], at)
            done = 0
            while done < count:
                done += os.pwrite(new.fileno(), buffer[done:count], at + done)
            at += count


def populate_file(path: str, size_bytes: int, stop: Callable[[], bool], *, start: int = 0) -> int:
    """Put pages behind ``path`` step by step; returns how far it came before ``stop()`` said so."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        size_bytes = min(size_bytes, os.fstat(fd).st_size)
        done = start - start % mmap.ALLOCATIONGRANULARITY
        while done < size_bytes and not stop():
            step = min(_STEP_BYTES, size_bytes - done)
            with mmap.mmap(fd, step, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=done) as window:
                anchor = ctypes.c_char.from_buffer(window)
                try:
                    populate_address(ctypes.addressof(anchor), step)
                finally:
                    del anchor
            done += step
        return done
    finally:
        os.close(fd)
