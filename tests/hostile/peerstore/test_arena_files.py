"""Invalid files in an arena: the agent starts, keeps intact shards and drops damaged ones."""

import contextlib
import os
from pathlib import Path

import msgspec
import pytest

from peerstore.checksums import chunk_checksum
from peerstore.daemon_process import current_process
from peerstore.errors import ShardNotFoundError
from peerstore.settings import StoreSettings
from peerstore.shard_records import Lease, ShardRecord
from peerstore.store.arena import TmpfsArena
from peerstore.store.node_store import NodeStore
from peerstore.store.slot_metadata import LeaseMetadata, SealMetadata
from tests.support.stores import MIB, load_shard, save_shard, shard_content, shard_key, store_directory

GOOD, VICTIM = shard_key(1), shard_key(2)
SLOT = "slot.job.0.00000000000000ff"


def shard_record(**changes):
    sums = {"checksums": b"\0" * 8, "size_bytes": 10, "chunk_bytes": MIB}
    return ShardRecord(**{"key": VICTIM, "parts": 1, "meta": b"", "sealed_ns": 0, **sums, **changes})


def seal_metadata(**changes):
    return msgspec.msgpack.encode(SealMetadata("lease", shard_record(**changes)))


def lease_metadata(**changes):
    fields = {"id": "x", "key": VICTIM, "parts": 1, "size_bytes": 10, "slot": "slot.job.0.of-another"}
    lease = Lease(**{**fields, "generation": 1, "prefaulted_bytes": 0, **changes})
    as_before = {**msgspec.to_builtins(lease), "path": "/etc/passwd"}  # the first release recorded a path
    return msgspec.msgpack.encode(
        {**msgspec.to_builtins(LeaseMetadata(lease, tuple(current_process()))), "lease": as_before}
    )


STRANGE = {
    "garbage": ("seal", b"\xc1\xc1\xc1"),
    "empty": ("seal", b""),
    "another kind": ("seal", msgspec.msgpack.encode({"a": 1})),
    "nested": ("seal", b"\x91" * 100_000),
    "lease garbage": ("lease", b"\xc1"),
}
METADATA = {
    "bytes that do not match": ("seal", seal_metadata()),
    "no chunk size": ("seal", seal_metadata(chunk_bytes=0)),
    "negative chunk size": ("seal", seal_metadata(chunk_bytes=-1)),
    "endless chunk size": ("seal", seal_metadata(chunk_bytes=1 << 62)),
    "too few checksums": ("seal", seal_metadata(checksums=b"")),
    "too many checksums": ("seal", seal_metadata(checksums=bytes(800))),
    "negative size": ("seal", seal_metadata(size_bytes=-10)),
    "endless size": ("seal", seal_metadata(size_bytes=1 << 60, checksums=b"")),
    "job that is a path": ("seal", seal_metadata(key=shard_key(1, job="../../x"))),
    "part outside": ("seal", seal_metadata(key=shard_key(1, part=5))),
    "lease of a path": ("lease", lease_metadata(key=shard_key(1, job="a/b"))),
    "lease of too much": ("lease", lease_metadata(size_bytes=1 << 50)),
    "lease of less than nothing": ("lease", lease_metadata(size_bytes=-1)),
}


@pytest.fixture
def directory():
    with store_directory() as place:
        with contextlib.closing(NodeStore(TmpfsArena(place), StoreSettings(budget="64MiB"))) as store:
            save_shard(store, GOOD)
            store.versions.mark_committed("job", GOOD.version_id)
        yield place


@contextlib.contextmanager
def open_and_check(directory):
    with contextlib.closing(NodeStore(TmpfsArena(directory), StoreSettings(budget="64MiB"))) as store:
        assert load_shard(store, GOOD) == shard_content(GOOD, MIB)
        assert [fact.key for fact in store.list_shards()] == [GOOD]
        yield store
        save_shard(store, shard_key(7))
        assert load_shard(store, shard_key(7)) == shard_content(shard_key(7), MIB)


@pytest.mark.parametrize("name", METADATA)
def test_intact_but_wrong_metadata_is_damage(directory, name):
    kind, data = METADATA[name]
    arena = TmpfsArena(directory)
    arena.create(SLOT, 4096)
    arena.put_metadata(f"{kind}.{SLOT}", data)
    with open_and_check(directory) as store:
        assert len(store.status().damage_reports) == 1
        assert store.status().jobs[0].newest_committed == 1
        with pytest.raises(ShardNotFoundError):
            store.pin(VICTIM)
        assert not (directory / "notes" / f"{kind}.{SLOT}").exists()


