"""Directory of one stream of batches: claims, published batches, eviction, byte count, file locks.

::

    tieredckpt-prepared-UID / JOB / STREAM / f-FINGERPRINT / 00000000000000000012.batch    complete, never changed
                                                             00000000000000000013.partial   locked by its writer
                                                             tally                         byte count

A partial file is also the lock of its batch: one process writes it. If that process dies, the kernel releases the lock
and the next process takes the file over. Renaming the file publishes the batch atomically. Batches have no other locks.

A user of a fingerprint holds a shared lock on its directory. A directory without a lock may be removed. Files with
other names belong to other programs and are neither read nor changed.

::

    index   ... 4   5   6   7  |cursor|  8   9   10   11 ...
            <- evicted first, all at once   then the farthest ahead ->

The byte count may only be too high, if a process died between the count and the change. A process that would have to
evict a batch counts the files first, and so does a process that opens the directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash

from elastic.errors import BatchDamagedError, CacheDirectoryError, PolicyError
from peerstore.shard_records import validate_job_name

USAGE_FILE = "tally"
_BATCH = re.compile(r"([0-9]{20})\.batch", re.ASCII)
_PARTIAL = re.compile(r"([0-9]{20})\.partial", re.ASCII)
_FINGERPRINT = re.compile(r"f-[0-9a-f]{32}", re.ASCII)
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_DIRECTORY_LOCK_S = 10.0
"""Seconds to wait for a directory's lock; removing a directory takes less."""


@dataclass(frozen=True)
class BatchClaim:
    """Right to write a batch, as long as its file is open."""

    index: int
    fd: int


