"""BatchCache: map a batch that exists, otherwise prepare, reserve, write and publish it.

::

    get(index, prepare)
      there ─────────────────────────────────────────────> mapped, compared with its checksum
      absent ── claim ── prepare ── reserve ── write ── publish ──┘
                  │ somebody else prepares it: wait      │ no room: used without being kept
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

_NORESERVE = 0x4000  # Linux: a private mapping needs no memory of its own
_ADVICE = (
    "Enlarge it (in Kubernetes: an emptyDir with medium Memory and a sizeLimit; with Docker: --shm-size) or max_bytes, "
    "prepare fewer batches ahead, or name another directory"
)
PrepareFunction: TypeAlias = Callable[[int], Any]


class CacheCounts(msgspec.Struct):
    """What a cache has done so far in this process."""

    hits: int = 0
    """Batches that were there."""
    prepared: int = 0
    """Calls of ``prepare``."""
    stored: int = 0
    """Of these, how many are in the cache for others."""
    damaged: int = 0
    """Batches that were there and not what was put; they were prepared again."""


class CacheResult(msgspec.Struct, frozen=True):
    """What came of asking for a batch to be there."""

    is_cached: bool
    batch: Any = None
    """Where it could not be kept."""


def fingerprint_digest(fingerprint: str | bytes | Mapping[str, Any]) -> str:
    """What stands for a fingerprint in names and files."""
    try:
        told = msgspec.json.encode(fingerprint, order="deterministic")
    except (TypeError, msgspec.MsgspecError) as error:
        raise PolicyError(f"a fingerprint is text, bytes or a mapping of plain values: {error}") from error
    return hashlib.sha256(BATCH_MAGIC + told).hexdigest()[:32]


def remove_job_batches(job: str, *, directory: Path | str | None = None) -> list[Path]:
    """Remove all batches of a job that has ended, of all its streams; returns what is still used and stays."""
    return remove_job_directory(batch_cache_directory() if directory is None else Path(directory), job)


def _never() -> bool:
    return False


class BatchCache:
    """Prepared batches of one stream of one job, on this node's shared memory.

    ``fingerprint`` says what batches are made of: everything that would change a batch's bytes under the same index
    (the data, the tokenizer, the seed, the packing). Batches of another fingerprint count as absent, and are removed
    unless a process still uses them.

    ``max_bytes`` bounds what is kept; beyond it, batches behind :meth:`mark_committed` are given up first, then those
    farthest ahead. A batch somebody has mapped stays as it is, for him.

    Where there is no room at all, the job goes on without the cache and says so once; ``required=True`` makes that a
    :class:`~elastic.errors.CacheFullError`.

    Any thread may call any method. Pickled, it is opened again on the other side.
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
        self._keeping = CacheWriter(self._folder, limit_bytes)
        try:
            with self._going_on():
                for name in self._folder.remove_other_fingerprints():
                    log.info("batches of another fingerprint (%s) are in use and stay", name)
                self._keeping.recount()
        except BaseException:
            self.close()
            raise

    def __reduce__(self) -> tuple[Callable[[], BatchCache], tuple[()]]:
        return self._open_again, ()

    def reopen(self) -> BatchCache:
        """The same cache, opened once more; for a process that was forked, perhaps while a thread held a lock."""
        return self._open_again()

    def __enter__(self) -> BatchCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def directory(self) -> Path:
        """Where the batches are."""
        return self._folder.path

    @property
    def fingerprint(self) -> str:
        """The digest of the fingerprint."""
        return self._digest

    def close(self) -> None:
        """Idempotent. Batches stay, and so do those that are mapped."""
        self._folder.close()

    def clear(self) -> None:
        """Remove all batches, also those that other processes would use."""
        self._keeping.clear()

    def get(
        self,
        index: int,
        prepare: PrepareFunction,
        *,
        position: int | None = None,
        should_stop: Callable[[], bool] = _never,
    ) -> Any:
        """The batch of this global index: mapped where it is kept, else out of ``prepare(index)``, and kept.

        Its tensors may be changed in place: that changes nobody else's. ``position`` is the first index the caller has
        not used yet; ``should_stop`` ends the wait for another process. What ``prepare`` raises is raised.
        """
        found = self.lookup(index)
        if found.is_cached:
            return found.batch
        made = self.prepare(index, prepare, position=position, should_stop=should_stop)
        if not made.is_cached:
            return made.batch
        found = self.lookup(index)
        return found.batch if found.is_cached else self._prepared(index, prepare)  # given up at once, for a nearer one

    def lookup(self, index: int) -> CacheResult:
        """The batch, mapped, if it is kept. One that is damaged is removed, and not there."""
        opened = None
        try:
            opened = self._folder.open_batch(_checked(index))
            if opened is None:
                return CacheResult(is_cached=False)
            batch = decode_batch(_mapped(*opened), self._digest, index, verify=self._verify)
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
        position: int | None = None,
        should_stop: Callable[[], bool] = _never,
    ) -> CacheResult:
        """Have the batch prepared and kept, by this process or another; where it cannot be kept, it is returned."""
        with contextlib.ExitStack() as undo:
            claim: BatchClaim | None = None
            with self._going_on():
                claim = undo.enter_context(
                    self._folder.claim(_checked(index), wait_s=self._wait_s, should_stop=should_stop)
                )
            if claim is None:  # whoever prepares it is slow, or stopped: each for himself then
                return CacheResult(is_cached=False, batch=self._prepared(index, prepare))
            if self._folder.has(index):
                return CacheResult(is_cached=True)
            failpoint("prepared.claimed")
            batch = self._prepared(index, prepare)
            encoded = encode_batch(self._digest, index, batch)
            failpoint("prepared.encoded")
            kept = self._keep(claim, encoded, index if position is None else position)
            return CacheResult(is_cached=True) if kept else CacheResult(is_cached=False, batch=batch)

    def mark_committed(self, index: int) -> None:
        """Training will not go back before ``index``: what lies behind it may be given up first.

        Holds for all processes of the node. Until it is called, what lies before a reader counts as behind.
        """
        with self._going_on():
            self._keeping.commit(_checked(index))

    def cached_indices(self) -> list[int]:
        """The indices that are kept."""
        return sorted(entry.index for entry in self._folder.entries())

    def used_bytes(self) -> int:
        """Of all kept batches; counted, not remembered."""
        return sum(entry.size_bytes for entry in self._folder.entries())

    def _prepared(self, index: int, prepare: PrepareFunction) -> Any:
        self._add(prepared=1)
        return prepare(index)

    def _keep(self, claim: BatchClaim, encoded: EncodedBatch, position: int) -> bool:
        kept = False
        with self._going_on():
            self._keeping.write(claim, encoded, position)
            kept = True
        self._add(stored=kept)
        return kept

    def _discard(self, index: int, fd: int | None, error: BatchDamagedError) -> None:
        log.warning("prepared batch %d in %s is damaged and will be prepared again: %s", index, self.directory, error)
        self._add(damaged=1)
        with self._going_on():
            self._keeping.discard(index, fd)

    def _add(self, **more: int) -> None:
        with self._lock:
            for name, count in more.items():
                setattr(self.counts, name, getattr(self.counts, name) + count)

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        """Without the cache, where it has no room or a file cannot be made; unless it was required."""
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


