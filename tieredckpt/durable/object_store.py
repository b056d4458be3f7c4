"""ObjectStore, the interface to object stores: its errors, object names, upload parts, stop signal.

A store with folders cannot hold both an object ``a`` and an object ``a/b``. This package never writes both.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from typing_extensions import Buffer, Self

from peerstore.sizes_and_durations import show_size
from tieredckpt.errors import CheckpointNotFoundError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType


class ObjectNotFoundError(CheckpointNotFoundError):
    """The object does not exist. This is certain, not merely unknown."""


class ObjectExistsError(UsageError):
    """``put(create_only=True)`` found an object with this name."""


class UploadCancelledError(UsageError):
    """``upload`` was canceled. Finished parts remain for a later call."""


@dataclass(frozen=True)
class ObjectInfo:
    name: str
    size_bytes: int
    modified_s: float
    """Unix time."""


@dataclass(frozen=True)
class StoreCapabilities:
    """Capabilities that this store has in practice, not according to its vendor."""

    conditional_put: bool
    """Whether the store enforces ``create_only``. If not, two racing writers both succeed."""
    resumable_upload: bool
    """Whether an interrupted ``upload`` continues after its finished parts."""


class UploadJournal(Protocol):
    """Journal of started uploads. With it ``upload`` can resume after its process was killed."""

    def get(self, name: str) -> bytes | None: ...
    def put(self, name: str, data: bytes) -> None: ...
    def remove(self, name: str) -> None: ...


ProgressCallback = Callable[[int], None]
"""Callback, from any thread, with the number of bytes just uploaded.

Parts of an earlier upload do not count.
"""


class ObjectStore(Protocol):
    """Objects by name below one URL. Names use ``/`` and never leave the URL.

    Guarantees of every store, tested by ``tests/contract/test_object_store.py``:

    - ``put`` and ``upload`` are atomic: until they return, readers see the old object or none.
    - ``get`` and ``get_ranges`` return exactly the requested bytes, never fewer, or raise.
    - :class:`ObjectNotFoundError` means that the object is absent, ``TierUnavailableError`` that the result is unknown
      after retries, and ``DurableRefusedError`` that the store rejected the request. ``StoreBusyError`` is the
      ``TierUnavailableError`` of a store that limits the request rate.
    - Any thread may call any method. No operation is retried beyond the settings' ``retry_s``.
    """

    @property
    def url(self) -> str: ...
    def put(self, name: str, data: bytes, *, create_only: bool = False) -> None: ...
    def get(self, name: str) -> bytes: ...
    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Return the bytes ``[start, stop)`` of each range, in order.

        Nearby ranges share a request. Distant ones are read in parallel.
        """

    def list(self, prefix: str, *, patience_s: float = math.inf) -> Iterable[ObjectInfo]:
        """Return the objects with names that start with ``prefix``, in name order.

        Raise after ``patience_s`` seconds of retries or, if the store lists in pages, without a new page.
        """

    def delete(self, names: Sequence[str]) -> None:
        """Delete these objects. Absent names raise no error."""

    def upload(
        self,
        name: str,
        source: Path,
        size_bytes: int,
        *,
        journal: UploadJournal,
        identity: str = "",
        progress: ProgressCallback = lambda _: None,
        cancel: threading.Event | None = None,
    ) -> None:
        """Upload the first ``size_bytes`` of a file, in parallel parts if the store supports them.

        ``identity`` identifies the bytes, for example by a digest. Parts of an interrupted upload are reused only for
        the same identity. Without one, they are reused only if the store can prove their content.
        """

    def abort_stale_uploads(self, prefix: str, *, older_than_s: float, keep: Iterable[str] = ()) -> int:
        """Delete remains of interrupted uploads below ``prefix``; return their number.

        Those of the names in ``keep`` remain.
        """

    def capabilities(self) -> StoreCapabilities:
        """Return the store's capabilities, which the first call probes."""

    def check_root(self) -> None:
        """Raise if a directory cannot be created. Other stores are not contacted."""

    def check_writes(self) -> None:
        """Write, read and delete one small object, or raise. A store may refuse only the deletion."""

    def interrupt(self) -> None:
        """End all waits before a retry with :class:`UploadCancelledError`, also in later calls.

        An upload ends by its own ``cancel``.
        """

    def close(self) -> None:
        """Interrupt the store, wait for the reads that have begun, and close its connections."""


MAX_OBJECT_NAME_BYTES = 1024


def is_valid_object_name(name: str) -> bool:
    return (
        bool(name)
        and name.isprintable()
        and "\\" not in name
        and all(part not in ("", ".", "..") for part in name.split("/"))
        and len(name.encode()) <= MAX_OBJECT_NAME_BYTES
    )


def check_object_name(name: str) -> str:
    """Return ``name``, or raise :class:`UsageError` if it is invalid."""
    if not is_valid_object_name(name):
        raise UsageError(
            f"{name!r} is not an object name: expected printable parts between single slashes, without '.', '..' or "
            f"a backslash, at most {MAX_OBJECT_NAME_BYTES} bytes"
        )
    return name


def check_object_prefix(prefix: str) -> str:
    """Return ``prefix`` if it is empty, a name or a name with a slash; else raise :class:`UsageError`."""
    if prefix:
        check_object_name(prefix.removesuffix("/") if prefix != "/" else prefix)
    return prefix