class CacheDirectory:
    """All batches of one fingerprint. Any number of threads and processes may open it."""

    def __init__(self, root: Path, job: str, stream: str, fingerprint: str) -> None:
        self._name = f"f-{fingerprint}"
        self.path = root / validate_job_name(job) / validate_job_name(stream) / self._name
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = threading.Lock()
        outer = _open_private_directory(root, None)
        try:
            for name in (job, stream):
                inner = _open_private_directory(name, outer)
                os.close(outer)
                outer = inner
            self._fds: tuple[int, int] | None = (outer, self._open_and_lock(outer))
        except BaseException:
            os.close(outer)
            raise

    def close(self) -> None:
        """Close the directory. Idempotent."""
        with self._lock:
            fds, self._fds = self._fds, None
        for fd in fds or ():
            os.close(fd)

    @property
    def fd(self) -> int:
        """Descriptor of the directory. Raises :class:`PolicyError` after :meth:`close`."""
        return self._open[1]

    @property
    def _stream(self) -> int:
        return self._open[0]

    @property
    def _open(self) -> tuple[int, int]:
        if self._fds is None:
            raise PolicyError(f"the cache of prepared batches in {self.path} was closed")
        return self._fds

    def _open_and_lock(self, stream: int) -> int:
        while True:
            fd = _open_private_directory(self._name, stream)
            try:
                # Closing releases the lock, without an explicit unlock: a forked worker shares it.
                held = lock_file(fd, wait_s=_DIRECTORY_LOCK_S, shared=True)
                if not held:
                    raise CacheDirectoryError(
                        f"{self.path} is locked by another process for more than {_DIRECTORY_LOCK_S:.0f} s"
                    )
                if _is_named(fd, self._name, stream):  # not removed before it was locked
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def open_batch(self, index: int) -> tuple[int, int] | None:
        """Return the descriptor and the size of a complete batch's file; ``None`` if it does not exist."""
        try:
            fd = os.open(batch_file_name(index), os.O_RDONLY | _FLAGS, dir_fd=self.fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BatchDamagedError(f"it cannot be opened: {error.strerror}") from error
        found = os.fstat(fd)
        if not _is_own_file(found):
            os.close(fd)
            raise BatchDamagedError("it is not a file of this user")
        return fd, found.st_size

    def has(self, index: int) -> bool:
        return bool(_is_file(batch_file_name(index), self.fd))

    @contextlib.contextmanager
    def claim(self, index: int, *, wait_s: float, should_stop: Callable[[], bool]) -> Iterator[BatchClaim | None]:
        """Claim the right to write a batch; ``None`` if another process holds it for longer than ``wait_s``.

        An unpublished claim leaves no file.
        """
        name = partial_file_name(index)
        while True:
            fd = self._open_partial(name)
            try:
                if not lock_file(fd, wait_s=wait_s, should_stop=should_stop):
                    yield None
                    return
                with unlock_at_end(fd):
                    if not _is_named(fd, name, self.fd):
                        continue  # published or removed meanwhile
                    try:
                        yield BatchClaim(index, fd)
                    finally:
                        if _is_named(fd, name, self.fd):
                            os.unlink(name, dir_fd=self.fd)
                    return
            finally:
                os.close(fd)

    def _open_partial(self, name: str) -> int:
        while True:
            try:
                fd = os.open(name, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600, dir_fd=self.fd)
            except OSError:
                if _is_file(name, self.fd) is not False:
                    raise
            else:
                found = os.fstat(fd)
                if _is_own_file(found) and found.st_nlink <= 1:
                    return fd
                os.close(fd)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.fd)  # not a batch, and not a file to write a batch into

    def publish(self, claim: BatchClaim) -> None:
        os.rename(partial_file_name(claim.index), batch_file_name(claim.index), src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def remove(self, index: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(batch_file_name(index), dir_fd=self.fd)

    def remove_damaged(self, index: int, fd: int | None) -> None:
        """Remove the damaged batch that was opened as ``fd``, unless another file has replaced it."""
        name = batch_file_name(index)
        if _is_named(fd, name, self.fd) if fd is not None else _is_file(name, self.fd) is False:
            os.unlink(name, dir_fd=self.fd)

    def entries(self) -> list[CacheEntry]:
        """Return the complete batches."""
        return [CacheEntry(int(match[1]), size) for match, size in self._files(_BATCH)]

    def unfinished(self) -> list[CacheEntry]:
        return [CacheEntry(int(match[1]), size) for match, size in self._files(_PARTIAL)]

    def remove_unfinished(self) -> None:
        """Remove unfinished files of dead processes."""
        for entry in self.unfinished():
            with contextlib.suppress(OSError):
                fd = os.open(partial_file_name(entry.index), os.O_RDWR | _FLAGS, dir_fd=self.fd)
                try:
                    if lock_file(fd, wait_s=0):
                        with unlock_at_end(fd):
                            if _is_named(fd, partial_file_name(entry.index), self.fd):
                                os.unlink(partial_file_name(entry.index), dir_fd=self.fd)
                finally:
                    os.close(fd)

    def remove_other_fingerprints(self) -> list[str]:
        """Remove unused batches of other fingerprints, and return the names of the ones in use."""
        others = [name for name in _names(self._stream) if _FINGERPRINT.fullmatch(name) and name != self._name]
        return [name for name in others if not remove_unused_fingerprint(name, self._stream)]

    def _files(self, pattern: re.Pattern[str]) -> Iterator[tuple[re.Match[str], int]]:
        with os.scandir(self.fd) as found:
            for entry in found:
                match = pattern.fullmatch(entry.name)
                if match:
                    with contextlib.suppress(FileNotFoundError):
                        if entry.is_file(follow_symlinks=False):
                            yield match, entry.stat(follow_symlinks=False).st_size


def remove_unused_fingerprint(name: str, parent: int) -> bool:
    """Remove a fingerprint's directory with our files, unless a process holds it.

    Return whether it is unused.
    """
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _FLAGS, dir_fd=parent)
    except OSError:  # removed, or not a directory of ours
        return True
    try:
        if not lock_file(fd, wait_s=0):
            return False
        with unlock_at_end(fd):
            with os.scandir(fd) as found:
                own_files = [one.name for one in found if _is_ours(one)]
            for inner in own_files:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(inner, dir_fd=fd)
            with contextlib.suppress(OSError):  # a file of another program is in it
                os.rmdir(name, dir_fd=parent)
        return True
    finally:
        os.close(fd)


def remove_job_directory(root: Path, job: str) -> list[Path]:
    """Remove a job's directories, unless a process holds them. Return the ones in use."""
    directory, held = root / validate_job_name(job), []
    if not directory.is_dir():
        return []
    with contextlib.ExitStack() as cleanup:
        outer = _open_private_directory(root, None)
        cleanup.callback(os.close, outer)
        jobs = _open_private_directory(job, outer)
        cleanup.callback(os.close, jobs)
        for stream in _names(jobs):
            inner = _open_private_directory(stream, jobs)
            cleanup.callback(os.close, inner)
            found = [name for name in _names(inner) if _FINGERPRINT.fullmatch(name)]
            held += [directory / stream / name for name in found if not remove_unused_fingerprint(name, inner)]
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(stream, dir_fd=jobs)
        with contextlib.suppress(OSError):
            os.rmdir(job, dir_fd=outer)
    return held


def _names(fd: int) -> list[str]:
    with os.scandir(fd) as found:
        return sorted(one.name for one in found if one.is_dir(follow_symlinks=False))


def batch_file_name(index: int) -> str:
    return f"{index:020d}.batch"


def partial_file_name(index: int) -> str:
    return f"{index:020d}.partial"


def _is_ours(entry: os.DirEntry[str]) -> bool:
    named = entry.name == USAGE_FILE or _BATCH.fullmatch(entry.name) or _PARTIAL.fullmatch(entry.name)
    return bool(named) and not entry.is_dir(follow_symlinks=False)


def _open_private_directory(name: str | Path, parent: int | None) -> int:
    """Open a directory that only this user can access, and create it if it is missing."""
    if parent is not None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=parent)
    except OSError as error:
        raise CacheDirectoryError(f"{name} cannot be used for prepared batches: {error.strerror}") from error
    found = os.fstat(fd)
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(fd)
        raise CacheDirectoryError(
            f"{name} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}, and must belong to "
            f"user {os.getuid()} with mode 0700. Remove it or choose another directory for prepared batches"
        )
    return fd


