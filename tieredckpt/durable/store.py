"""The seam to object stores: everything the durable tier needs, and no more."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from typing_extensions import Buffer

from tieredckpt.errors import CheckpointNotFoundError, UsageError

if TYPE_CHECKING:
    import threading
    from pathlib import Path


class ObjectNotFoundError(CheckpointNotFoundError):
    """No object of that name. Absent, not unknown."""


class ObjectExistsError(UsageError):
    """``put(create_only=True)`` found an object of that name."""


class UploadCancelledError(UsageError):
    """``upload`` was told to stop; what was finished is kept for a later call."""


@dataclass(frozen=True)
class ObjectInfo:
    name: str
    size_bytes: int
    modified_s: float
    """Unix time."""


@dataclass(frozen=True)
class Capabilities:
    """What this store was seen to honour, not what its vendor says."""

    conditional_put: bool
    """``create_only`` is enforced by the store. Where it is not, two racing writers both win."""
    resumable_upload: bool
    """An interrupted ``upload`` continues after the parts that were finished."""


class Journal(Protocol):
    """Where ``upload`` notes what it has begun, so that it can go on after this process was killed."""

    def get(self, name: str) -> bytes | None: ...
    def put(self, name: str, data: bytes) -> None: ...
    def remove(self, name: str) -> None: ...


Progress = Callable[[int], None]
"""Called, from any thread, with the number of bytes the store just took; parts it had from before are not counted."""


class ObjectStore(Protocol):
    """Objects by name below one URL. Names use ``/`` and never leave the URL.

    Promises every store makes (``tests/contract/test_object_store.py`` holds it to them):

    - ``put`` and ``upload`` are all or nothing: until they return, readers see the old object or none.
    - ``get`` and ``get_ranges`` return exactly the bytes asked for, or raise. Never fewer.
    - :class:`ObjectNotFoundError` means absent, ``TierUnavailableError`` unknown (after retries), and
      ``DurableRefusedError`` that the store said no; ``StoreBusyError`` is a throttled kind of unknown.
    - Any thread may call any method. No operation is retried beyond the settings' ``retry_s``.
    """

    @property
    def url(self) -> str: ...
    def put(self, name: str, data: bytes, *, create_only: bool = False) -> None: ...
    def get(self, name: str) -> bytes: ...
    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """The bytes ``[start, stop)`` of each range, in order; close ones fetched together, far ones in parallel."""

    def list(self, prefix: str, *, patience_s: float = math.inf) -> Iterable[ObjectInfo]:
        """Objects whose names start with ``prefix``, in name order. Given up when it was tried for
        ``patience_s``, or, where pages come, when none did for so long.
        """

    def delete(self, names: Sequence[str]) -> None:
        """Absent names are fine."""

    def upload(
        self,
        name: str,
        source: Path,
        size_bytes: int,
        *,
        journal: Journal,
        identity: str = "",
        progress: Progress = lambda _: None,
        cancel: threading.Event | None = None,
    ) -> None:
        """Put the first ``size_bytes`` of a file, in parallel parts where the store has them.

        ``identity`` says which bytes these are (a digest, or what their seal is called). Parts of an interrupted
        upload are used again only for the same identity; without one, only where the store can prove what they hold.
        """

    def discard_uploads(self, prefix: str, *, older_than_s: float, keep: Iterable[str] = ()) -> int:
        """Remove what interrupted uploads left below ``prefix``, except for the names in ``keep``; how many."""

    def capabilities(self) -> Capabilities:
        """Probed once, by trying."""

    def interrupt(self) -> None:
        """Whoever waits for a store that is away waits no longer: :class:`UploadCancelledError`. For good."""

    def close(self) -> None: ...