@pytest.mark.parametrize("name", STRANGE)
def test_metadata_of_another_version_is_kept(directory, name):
    kind, data = STRANGE[name]
    arena = TmpfsArena(directory)
    arena.create(SLOT, 4096)
    arena.put_metadata(f"{kind}.{SLOT}", data)
    with open_and_check(directory) as store:
        assert [(one.name, one.size_bytes) for one in store.status().unrecognized] == [(SLOT, 4096)]
        assert store.status().damage_reports == ()
        assert (directory / "notes" / f"{kind}.{SLOT}").exists()
        assert (directory / "slots" / SLOT).exists()


def test_lease_metadata_does_not_choose_its_file(directory):
    """The store seals the lease's slot, and ignores the path in its metadata."""
    arena = TmpfsArena(directory)
    arena.create(SLOT, 10)
    arena.put_metadata(f"lease.{SLOT}", lease_metadata())
    with open_and_check(directory) as store:
        assert store.lease(VICTIM, 10, 1).slot == SLOT
        with (directory / "slots" / SLOT).open("r+b") as file:  # other tests have slots of this name, too
            file.write(shard_content(VICTIM, 10))
        store.seal(store.lease(VICTIM, 10, 1).id, 10)
        assert load_shard(store, VICTIM) == shard_content(VICTIM, 10)


def test_files_of_the_first_release_are_loaded(directory):
    """Their slots have exactly the size of the shard. The store reads them, but does not reuse them."""
    arena, size = TmpfsArena(directory), MIB + 4711
    arena.create(SLOT, size)
    Path(arena.path(SLOT)).write_bytes(shard_content(VICTIM, size))
    sums = b"".join(chunk_checksum(shard_content(VICTIM, size)[at : at + MIB]).to_bytes(8, "little") for at in (0, MIB))
    arena.put_metadata(f"seal.{SLOT}", seal_metadata(size_bytes=size, checksums=sums))
    with contextlib.closing(NodeStore(TmpfsArena(directory), StoreSettings(budget="64MiB"))) as store:
        assert load_shard(store, VICTIM) == shard_content(VICTIM, size)
        pin = store.pin(VICTIM)
        store.unpin(pin.id)
        for version in range(3, 8):
            assert store.lease(shard_key(version), size, 1).slot != SLOT
            save_shard(store, shard_key(version), size)
        assert max(fact.key.version for fact in store.list_shards("job")) == 7
        assert os.pread(pin.fd, size, 0) == shard_content(VICTIM, size)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("job.we@ird", b"\xc0"),
        ("job.job2", b"\xc1"),
        ("job.job2", b""),
        ("job.job2", b"\xdd\xff\xff\xff\xff"),
        ("seal.slot.nowhere", b"\xc1"),
        ("lease.slot.nowhere", seal_metadata()),
        ("blob.job/strange", b"\xff"),
        ("unheard-of", b""),
    ],
)
def test_metadata_without_a_slot_is_ignored(directory, name, data):
    TmpfsArena(directory).put_metadata(name, data)
    with open_and_check(directory):
        pass


def test_damaged_job_record_keeps_older_writers_fenced(directory):
    """The claim is lost, but the sealed shards still record the last incarnation."""
    with contextlib.closing(NodeStore(TmpfsArena(directory), StoreSettings(budget="64MiB"))) as store:
        save_shard(store, shard_key(5, epoch=9, name="ninth"))
    (directory / "notes" / "job.job").write_bytes(b"damaged")
    with contextlib.closing(NodeStore(TmpfsArena(directory), StoreSettings(budget="64MiB"))) as store:
        assert store.epoch("job") == 9
        assert load_shard(store, GOOD) == shard_content(GOOD, MIB)


def test_non_files_are_left_alone(directory):
    for place in ("slots", "notes", "folders", "fresh"):
        (directory / place / "slot.folder").mkdir()
        (directory / place / "slot.link").symlink_to("/etc/passwd")
        os.mkfifo(directory / place / "job.fifo")
        (directory / place / "slot file").write_bytes(b"a stranger's")
    with open_and_check(directory) as store:
        assert store.status().damage_reports == ()
    for place in ("slots", "notes", "folders", "fresh"):
        assert (directory / place / "slot.link").is_symlink()
        assert (directory / place / "slot.folder").is_dir()
    assert (directory / "slots" / "slot file").read_bytes() == b"a stranger's"


def test_slots_without_metadata_are_removed_and_foreign_files_stay(directory):
    (directory / "slots" / "slot.job.0.0000000000000001").write_bytes(b"x" * 100)
    (directory / "slots" / "readme.txt").write_bytes(b"a stranger's")
    with open_and_check(directory) as store:
        assert store.status().arena.slots == 1
    assert not (directory / "slots" / "slot.job.0.0000000000000001").exists()
    assert (directory / "slots" / "readme.txt").exists()