def _is_named(fd: int, name: str, parent: int) -> bool:
    try:
        named = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))


def _is_file(name: str, parent: int) -> bool | None:
    """Return whether ``name`` is a regular file; ``None`` if it does not exist.

    A link is not a regular file.
    """
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return None


def _is_own_file(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()


@dataclass(frozen=True)
class CacheEntry:
    """A batch in the cache."""

    index: int
    size_bytes: int


class EvictionPlan(NamedTuple):
    """Batches to evict, or the result that the new batch does not fit."""

    fits: bool
    evict: tuple[int, ...] = ()


def plan_eviction(entries: Sequence[CacheEntry], cursor: int, new: CacheEntry, limit_bytes: int) -> EvictionPlan:
    """Return the evictions that make space for ``new``.

    The nearer ahead of the cursor a batch is, the more it is worth. Batches behind the cursor are worth less than any
    batch ahead, and are evicted together, so that the next batches need no new plan. No batch is evicted for one of
    lower value, or for one that would still not fit.
    """
    excess = sum(entry.size_bytes for entry in entries) + new.size_bytes - limit_bytes
    if excess <= 0:
        return EvictionPlan(fits=True)
    worth_less = [entry for entry in entries if _cost(entry.index, cursor) > _cost(new.index, cursor)]
    worth_less.sort(key=lambda entry: _cost(entry.index, cursor), reverse=True)
    evicted: list[int] = []
    for entry in worth_less:
        if excess <= 0 and entry.index >= cursor:
            break
        evicted.append(entry.index)
        excess -= entry.size_bytes
    return EvictionPlan(fits=True, evict=tuple(evicted)) if excess <= 0 else EvictionPlan(fits=False)


def _cost(index: int, cursor: int) -> tuple[bool, int]:
    """Return the eviction order of a batch: the highest is evicted first."""
    return (index < cursor, abs(index - cursor))


_MAGIC = b"TCTALLY1"
_BODY = struct.Struct("<8sqq")
_LOCK_S = 10.0
UNKNOWN_USAGE = -1


@dataclass
class CacheUsage:
    """Byte count of a cache, valid while its lock is held. Written when the lock is released."""

    used_bytes: int = UNKNOWN_USAGE
    """Bytes of all batches, including unfinished ones."""
    committed: int = UNKNOWN_USAGE
    """First index that training may still need."""


@contextlib.contextmanager
def locked_usage(folder_fd: int) -> Iterator[CacheUsage]:
    """Yield the byte count under an exclusive lock.

    Raises ``TimeoutError`` if another process holds it too long.
    """
    fd = _open(folder_fd)
    try:
        if not lock_file(fd, wait_s=_LOCK_S):
            raise TimeoutError(f"the tally of prepared batches is locked for more than {_LOCK_S:.0f} s")
        with unlock_at_end(fd):
            before = os.pread(fd, _BODY.size + 8, 0)
            tally = _read(before)
            yield tally
            body = _BODY.pack(_MAGIC, tally.used_bytes, tally.committed)
            after = body + xxhash.xxh3_64_digest(body)
            if after != before:
                os.pwrite(fd, after, 0)
    finally:
        os.close(fd)


def _open(folder_fd: int) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    for _ in range(2):
        with contextlib.suppress(OSError):
            fd = os.open(USAGE_FILE, flags, 0o600, dir_fd=folder_fd)
            found = os.fstat(fd)
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.getuid():
                return fd
            os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(USAGE_FILE, dir_fd=folder_fd)
    raise FileExistsError(
        errno.EEXIST, "the usage file of prepared batches is not a regular file of this user", USAGE_FILE
    )


def _read(data: bytes) -> CacheUsage:
    if len(data) != _BODY.size + 8 or xxhash.xxh3_64_digest(data[: _BODY.size]) != data[_BODY.size :]:
        return CacheUsage()
    magic, used, committed = _BODY.unpack(data[: _BODY.size])
    return CacheUsage(max(used, UNKNOWN_USAGE), max(committed, UNKNOWN_USAGE)) if magic == _MAGIC else CacheUsage()


_FIRST_PAUSE_S = 50e-6
_LONGEST_PAUSE_S = 5e-3


def lock_file(fd: int, *, wait_s: float, shared: bool = False, should_stop: Callable[[], bool] = lambda: False) -> bool:
    """Lock an open file against all other openings, also in this process; return False on timeout."""
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
    deadline, pause_s = time.monotonic() + wait_s, _FIRST_PAUSE_S
    while True:
        try:
            fcntl.flock(fd, kind)
        except BlockingIOError:
            if should_stop() or time.monotonic() >= deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        else:
            return True


@contextlib.contextmanager
def unlock_at_end(fd: int) -> Iterator[None]:
    """Unlock at the end of the block.

    Closing is not enough: a process forked meanwhile shares the opening.
    """
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)
