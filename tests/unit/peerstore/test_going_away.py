"""Writers, readers and jobs that went away, by a clock that the test moves."""

import contextlib

import pytest

from peerstore.arena import MemfdArena
from peerstore.errors import LeaseLostError
from peerstore.owners import Owner, myself
from peerstore.settings import StoreSettings
from peerstore.store import NodeStore
from tests.support.stores import MIB, content, key, load, save

GRACE, TTL = 30.0, 600.0
DEAD = Owner(myself().pid, -7)


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
    lease = store.lease(key(), MIB, 1, owner=DEAD)
    store.sweep()
    with pytest.raises(LeaseLostError):
        store.seal(lease.id, 10)
    assert store.lease(key(1), MIB, 1).slot == lease.slot


def test_a_silent_writer_keeps_its_lease_for_a_while(store, clock):
    store.arrived(myself(), "job")
    lease = store.lease(key(), MIB, 1)
    clock.now += 10 * GRACE
    store.sweep()
    store.departed(myself(), "job")
    clock.now += GRACE
    store.sweep()
    store.arrived(myself(), "job")  # it is back in time
    store.departed(myself(), "job")
    clock.now += GRACE
    store.sweep()
    assert store.grow(lease.id, 10).id == lease.id
    clock.now += 1
    store.sweep()
    with pytest.raises(LeaseLostError):
        store.seal(lease.id, 10)
    assert store.status().arena.slots == 0, "a slot that its writer may still have mapped is not given to others"


def test_a_reader_that_went_away_holds_nothing(store, clock):
    save(store, key())
    gone, here = store.pin(key(), owner=DEAD), store.pin(key())
    store.sweep()
    assert store.status().arena.pins == 1
    assert not store.unpin(gone.id)
    assert store.unpin(here.id)


def test_a_job_is_kept_for_its_time_after_its_last_process_left(store, clock):
    store.arrived(myself(), "job")
    save(store, key())
    store.put_blob("job", "layout", b"x")
    clock.now += 10 * TTL
    store.sweep()
    store.departed(myself(), "job")
    clock.now += TTL
    store.sweep()
    assert store.status().jobs[0].expires_in_s == 0
    assert load(store, key()) == content(key(), MIB)
    assert store.idle_s() == 0, "an agent with shards is needed"
    clock.now += 1
    store.sweep()
    assert store.inventory() == []
    assert store.blobs("job") == []
    assert store.status().jobs == ()
    assert store.status().arena.slots == 0


def test_a_job_that_somebody_reads_or_uploads_is_kept(store, clock):
    save(store, key())
    store.hold(key(), "drain")
    clock.now += TTL + 1
    store.sweep()
    assert load(store, key()) == content(key(), MIB)
    store.unhold(key(), "drain")
    store.sweep()
    assert store.inventory() == []


def test_how_long_nobody_needed_the_store(store, clock):
    clock.now += 5
    assert store.idle_s() == 5
    store.arrived(myself(), "job")
    clock.now += 5
    assert store.idle_s() == 0
    store.departed(myself(), "job")
    clock.now += 7
    assert store.idle_s() == 7
