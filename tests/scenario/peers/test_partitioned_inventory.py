"""Inventories of a job with partitions are complete, whatever its delegates answer."""

import itertools
import threading

import msgspec
import pytest

from peerstore.errors import PeerStoreError, ProtocolError, UnavailableError
from peerstore.membership.swim import MembershipSettings
from peerstore.membership.topology import MAX_DELEGATES, NodePartitions
from peerstore.peers.peer_messages import (
    MAX_NODES_PER_REQUEST,
    GetPartitionInventory,
    NodeInventory,
    PartitionInventory,
)
from peerstore.shard_records import ShardKey
from tests.support.local_nodes import JOB, local_nodes, wait_until
from tests.support.stores import shard_key

NAMES = tuple(f"n{number:02d}" for number in range(12))
SPLIT_FROM = 8
SIZE = 4096
STEADY = MembershipSettings(heartbeat_s=1.0, ping_timeout_s=10.0, dead_after_s=10.0)
"""Long timeouts, because twelve nodes share this process and a node may be delayed for half a second."""
PARTITIONS = NodePartitions(NAMES, split_from=SPLIT_FROM)


@pytest.fixture
def nodes(monkeypatch):
    with local_nodes(*NAMES, copies=2, split_from=SPLIT_FROM, membership=STEADY) as nodes:
        for part, node in enumerate(nodes):
            node.write(shard_key(1, part), SIZE, parts=len(NAMES))
        nodes.wait_replicated(1)
        nodes.monkeypatch = monkeypatch
        yield nodes
        monkeypatch.undo()  # closing nodes would query a lying delegate repeatedly
        for one, other in itertools.combinations(NAMES, 2):  # closing nodes would wait for a cut connection
            nodes.network.heal(one, other)


ASKER = next(name for name in NAMES if len(PARTITIONS.partition_of(name)) >= 2)
FAR = max(PARTITIONS.other_partitions(ASKER), key=len)
"""Another partition, with the asker's first delegate first."""


def replace_partition_reply(nodes, name, answer):
    """Let ``name`` reply to partition queries with ``answer(request, original handler)``."""
    service = nodes[name].job_peers.inventory_service
    honest = service.serve_partition
    nodes.monkeypatch.setattr(service, "serve_partition", lambda request: answer(request, honest))


def count_inventories(nodes, name):
    """Return a list that grows with each inventory that ``name`` makes of itself."""
    peers, queries = nodes[name].job_peers, []
    honest = peers.local_inventory

    def record_query():
        queries.append(name)
        return honest()

    nodes.monkeypatch.setattr(peers, "local_inventory", record_query)
    return queries


def assert_complete_inventory(nodes, asker=ASKER):
    inventory = nodes[asker].job_peers.inventory(fresh=True)
    assert inventory.unreachable == {}
    assert set(inventory.nodes) == set(NAMES)
    for name in NAMES:
        assert {fact.key: fact.holders for fact in inventory.nodes[name].shards} == {
            fact.key: fact.holders for fact in nodes[name].shard_infos().values()
        }
    return inventory


def test_job_has_several_partitions():
    assert len(PARTITIONS.other_partitions(ASKER)) >= 2
    assert len(FAR) >= 3


def test_inventory_includes_everything_nodes_report(nodes):
    for asker in NAMES:
        assert_complete_inventory(nodes, asker)


def test_inventory_queries_one_node_of_each_other_partition(nodes):
    queried = []
    for name in NAMES:
        replace_partition_reply(nodes, name, lambda names, honest, name=name: queried.append(name) or honest(names))
    assert_complete_inventory(nodes)
    assert sorted(queried) == sorted(members[0] for members in PARTITIONS.other_partitions(ASKER))


def test_holders_are_confirmed_by_delegates(nodes):
    writer = nodes[ASKER]
    partner = writer.job_peers.replicator.partners[0]
    confirmed = []
    nodes.monkeypatch.setattr(
        writer.job_peers.replicator, "confirm_holder", lambda of, by, _life: confirmed.append((of, by))
    )
    writer.job_peers.inventory(fresh=True)
    mine = next(of for of, fact in writer.shard_infos().items() if not fact.holders)
    assert (mine, partner) in confirmed


