"""A job that is large enough to look by districts sees what it would see by asking everybody, whatever lookouts do."""

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
"""Twelve nodes share this process: one that comes to nothing for half a second would take its clock for leapt."""
DISTRICTS = NodePartitions(NAMES, split_from=SPLIT_FROM)


@pytest.fixture
def nodes(monkeypatch):
    with local_nodes(*NAMES, copies=2, split_from=SPLIT_FROM, membership=STEADY) as nodes:
        for part, node in enumerate(nodes):
            node.write(shard_key(1, part), SIZE, parts=len(NAMES))
        nodes.wait_replicated(1)
        nodes.monkeypatch = monkeypatch
        yield nodes
        monkeypatch.undo()  # who lies is asked again and again by those that leave
        for one, other in itertools.combinations(NAMES, 2):  # nobody waits at the end for a way that is cut
            nodes.network.heal(one, other)


ASKER = next(name for name in NAMES if len(DISTRICTS.partition_of(name)) >= 2)
FAR = max(DISTRICTS.other_partitions(ASKER), key=len)
"""Another district, the asker's lookout first."""


def replace_partition_reply(nodes, name, answer):
    """From now on ``name`` answers who asks it to look with ``answer(asked, honest answer)``."""
    looking = nodes[name].job_peers.inventory_service
    honest = looking.serve_partition
    nodes.monkeypatch.setattr(looking, "serve_partition", lambda asked: answer(asked, honest))


def count_inventories(nodes, name):
    """How often ``name`` is looked at by others from now on."""
    team, looks = nodes[name].job_peers, []
    honest = team.local_inventory

    def look():
        looks.append(name)
        return honest()

    nodes.monkeypatch.setattr(team, "local_inventory", look)
    return looks


def assert_complete_inventory(nodes, asker=ASKER):
    sight = nodes[asker].job_peers.inventory(fresh=True)
    assert sight.unreachable == {}
    assert set(sight.nodes) == set(NAMES)
    for name in NAMES:
        assert {fact.key: fact.holders for fact in sight.nodes[name].shards} == {
            fact.key: fact.holders for fact in nodes[name].shard_infos().values()
        }
    return sight


def test_job_has_several_partitions():
    assert len(DISTRICTS.other_partitions(ASKER)) >= 2
    assert len(FAR) >= 3


def test_inventory_includes_everything_nodes_report(nodes):
    for asker in NAMES:
        assert_complete_inventory(nodes, asker)


def test_inventory_queries_one_node_of_each_other_partition(nodes):
    asked = []
    for name in NAMES:
        replace_partition_reply(nodes, name, lambda names, honest, name=name: asked.append(name) or honest(names))
    assert_complete_inventory(nodes)
    assert sorted(asked) == sorted(members[0] for members in DISTRICTS.other_partitions(ASKER))


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
    """Also while others ask all the time, and share what lookouts find."""
    stop, failures = threading.Event(), []

    def ask(name):
        while not stop.is_set():
            try:
                nodes[name].job_peers.inventory(fresh=True)
            except PeerStoreError as error:
                failures.append(error)

    asking = [threading.Thread(target=ask, args=(name,)) for name in NAMES[::3]]
    for thread in asking:
        thread.start()
    try:
        for version in range(2, 12):
            of = ShardKey(JOB, version, 1, "a", 0, version)
            nodes[FAR[version % len(FAR)]].write(of, SIZE, parts=12)
            assert of in nodes[ASKER].job_peers.shard_sources(fresh=True), f"version {version} was sealed before"
    finally:
        stop.set()
        for thread in asking:
            thread.join(60)
    assert failures == []


def test_concurrent_queries_share_a_few_inventories(nodes):
    delegate, member = FAR[0], FAR[1]
    looks = count_inventories(nodes, member)
    inside, go_on = threading.Semaphore(0), threading.Event()
    honest = nodes[member].job_peers.local_inventory

    def wait_and_query():
        inside.release()
        assert go_on.wait(60)
        return honest()

    nodes.monkeypatch.setattr(nodes[member].job_peers, "local_inventory", wait_and_query)
    arrived, found = [], []
    replace_partition_reply(nodes, delegate, lambda asked, honest: arrived.append(1) or honest(asked))
    peer = nodes[ASKER].job_peers.membership.client_for(delegate)

    def ask():
        found.append(peer.call("partition_inventory", GetPartitionInventory(FAR), PartitionInventory, timeout_s=60))

    asking = [threading.Thread(target=ask) for _ in range(30)]
    for thread in asking:
        thread.start()
    assert inside.acquire(timeout=60)
    wait_until(lambda: len(arrived) == len(asking), "all have asked while the first look goes on")
    go_on.set()
    for thread in asking:
        thread.join(60)
    assert len(found) == 30
    assert all(set(answer.nodes) == set(FAR) and answer.unreachable == {} for answer in found)
    assert 2 <= len(looks) <= 4, "30 have asked"


