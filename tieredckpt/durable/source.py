"""The file an upload reads, window by window, without a copy."""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import TYPE_CHECKING

from typing_extensions import Self

from tieredckpt.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType


class Source:
    """The first ``size_bytes`` of a file. Only the windows in use are mapped, so memory does not grow with the file."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._check()
        except BaseException:
            os.close(self.fd)
            raise

    @contextlib.contextmanager
    def window(self, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes ``[start, stop)``; the view must not be kept."""
        if start == stop:
            yield memoryview(b"")
            return
        self._check()
        skip = start % mmap.ALLOCATIONGRANULARITY
        # Not populated: that would hold the interpreter's lock, and the kernel maps the pages around a touched one.
        with (
            mmap.mmap(self.fd, stop - start + skip, prot=mmap.PROT_READ, offset=start - skip) as mapped,
            memoryview(mapped) as whole,
            whole[skip:] as view,
        ):
            yield view

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self) -> None:
        """Touching a mapped page behind the end of the file would kill the process."""
        have = os.fstat(self.fd).st_size
        if have < self.size_bytes:
            raise UsageError(f"{self.path} has {have} bytes, the upload was to send {self.size_bytes}")
