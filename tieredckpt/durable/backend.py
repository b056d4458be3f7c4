"""The seam inside an object store: what a library or a file system does, one try at a time, with its own errors.

:class:`~tieredckpt.durable.reliable.ReliableStore` makes an ``ObjectStore`` of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from typing_extensions import Buffer

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from peerstore.bandwidth import Bandwidth
    from tieredckpt.durable.retry import Retry
    from tieredckpt.durable.source import Source
    from tieredckpt.durable.stop import Stop
    from tieredckpt.durable.store import Journal, ObjectInfo, Progress

_WINDOW_BYTES = 32 << 20


@dataclass(frozen=True)
class Upload:
    """Everything one upload needs; ``retry`` sleeps with ``stop``."""

    name: str
    what: str
    """Begins error messages."""
    source: Source
    identity: str
    journal: Journal
    progress: Progress
    stop: Stop
    retry: Retry
    bandwidth: Bandwidth

    def pieces(self) -> Generator[memoryview, None, None]:
        """The whole source, no faster than the limit allows, until told to stop; each piece is valid until the next."""
        for start in range(0, self.source.size_bytes, _WINDOW_BYTES):
            with self.source.window(start, min(start + _WINDOW_BYTES, self.source.size_bytes)) as window:
                yield from self.pieces_of(window)

    def pieces_of(self, view: memoryview) -> Generator[memoryview, None, None]:
        """The same for a part of it."""
        step = self.bandwidth.slice_bytes
        for start in range(0, len(view), step):
            self.stop.check()
            with view[start : start + step] as piece:
                self.bandwidth.take(len(piece), self.stop.wait)
                yield piece


class Backend(Protocol):
    """Any thread may call any method. Names were checked by the caller."""

    @property
    def url(self) -> str: ...
    @property
    def resumes(self) -> bool:
        """Whether an interrupted upload leaves something to go on with."""

    @property
    def pages(self) -> bool:
        """Whether listings come in pages, so that a long silence means that it is away."""

    def renew(self) -> bool:
        """Look for other credentials after a refusal; whether there are any."""

    def put(self, name: str, data: bytes, *, create_only: bool) -> None:
        """All or nothing. Where the store cannot enforce ``create_only``, it is ignored."""

    def exists(self, name: str) -> bool: ...
    def get(self, name: str) -> bytes: ...
    def get_range(self, name: str, start: int, stop: int) -> Buffer:
        """Fewer bytes only where the object ends."""

    def list(self, prefix: str) -> Iterable[ObjectInfo]:
        """In any order; what does not start with ``prefix`` may be among it."""

    def delete(self, names: Sequence[str]) -> None: ...
    def upload(self, upload: Upload) -> None: ...
    def discard_uploads(self, prefix: str, older_than_s: float, keep: frozenset[str]) -> int: ...
    def close(self) -> None: ...
