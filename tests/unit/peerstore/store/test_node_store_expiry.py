"""Expiry of writers, readers and jobs that have left, on a clock that the test moves."""

import contextlib
import errno
import time

import pytest

from peerstore.daemon_process import ProcessIdentity, current_process
from peerstore.errors import ArenaFullError, LeaseLostError
from peerstore.settings import StoreSettings
from peerstore.store.arena import MemfdArena
from peerstore.store.node_store import NodeStore
from peerstore.store.slot_metadata import EXPIRED_JOB_METADATA
from peerstore.store.store_listener import StoreListener
from tests.support.failing_calls import UNKNOWN, failing_os_call
from tests.support.stores import MIB, load_shard, save_shard, shard_content, shard_key

GRACE, TTL = 30.0, 600.0
DEAD = ProcessIdentity(current_process().pid, -7)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(clock):
    arena = MemfdArena()
    settings = StoreSettings(budget="64MiB", lease_grace_s=GRACE, job_ttl_s=TTL)
    with contextlib.closing(NodeStore(arena, settings, clock=clock)) as one:
        yield one
    arena.purge()


def test_a_dead_writers_slot_is_free_at_once(store):
    lease = store.lease(shard_key(), MIB, 1, owner=DEAD)
    store.sweep()
    with pytest.raises(LeaseLostError):
        store.seal(lease.id, 10)
    assert store.lease(shard_key(1), MIB, 1).slot == lease.slot


def test_a_silent_writer_keeps_its_lease_for_a_while(store, clock):
    store.jobs.clients.client_connected(current_process(), "job")
    lease = store.lease(shard_key(), MIB, 1)
    clock.now += 10 * GRACE
    store.sweep()
    store.client_disconnected(current_process(), "job")
    clock.now += GRACE
    store.sweep()
    store.jobs.clients.client_connected(current_process(), "job")  # it returns in time
    store.client_disconnected(current_process(), "job")
    clock.now += GRACE
    store.sweep()
    assert store.grow(lease.id, 10).id == lease.id
    clock.now += 1
    store.sweep()
    with pytest.raises(LeaseLostError):
        store.seal(lease.id, 10)
    assert store.status().arena.slots == 0, "a slot that its writer may still have mapped is not given to others"


def test_memory_of_a_job_without_shards_and_processes_is_freed(store, clock):
    """A job that succeeded deletes its versions by name, and the agent may run on for other jobs."""
    store.jobs.clients.client_connected(current_process(), "job")
    for version in range(2):
        save_shard(store, shard_key(version))
    assert store.versions.delete("job", [shard_key(version).version_id for version in range(2)]) == 2
    assert store.status().arena.free_slots == 2, "the connected process may save again"
    store.client_disconnected(current_process(), "job")
    clock.now += GRACE
    store.sweep()
    assert store.status().arena.free_slots == 2, "a process that restarts reuses their memory"
    clock.now += 1
    store.sweep()
    assert store.status().arena.slots == 0


def test_deletion_of_the_last_version_of_an_unused_job_frees_its_memory(store):
    for version in range(2):
        save_shard(store, shard_key(version))
    store.versions.delete("job", [shard_key(0).version_id])
    assert store.status().arena.slots == 2
    store.versions.delete("job", [shard_key(1).version_id])
    assert store.status().arena.slots == 0


@pytest.mark.parametrize("code", UNKNOWN, ids=errno.errorcode.get)
def test_process_that_cannot_be_inspected_counts_as_alive(store, code):
    """An agent without free descriptors cannot read ``/proc``: its writers and readers continue."""
    save_shard(store, shard_key())
    lease, pin = store.lease(shard_key(1), MIB, 1), store.pin(shard_key())
    with failing_os_call("open", code, below="/proc") as failed:
        store.sweep()
    assert failed
    assert store.unpin(pin.id)
    assert store.seal(lease.id, 10).key == shard_key(1)


def test_a_reader_that_went_away_holds_nothing(store, clock):
    save_shard(store, shard_key())
    gone, here = store.pin(shard_key(), owner=DEAD), store.pin(shard_key())
    store.sweep()
    assert store.status().arena.pins == 1
    assert not store.unpin(gone.id)
    assert store.unpin(here.id)


def test_a_job_is_kept_for_its_time_after_its_last_process_left(store, clock):
    store.jobs.clients.client_connected(current_process(), "job")
    save_shard(store, shard_key())
    store.blobs.put("job", "layout", b"x")
    clock.now += 10 * TTL
    store.sweep()
    store.client_disconnected(current_process(), "job")
    clock.now += TTL
    store.sweep()
    assert store.status().jobs[0].expires_in_s == 0
    assert load_shard(store, shard_key()) == shard_content(shard_key(), MIB)
    assert store.jobs.clients.idle_s() == 0, "an agent with shards is needed"
    clock.now += 1
    store.sweep()
    assert store.list_shards() == []
    assert store.blobs.list_names("job") == []
    assert store.status().jobs == ()
    assert store.status().arena.slots == 0


def test_job_with_a_reader_or_an_upload_is_kept(store, clock):
    save_shard(store, shard_key())
    store.reader.hold(shard_key(), "drain")
    clock.now += TTL + 1
    store.sweep()
    assert load_shard(store, shard_key()) == shard_content(shard_key(), MIB)
    store.reader.release_hold(shard_key(), "drain")
    store.sweep()
    assert store.list_shards() == []


