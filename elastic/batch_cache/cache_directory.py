"""The directory of one stream of batches: claims, published batches, eviction, the shared byte count, file locks.

::

    tieredckpt-prepared-UID / JOB / STREAM / f-FINGERPRINT / 00000000000000000012.batch    complete, never changed
                                                             00000000000000000013.partial   locked by who makes it
                                                             tally                         how much there is

What is being made is also the lock that says so: one process makes a batch, the kernel lets go when that process dies,
and what it left is taken over by the next one. Renaming it makes the batch, all of it at once. Nothing else is a lock.

Whoever uses a fingerprint holds its directory (a shared lock); one that nobody holds may be swept. What has another
name than the above was put there by somebody else and is neither read nor touched.

::

    index   ... 4   5   6   7  |cursor|  8   9   10   11 ...
            <- given up first, all at once   farthest ahead next ->

The number of bytes may only be too high (a process died between saying and doing). Whoever would have to give something
up because of it counts the files first, and so does whoever opens the folder.
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
_MAKING = re.compile(r"([0-9]{20})\.partial", re.ASCII)
_FINGERPRINT = re.compile(r"f-[0-9a-f]{32}", re.ASCII)
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_ENTER_S = 10.0
"""Sweeping a directory takes less."""


@dataclass(frozen=True)
class BatchClaim:
    """The right to make a batch, as long as its file is open."""

    index: int
    fd: int


class CacheDirectory:
    """All batches of one fingerprint. Any number of threads and processes may have it open."""

    def __init__(self, root: Path, job: str, stream: str, fingerprint: str) -> None:
        self._name = f"f-{fingerprint}"
        self.path = root / validate_job_name(job) / validate_job_name(stream) / self._name
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = threading.Lock()
        outer = _enter(root, None)
        try:
            for name in (job, stream):
                inner = _enter(name, outer)
                os.close(outer)
                outer = inner
            self._fds: tuple[int, int] | None = (outer, self._enter_and_hold(outer))
        except BaseException:
            os.close(outer)
            raise

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            fds, self._fds = self._fds, None
        for fd in fds or ():
            os.close(fd)

    @property
    def fd(self) -> int:
        """The directory's; raises once this was closed."""
        return self._open[1]

    @property
    def _stream(self) -> int:
        return self._open[0]

    @property
    def _open(self) -> tuple[int, int]:
        if self._fds is None:
            raise PolicyError(f"the cache of prepared batches in {self.path} was closed")
        return self._fds

    def _enter_and_hold(self, stream: int) -> int:
        while True:
            fd = _enter(self._name, stream)
            try:
                # Not let go of by word: a worker that was forked holds the same.
                held = lock_file(fd, wait_s=_ENTER_S, shared=True)
                if not held:
                    raise CacheDirectoryError(
                        f"{self.path} is locked by another process for more than {_ENTER_S:.0f} s"
                    )
                if _is_named(fd, self._name, stream):  # and was not swept before it was held
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def open_batch(self, index: int) -> tuple[int, int] | None:
        """A complete batch's file and its size; ``None`` when there is none."""
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
        """The right to make a batch; ``None`` where another process has it for longer than ``wait_s``.

        A claim that was not published leaves nothing behind.
        """
        name = partial_file_name(index)
        while True:
            fd = self._open_making(name)
            try:
                if not lock_file(fd, wait_s=wait_s, should_stop=should_stop):
                    yield None
                    return
                with unlock_at_end(fd):
                    if not _is_named(fd, name, self.fd):
                        continue  # published or swept meanwhile
                    try:
                        yield BatchClaim(index, fd)
                    finally:
                        if _is_named(fd, name, self.fd):
                            os.unlink(name, dir_fd=self.fd)
                    return
            finally:
                os.close(fd)

    def _open_making(self, name: str) -> int:
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
                os.unlink(name, dir_fd=self.fd)  # neither a batch nor anything that one may be written into

    def publish(self, claim: BatchClaim) -> None:
        os.rename(partial_file_name(claim.index), batch_file_name(claim.index), src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def remove(self, index: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(batch_file_name(index), dir_fd=self.fd)

    def remove_damaged(self, index: int, fd: int | None) -> None:
        """Remove what was found damaged when it was opened as ``fd``, and not what has taken its place since."""
        name = batch_file_name(index)
        if _is_named(fd, name, self.fd) if fd is not None else _is_file(name, self.fd) is False:
            os.unlink(name, dir_fd=self.fd)

    def entries(self) -> list[CacheEntry]:
        """The complete batches."""
        return [CacheEntry(int(match[1]), size) for match, size in self._files(_BATCH)]

    def unfinished(self) -> list[CacheEntry]:
        return [CacheEntry(int(match[1]), size) for match, size in self._files(_MAKING)]

    def remove_unfinished(self) -> None:
        """Remove what dead processes have left unfinished."""
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
        """Remove other fingerprints' batches where nobody uses them; the names of those that are still used."""
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
    """Remove a fingerprint's directory, of which only our own files, unless a process holds it."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _FLAGS, dir_fd=parent)
    except OSError:  # gone, or not a directory: nothing of ours
        return True
    try:
        if not lock_file(fd, wait_s=0):
            return False
        with unlock_at_end(fd):
            with os.scandir(fd) as found:
                ours = [one.name for one in found if _is_ours(one)]
            for inner in ours:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(inner, dir_fd=fd)
            with contextlib.suppress(OSError):  # a stranger's file is in it
                os.rmdir(name, dir_fd=parent)
        return True
    finally:
        os.close(fd)


def remove_job_directory(root: Path, job: str) -> list[Path]:
    """Remove what a job has, unless a process holds it; returns what is held."""
    place, held = root / validate_job_name(job), []
    if not place.is_dir():
        return []
    with contextlib.ExitStack() as undo:
        outer = _enter(root, None)
        undo.callback(os.close, outer)
        jobs = _enter(job, outer)
        undo.callback(os.close, jobs)
        for stream in _names(jobs):
            inner = _enter(stream, jobs)
            undo.callback(os.close, inner)
            found = [name for name in _names(inner) if _FINGERPRINT.fullmatch(name)]
            held += [place / stream / name for name in found if not remove_unused_fingerprint(name, inner)]
            with contextlib.suppress(OSError):  # something is in it
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
    named = entry.name == USAGE_FILE or _BATCH.fullmatch(entry.name) or _MAKING.fullmatch(entry.name)
    return bool(named) and not entry.is_dir(follow_symlinks=False)


def _enter(name: str | Path, parent: int | None) -> int:
    """A directory that only this user can enter, made where it is missing."""
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
            f"{name} must be a directory of user {os.getuid()} with mode 0700, it belongs to {found.st_uid} with mode "
            f"{stat.S_IMODE(found.st_mode):04o}: remove it or name another directory for prepared batches"
        )
    return fd


def _is_named(fd: int, name: str, parent: int) -> bool:
    try:
        named = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))


def _is_file(name: str, parent: int) -> bool | None:
    """``None`` when there is nothing of that name; a link is no file."""
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
    """What has to go; or that it is not worth it."""

    fits: bool
    evict: tuple[int, ...] = ()


def plan_eviction(entries: Sequence[CacheEntry], cursor: int, new: CacheEntry, limit_bytes: int) -> EvictionPlan:
    """How ``new`` gets room among ``entries``.

    The nearer ahead of the cursor, the more a batch is worth; all that lies behind is worth less than anything ahead,
    and goes together, so that this is not asked again for every batch. Nothing is given up for a batch that is worth
    less, or that would not fit all the same.
    """
    excess = sum(entry.size_bytes for entry in entries) + new.size_bytes - limit_bytes
    if excess <= 0:
        return EvictionPlan(fits=True)
    worth_less = [entry for entry in entries if _cost(entry.index, cursor) > _cost(new.index, cursor)]
    worth_less.sort(key=lambda entry: _cost(entry.index, cursor), reverse=True)
    given: list[int] = []
    for entry in worth_less:
        if excess <= 0 and entry.index >= cursor:
            break
        given.append(entry.index)
        excess -= entry.size_bytes
    return EvictionPlan(fits=True, evict=tuple(given)) if excess <= 0 else EvictionPlan(fits=False)


def _cost(index: int, cursor: int) -> tuple[bool, int]:
    """The lower, the longer it is kept."""
    return (index < cursor, abs(index - cursor))


_MAGIC = b"TCTALLY1"
_BODY = struct.Struct("<8sqq")
_LOCK_S = 10.0
UNKNOWN_USAGE = -1


@dataclass
class CacheUsage:
    """As it stands while its lock is held; written when the lock is let go."""

    used_bytes: int = UNKNOWN_USAGE
    """Of all batches, also those being made."""
    committed: int = UNKNOWN_USAGE
    """The first index that training may still need."""


@contextlib.contextmanager
def locked_usage(folder_fd: int) -> Iterator[CacheUsage]:
    """The tally, for this thread alone. ``TimeoutError`` when somebody else has it for longer than it can take."""
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
        errno.EEXIST, "something that is no file has the name of the tally of prepared batches", USAGE_FILE
    )


def _read(data: bytes) -> CacheUsage:
    if len(data) != _BODY.size + 8 or xxhash.xxh3_64_digest(data[: _BODY.size]) != data[_BODY.size :]:
        return CacheUsage()
    magic, used, committed = _BODY.unpack(data[: _BODY.size])
    return CacheUsage(max(used, UNKNOWN_USAGE), max(committed, UNKNOWN_USAGE)) if magic == _MAGIC else CacheUsage()


_FIRST_PAUSE_S = 50e-6
_LONGEST_PAUSE_S = 5e-3


def lock_file(fd: int, *, wait_s: float, shared: bool = False, should_stop: Callable[[], bool] = lambda: False) -> bool:
    """Lock an open file against all other openings of it, also in this process; False when that took too long."""
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
    """Let go at the end, by word and not by closing: a process forked meanwhile has the same opening."""
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)
