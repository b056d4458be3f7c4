"""Contract of a store with torch: ours responds like torch's own."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from elastic.rendezvous.rootless_tcpstore import RootlessStore
from elastic.workers.native_connections import close_store_connections
from tests.support.control_planes import start_all, wait_results
from tests.support.store_servers import RendezvousServer, server_processes
from tests.support.zygote import Zygote

_SOON = timedelta(seconds=0.3)
_LONG = timedelta(seconds=120)
Connect = Callable[[], Any]


@pytest.fixture(scope="module")
def servers(zygote: Zygote) -> Iterator[list[RendezvousServer]]:
    with server_processes(zygote, 3) as running:
        yield running


@pytest.fixture(params=["tcp", "hash", "rootless", "rootless of one"])
def connect_unprefixed(request: pytest.FixtureRequest, servers: list[RendezvousServer]) -> Iterator[Connect]:
    """Return a function that opens clients of the same store, as different ranks do."""
    made: list[RootlessStore] = []
    alone = dist.HashStore()

    def rootless(count: int) -> RootlessStore:
        addresses = [server.address for server in servers[:count]]
        made.append(RootlessStore(addresses, close_connections=close_store_connections, timeout=_LONG))
        return made[-1]

    def tcp() -> dist.TCPStore:
        one = servers[0]
        return dist.TCPStore(one.host, one.port, is_master=False, wait_for_workers=False, timeout=_LONG)

    yield {
        "tcp": tcp,
        "hash": lambda: alone,
        "rootless": lambda: rootless(3),
        "rootless of one": lambda: rootless(1),
    }[request.param]
    for store in made:
        store.close()


@pytest.fixture
def connect(connect_unprefixed: Connect) -> Connect:
    """Return a function that opens clients through a C++ prefix, as torch does, unique to the test."""
    prefix = uuid.uuid4().hex
    return lambda: dist.PrefixStore(prefix, connect_unprefixed())


@pytest.fixture
def store(connect_unprefixed: Connect) -> Iterator[Any]:
    """Yield a client through a C++ prefix. The store below must live as long as the test."""
    below = connect_unprefixed()
    yield dist.PrefixStore(uuid.uuid4().hex, below)
    del below


def test_value_set_by_one_client_is_visible_to_others(connect):
    one, other = connect(), connect()
    for number in range(20):
        one.set(f"key {number}", f"value {number}")
    assert [other.get(f"key {number}") for number in range(20)] == [f"value {number}".encode() for number in range(20)]
    one.set("key 3", "")
    one.wait(["key 3"], _LONG)
    assert one.get("key 3") == b""


def test_value_bytes_round_trip(store):
    raw = bytes(range(256)) * 40
    store.set("raw", raw.decode("latin-1"))
    assert store.get("raw").decode() == raw.decode("latin-1")


def test_a_sum_is_the_same_for_all(connect):
    stores = [connect() for _ in range(4)]

    def count(one: Any) -> list[int]:
        return [one.add("sum", 1) for _ in range(50)]

    said = wait_results(start_all(*(lambda one=one: count(one) for one in stores)))
    assert sorted(number for numbers in said for number in numbers) == list(range(1, 201))  # each once: linearizable
    assert all(numbers == sorted(numbers) for numbers in said)
    assert (stores[0].add("sum", 0), stores[1].get("sum")) == (200, b"200")
    assert stores[2].add("sum", -200) == 0


def test_only_one_compare_set_succeeds(connect):
    stores = [connect() for _ in range(4)]
    said = wait_results(
        start_all(*(lambda one=one, n=n: one.compare_set("chosen", "", f"rank {n}") for n, one in enumerate(stores)))
    )
    assert len(set(said)) == 1
    assert {one.get("chosen") for one in stores} == set(said)
    assert stores[0].compare_set("chosen", "somebody else", "rank 9") == said[0]
    assert stores[1].compare_set("chosen", said[0].decode(), "rank 9") == b"rank 9"


def test_compare_set_of_a_missing_key_sets_nothing(store):
    store.compare_set("absent", "this", "this")
    store.compare_set("absent", "that", "this")
    assert not store.check(["absent"])


def test_key_can_be_checked_and_deleted(store):
    assert not store.check(["a"])
    store.set("a", "1")
    store.set("b", "2")
    assert store.check(["a", "b"])
    assert not store.check(["a", "c"])
    assert store.delete_key("a")
    assert not store.delete_key("a")
    assert not store.check(["a"])
    assert store.get("b") == b"2"


def test_keys_are_counted_once(connect):
    one = connect()
    before = one.num_keys()
    for number in range(8):
        one.set(f"counted {number}", "x")
    assert one.num_keys() == before + 8


def test_a_wait_ends_when_the_last_key_is_there(connect):
    one, other = connect(), connect()
    waiting = start_all(lambda: one.wait(["first", "second"], _LONG), lambda: connect().get("second"))
    other.set("first", "1")
    assert not any(future.done() for future in waiting)
    other.set("second", "2")
    assert wait_results(waiting) == [None, b"2"]


def test_wait_for_a_missing_key_times_out(connect):
    one = connect()
    with pytest.raises(RuntimeError, match=r"(?i)timeout"):
        one.wait(["never"], _SOON)
    one.set_timeout(_SOON)
    with pytest.raises(RuntimeError, match=r"(?i)timeout"):
        one.get("never")
    one.set("there", "1")
    one.wait(["there"], _SOON)


def test_many_keys_at_once(store):
    store.multi_set(["x", "y"], ["1", "2"])
    assert store.multi_get(["y", "x"]) == [b"2", b"1"]
    if store.has_extended_api():
        store.append("x", "3")
        store.append("new", "4")
        assert store.multi_get(["x", "new"]) == [b"13", b"4"]


def test_queues(connect_unprefixed, request):
    """Without a prefix, as torch's prefix does not pass queues on to stores written in Python."""
    one, other, name = connect_unprefixed(), connect_unprefixed(), uuid.uuid4().hex
    popped = start_all(lambda: connect_unprefixed().queue_pop(name))
    one.queue_push(name, "1")
    assert wait_results(popped) == [b"1"]
    one.queue_push(name, "2")
    one.queue_push(name, "3")
    assert other.queue_len(name) == 2
    assert [other.queue_pop(name), one.queue_pop(name, False)] == [b"2", b"3"]
    assert other.queue_len(name) == 0


def test_barrier_releases_all_ranks(connect):
    passed: list[int] = []
    lock = threading.Lock()

    def enter_barrier(number: int) -> int:
        connect().barrier("all", 3, _LONG)
        with lock:
            passed.append(number)
        return number

    first = start_all(lambda: enter_barrier(0), lambda: enter_barrier(1))
    assert passed == []
    assert wait_results([*first, *start_all(lambda: enter_barrier(2))]) == [0, 1, 2]


def test_prefix_stores_can_be_nested(connect):
    below = connect()
    one, two = dist.PrefixStore("1", below), dist.PrefixStore("2", dist.PrefixStore("1", below))
    one.set("key", "one")
    two.set("key", "two")
    assert (one.get("key"), two.get("key"), below.get("1/key")) == (b"one", b"two", b"one")
