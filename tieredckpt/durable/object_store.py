"""ObjectStore, the interface to object stores: its errors, object names, upload parts, stop signal.

Where an object ``a`` is, stores made of folders cannot keep ``a/b`` as well; nothing here needs both.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import socket
import threading
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
class StoreCapabilities:
    """What this store was seen to honour, not what its vendor says."""

    conditional_put: bool
    """``create_only`` is enforced by the store. Where it is not, two racing writers both win."""
    resumable_upload: bool
    """An interrupted ``upload`` continues after the parts that were finished."""


class UploadJournal(Protocol):
    """Where ``upload`` notes what it has begun, so that it can go on after this process was killed."""

    def get(self, name: str) -> bytes | None: ...
    def put(self, name: str, data: bytes) -> None: ...
    def remove(self, name: str) -> None: ...


ProgressCallback = Callable[[int], None]
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
        journal: UploadJournal,
        identity: str = "",
        progress: ProgressCallback = lambda _: None,
        cancel: threading.Event | None = None,
    ) -> None:
        """Put the first ``size_bytes`` of a file, in parallel parts where the store has them.

        ``identity`` says which bytes these are (a digest, or what their seal is called). Parts of an interrupted
        upload are used again only for the same identity; without one, only where the store can prove what they hold.
        """

    def abort_stale_uploads(self, prefix: str, *, older_than_s: float, keep: Iterable[str] = ()) -> int:
        """Remove what interrupted uploads left below ``prefix``, except for the names in ``keep``; how many."""

    def capabilities(self) -> StoreCapabilities:
        """Probed once, by trying."""

    def check_root(self) -> None:
        """Raise if a directory cannot be created. Other stores are not asked."""

    def check_writes(self) -> None:
        """Write, read and delete one small object, or raise. A store that refuses only the deletion passes."""

    def interrupt(self) -> None:
        """Whoever waits for a store that is away waits no longer: :class:`UploadCancelledError`. For good."""

    def close(self) -> None: ...


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
    """``name``, or :class:`UsageError`."""
    if not is_valid_object_name(name):
        raise UsageError(
            f"{name!r} is not an object name: expected printable parts between single slashes, without '.', '..' or "
            f"a backslash, at most {MAX_OBJECT_NAME_BYTES} bytes"
        )
    return name


def check_object_prefix(prefix: str) -> str:
    """A name, its beginning, or nothing at all."""
    if prefix:
        check_object_name(prefix.removesuffix("/") if prefix != "/" else prefix)
    return prefix


def listable_folder(prefix: str) -> str:
    """The longest part of ``prefix`` that ends with a slash, without it: what stores with folders can list."""
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
    """From 1."""
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class UploadedPart:
    """What the store says about a part it has."""

    number: int
    size_bytes: int
    etag: str
    checksum: str = ""
    """As this package computes it; empty where the store keeps none."""


def part_size_for(size_bytes: int, wanted_bytes: int) -> int:
    """``wanted_bytes``, or as much more as it takes to stay within the number of parts S3 allows."""
    if size_bytes > MAX_UPLOAD_PARTS * MAX_UPLOAD_PART_BYTES:
        raise UsageError(f"{show_size(size_bytes)} is more than one object can hold: save on more ranks")
    least = -(-size_bytes // MAX_UPLOAD_PARTS)
    rounded = -(-least // _ROUND_BYTES) * _ROUND_BYTES
    return min(MAX_UPLOAD_PART_BYTES, max(MIN_UPLOAD_PART_BYTES, wanted_bytes, rounded))


def split_upload(size_bytes: int, part_bytes: int) -> list[UploadPart]:
    """Parts of ``part_bytes`` each; the last one is what is left."""
    starts = range(0, size_bytes, part_bytes)
    return [UploadPart(i, start, min(start + part_bytes, size_bytes)) for i, start in enumerate(starts, 1)]


def reusable_parts(
    parts: Iterable[UploadPart],
    stored: Iterable[UploadedPart],
    *,
    same_source: bool,
    checksum: Callable[[UploadPart], str],
) -> dict[int, UploadedPart]:
    """The parts that need not be sent again, by number.

    Where the store kept a checksum it decides. Where it kept none, the size does, and only if the caller vouches that
    the source is the one the parts came from.
    """
    there = {part.number: part for part in stored}
    kept = {}
    for part in parts:
        found = there.get(part.number)
        if found is None or found.size_bytes != part.size_bytes or not found.etag:
            continue
        if found.checksum == checksum(part) if found.checksum else same_source:
            kept[part.number] = found
    return kept


class UploadSource:
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


_POLL_S = 0.05


class StopSignal:
    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._children: list[StopSignal] = []

    def child(self) -> StopSignal:
        """One that this one stops, but not the other way round."""
        child = StopSignal()
        with self._lock:
            self._children.append(child)
        if self.is_set():
            child.set()
        return child

    def set(self) -> None:
        self._event.set()
        with self._lock:
            for child in self._children:
                child.set()
            for sock in self._sockets:
                with contextlib.suppress(OSError):  # closed by its own thread meanwhile
                    sock.shutdown(socket.SHUT_RDWR)

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> None:
        """Sleep, unless told to stop; then raise."""
        self._event.wait(seconds)
        self.raise_if_set()

    def raise_if_set(self) -> None:
        if self._event.is_set():
            raise UploadCancelledError(
                "cancelled, because the process ends; a later upload goes on after the parts that are finished"
            )

    @contextlib.contextmanager
    def linked_to(self, cancel: threading.Event | None) -> Iterator[None]:
        """While in here, stop when somebody sets ``cancel``."""
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
        """While in here, ``set`` from another thread makes this socket's calls fail, and that is raised as a stop."""
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