def _checked(index: int) -> int:
    if type(index) is not int or not 0 <= index <= MAX_BATCH_INDEX:
        raise PolicyError(f"a batch's index is a whole number from 0 to {MAX_BATCH_INDEX}, not {index!r}")
    return index


def _mapped(fd: int, size_bytes: int) -> mmap.mmap:
    """The file's own pages; one that is written to becomes the writer's own copy."""
    if not size_bytes:
        raise BatchDamagedError("it is empty")
    flags, access = mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    return mmap.mmap(fd, size_bytes, flags, access)


class _Refusal(NamedTuple):
    """A batch that had no room, and how things were then."""

    entry: CacheEntry
    cursor: int
    used_bytes: int


class CacheWriter:
    """The writing side of a folder, bounded in bytes."""

    def __init__(self, folder: CacheDirectory, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._refusal: _Refusal | None = None
        self.evicted = 0
        """Batches removed to make room, by this process."""

    def recount(self) -> None:
        """Sweep what dead processes left unfinished, and say how much there is."""
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

    def discard(self, index: int, fd: int | None) -> None:
        """Remove a batch that is damaged, as it was opened."""
        with locked_usage(self._folder.fd) as tally:
            tally.used_bytes = UNKNOWN_USAGE
            self._folder.remove_damaged(index, fd)

    def write(self, claim: BatchClaim, encoded: EncodedBatch, position: int) -> None:
        """Write and publish; :class:`CacheFullError` or ``OSError`` where that cannot be, and nothing is left."""
        self._reserve(claim, encoded.layout.size_bytes, position)
        failpoint("prepared.reserved")
        _write(claim.fd, encoded)
        failpoint("prepared.written")
        self._folder.publish(claim)
        failpoint("prepared.published")

    def _reserve(self, claim: BatchClaim, size_bytes: int, position: int) -> None:
        """Room for a batch: its file has its size before anybody else may count."""
        with locked_usage(self._folder.fd) as tally:
            os.ftruncate(claim.fd, 0)  # what a dead process left in it
            cursor = position if tally.committed == UNKNOWN_USAGE else tally.committed
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
            f"batch {new.index} has {show_size(new.size_bytes)}, for which there is no room in "
            f"{show_size(self._limit_bytes)} beside what training needs sooner, from batch {cursor} on"
        )

    def _is_refused_again(self, new: CacheEntry, cursor: int, tally: CacheUsage) -> bool:
        """Nothing has changed since a nearer and smaller one had no room: no need to look through all files again."""
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
