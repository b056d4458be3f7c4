"""Faults of the rendezvous store: members die or hang, and the world ends."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from elastic.control.control_plane import RankAssignment
from elastic.rendezvous import store_server_client
from elastic.rendezvous.old_key_cleanup import OldKeyCleanup, epoch_prefix, is_old_key
from elastic.rendezvous.rootless_tcpstore import RootlessStore
from elastic.rendezvous.store_server_client import StoreServerClient, StoreTimeouts
from elastic.rendezvous.store_servers import key_holders
from elastic.workers.native_connections import close_store_connections
from elastic.workers.process_groups import ProcessGroups
from tests.support.control_planes import start_all, wait_results
from tests.support.local_nodes import wait_until
from tests.support.store_servers import RendezvousServer, server_processes
from tests.support.zygote import Zygote

pytestmark = pytest.mark.slow

_LONG = timedelta(seconds=120)
_HASTY = StoreTimeouts(wait_slice_s=0.2, response_timeout_s=2.0, connect_timeout_s=2.0, retry_after_s=60.0)
_COUNT = 3


@pytest.fixture
def servers(zygote: Zygote) -> Iterator[list[RendezvousServer]]:
    with server_processes(zygote, _COUNT) as running:
        yield running


@pytest.fixture
def connect(servers: list[RendezvousServer]) -> Iterator[Callable[..., RootlessStore]]:
    made: list[RootlessStore] = []

    def new(patience: StoreTimeouts | None = None) -> RootlessStore:
        addresses = [server.address for server in servers]
        made.append(
            RootlessStore(addresses, close_connections=close_store_connections, timeout=_LONG, timeouts=patience)
        )
        return made[-1]

    yield new
    for store in made:
        store.abort()
        store.close()


def key_held_by(first: int, second: int | None = None) -> str:
    """Return a key that these members hold, in this order."""
    for number in range(1000):
        held = key_holders(f"key {number}", _COUNT)
        if held[0] == first and second in (None, held[1]):
            return f"key {number}"
    raise AssertionError("no key found")


def set_keys(store: RootlessStore, number: int = 60) -> list[str]:
    names = [f"key {one}" for one in range(number)]
    for name in names:
        store.set(name, name.upper())
    return names


def test_no_key_is_lost_with_a_member(servers, connect):
    names = set_keys(connect())
    one, fresh = connect(), connect()
    assert [one.get(name) for name in names[:30]] == [name.upper().encode() for name in names[:30]]
    servers[1].kill()
    for store in (one, fresh):  # with and without existing connections
        store.wait(names, _LONG)
        assert store.check(names)
        assert store.multi_get(names) == [name.upper().encode() for name in names]
        assert store.num_keys() == len(names)
        assert store.delete_key(names[0])
        store.set(names[0], names[0].upper())


def test_wait_skips_a_member_that_dies(servers, connect):
    key = key_held_by(2, 0)
    waiters = [connect() for _ in range(3)]
    assert not any(one.check([key]) for one in waiters)  # all are connected
    waiting = start_all(*(lambda one=one: one.get(key) for one in waiters))
    servers[2].kill()
    connect().set(key, "late")
    assert wait_results(waiting) == [b"late"] * 3


def test_counters_survive_a_member_death(servers, connect):
    key = key_held_by(0, 1)
    stores = [connect() for _ in range(3)]
    said = [store.add(key, 1) for _ in range(5) for store in stores]
    assert said == list(range(1, 16))
    assert stores[0].compare_set("chosen" + key, "", "n0") == b"n0"
    servers[0].kill()
    assert [store.add(key, 1) for store in stores] == [16, 17, 18]
    assert {store.compare_set("chosen" + key, "", "n1") for store in stores} == {b"n0"}
    connect().append(key, "0")
    assert stores[1].get(key) == b"180"


def test_sums_during_a_member_death_include_every_reply(servers, connect):
    key, go_on = key_held_by(1, 2), threading.Event()
    stores = [connect() for _ in range(3)]

    def count(store: RootlessStore) -> list[int]:
        said = []
        while not go_on.is_set() or len(said) < 50:
            said.append(store.add(key, 1))
        return said

    counting = start_all(*(lambda one=one: count(one) for one in stores))
    wait_until(lambda: connect().add(key, 0) > 100)
    servers[1].kill()
    go_on.set()
    said = wait_results(counting)
    total = connect().add(key, 0)
    answered = sum(map(len, said))
    assert total == answered  # the sum counts every acknowledged add once
    assert all(numbers == sorted(set(numbers)) for numbers in said)  # each rank sees it grow
    assert max(max(numbers) for numbers in said) <= total + 3


def test_member_that_dies_during_a_slow_connect_is_gone(servers, connect, monkeypatch):
    key, connected = key_held_by(1, 2), StoreServerClient._connected
    assert connect().add(key, 1) == 1

    def die_first(client: StoreServerClient) -> dist.TCPStore:
        if client.address == servers[1].address:
            servers[1].kill()
        return connected(client)

    monkeypatch.setattr(StoreServerClient, "_connected", die_first)
    monkeypatch.setattr(store_server_client, "_CONNECT_TIMEOUT", timedelta(seconds=_HASTY.connect_timeout_s + 1))
    assert connect(_HASTY).add(key, 1) == 2


def test_key_with_two_lost_holders_is_an_error_at_once(servers, connect):
    store, lost, kept = connect(), key_held_by(0, 1), key_held_by(2, 0)
    store.set(lost, "1")
    store.set(kept, "2")
    servers[0].kill()
    servers[1].kill()
    for ask in (
        lambda: store.get(lost),
        lambda: store.wait([lost], _LONG),
        lambda: store.check([lost]),
        lambda: store.add(lost, 1),
        lambda: connect().get(lost),
    ):
        with pytest.raises(dist.DistNetworkError, match="gone"):
            ask()
    assert store.get(kept) == b"2"


def test_a_stopped_member_is_read_around(servers, connect):
    key, other, store = key_held_by(1, 2), key_held_by(0, 1), connect(_HASTY)
    store.set(key, "1")
    store.set(other, "2")
    assert store.get(key) == b"1"
    servers[1].suspend()
    assert (store.get(key), store.get(other)) == (b"1", b"2")
    assert store.check([key, other])


@pytest.mark.nightly
def test_a_member_that_was_stopped_before_is_read_around(servers, connect):
    """A torch client notices slowly; the store does not wait for the member a second time."""
    key, other = key_held_by(1, 2), key_held_by(0, 1)
    connect().multi_set([key, other], ["1", "2"])
    assert connect().multi_get([key, other]) == [b"1", b"2"]
    servers[1].suspend()
    store = connect(_HASTY)
    assert store.multi_get([key, other]) == [b"1", b"2"]
    store.set("x" + key, "3")
    assert store.get("x" + key) == b"3"


def test_a_stopped_member_still_decides_about_its_sums(servers, connect):
    """The member may still be alive, and two members that decide could disagree."""
    key, store = key_held_by(1, 2), connect(_HASTY)
    assert store.add(key, 1) == 1
    servers[1].suspend()
    with pytest.raises(dist.DistNetworkError, match="decides"):
        store.add(key, 1)
    servers[1].resume()
    assert store.add(key, 1) >= 2


def test_waits_end_when_the_world_is_cut(connect):
    store = connect()
    waiting = start_all(
        lambda: store.get("never"), lambda: store.wait([key_held_by(2)], _LONG), lambda: store.queue_pop("q")
    )
    wait_until(lambda: sum(holder.connected for holder in store._holders) >= 2)
    store.abort()
    for future in waiting:
        with pytest.raises(dist.DistNetworkError):
            future.result(60)
    with pytest.raises(dist.DistNetworkError, match="cut"):
        store.get("never")
    with pytest.raises(dist.DistNetworkError, match="cut"):
        dist.PrefixStore("x", store).set("a", "1")


def test_abort_of_one_rank_does_not_affect_others(connect, servers, zygote):
    """The other rank is a process, as stores of one process share their connections."""
    store, key = connect(), key_held_by(0)
    running = zygote.start(_wait_for_key, [server.address for server in servers], key)
    running.wait_line("waiting")
    store.set("x", "1")
    store.abort()
    connect().set(key, "there")
    assert running.wait().result == b"there"


def _wait_for_key(say: Callable[[str], object], addresses: list[str], key: str) -> bytes:
    store = RootlessStore(addresses, close_connections=close_store_connections, timeout=_LONG)
    say("waiting")
    value = store.get(key)
    store.close()
    return value


def test_closed_store_leaves_no_threads_or_connections(connect):
    before = {thread.ident for thread in threading.enumerate()}
    store = connect()
    set_keys(store)
    store.close()
    store.close()
    assert {thread.ident for thread in threading.enumerate()} <= before
    with pytest.raises(dist.DistNetworkError, match="closed"):
        store.get("key 1")


def test_idle_connection_closed_by_others_is_reopened(servers, connect):
    """The end of a world closes all connections to its addresses, including another store's."""
    key, store = key_held_by(1, 2), connect()
    for count in range(1, 6):
        assert store.add(key, 1) == count
        close_store_connections(store._holders[1]._addresses)
    assert connect().add(key, 0) == 5


