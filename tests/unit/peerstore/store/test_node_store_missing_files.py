"""A slot file that another process removed or truncated costs its copy and no later save."""

import contextlib
import os
from pathlib import Path

import pytest

from peerstore.errors import PeerStoreError, ShardDamagedError, ShardNotFoundError
from peerstore.settings import StoreSettings
from peerstore.store.arena import TmpfsArena
from peerstore.store.node_store import NodeStore
from tests.support.stores import MIB, load_shard, save_shard, shard_content, shard_key, store_directory, write_slot


@pytest.fixture
def directory():
    with store_directory() as place:
        yield place


@pytest.fixture
def store(directory):
    with contextlib.closing(NodeStore(TmpfsArena(directory), StoreSettings(budget="64MiB"))) as one:
        yield one


def cut(path):
    os.truncate(path, 4096)


@pytest.fixture(params=[os.unlink, cut], ids=["removed", "truncated"])
def harm(request):
    return request.param


def go_on(store, versions):
    for version in versions:
        save_shard(store, shard_key(version))
        assert load_shard(store, shard_key(version)) == shard_content(shard_key(version), MIB)


def test_missing_file_of_a_superseded_version(store, directory, harm):
    go_on(store, (1, 2))
    harm(store.reader.shard_path(shard_key(1)))
    go_on(store, range(3, 8))
    assert len(list((directory / "slots").iterdir())) == store.status().arena.slots == 2


def test_missing_file_of_the_newest_version(store, harm):
    go_on(store, (1, 2))
    harm(store.reader.shard_path(shard_key(2)))
    with pytest.raises(ShardDamagedError):
        store.pin(shard_key(2))
    with pytest.raises(ShardNotFoundError):
        store.pin(shard_key(2))
    assert [fact.key for fact in store.list_shards("job")] == [shard_key(1)], "offered to nobody"
    assert any("job/2" in damage.what for damage in store.status().damage_reports)
    assert load_shard(store, shard_key(1)) == shard_content(shard_key(1), MIB)
    go_on(store, range(3, 8))


def test_missing_file_of_a_free_slot(store, directory, harm):
    lease = store.lease(shard_key(1), MIB, 1)
    store.release(lease.id)
    harm(directory / "slots" / lease.slot)
    go_on(store, range(1, 4))


def test_missing_file_of_a_leased_slot(store, directory, harm):
    """The save in progress is lost and raises."""
    lease = store.lease(shard_key(1), MIB, 1)
    harm(directory / "slots" / lease.slot)
    with pytest.raises(PeerStoreError):
        store.seal(lease.id, MIB)
    assert not Path(directory / "slots" / lease.slot).exists()
    store.release(lease.id)
    go_on(store, range(1, 4))


def test_missing_file_of_a_repeated_lease(store, directory, harm):
    lease = store.lease(shard_key(1), MIB, 1)
    harm(directory / "slots" / lease.slot)
    again = store.lease(shard_key(1), MIB, 1)
    write_slot(again, shard_content(shard_key(1), MIB))
    store.seal(again.id, MIB)
    assert load_shard(store, shard_key(1)) == shard_content(shard_key(1), MIB)
