"""Arenas left by another release: shards are retained, named, counted and usable again."""

import contextlib
import errno

import msgspec
import pytest

from peerstore.errors import ArenaFullError, FencedError, ShardNotFoundError, UnavailableError
from peerstore.settings import StoreSettings
from peerstore.store import slot_metadata
from peerstore.store.arena import TmpfsArena, _framed
from peerstore.store.node_store import NodeStore
from tests.support.failing_calls import failing_os_call
from tests.support.stores import MIB, load_shard, save_shard, shard_content, shard_key, store_directory

OLD, NEW = shard_key(1), shard_key(2)


@pytest.fixture
def directory():
    with store_directory() as place:
        yield place


@contextlib.contextmanager
def opened(directory, budget="64MiB"):
    with contextlib.closing(NodeStore(TmpfsArena(directory), StoreSettings(budget=budget))) as store:
        yield store


@contextlib.contextmanager
def newer_release(monkeypatch):
    """Use the next format of notes in this block."""
    with monkeypatch.context() as patch:
        patch.setattr(slot_metadata, "METADATA_FORMAT", slot_metadata.METADATA_FORMAT + 1)
        put = slot_metadata.MetadataStore.put

        def of_next(self, kind, name, note):
            put(self, kind, name, msgspec.structs.replace(note, format=slot_metadata.METADATA_FORMAT))

        patch.setattr(slot_metadata.MetadataStore, "put", of_next)
        yield


@pytest.fixture
def rolled_back(directory, monkeypatch):
    """Write a step of this version and one of the next, then return to this version."""
    with opened(directory) as store:
        save_shard(store, OLD)
        store.versions.mark_committed("job", OLD.version_id)
    with newer_release(monkeypatch), opened(directory) as store:
        assert load_shard(store, OLD) == shard_content(OLD, MIB), "an upgrade finds everything"
        save_shard(store, NEW, meta=b"of the next version")
        store.versions.mark_committed("job", NEW.version_id)
    return directory


def test_shards_of_a_newer_release_are_kept_and_the_older_step_restores(rolled_back, monkeypatch):
    with opened(rolled_back) as store:
        assert [fact.key for fact in store.list_shards()] == [OLD]
        assert load_shard(store, OLD) == shard_content(OLD, MIB)
        status = store.status()
        (claim, slot) = sorted(status.unrecognized, key=lambda one: one.size_bytes)
        assert (claim.name, slot.size_bytes) == ("job.job", MIB)
        assert f"format {slot_metadata.METADATA_FORMAT + 1}" in slot.reason
        assert status.arena.unrecognized_bytes == MIB
        assert status.damage_reports == ()
        save_shard(store, shard_key(3))
    with newer_release(monkeypatch), opened(rolled_back) as store:
        assert sorted(fact.key.version for fact in store.list_shards()) == [1, 2, 3]
        assert load_shard(store, NEW) == shard_content(NEW, MIB)
        assert store.status().unrecognized == ()


def test_notes_of_an_older_format_are_kept_and_named(directory):
    with opened(directory) as store:
        save_shard(store, OLD)
    (place,) = (directory / "notes").glob("seal.*")
    arena = TmpfsArena(directory)
    note = msgspec.msgpack.decode(arena.get_metadata(place.name))
    arena.put_metadata(place.name, msgspec.msgpack.encode({**note, "format": slot_metadata.OLDEST_METADATA_FORMAT - 1}))
    arena.close()
    with opened(directory) as store:
        assert store.list_shards() == []
        (slot,) = store.status().unrecognized
        assert f"has format {slot_metadata.OLDEST_METADATA_FORMAT - 1}, this version reads" in slot.reason


def test_writers_of_the_past_stay_refused(directory, monkeypatch):
    with newer_release(monkeypatch), opened(directory) as store:
        store.claim("job", "ninth", at_least=8)
    with opened(directory) as store:
        assert store.epoch("job") == 9
        with pytest.raises(FencedError):
            store.lease(shard_key(5, epoch=8, name="eighth"), MIB, 1)


def test_shards_set_aside_use_budget_and_can_be_dropped(rolled_back):
    with opened(rolled_back, "2MiB") as store:
        assert [fact.key for fact in store.list_shards()] == [OLD]
        with pytest.raises(ArenaFullError, match=r"1\.0 MiB more is in slots that another version"):
            save_shard(store, shard_key(3))
        name = next(one.name for one in store.status().unrecognized if one.size_bytes)
        assert store.drop_unrecognized(["slot.other"]) == 0
        assert store.drop_unrecognized([name]) == MIB
        assert store.status().arena.unrecognized_bytes == 0
        assert not [path for path in rolled_back.rglob("*") if path.name.endswith(name)]
        save_shard(store, shard_key(3))


UNKNOWN = {
    "another frame": lambda raw: b"PSN2" + raw[4:],
    "not ours inside": lambda _: _framed(b"\xc1\xc1\xc1"),
    "another kind": lambda _: _framed(msgspec.msgpack.encode({"a": 1})),
}


@pytest.mark.parametrize("harm", UNKNOWN)
@pytest.mark.parametrize("kind", ["seal", "lease"])
def test_intact_unknown_metadata_is_kept(directory, kind, harm):
    with opened(directory) as store:
        save_shard(store, OLD)
        if kind == "seal":
            save_shard(store, NEW)
        else:
            store.lease(NEW, MIB, 1)
    place = max((directory / "notes").glob(f"{kind}.*"), key=lambda path: path.stat().st_mtime_ns)
    place.write_bytes(UNKNOWN[harm](place.read_bytes()))
    with opened(directory) as store:
        assert [fact.key for fact in store.list_shards()] == [OLD]
        with pytest.raises(ShardNotFoundError):
            store.pin(NEW)
        (aside,) = store.status().unrecognized
        assert aside.size_bytes == MIB
        assert place.exists()
        assert (directory / "slots" / aside.name).exists()


def test_unreadable_metadata_differs_from_invalid_metadata(directory):
    with opened(directory) as store:
        save_shard(store, OLD)
    (place,) = (directory / "notes").glob("seal.*")
    with failing_os_call("open", errno.EIO, below=str(place)), opened(directory) as store:
        assert store.list_shards() == []
        assert [one.size_bytes for one in store.status().unrecognized] == [MIB]
    with opened(directory) as store:
        assert load_shard(store, OLD) == shard_content(OLD, MIB)


@pytest.mark.parametrize("which", ["seal.*", "job.*"])
def test_agent_short_of_descriptors_does_not_start_without_its_shards(directory, which):
    with opened(directory) as store:
        save_shard(store, OLD)
    (place,) = (directory / "notes").glob(which)
    with failing_os_call("open", errno.EMFILE, below=str(place)), pytest.raises(UnavailableError):
        NodeStore(TmpfsArena(directory), StoreSettings(budget="64MiB"))
    with opened(directory) as store:
        assert load_shard(store, OLD) == shard_content(OLD, MIB)