def test_idle_time_counts_from_the_last_client(store, clock):
    clock.now += 5
    assert store.jobs.clients.idle_s() == 5
    store.jobs.clients.client_connected(current_process(), "job")
    clock.now += 5
    assert store.jobs.clients.idle_s() == 0
    store.client_disconnected(current_process(), "job")
    clock.now += 7
    assert store.jobs.clients.idle_s() == 7


# -- jobs that were not told to go -------------------------------------------------------------------------------------


def test_expired_job_stays_recorded_with_time_and_cause(clock):
    arena = MemfdArena()
    settings = StoreSettings(budget="64MiB", job_ttl_s=TTL)
    with contextlib.closing(NodeStore(arena, settings, clock=clock)) as store:
        before = time.time_ns()
        for version in (1, 2):
            save_shard(store, shard_key(version))
        save_shard(store, shard_key(3, part=0), parts=2)  # never complete
        save_shard(store, shard_key(1, job="torn"), parts=2)
        assert store.jobs.clients.expired_job("job") is None
        clock.now += TTL + 1
        store.sweep()
        found = store.jobs.clients.expired_job("job")
        assert (found.job, found.newest_committed) == ("job", shard_key(2).version_id)
        assert before <= found.at_ns <= time.time_ns()
        assert "no process had used it for 0.2 hours" in found.reason
        assert store.jobs.clients.expired_job("torn") is None, "of which nothing was ever whole"
        assert store.jobs.clients.expired_job("nobody") is None
        assert store.status().jobs == ()
    with contextlib.closing(NodeStore(arena, settings, clock=clock)) as again:
        assert again.jobs.clients.expired_job("job") == found
    arena.purge(keep=EXPIRED_JOB_METADATA)  # an unused agent exits
    with contextlib.closing(NodeStore(arena, settings, clock=clock)) as later:
        assert later.jobs.clients.expired_job("job") == found
        later.versions.delete("job")  # the owner deletes it
        assert later.jobs.clients.expired_job("job") is None
    arena.purge()


def test_number_of_remembered_expired_jobs_is_limited(store, clock, monkeypatch):
    monkeypatch.setattr("peerstore.store.job_clients._MAX_EXPIRED_JOBS", 3)
    for number in range(5):
        save_shard(store, shard_key(job=f"job{number}"), 100)
        clock.now += TTL + 1
        store.sweep()
    expired = [store.jobs.clients.expired_job(f"job{number}") is not None for number in range(5)]
    assert expired == [False, False, True, True, True]


DAY = 86400.0


@pytest.fixture
def patient(clock):
    arena = MemfdArena()
    settings = StoreSettings(budget="64MiB", job_ttl_s=DAY)
    with contextlib.closing(NodeStore(arena, settings, clock=clock)) as one:
        yield one
    arena.purge()


def test_oldest_unused_jobs_are_evicted_for_space(patient, clock):
    told = []
    listener = StoreListener()
    listener.on_job_expired = told.append
    patient.subscribe(listener)
    for number in range(3):
        save_shard(patient, shard_key(job=f"old{number}"), 16 * MIB)
        clock.now += 1
    clock.now += 2 * 3600
    save_shard(patient, shard_key(1), 16 * MIB)
    assert patient.list_shards("old0"), "there is room"
    save_shard(patient, shard_key(2), 16 * MIB)
    patient.sweep()
    assert [bool(patient.list_shards(f"old{number}")) for number in range(3)] == [False, True, True]
    assert told == ["old0"]
    said = patient.jobs.clients.expired_job("old0")
    assert said.newest_committed == shard_key().version_id
    assert said.reason == "no process had used it for 2.0 hours, and job job needed the memory"
    held = patient.lease(shard_key(3), 16 * MIB, 1)  # its own older version is evicted first
    assert patient.list_shards("old1")
    patient.grow(held.id, 20 * MIB)  # in addition to its slot: both other jobs are evicted
    assert [bool(patient.list_shards(f"old{number}")) for number in range(3)] == [False, False, False]


def test_recent_or_used_job_is_not_evicted(patient, clock):
    patient.jobs.clients.client_connected(current_process(), "running")
    save_shard(patient, shard_key(job="running"), 20 * MIB)
    save_shard(patient, shard_key(job="read"), 20 * MIB)
    pin = patient.pin(shard_key(job="read"))
    clock.now += 2 * 3600
    save_shard(patient, shard_key(job="interrupted"), 20 * MIB)
    clock.now += 3599
    with pytest.raises(ArenaFullError):
        patient.lease(shard_key(), 20 * MIB, 1)
    assert {fact.key.job for fact in patient.list_shards()} == {"running", "read", "interrupted"}
    clock.now += 2
    save_shard(patient, shard_key(), 20 * MIB)
    assert {fact.key.job for fact in patient.list_shards()} == {"running", "read", "job"}
    pin.close()


def test_no_job_is_evicted_when_that_would_not_suffice(patient, clock):
    save_shard(patient, shard_key(job="old"), 16 * MIB)
    clock.now += 2 * 3600
    with pytest.raises(ArenaFullError):
        patient.lease(shard_key(), 65 * MIB, 1)
    assert patient.list_shards("old")
    assert patient.jobs.clients.expired_job("old") is None