def test_connection_closed_during_setup_is_reopened(servers, connect, monkeypatch):
    made, connected = [], StoreServerClient._connected

    def connect_and_close(self):
        client = connected(self)
        if not made:
            assert close_store_connections(self._addresses)
        made.append(client)
        return client

    monkeypatch.setattr(StoreServerClient, "_connected", connect_and_close)
    assert connect().add(key_held_by(0), 1) == 1
    assert connect().add(key_held_by(0), 0) == 1


def test_reply_received_with_the_end_of_its_connection_counts(servers, connect):
    """A slow reply still counts. The next request uses another connection."""
    short = StoreTimeouts(wait_slice_s=0.2, response_timeout_s=2.0)
    (holder,) = [one for one in connect(short)._holders if one.port == servers[0].port]

    def add_and_wait_closed(client):
        said = client.add("sum", 1)
        wait_until(lambda: is_closed(client))
        return said

    def is_closed(client):
        try:
            return client.check(["sum"]) is None
        except dist.DistNetworkError:
            return True

    assert holder.call(add_and_wait_closed, again=False) == 1
    assert holder.call(lambda client: client.add("sum", 1), again=False) == 2


# -- meetings of process groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["never", "before", "during", "after"])
def test_ranks_meet_although_a_member_dies(servers, zygote, tmp_path, when):
    """All uses of a store by torch succeed after one member is killed."""
    gate, addresses, size = tmp_path / "gate", [server.address for server in servers], 3
    if when == "before":
        servers[1].kill()
    ranks = [zygote.start(_initialize_and_synchronize, addresses, rank, size, when, str(gate)) for rank in range(size)]
    if when == "during":
        ranks[0].wait_line("the others wait")
        servers[1].kill()
    if when == "after":
        for rank in ranks:
            rank.wait_line("met")
        servers[1].kill()
    gate.touch()
    assert [rank.wait().result for rank in ranks] == [([9.0] * 4, [0, 1, 2])] * size


