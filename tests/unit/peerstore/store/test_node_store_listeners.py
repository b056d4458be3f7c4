"""Events that the owner of a store's contents receives."""

import os
import uuid
from pathlib import Path

import pytest

from peerstore.errors import ArenaFullError
from peerstore.settings import StoreSettings
from peerstore.store.arena import TmpfsArena
from peerstore.store.node_store import NodeStore
from peerstore.store.store_listener import StoreListener
from tests.support.leaks import process_prefix
from tests.support.stores import flip_byte, save_shard, shard_key


class Diary(StoreListener):
    def __init__(self):
        self.lines = []

    def on_shard_sealed(self, record):
        self.lines.append(("sealed", record.key))

    def on_shard_damaged(self, key, record, reason):
        assert key == record.key
        self.lines.append(("damaged", key, reason))


@pytest.fixture
def place():
    """A directory in which a store is opened repeatedly."""
    directory = Path("/dev/shm") / (process_prefix("peerstore") + uuid.uuid4().hex[:8])
    stores = []

    def open_it():
        for store in stores:
            store.close()
        stores[:] = [NodeStore(TmpfsArena(directory), StoreSettings(budget="64MiB"))]
        return stores[0]

    yield open_it
    for store in stores:
        store.close()
    TmpfsArena(directory).purge()
    directory.rmdir()


def test_listener_receives_damage_found_by_verification(place):
    store, diary = place(), Diary()
    store.subscribe(diary)
    save_shard(store, shard_key(3))
    flip_byte(store.reader.shard_path(shard_key(3)), 17)
    assert store.verify(shard_key(3)) == (0,)
    reason = "1 of its chunks changed after it was sealed, first: 0"
    assert diary.lines == [("sealed", shard_key(3)), ("damaged", shard_key(3), reason)]


def test_late_listener_receives_damage_found_after_a_restart(place):
    store = place()
    save_shard(store, shard_key(3, part=0), parts=3)
    save_shard(store, shard_key(3, part=8), parts=9)
    save_shard(store, shard_key(3, part=1), parts=3)
    flip_byte(store.reader.shard_path(shard_key(3, part=8)), 17)
    os.truncate(store.reader.shard_path(shard_key(3, part=1)), 100)
    store = place()
    assert [fact.key.part for fact in store.list_shards()] == [0]
    diary = Diary()
    store.subscribe(diary)
    assert sorted(diary.lines) == [
        ("damaged", shard_key(3, part=1), "its file has only 100 of 1048576 bytes"),
        ("damaged", shard_key(3, part=8), "1 chunks differ after a restart, first: 0"),
        ("sealed", shard_key(3, part=0)),
    ]


def test_damage_report_of_an_absent_shard_is_ignored(place):
    store, diary = place(), Diary()
    store.subscribe(diary)
    store.report_damage(shard_key(1), "so they say")
    assert diary.lines == []
    assert store.status().damage_reports == ()


class NoRoom(StoreListener):
    """A listener that has no space to record any event."""

    def _fail(self, *_, **__):
        raise ArenaFullError("no room for a note")

    on_shard_sealed = on_shard_damaged = on_replica_stored = on_version_decided = on_job_expired = on_client_left = (
        _fail
    )


def test_failing_listener_does_not_block_the_others(place):
    diary, store = Diary(), place()
    save_shard(store, shard_key(0))
    store.subscribe(NoRoom())
    store.subscribe(diary)
    save_shard(store, shard_key(1))
    flip_byte(store.reader.shard_path(shard_key(1)), 5)
    assert store.verify(shard_key(1)) == (0,)
    store.versions.mark_committed("job", shard_key(0).version_id)
    assert [line[:2] for line in diary.lines] == [
        ("sealed", shard_key(0)),
        ("sealed", shard_key(1)),
        ("damaged", shard_key(1)),
    ]
    assert store.status().counters["listener_errors"] == 4
