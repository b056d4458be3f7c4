"""Every system call of the store fails once, in every way: nothing is lost, nothing is called damaged, and the next try
works."""

import contextlib
import errno
import os
import shutil
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest

import peerstore
from peerstore import pages
from peerstore.arena import TmpfsArena
from peerstore.errors import PeerStoreError
from peerstore.settings import StoreSettings
from peerstore.store import NodeStore, SealListener
from tests.support.stores import MIB, content, fill, key, pinned_file, store_directory

CODES = (errno.EMFILE, errno.EIO, errno.ENOSPC, errno.ENOMEM, errno.EINTR)
CALLS = (
    *("open", "fstat", "stat", "lstat", "ftruncate", "truncate", "rename", "replace", "unlink", "mkdir", "rmdir"),
    *("preadv", "pread", "pwrite", "write", "read", "scandir", "listdir", "statvfs", "fsync", "dup", "dup2"),
    *("memfd_create", "posix_fallocate", "fdopen"),
)
"""Whatever of ``os`` this package may use on files."""
SIZE = MIB + 5
_HERE = str(Path(peerstore.__file__).parent)


class Failing:
    """Counts the calls of this package's modules, and lets one of them fail."""

    def __init__(self, at=0, code=0):
        self.at, self.code = at, code
        self.calls = 0
        self.failed = ""
        self._lock = threading.Lock()

    def _counted(self, name):
        frame = sys._getframe(2)
        while frame is not None and not frame.f_code.co_filename.startswith(_HERE):
            if frame.f_code.co_filename == __file__ or "tests/support" in frame.f_code.co_filename:
                return  # a writer's or a reader's own call
            frame = frame.f_back
        if frame is None:
            return
        with self._lock:
            self.calls += 1
            now = self.calls == self.at
        if now:
            self.failed = f"{name} in {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            raise OSError(self.code, os.strerror(self.code))

    @contextlib.contextmanager
    def injected(self):
        def wrapped(name, real):
            def call(*args, **kwargs):
                self._counted(name)
                return real(*args, **kwargs)

            return call

        with contextlib.ExitStack() as stack:
            for name in CALLS:
                if hasattr(os, name):
                    stack.enter_context(mock.patch.object(os, name, wrapped(name, getattr(os, name))))
            stack.enter_context(mock.patch.object(pages.mmap, "mmap", wrapped("mmap", pages.mmap.mmap)))
            yield self


def again(work):
    """What a caller does that is told "not now": it asks again."""
    for left in (2, 1, 0):
        try:
            return work()
        except (PeerStoreError, OSError):
            if not left:
                raise
    return None


def opened(directory):
    return NodeStore(TmpfsArena(directory), StoreSettings(budget="64MiB"), threads=1)


def save(store, of, parts=1):
    lease = again(lambda: store.lease(of, SIZE, parts))
    again(lambda: fill(lease, content(of, SIZE)))
    return again(lambda: store.seal(lease.id, SIZE, b"meta"))


def verified(store, of):
    return again(lambda: store.verify(of))


def load(store, of):
    pin = again(lambda: store.pin(of))
    try:
        return pinned_file(pin).read_bytes()[: pin.record.size_bytes]
    finally:
        store.unpin(pin.id)


class Told(SealListener):
    def __init__(self):
        self.keys = set()

    def sealed(self, record):
        self.keys.add(record.key)

    def copied(self, record, holders):
        self.keys.add(record.key)


def story(directory, failing):
    """Save, verify, read, a copy from elsewhere, blobs, an agent that is killed and one that takes over."""
    with failing.injected():
        store = again(lambda: opened(directory))
        try:
            told = Told()
            store.subscribe(told)
            again(lambda: store.claim("job", "a"))
            save(store, key(1))
            again(lambda: store.call_whole("job", key(1).group))
            again(lambda: store.put_blob("job", "layout.x", b"layout"))
            assert verified(store, key(1)) == ()
            save(store, key(2))
            again(lambda: store.call_whole("job", key(2).group))
            record = store.records("job", key(1).group)[0]
            copied = key(1, part=1, job="other")
            copy = record.__class__(copied, 2, record.size_bytes, record.chunk_bytes, record.checksums, b"", 1)
            lease = again(lambda: store.begin_copy(copy, whole=True))
            again(lambda: fill(lease, content(key(1), SIZE)))
            again(lambda: store.seal_copy(lease.id, copy, ("n1", "n2")))
            assert again(lambda: store.get_blob("job", "layout.x")) == b"layout"
            assert told.keys == {key(1), key(2), copied}, "somebody was not told"
        finally:
            store.close()
        store = again(lambda: opened(directory))
        try:
            assert {fact.key for fact in again(store.inventory)} == {key(1), key(2), copied}
            assert store.status().damages == (), failing.failed
            assert store.status().aside == (), failing.failed
            for version in (1, 2):
                assert verified(store, key(version)) == ()
                assert load(store, key(version)) == content(key(version), SIZE)
            assert again(lambda: store.get_blob("job", "layout.x")) == b"layout"
            save(store, key(3))
        finally:
            store.close()


@pytest.fixture(scope="module")
def calls():
    with store_directory() as directory:
        counting = Failing()
        story(directory, counting)
    assert counting.calls > 100
    return counting.calls


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_nothing_is_lost_and_the_next_try_works(calls, code):
    """Every call fails here with one of the errors."""
    each_fails(range(1 + CODES.index(code), calls + 1, len(CODES)), code)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_whichever_error_it_is(calls, code):
    """Every call fails with every error: four minutes on two cores."""
    each_fails(range(1, calls + 1), code)


def each_fails(calls, code):
    lost = []
    with store_directory() as directory:
        for at in calls:
            failing = Failing(at, code)
            try:
                story(directory, failing)
            except BaseException as error:
                lost.append((failing.failed, repr(error)))
            shutil.rmtree(directory, ignore_errors=True)
    assert not lost, "\n".join(f"{what}: {error}" for what, error in sorted(set(lost)))
