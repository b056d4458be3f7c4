"""SegmentedFile: a read-only file that consists of constant bytes and of ranges of stored bytes."""

from __future__ import annotations

import bisect
import io
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Protocol

from tieredckpt.restore.step_index import ByteRange

READ_BUFFER_BYTES = 8 << 20
Segment = bytes | tuple[int, ByteRange]
"""Constant bytes, or the number of a part and a range of its bytes."""


class SegmentSource(Protocol):
    """Source of the stored bytes of a file."""

    def read_into(self, target: memoryview, part: int, span: ByteRange) -> None:
        """Read exactly the bytes of ``span`` into ``target``, or raise."""

    def close(self) -> None: ...


class SegmentedFile(io.RawIOBase):
    """Read-only file of constant bytes and of ranges that ``source`` reads.

    Its close closes ``source`` and, after a successful read, calls ``read``.
    """

    def __init__(self, segments: Sequence[Segment], source: SegmentSource, read: Callable[[], None]) -> None:
        super().__init__()
        self._segments = segments
        self._source = source
        self._read = read
        self._read_ok = False
        """Whether the last read succeeded."""
        self._starts = [0, *itertools.accumulate(map(segment_size, segments))]
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._starts[-1]}[whence]
        if start + offset < 0:
            raise ValueError(f"position {start + offset}")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: object, /) -> int:
        self._read_ok = False
        with memoryview(buffer) as view, view.cast("B") as flat:  # type: ignore[arg-type]
            done = 0
            number = max(0, bisect.bisect_right(self._starts, self._at) - 1)
            while done < len(flat) and number < len(self._segments):
                segment, within = self._segments[number], self._at - self._starts[number]
                count = min(len(flat) - done, segment_size(segment) - within)
                if isinstance(segment, bytes):
                    flat[done : done + count] = segment[within : within + count]
                elif count:
                    part, (start, _) = segment
                    span = ByteRange(start + within, start + within + count)
                    self._source.read_into(flat[done : done + count], part, span)
                done, self._at, number = done + count, self._at + count, number + 1
        self._read_ok = True
        return done

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._source.close()
            if self._read_ok:
                self._read()


def segment_size(segment: Segment) -> int:
    """Return the number of bytes of ``segment``."""
    return len(segment) if isinstance(segment, bytes) else segment[1].stop - segment[1].start
