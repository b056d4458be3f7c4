"""An unreadable shard is retained; wrong bytes, short files and missing files are damage."""

import contextlib
import errno
import os
from pathlib import Path

import pytest

from peerstore import checksums
from peerstore.errors import ShardDamagedError, ShardNotFoundError, ShardUnreadableError, UnavailableError
from peerstore.peers.peer_messages import ReadRanges
from peerstore.peers.shard_server import RangeServer
from peerstore.settings import StoreSettings
from peerstore.store.arena import TmpfsArena
from peerstore.store.node_store import NodeStore
from tests.support.failing_calls import UNKNOWN, failing_os_call
from tests.support.local_nodes import wait_until
from tests.support.stores import (
    MIB,
    flip_byte,
    load_shard,
    open_client,
    save_shard,
    serve_store,
    shard_content,
    shard_key,
    store_directory,
    write_slot,
)

KEY = shard_key(1)


@pytest.fixture
def directory():
    with store_directory() as place:
        yield place


@contextlib.contextmanager
def opened(directory):
    with contextlib.closing(NodeStore(TmpfsArena(directory), StoreSettings(budget="64MiB"))) as store:
        yield store


@pytest.fixture
def store(directory):
    with opened(directory) as store:
        save_shard(store, KEY, 5 * MIB // 2)
        store.versions.mark_committed("job", KEY.version_id)
        yield store


def is_whole(store):
    assert store.verify(KEY) == ()
    assert load_shard(store, KEY) == shard_content(KEY, 5 * MIB // 2)
    assert store.status().damage_reports == ()
    assert store.status().jobs[0].newest_committed == 1


@pytest.mark.parametrize("call", ["open", "preadv"])
@pytest.mark.parametrize("code", UNKNOWN, ids=errno.errorcode.get)
def test_unreadable_shard_is_kept(store, directory, call, code):
    with failing_os_call(call, code, below=str(directory / "slots")) as failed:
        with pytest.raises(ShardUnreadableError, match=os.strerror(code)):
            store.verify(KEY)
        assert failed
    is_whole(store)
    assert store.status().counters["unreadable_reads"] == 1


def test_a_machine_without_memory_for_a_buffer_loses_nothing(store, monkeypatch):
    def none_left(size):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(checksums, "bytearray", none_left, raising=False)
        with pytest.raises(ShardUnreadableError, match="MemoryError"):
            store.verify(KEY)
    is_whole(store)


def test_unreadable_shard_error_crosses_the_socket(store, directory, tmp_path):
    with serve_store(store, tmp_path) as path, open_client(path) as client:
        with (
            failing_os_call("open", errno.EMFILE, below=str(directory / "slots")),
            pytest.raises(ShardUnreadableError, match="Too many open files"),
        ):
            client.verify(KEY)
        assert client.verify(KEY) == ()


@pytest.mark.parametrize(
    ("harm", "bad"),
    [
        (lambda path: flip_byte(path, MIB + 5), (1,)),
        (lambda path: os.truncate(path, MIB + 5), (1, 2)),
        (lambda path: os.truncate(path, 0), (0, 1, 2)),
        (os.unlink, (0, 1, 2)),
    ],
    ids=["a flipped bit", "short", "empty", "gone"],
)
def test_damaged_shard_is_dropped(store, harm, bad):
    harm(store.reader.shard_path(KEY))
    assert store.verify(KEY) == bad
    with pytest.raises(ShardNotFoundError):
        store.pin(KEY)
    assert [damage.what for damage in store.status().damage_reports] == [str(KEY)]


@pytest.mark.parametrize("harm", [lambda path: os.truncate(path, MIB), os.unlink], ids=["short", "gone"])
def test_reader_gets_damage_once_and_then_not_found(store, harm):
    harm(store.reader.shard_path(KEY))
    with pytest.raises(ShardDamagedError):
        store.pin(KEY)
    with pytest.raises(ShardNotFoundError):
        store.pin(KEY)
    assert [damage.what for damage in store.status().damage_reports] == [str(KEY)]


@pytest.mark.parametrize("size_bytes", [5 * MIB // 2, 8 * MIB], ids=["nothing behind it", "more behind it"])
def test_file_of_another_size_with_all_needed_bytes_is_intact(store, size_bytes):
    os.truncate(store.reader.shard_path(KEY), size_bytes)
    is_whole(store)


@pytest.mark.parametrize("code", UNKNOWN, ids=errno.errorcode.get)
def test_shard_that_a_reader_cannot_open_is_kept(store, directory, code):
    with failing_os_call("open", code, below=str(directory / "slots")), pytest.raises(ShardUnreadableError):
        store.pin(KEY)
    is_whole(store)
    assert store.status().counters["unreadable_reads"] == 1


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_seal_that_cannot_read_is_tried_again(store, directory, call):
    lease = store.lease(shard_key(2), MIB, 1)
    write_slot(lease, shard_content(shard_key(2), MIB))
    with failing_os_call(call, errno.EMFILE, below=str(directory / "slots")), pytest.raises(UnavailableError):
        store.seal(lease.id, MIB)
    store.seal(lease.id, MIB)
    assert load_shard(store, shard_key(2)) == shard_content(shard_key(2), MIB)


# -- after a restart ----------------------------------------------------------------------------------------------


def adopting(store):
    return store.status().verifying


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_recovered_shard_waits_until_it_is_readable(directory, call):
    with opened(directory) as store:
        save_shard(store, KEY, 5 * MIB // 2)
        store.versions.mark_committed("job", KEY.version_id)
    with contextlib.ExitStack() as stack:
        with failing_os_call(call, errno.EMFILE, below=str(directory / "slots" / "slot.job")) as failed:
            store = stack.enter_context(opened(directory))
            wait_until(lambda: len(failed) > 2, "a second try")
            assert adopting(store) == 1
        assert [fact.key for fact in store.list_shards()] == [KEY]
        is_whole(store)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_permanently_unreadable_shard_blocks_no_recovery(directory):
    """For example a lost memory page: other shards are served, and newer versions replace it."""
    with opened(directory) as store:
        save_shard(store, KEY, MIB)
        save_shard(store, shard_key(1, part=1), MIB, parts=2)
        path = store.reader.shard_path(KEY)
    clock = Clock()
    small = StoreSettings(budget="3MiB")
    with (
        failing_os_call("preadv", errno.EIO, below=path) as failed,
        contextlib.closing(NodeStore(TmpfsArena(directory), small, clock=clock)) as store,
    ):
        wait_until(lambda: failed, "a first try")
        clock.now = 60.0
        assert [fact.key for fact in store.list_shards()] == [shard_key(1, part=1)]
        assert Path(path).exists(), "it was not given up"
        for version in (2, 3, 4):
            save_shard(store, shard_key(version), MIB)
            store.versions.mark_committed("job", shard_key(version).version_id)
        assert store.status().damage_reports == ()


# -- for other nodes ----------------------------------------------------------------------------------------------


def asked(store, *ranges):
    (record,) = store.reader.records("job", KEY.version_id)
    return ReadRanges(KEY, checksums.chunk_checksum(record.checksums), ranges)


def lent(store, *ranges):
    loan = RangeServer(store).open("job", asked(store, *ranges))
    try:
        loan.fill()
    finally:
        loan.close()


@pytest.mark.parametrize("code", UNKNOWN, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["open", "preadv"])
def test_unreadable_shard_is_reported_to_other_nodes_as_unreadable(store, directory, call, code):
    with failing_os_call(call, code, below=str(directory / "slots")):
        with pytest.raises(ShardUnreadableError):
            lent(store, (10, 20))
        with pytest.raises(ShardUnreadableError):
            RangeServer(store).verify_chunks(KEY, [(0, 1)])
        RangeServer(store).try_verify_chunks(KEY, [(0, 1)])
    lent(store, (10, 20))
    is_whole(store)
    assert store.status().arena.pins == 0


def test_missing_file_is_reported_to_other_nodes_as_damage(store):
    Path(store.reader.shard_path(KEY)).unlink()
    with pytest.raises(ShardDamagedError):
        lent(store, (10, 20))
