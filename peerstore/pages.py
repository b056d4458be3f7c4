"""Files in memory, mapped: the few system calls this package makes on pages."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator
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

    def __init__(self, fd: int, size_bytes: int, *, writable: bool = False) -> None:
        """The first ``size_bytes`` of an open file, which may be closed then."""
        have = os.fstat(fd).st_size
        if have < size_bytes:
            raise ValueError(f"a file of {have} bytes is to be mapped, {size_bytes} were expected")
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


def copy_file(source: int, target: int) -> None:
    """Write what one open file holds into another one that is at least as large."""
    buffer = memoryview(bytearray(8 << 20))
    at, size = 0, os.fstat(source).st_size
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but holes is left
                return
            raise
        count = os.preadv(source, [buffer], at)
        done = 0
        while done < count:
            done += os.pwrite(target, buffer[done:count], at + done)
        at += count


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    """An open file, closed when the block ends."""
    try:
        yield fd
    finally:
        os.close(fd)


def populate_file(fd: int, size_bytes: int, stop: Callable[[], bool], *, start: int = 0) -> int:
    """Put pages behind an open file step by step; returns how far it came before ``stop()`` said so."""
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