@pytest.mark.nightly
def test_ranks_meet_although_a_member_is_stopped(servers, zygote, tmp_path):
    gate, addresses, size = tmp_path / "gate", [server.address for server in servers], 3
    gate.touch()
    servers[2].suspend()
    ranks = [
        zygote.start(_initialize_and_synchronize, addresses, rank, size, "stopped", str(gate)) for rank in range(size)
    ]
    assert [rank.wait().result for rank in ranks] == [([9.0] * 4, [0, 1, 2])] * size


def _initialize_and_synchronize(
    say: Callable[[str], object], addresses: list[str], rank: int, size: int, when: str, gate: str
) -> tuple[list[float], list[Any]]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from elastic.rendezvous import store_server_client

    if when == "stopped":
        store_server_client.StoreTimeouts.__init__.__defaults__ = (0.2, 2.0, 2.0, 60.0)  # shorter timeouts
    place = RankAssignment(3, rank, size, 0, 1, rank, size, addresses[0], stores=tuple(addresses))
    groups = ProcessGroups(place, backend="gloo", timeout=_LONG)
    if when == "during" and rank == 0:
        looked = RootlessStore(addresses, close_connections=close_store_connections, timeout=_LONG)
        wait_until(lambda: len(looked.list_keys()) >= size - 1)
        looked.close()
        say("the others wait")
        wait_until(Path(gate).exists)
    groups.initialize()
    say("met")
    if when == "after":
        wait_until(Path(gate).exists)
    found = torch.full((4,), float(rank))
    dist.all_reduce(found)
    dist.all_reduce(found, group=dist.new_group(list(range(size))))
    dist.monitored_barrier(timeout=_LONG)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
    model(torch.ones(1, 4)).sum().backward()
    said: list[Any] = [None] * size
    dist.all_gather_object(said, rank)
    groups.destroy(broken=False)
    return found.tolist(), said


