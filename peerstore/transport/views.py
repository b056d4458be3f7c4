"""Where a transfer is in a list of views."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from types import TracebackType

from typing_extensions import Self

from peerstore.errors import RequestError
from peerstore.transport.seam import Seen

MAX_VIEWS = 1024
"""What Linux takes in one call (IOV_MAX)."""


class Cursor:
    """A run of views, and how far into them a transfer has come.

    Views made here are released at the end, also after an error: a mapping with a forgotten view cannot be closed.
    """

    def __init__(self, views: Iterable[memoryview], seen: Seen | None = None) -> None:
        self._made: list[memoryview] = []
        self._views = [as_bytes for view in views if (as_bytes := self._flat(view)).nbytes]
        self._at = 0
        self._offset = 0
        self._lent: list[memoryview] = []
        self._size = self.left = sum(view.nbytes for view in self._views)
        self._seen = seen

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._take_back()
        for view in self._made:
            view.release()
        self._views.clear()

    def window(self, most_bytes: int) -> list[memoryview]:
        """The next views to transfer, at most ``most_bytes`` of them. Good until the next call."""
        self._take_back()
        window: list[memoryview] = []
        start = self._offset
        for view in itertools.islice(self._views, self._at, self._at + MAX_VIEWS):
            stop = min(view.nbytes, start + most_bytes)
            if start or stop < view.nbytes:
                view = view[start:stop]  # noqa: PLW2901 - the same view, less of it
                self._lent.append(view)
            window.append(view)
            most_bytes -= stop - start
            start = 0
            if not most_bytes:
                break
        return window

    def advance(self, count: int) -> None:
        """``count`` bytes of the last window were transferred."""
        self.left -= count
        self._offset += count
        while self._at < len(self._views) and self._offset >= self._views[self._at].nbytes:
            self._offset -= self._views[self._at].nbytes
            self._at += 1
        if self._seen is not None:
            self._seen(self._size - self.left)

    def _flat(self, view: memoryview) -> memoryview:
        if view.format == "B" and view.ndim == 1 and view.contiguous:
            return view
        try:
            flat = view.cast("B")
        except TypeError as error:
            raise RequestError(f"a view of shape {view.shape} cannot be transferred as bytes: {error}") from error
        self._made.append(flat)
        return flat

    def _take_back(self) -> None:
        for view in self._lent:
            with contextlib.suppress(BufferError):  # a thread that was interrupted in a call still has it
                view.release()
        self._lent.clear()