def listable_folder(prefix: str) -> str:
    """Return the folder of ``prefix`` without its last slash, for stores that list whole folders."""
    return prefix.rpartition("/")[0]


def join_object_name(root: str, name: str) -> str:
    return f"{root}/{name}" if root else name


MAX_UPLOAD_PARTS = 10_000
MIN_UPLOAD_PART_BYTES = 5 << 20
MAX_UPLOAD_PART_BYTES = 5 << 30
_ROUND_BYTES = 1 << 20


@dataclass(frozen=True)
class UploadPart:
    number: int
    """Number of the part, from 1."""
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class UploadedPart:
    """An uploaded part, as the store reports it."""

    number: int
    size_bytes: int
    etag: str
    checksum: str = ""
    """Checksum as this package computes it; "" if the store has none."""


def part_size_for(size_bytes: int, wanted_bytes: int) -> int:
    """Return ``wanted_bytes``, adjusted to S3's limits on the size and number of parts."""
    if size_bytes > MAX_UPLOAD_PARTS * MAX_UPLOAD_PART_BYTES:
        raise UsageError(f"{show_size(size_bytes)} is more than one object can hold: save on more ranks")
    least = -(-size_bytes // MAX_UPLOAD_PARTS)
    rounded = -(-least // _ROUND_BYTES) * _ROUND_BYTES
    return min(MAX_UPLOAD_PART_BYTES, max(MIN_UPLOAD_PART_BYTES, wanted_bytes, rounded))


def split_upload(size_bytes: int, part_bytes: int) -> list[UploadPart]:
    """Return parts of ``part_bytes`` each. The last one may be smaller."""
    starts = range(0, size_bytes, part_bytes)
    return [UploadPart(i, start, min(start + part_bytes, size_bytes)) for i, start in enumerate(starts, 1)]


def reusable_parts(
    parts: Iterable[UploadPart],
    stored: Iterable[UploadedPart],
    *,
    same_source: bool,
    checksum: Callable[[UploadPart], str],
) -> dict[int, UploadedPart]:
    """Return by number the parts that need not be sent again.

    If the store has a checksum of a part, it decides. If not, the size decides, and only if the caller states that the
    part came from the same source.
    """
    stored_parts = {part.number: part for part in stored}
    reusable = {}
    for part in parts:
        found = stored_parts.get(part.number)
        if found is None or found.size_bytes != part.size_bytes or not found.etag:
            continue
        if found.checksum == checksum(part) if found.checksum else same_source:
            reusable[part.number] = found
    return reusable


class UploadSource:
    """The first ``size_bytes`` of a file.

    Only windows in use are mapped, so memory does not grow with the file.
    """

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
        """Yield the bytes ``[start, stop)``. The view is valid only within the block."""
        if start == stop:
            yield memoryview(b"")
            return
        self._check()
        skip = start % mmap.ALLOCATIONGRANULARITY
        # Do not populate the mapping: that holds the interpreter's lock. The kernel maps pages around a touched one.
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
        """Raise if the file has become too short: touching a mapped page past its end would kill the process."""
        have = os.fstat(self.fd).st_size
        if have < self.size_bytes:
            raise UsageError(f"{self.path} has {have} bytes, the upload was to send {self.size_bytes}")


_POLL_S = 0.05


class StopSignal:
    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._children: weakref.WeakSet[StopSignal] = weakref.WeakSet()

    def child(self) -> StopSignal:
        """Return a signal that is set with this one, but not the other way round."""
        child = StopSignal()
        with self._lock:
            self._children.add(child)
        if self.is_set():
            child.set()
        return child

    def set(self) -> None:
        self._event.set()
        with self._lock:
            for child in list(self._children):
                child.set()
            for sock in self._sockets:
                with contextlib.suppress(OSError):  # closed by its own thread meanwhile
                    sock.shutdown(socket.SHUT_RDWR)

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> None:
        """Sleep for ``seconds``; raise :class:`UploadCancelledError` once the signal is set."""
        self._event.wait(seconds)
        self.raise_if_set()

    def raise_if_set(self) -> None:
        if self._event.is_set():
            raise UploadCancelledError("canceled, because the process ends. A later upload reuses the finished parts")

    @contextlib.contextmanager
    def linked_to(self, cancel: threading.Event | None) -> Iterator[None]:
        """Set this signal when ``cancel`` is set, while the block runs."""
        if cancel is None:
            yield
            return
        done = threading.Event()

        def follow() -> None:
            while not done.is_set():
                if cancel.wait(_POLL_S):
                    self.set()
                    return

        thread = threading.Thread(target=follow, name="tieredckpt-cancel", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    @contextlib.contextmanager
    def shutting_down_on_stop(self, sock: socket.socket) -> Iterator[None]:
        """Shut ``sock`` down when this signal is set, while the block runs.

        Errors of the socket are then raised as a cancellation.
        """
        with self._lock:
            self._sockets.add(sock)
        try:
            self.raise_if_set()
            yield
        except OSError:
            self.raise_if_set()
            raise
        finally:
            with self._lock:
                self._sockets.discard(sock)
