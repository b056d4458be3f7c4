"""One suite over every store: in this process, over anonymous memory, and behind a real agent's socket."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from peerstore.arena import TmpfsArena
from peerstore.errors import (
    ArenaBusyError,
    ArenaFullError,
    LeaseLostError,
    RequestError,
)
from peerstore.operations import Store
from peerstore.settings import AgentPlace, StoreSettings
from peerstore.store import NodeStore
from peerstore.testing import memory_store
from tests.support.agents import agent_directory
from tests.support.stores import MIB, client_of, content, fill, key, load, save

Opener = Callable[[str], contextlib.AbstractContextManager[Store]]


@contextlib.contextmanager
def in_process(budget: str) -> Iterator[Store]:
    directory = Path("/dev/shm") / f"peerstore-test-{uuid.uuid4().hex[:12]}"
    arena = TmpfsArena(directory)
    store = NodeStore(arena, StoreSettings(budget=budget))
    try:
        yield store
    finally:
        store.close()
        arena.purge()
        directory.rmdir()


@contextlib.contextmanager
def behind_an_agent(budget: str) -> Iterator[Store]:
    with agent_directory() as directory:
        place = AgentPlace(directory)
        agent = subprocess.Popen(
            [sys.executable, "-m", "peerstore.cli", "serve", "--dir", str(directory), "--budget", budget],
            stderr=subprocess.DEVNULL,
        )
        try:
            with client_of(place.socket, retry_s=20) as client:
                yield client
        finally:
            agent.terminate()
            assert agent.wait(20) == 0


KINDS: dict[str, Opener] = {"node": in_process, "memory": memory_store, "agent": behind_an_agent}


@pytest.fixture(params=KINDS)
def open_store(request: pytest.FixtureRequest) -> Opener:
    return KINDS[request.param]


@pytest.fixture
def store(open_store: Opener) -> Iterator[Store]:
    with open_store("64MiB") as one:
        yield one


# -- growing ----------------------------------------------------------------------------------------------------------


def test_a_leased_slot_grows_and_keeps_what_was_written(store):
    lease = store.lease(key(), 1000, 1)
    fill(lease, b"first")
    grown = store.grow(lease.id, 3 * MIB)
    assert (grown.id, grown.path, grown.generation, grown.size_bytes) == (
        lease.id,
        lease.path,
        lease.generation,
        3 * MIB,
    )
    fill(grown, b"last", 3 * MIB - 4)
    store.seal(grown.id, 3 * MIB)
    assert load(store, key()) == b"first" + bytes(3 * MIB - 9) + b"last"


def test_growing_to_less_changes_nothing(store):
    lease = store.lease(key(), MIB, 1)
    assert store.grow(lease.id, 10) == lease
    assert store.grow(lease.id, 2 * MIB) == store.grow(lease.id, 2 * MIB)


def test_what_a_slot_grew_by_is_accounted_for(store):
    lease = store.lease(key(), MIB, 1)
    store.grow(lease.id, 40 * MIB)
    assert store.status().arena.allocated_bytes == 40 * MIB
    with pytest.raises(ArenaBusyError):
        store.lease(key(part=1), 30 * MIB, 2)


def test_growing_above_the_budget_says_how_much_is_needed_and_loses_nothing(store):
    save(store, key(0))
    lease = store.lease(key(1), MIB, 1)
    fill(lease, b"kept")
    with pytest.raises(ArenaFullError, match=rf"budget is {64 * MIB} bytes, of which {MIB} .* to {65 * MIB} bytes"):
        store.grow(lease.id, 64 * MIB)
    store.seal(lease.id, 4)
    assert load(store, key(1)) == b"kept"
    assert load(store, key(0)) == content(key(0), MIB)


def test_growing_takes_superseded_versions_and_free_slots_never_the_newest_whole_one(store):
    for version in range(2):
        save(store, key(version), 20 * MIB)
    store.abandon(store.lease(key(0, job="other"), 10 * MIB, 1).id)
    lease = store.lease(key(2), MIB, 1)
    store.grow(lease.id, 44 * MIB)
    assert [fact.key.version for fact in store.inventory("job")] == [1]
    assert load(store, key(1)) == content(key(1), 20 * MIB)


def test_growing_waits_for_nobody_unless_asked(store):
    store.lease(key(job="other"), 40 * MIB, 1)
    lease = store.lease(key(), MIB, 1)
    with pytest.raises(ArenaBusyError, match="grows to"):
        store.grow(lease.id, 40 * MIB)


def test_only_a_lease_can_grow(store):
    lease = store.lease(key(), 10, 1)
    store.seal(lease.id, 0)
    with pytest.raises(RequestError, match="sealed already"):
        store.grow(lease.id, 20)
    with pytest.raises(LeaseLostError):
        store.grow("nobody", 20)