# -- freshness and sharing --------------------------------------------------------------------------------------------


def test_shards_sealed_before_the_query_are_seen(nodes):
    """Other nodes query all the time and share the delegates' results."""
    stop, failures = threading.Event(), []

    def query(name):
        while not stop.is_set():
            try:
                nodes[name].job_peers.inventory(fresh=True)
            except PeerStoreError as error:
                failures.append(error)

    threads = [threading.Thread(target=query, args=(name,)) for name in NAMES[::3]]
    for thread in threads:
        thread.start()
    try:
        for version in range(2, 12):
            of = ShardKey(JOB, version, 1, "a", 0, version)
            nodes[FAR[version % len(FAR)]].write(of, SIZE, parts=12)
            assert of in nodes[ASKER].job_peers.shard_sources(fresh=True), f"version {version} is missing"
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert failures == []


def test_concurrent_queries_share_a_few_inventories(nodes):
    delegate, member = FAR[0], FAR[1]
    queries = count_inventories(nodes, member)
    inside, released = threading.Semaphore(0), threading.Event()
    honest = nodes[member].job_peers.local_inventory

    def wait_and_query():
        inside.release()
        assert released.wait(60)
        return honest()

    nodes.monkeypatch.setattr(nodes[member].job_peers, "local_inventory", wait_and_query)
    arrived, found = [], []
    replace_partition_reply(nodes, delegate, lambda request, honest: arrived.append(1) or honest(request))
    peer = nodes[ASKER].job_peers.membership.client_for(delegate)

    def query():
        found.append(peer.call("partition_inventory", GetPartitionInventory(FAR), PartitionInventory, timeout_s=60))

    threads = [threading.Thread(target=query) for _ in range(30)]
    for thread in threads:
        thread.start()
    assert inside.acquire(timeout=60)
    wait_until(lambda: len(arrived) == len(threads), "all queries arrive during the first inventory")
    released.set()
    for thread in threads:
        thread.join(60)
    assert len(found) == 30
    assert all(set(answer.nodes) == set(FAR) and answer.unreachable == {} for answer in found)
    assert 2 <= len(queries) <= 4, "30 queries must share a few inventories"


# -- failing delegates ------------------------------------------------------------------------------------------------


def test_delegate_that_dies_during_its_inventory_is_replaced(nodes):
    delegate = FAR[0]

    def die(request, honest):
        nodes.network.kill_node(delegate)
        for name in NAMES:
            if name != delegate:
                nodes.network.cut(delegate, name)
        return honest(request)

    replace_partition_reply(nodes, delegate, die)
    inventory = nodes[ASKER].job_peers.inventory(fresh=True)
    assert set(inventory.nodes) == set(NAMES) - {delegate}
    assert set(inventory.unreachable) == {delegate}
    assert "cannot be reached" in inventory.unreachable[delegate]


def test_silent_delegate_is_not_awaited(nodes):
    """The next delegate includes the silent one in its reply."""
    nodes.network.stall(FAR[0], ASKER)
    assert_complete_inventory(nodes)


def test_every_node_is_queried_when_no_delegate_answers(nodes):
    requests = []

    def refuse(request, _honest):
        requests.append(request)
        raise UnavailableError("not now")

    for name in FAR:
        replace_partition_reply(nodes, name, refuse)
    assert_complete_inventory(nodes)
    assert len(requests) == min(MAX_DELEGATES, len(FAR))


def test_nodes_unreachable_from_a_delegate_are_queried_directly(nodes):
    """The path from the delegate may be broken, and not the node."""
    for delegate in FAR:
        for member in FAR:
            if delegate < member:
                nodes.network.cut(delegate, member)
    assert_complete_inventory(nodes)


def test_unreachable_node_is_named(nodes):
    lost = FAR[1]
    for name in NAMES:
        if name != lost:
            nodes.network.cut(lost, name)
    inventory = nodes[ASKER].job_peers.inventory(fresh=True)
    assert set(inventory.unreachable) == {lost}
    assert set(inventory.nodes) == set(NAMES) - {lost}


