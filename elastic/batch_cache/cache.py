"""BatchCache: map an existing batch, or prepare, reserve, write and publish it.

::

    get(index, prepare)
      cached ───────────────────────────────────────────> mapped, compared with its checksum
      absent ── claim ── prepare ── reserve ── write ── publish ──┘
                  │ another process prepares it: wait    │ no space: returned without being cached
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

import msgspec

from elastic.batch_cache.batch_format import BATCH_MAGIC, MAX_BATCH_INDEX, EncodedBatch, decode_batch, encode_batch
from elastic.batch_cache.cache_directory import (
    UNKNOWN_USAGE,
    BatchClaim,
    CacheDirectory,
    CacheEntry,
    CacheUsage,
    locked_usage,
    plan_eviction,
    remove_job_directory,
)
from elastic.errors import BatchDamagedError, CacheFullError, PolicyError
from elastic.settings import batch_cache_directory
from peerstore.failpoints import failpoint
from peerstore.sizes_and_durations import parse_size, show_size

log = logging.getLogger(__name__)

_NORESERVE = 0x4000  # Linux: do not reserve swap space for a private mapping
_ADVICE = (
    "Enlarge it (in Kubernetes: an emptyDir with medium Memory and a sizeLimit; with Docker: --shm-size) or max_bytes, "
    "prepare fewer batches ahead, or name another directory"
)
PrepareFunction: TypeAlias = Callable[[int], Any]


class CacheCounts(msgspec.Struct):
    """Counters of a cache in this process."""

    hits: int = 0
    """Batches found in the cache."""
    prepared: int = 0
    """Calls of ``prepare``."""
    stored: int = 0
    """Prepared batches that were stored for other readers."""
    damaged: int = 0
    """Damaged batches, which were prepared again."""


class CacheResult(msgspec.Struct, frozen=True):
    """Result of a lookup or of a preparation."""

    is_cached: bool
    batch: Any = None
    """The batch, if it was looked up or could not be cached."""


def fingerprint_digest(fingerprint: str | bytes | Mapping[str, Any]) -> str:
    """Return the digest of a fingerprint, for names and files."""
    try:
        encoded = msgspec.json.encode(fingerprint, order="deterministic")
    except (TypeError, msgspec.MsgspecError) as error:
        raise PolicyError(f"a fingerprint is text, bytes or a mapping of plain values: {error}") from error
    return hashlib.sha256(BATCH_MAGIC + encoded).hexdigest()[:32]


def remove_job_batches(job: str, *, directory: Path | str | None = None) -> list[Path]:
    """Remove all batches of a finished job, in all streams. Return directories that are in use and remain."""
    return remove_job_directory(batch_cache_directory() if directory is None else Path(directory), job)


def _never() -> bool:
    return False


class BatchCache:
    """Prepared batches of one stream of one job, in this node's shared memory.

    ``fingerprint`` describes everything that changes a batch's bytes under the same index: the data, the tokenizer, the
    seed, the packing. Batches of another fingerprint count as absent, and are removed unless a process uses them.

    ``max_bytes`` limits the cache. Beyond it, batches before :meth:`mark_committed` are evicted first, then the ones
    farthest ahead. A mapped batch remains valid for its process.

    If no space is left, the job continues without the cache and logs one warning; with ``required=True`` it raises
    :class:`~elastic.errors.CacheFullError`.

    Thread-safe. Unpickling opens the cache again.
    """

    def __init__(
        self,
        job: str,
        *,
        fingerprint: str | bytes | Mapping[str, Any],
        stream: str = "train",
        max_bytes: int | str = "4GiB",
        directory: Path | str | None = None,
        required: bool = False,
        verify: bool = True,
        wait_s: float = 60.0,
    ) -> None:
        root = batch_cache_directory() if directory is None else Path(directory)
        self._open_again = functools.partial(
            BatchCache,
            job,
            fingerprint=fingerprint,
            stream=stream,
            max_bytes=max_bytes,
            directory=root,
            required=required,
            verify=verify,
            wait_s=wait_s,
        )
        self._required = required
        self._verify = verify
        self._wait_s = wait_s
        self._digest = fingerprint_digest(fingerprint)
        self._lock = threading.Lock()
        self._warned = False
        self.counts = CacheCounts()
        limit_bytes = parse_size(max_bytes)
        self._folder = CacheDirectory(root, job, stream, self._digest)
        self._writer = CacheWriter(self._folder, limit_bytes)
        try:
            with self._tolerate_full_cache():
                for name in self._folder.remove_other_fingerprints():
                    log.info("batches of another fingerprint (%s) are in use and stay", name)
                self._writer.recount()
        except BaseException:
            self.close()
            raise

    def __reduce__(self) -> tuple[Callable[[], BatchCache], tuple[()]]:
        return self._open_again, ()

    def reopen(self) -> BatchCache:
        """Open the same cache again in a forked process, where a lock may be held forever."""
        return self._open_again()

    def __enter__(self) -> BatchCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def directory(self) -> Path:
        """Directory of the batches."""
        return self._folder.path

    @property
    def fingerprint(self) -> str:
        """Digest of the fingerprint."""
        return self._digest

    def close(self) -> None:
        """Close the directory. Idempotent; stored and mapped batches remain."""
        self._folder.close()

    def clear(self) -> None:
        """Remove all batches, even if other processes would use them."""
        self._writer.clear()

    def get(
        self,
        index: int,
        prepare: PrepareFunction,
        *,
        should_stop: Callable[[], bool] = _never,
    ) -> Any:
        """Return the batch of a global index, from the cache or from ``prepare(index)``, and cache it.

        Its tensors may be changed in place without effects on other processes. ``should_stop`` ends the wait for
        another process. Exceptions of ``prepare`` propagate.
        """
        found = self.lookup(index)
        if found.is_cached:
            return found.batch
        result = self.prepare(index, prepare, should_stop=should_stop)
        if not result.is_cached:
            return result.batch
        found = self.lookup(index)
        return (
            found.batch if found.is_cached else self._call_prepare(index, prepare)
        )  # evicted at once, for a nearer batch

    def lookup(self, index: int) -> CacheResult:
        """Return the batch, mapped, if it is cached. A damaged one is removed and counts as absent."""
        opened = None
        try:
            opened = self._folder.open_batch(_validated_index(index))
            if opened is None:
                return CacheResult(is_cached=False)
            batch = decode_batch(_map_file(*opened), self._digest, index, verify=self._verify)
        except BatchDamagedError as error:
            self._discard(index, None if opened is None else opened[0], error)
            return CacheResult(is_cached=False)
        finally:
            if opened is not None:
                os.close(opened[0])
        self._add(hits=1)
        return CacheResult(is_cached=True, batch=batch)

    def prepare(
        self,
        index: int,
        prepare: PrepareFunction,
        *,
        should_stop: Callable[[], bool] = _never,
    ) -> CacheResult:
        """Prepare and cache the batch, in this process or another one. Return it if it cannot be cached."""
        with contextlib.ExitStack() as undo:
            claim: BatchClaim | None = None
            with self._tolerate_full_cache():
                claim = undo.enter_context(
                    self._folder.claim(_validated_index(index), wait_s=self._wait_s, should_stop=should_stop)
                )
            if claim is None:  # the other process is slow or stopped: prepare it here too
                return CacheResult(is_cached=False, batch=self._call_prepare(index, prepare))
            if self._folder.has(index):
                return CacheResult(is_cached=True)
            failpoint("prepared.claimed")
            batch = self._call_prepare(index, prepare)
            encoded = encode_batch(self._digest, index, batch)
            failpoint("prepared.encoded")
            is_stored = self._store(claim, encoded)
            return CacheResult(is_cached=True) if is_stored else CacheResult(is_cached=False, batch=batch)

    def remove(self, index: int) -> None:
        """Remove a batch that no process should use again. A mapped one remains valid for its process."""
        with self._tolerate_full_cache():
            self._writer.remove(_validated_index(index))

    def mark_committed(self, index: int) -> None:
        """Record that training will not return to batches before ``index``, so that they may be evicted first.

        Applies to all processes of the node. Before the first call, batches before the one to store count as used.
        """
        with self._tolerate_full_cache():
            self._writer.commit(_validated_index(index))

    def cached_indices(self) -> list[int]:
        """Return the indices of the cached batches."""
        return sorted(entry.index for entry in self._folder.entries())

    def used_bytes(self) -> int:
        """Return the size of all cached batches, counted from the files."""
        return sum(entry.size_bytes for entry in self._folder.entries())

    def _call_prepare(self, index: int, prepare: PrepareFunction) -> Any:
        self._add(prepared=1)
        return prepare(index)

    def _store(self, claim: BatchClaim, encoded: EncodedBatch) -> bool:
        is_stored = False
        with self._tolerate_full_cache():
            self._writer.write(claim, encoded)
            is_stored = True
        self._add(stored=is_stored)
        return is_stored

    def _discard(self, index: int, fd: int | None, error: BatchDamagedError) -> None:
        log.warning("prepared batch %d in %s is damaged and will be prepared again: %s", index, self.directory, error)
        self._add(damaged=1)
        with self._tolerate_full_cache():
            self._writer.discard(index, fd)

    def _add(self, **more: int) -> None:
        with self._lock:
            for name, count in more.items():
                setattr(self.counts, name, getattr(self.counts, name) + count)

    @contextlib.contextmanager
    def _tolerate_full_cache(self) -> Iterator[None]:
        """Continue without the cache if it has no space or a file cannot be created, unless it is required."""
        try:
            yield
        except (OSError, CacheFullError) as error:
            if self._required:
                raise CacheFullError(f"prepared batches in {self.directory}: {error}. {_ADVICE}") from error
            with self._lock:
                first, self._warned = not self._warned, True
            if first:
                log.warning(
                    "going on without keeping all prepared batches in %s: %s. %s", self.directory, error, _ADVICE
                )


def _validated_index(index: int) -> int:
    if type(index) is not int or not 0 <= index <= MAX_BATCH_INDEX:
        raise PolicyError(f"a batch's index is a whole number from 0 to {MAX_BATCH_INDEX}, not {index!r}")
    return index


def _map_file(fd: int, size_bytes: int) -> mmap.mmap:
    """Map the file copy-on-write: written pages become private to this process."""
    if not size_bytes:
        raise BatchDamagedError("it is empty")
    flags, access = mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    return mmap.mmap(fd, size_bytes, flags, access)


class _Refusal(NamedTuple):
    """A batch that did not fit, and the state of the cache then."""

    entry: CacheEntry
    cursor: int
    used_bytes: int


class CacheWriter:
    """Writer of a cache directory, limited in bytes."""

    def __init__(self, folder: CacheDirectory, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._refusal: _Refusal | None = None
        self.evicted = 0
        """Batches that this process evicted."""

    def recount(self) -> None:
        """Remove unfinished files of dead processes, and count the bytes."""
        with locked_usage(self._folder.fd) as tally:
            self._count(tally)

    def commit(self, index: int) -> None:
        with locked_usage(self._folder.fd) as tally:
            tally.committed = index

    def clear(self) -> None:
        with locked_usage(self._folder.fd) as tally:
            for entry in self._folder.entries():
                self._folder.remove(entry.index)
            self._count(tally)

    def remove(self, index: int) -> None:
        with locked_usage(self._folder.fd) as tally:
            tally.used_bytes = UNKNOWN_USAGE
            self._folder.remove(index)

    def discard(self, index: int, fd: int | None) -> None:
        """Remove a damaged batch that was opened as ``fd``."""
        with locked_usage(self._folder.fd) as tally:
            tally.used_bytes = UNKNOWN_USAGE
            self._folder.remove_damaged(index, fd)

    def write(self, claim: BatchClaim, encoded: EncodedBatch) -> None:
        """Write and publish a batch.

        Raises :class:`CacheFullError` or ``OSError`` if that fails, and leaves no file.
        """
        self._reserve(claim, encoded.layout.size_bytes)
        failpoint("prepared.reserved")
        _write(claim.fd, encoded)
        failpoint("prepared.written")
        self._folder.publish(claim)
        failpoint("prepared.published")

    def _reserve(self, claim: BatchClaim, size_bytes: int) -> None:
        """Reserve space for a batch: its file has its size before another process can count."""
        with locked_usage(self._folder.fd) as tally:
            os.ftruncate(claim.fd, 0)  # data of a dead process
            cursor = claim.index if tally.committed == UNKNOWN_USAGE else tally.committed
            if tally.used_bytes == UNKNOWN_USAGE or tally.used_bytes + size_bytes > self._limit_bytes:
                self._make_room(CacheEntry(claim.index, size_bytes), cursor, tally)
            place = os.statvfs(self._folder.fd)
            if size_bytes > place.f_bavail * place.f_frsize:
                raise CacheFullError(
                    f"batch {claim.index} has {show_size(size_bytes)}, and of the file system's "
                    f"{show_size(place.f_blocks * place.f_frsize)} only {show_size(place.f_bavail * place.f_frsize)} "
                    "are free"
                )
            os.ftruncate(claim.fd, size_bytes)
            tally.used_bytes += size_bytes

    def _make_room(self, new: CacheEntry, cursor: int, tally: CacheUsage) -> None:
        if not self._is_refused_again(new, cursor, tally):
            entries, making_bytes = self._count(tally)
            room = plan_eviction(entries, cursor, new, self._limit_bytes - making_bytes)
            sizes = {entry.index: entry.size_bytes for entry in entries}
            for index in room.evict:
                self._folder.remove(index)
                failpoint("prepared.gave-up")
                tally.used_bytes -= sizes[index]
            self.evicted += len(room.evict)
            if room.fits:
                return
        self._refusal = _Refusal(new, cursor, tally.used_bytes)
        raise CacheFullError(
            f"batch {new.index} has {show_size(new.size_bytes)} and does not fit into {show_size(self._limit_bytes)} "
            f"together with the batches that training needs sooner, starting with batch {cursor}"
        )

    def _is_refused_again(self, new: CacheEntry, cursor: int, tally: CacheUsage) -> bool:
        """Return whether nothing has changed since a nearer and smaller batch did not fit.

        Then a new count of the files is useless.

        """
        last = self._refusal
        return (
            last is not None
            and (last.cursor, last.used_bytes) == (cursor, tally.used_bytes)
            and new.index >= last.entry.index >= cursor
            and new.size_bytes >= last.entry.size_bytes
        )

    def _count(self, tally: CacheUsage) -> tuple[list[CacheEntry], int]:
        self._folder.remove_unfinished()
        entries = self._folder.entries()
        making_bytes = sum(entry.size_bytes for entry in self._folder.unfinished())
        tally.used_bytes = sum(entry.size_bytes for entry in entries) + making_bytes
        return entries, making_bytes


def _write(fd: int, encoded: EncodedBatch) -> None:
    laid, half = encoded.layout, len(encoded.layout.head) // 2
    pieces = [(0, memoryview(laid.head)[:half]), (half, memoryview(laid.head)[half:])]
    starts = (len(laid.head) + part.start for part in laid.parts)
    pieces += zip(starts, encoded.views, strict=True)
    for number, (at, view) in enumerate(pieces):
        if number == len(pieces) // 2:
            failpoint("prepared.half")
        _write_at(fd, view, at)


def _write_at(fd: int, view: memoryview, at: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], at + done)