# -- lookouts that are no use -----------------------------------------------------------------------------------------


def test_delegate_that_dies_during_its_inventory_is_replaced(nodes):
    delegate = FAR[0]

    def die(asked, honest):
        nodes.network.kill_node(delegate)
        for name in NAMES:
            if name != delegate:
                nodes.network.cut(delegate, name)
        return honest(asked)

    replace_partition_reply(nodes, delegate, die)
    sight = nodes[ASKER].job_peers.inventory(fresh=True)
    assert set(sight.nodes) == set(NAMES) - {delegate}
    assert set(sight.unreachable) == {delegate}
    assert "cannot be reached" in sight.unreachable[delegate]


def test_silent_delegate_is_not_awaited(nodes):
    """It is still seen itself: by the next lookout."""
    nodes.network.stall(FAR[0], ASKER)
    assert_complete_inventory(nodes)


def test_every_node_is_queried_when_no_delegate_answers(nodes):
    asked = []

    def refuse(names, _honest):
        asked.append(names)
        raise UnavailableError("not now")

    for name in FAR:
        replace_partition_reply(nodes, name, refuse)
    assert_complete_inventory(nodes)
    assert len(asked) == min(MAX_DELEGATES, len(FAR))


def test_nodes_unreachable_from_a_delegate_are_queried_directly(nodes):
    """Its way may be bad, and not the node."""
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
    sight = nodes[ASKER].job_peers.inventory(fresh=True)
    assert set(sight.unreachable) == {lost}
    assert set(sight.nodes) == set(NAMES) - {lost}


# -- lookouts that lie ------------------------------------------------------------------------------------------------

NOTHING = msgspec.Raw(msgspec.msgpack.encode(NodeInventory((), 99, "liar", None, 0)))


def test_unrequested_nodes_in_a_reply_are_ignored(nodes):
    others = [name for name in NAMES if name not in FAR]

    def lie(asked, honest):
        answer = honest(asked)
        return PartitionInventory(
            answer.nodes | dict.fromkeys(["stranger", *others], NOTHING), {"nobody": "made up", **answer.unreachable}
        )

    replace_partition_reply(nodes, FAR[0], lie)
    assert_complete_inventory(nodes)


@pytest.mark.parametrize(
    "answer",
    [
        lambda asked, _: PartitionInventory({}, {}),
        lambda asked, _: PartitionInventory({}, dict.fromkeys(asked.nodes, "it is not there")),
        lambda asked, _: PartitionInventory(dict.fromkeys(asked.nodes, msgspec.Raw(b"\x93\x01\x02\x03")), {}),
        lambda asked, _: PartitionInventory(dict.fromkeys(asked.nodes, msgspec.Raw(b"\xc0")), {}),
    ],
    ids=["nothing", "all silent", "no such thing", "nil"],
)
def test_nodes_without_a_usable_reply_are_queried_directly(nodes, answer):
    replace_partition_reply(nodes, FAR[0], answer)
    assert_complete_inventory(nodes)


# -- what a lookout is asked ------------------------------------------------------------------------------------------


def query_partition(nodes, names, delegate=FAR[0]):
    return (
        nodes[ASKER]
        .job_peers.membership.client_for(delegate)
        .call("partition_inventory", GetPartitionInventory(tuple(names)), PartitionInventory)
    )


def test_nodes_of_other_partitions_are_not_queried(nodes):
    others = [name for name in NAMES if name not in FAR]
    looks = [count_inventories(nodes, name) for name in NAMES]
    answer = query_partition(nodes, [*others, "stranger", "", "../n01"])
    assert answer.nodes == {}
    assert set(answer.unreachable) == {*others, "stranger", "", "../n01"}
    assert set(answer.unreachable.values()) == {f"{FAR[0]} does not look at it: it is in another partition"}
    assert not any(looks), "nobody was looked at for that"


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
    """Here because one node has very much to say; the asker gets it from that node."""
    big, room = FAR[1], 1 << 20
    nodes.monkeypatch.setattr("peerstore.peers.peer_inventory.MAX_PARTITION_REPLY_BYTES", room)
    honest = nodes[big].job_peers.local_inventory

    def oversized_inventory():
        looked = honest()
        return msgspec.structs.replace(looked, incarnation="x" * (room + 1))

    nodes.monkeypatch.setattr(nodes[big].job_peers, "local_inventory", oversized_inventory)
    answer = query_partition(nodes, FAR)
    assert set(answer.nodes) == set(FAR) - {big}
    assert "does not fit" in answer.unreachable[big]
    sight = assert_complete_inventory(nodes)
    assert len(sight.nodes[big].incarnation) > room