# -- lying delegates --------------------------------------------------------------------------------------------------

NOTHING = msgspec.Raw(msgspec.msgpack.encode(NodeInventory((), 99, "liar", None, 0)))


def test_unrequested_nodes_in_a_reply_are_ignored(nodes):
    others = [name for name in NAMES if name not in FAR]

    def lie(request, honest):
        answer = honest(request)
        return PartitionInventory(
            answer.nodes | dict.fromkeys(["stranger", *others], NOTHING), {"nobody": "made up", **answer.unreachable}
        )

    replace_partition_reply(nodes, FAR[0], lie)
    assert_complete_inventory(nodes)


@pytest.mark.parametrize(
    "answer",
    [
        lambda request, _: PartitionInventory({}, {}),
        lambda request, _: PartitionInventory({}, dict.fromkeys(request.nodes, "unreachable")),
        lambda request, _: PartitionInventory(dict.fromkeys(request.nodes, msgspec.Raw(b"\x93\x01\x02\x03")), {}),
        lambda request, _: PartitionInventory(dict.fromkeys(request.nodes, msgspec.Raw(b"\xc0")), {}),
    ],
    ids=["empty", "all silent", "wrong type", "nil"],
)
def test_nodes_without_a_usable_reply_are_queried_directly(nodes, answer):
    replace_partition_reply(nodes, FAR[0], answer)
    assert_complete_inventory(nodes)


# -- requests to a delegate -------------------------------------------------------------------------------------------


def query_partition(nodes, names, delegate=FAR[0]):
    return (
        nodes[ASKER]
        .job_peers.membership.client_for(delegate)
        .call("partition_inventory", GetPartitionInventory(tuple(names)), PartitionInventory)
    )


def test_nodes_of_other_partitions_are_not_queried(nodes):
    others = [name for name in NAMES if name not in FAR]
    queries = [count_inventories(nodes, name) for name in NAMES]
    answer = query_partition(nodes, [*others, "stranger", "", "../n01"])
    assert answer.nodes == {}
    assert set(answer.unreachable) == {*others, "stranger", "", "../n01"}
    assert set(answer.unreachable.values()) == {f"{FAR[0]} does not look at it: it is in another partition"}
    assert not any(queries), "a node was queried for a refused request"


def test_only_requested_nodes_of_the_partition_are_queried(nodes):
    answer = query_partition(nodes, [FAR[1], "stranger", FAR[1], ASKER])
    assert set(answer.nodes) == {FAR[1]}
    assert set(answer.unreachable) == {"stranger", ASKER}


def test_too_many_names_are_refused(nodes):
    assert set(query_partition(nodes, [f"x{number}" for number in range(MAX_NODES_PER_REQUEST)]).unreachable) != set()
    with pytest.raises(ProtocolError):
        query_partition(nodes, [f"x{number}" for number in range(MAX_NODES_PER_REQUEST + 1)])
    with pytest.raises(ProtocolError):
        query_partition(nodes, ["x" * 129])
    assert_complete_inventory(nodes)


def test_oversized_reply_is_left_to_the_caller(nodes):
    """One node's inventory is too large for the delegate's reply, so the asker queries that node."""
    big, room = FAR[1], 1 << 20
    nodes.monkeypatch.setattr("peerstore.peers.peer_inventory.MAX_PARTITION_REPLY_BYTES", room)
    honest = nodes[big].job_peers.local_inventory

    def oversized_inventory():
        return msgspec.structs.replace(honest(), incarnation="x" * (room + 1))

    nodes.monkeypatch.setattr(nodes[big].job_peers, "local_inventory", oversized_inventory)
    answer = query_partition(nodes, FAR)
    assert set(answer.nodes) == set(FAR) - {big}
    assert "does not fit" in answer.unreachable[big]
    inventory = assert_complete_inventory(nodes)
    assert len(inventory.nodes[big].incarnation) > room