# -- worlds that are over ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("worlds", [100, pytest.param(1000, marks=pytest.mark.nightly)])
def test_store_does_not_grow_over_many_worlds(servers, connect, worlds):
    store, most = connect(), 0
    store.set("of somebody else", "1")
    for epoch in range(worlds):
        world = dist.PrefixStore(epoch_prefix(epoch), store)
        for rank in range(2):
            world.set(f"default_pg/0//cpu//{rank}", "an address")
        if epoch % 50 == 49:  # without a cleanup in between
            sweeps = [
                OldKeyCleanup(server.address, epoch, close_connections=close_store_connections) for server in servers
            ]
            assert all(sweep.join(60) for sweep in sweeps)
            for sweep in sweeps:
                sweep.stop()
            most = max(most, store.num_keys())
    assert most == 1 + 2  # keys of this world and one foreign key
    assert store.get("of somebody else") == b"1"


@pytest.mark.parametrize("kind", ["rootless", "one"])
def test_successive_worlds_leave_only_the_last_keys(servers, connect, kind):
    addresses = tuple(server.address for server in servers[: 3 if kind == "rootless" else 1])
    sizes = []
    for epoch in range(5):
        place = RankAssignment(epoch, 0, 1, 0, 1, 0, 1, addresses[0], stores=addresses if kind == "rootless" else ())
        groups = ProcessGroups(place, backend="gloo", timeout=_LONG)
        groups.initialize()
        dist.new_group([0])
        if groups._sweeping is not None:
            assert groups._sweeping.join(60)
        groups.destroy(broken=epoch % 2 == 1)
        sizes.append(len(_all_keys(servers)))
    if kind == "one":
        assert max(sizes[1:]) == sizes[1]
    else:  # the only rank cleans up one of the three servers
        assert len([key for key in _keys_of(servers[0]) if is_old_key(key, 4)]) == 0


def test_cleanup_of_a_stopped_server_can_be_ended(servers):
    servers[0].suspend()
    sweep = OldKeyCleanup(servers[0].address, 5, close_connections=close_store_connections)
    assert not sweep.join(0.05)
    sweep.stop()
    servers[0].resume()
    assert sweep.join(60)


def test_ended_cleanup_closes_no_later_connections(servers):
    """A cleanup may hang in a stopped server while the next world connects to the same addresses."""
    after, ended = [], threading.Event()

    def close_and_record(addresses):
        after.append(ended.is_set())
        return close_store_connections(addresses)

    servers[0].suspend()
    sweep = OldKeyCleanup(servers[0].address, 5, close_connections=close_and_record)
    assert not sweep.join(0.05)
    sweep.stop()
    ended.set()
    sweep.join(1.0)
    servers[0].resume()
    assert sweep.join(60)
    assert True not in after
    assert after


@pytest.mark.parametrize("ends", [pytest.param(True, marks=pytest.mark.nightly), False])
def test_process_exits_cleanly_during_a_cleanup(servers, ends):
    """A thread inside torch's C++ code at interpreter exit aborts the process."""
    client = dist.TCPStore(servers[0].host, servers[0].port, is_master=False, wait_for_workers=False, timeout=_LONG)
    for number in range(5000):
        client.set(f"{epoch_prefix(1)}/{number}", "x")
    command = [sys.executable, "-c", _SWEEPS, servers[0].address, str(ends)]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0


_SWEEPS = """
import sys
from elastic.rendezvous.old_key_cleanup import OldKeyCleanup
from elastic.workers.native_connections import close_store_connections
sweep = OldKeyCleanup(sys.argv[1], 5, close_connections=close_store_connections)
while not sweep.deleted and not sweep.join(0.001):
    pass
if sys.argv[2] == "True":
    sweep.stop()
"""


def _keys_of(server: RendezvousServer) -> list[str]:
    client = dist.TCPStore(server.host, server.port, is_master=False, wait_for_workers=False, timeout=_LONG)
    return client.list_keys()


def _all_keys(servers: list[RendezvousServer]) -> set[str]:
    return {key for server in servers for key in _keys_of(server)}
