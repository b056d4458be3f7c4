"""Message counts of large jobs, by the code that prints the table in ``docs/explanation/scale.md``."""

import math
import re

import pytest

from peerstore import message_codec
from peerstore.commit_protocol import BROADCAST_FANOUT
from peerstore.membership.topology import NodePartitions
from peerstore.peers.peer_inventory import MAX_PARTITION_REPLY_BYTES
from peerstore.peers.peer_messages import MAX_NODES_PER_REQUEST
from peerstore.replication.replica_placement import place_replicas
from peerstore.transport.base import MAX_MESSAGE_HEADER_BYTES
from tests.simulation.scale import (
    ROUNDS,
    commit_cost,
    count_queries,
    decode_all,
    make_inventories,
    make_nodes,
    measure,
    moved_copies,
    periods_until_known,
    ping_cost,
    responses_for,
)

MOST_NODES = 10_000


def names_of(nodes):
    return sorted(node.id for node in nodes)


@pytest.mark.parametrize("count", [64, 100, 300, 1000])
def test_restart_messages_per_node_grow_with_the_square_root(count):
    names = names_of(make_nodes(count))
    partitions = NodePartitions(names)
    queries = count_queries(names, partitions)
    expected = sum(
        ROUNDS * (len(partitions.partition_of(me)) - 1) + len(partitions.other_partitions(me)) for me in names
    )
    assert queries.restart == expected
    root = math.sqrt(count)
    assert queries.restart <= 4.5 * count * root
    assert max(queries.most_to_one, queries.most_from_one) <= 6 * root
    assert queries.one_node <= count


def test_job_below_the_limit_queries_every_node():
    names = names_of(make_nodes(63))
    queries = count_queries(names, NodePartitions(names))
    assert queries.one_node == 62
    assert queries.restart == ROUNDS * 63 * 62


def test_inventory_replies_contain_all_shards():
    nodes = make_nodes(300)
    names = names_of(nodes)
    partitions, inventories = NodePartitions(names), make_inventories(names, place_replicas(nodes))
    me = names[17]
    decoded = decode_all(responses_for(me, partitions, inventories), len(partitions.partition_of(me)) - 1)
    expected = sorted(repr(inventories[name]) for name in names if name != me)
    assert sorted(repr(inventory) for inventory in decoded.values()) == expected


def test_replies_of_the_largest_job_stay_below_the_limits():
    """Allow a hundred times as many parts and parities per node."""
    names = names_of(make_nodes(MOST_NODES))
    partitions = NodePartitions(names)
    largest = max(len(partitions.partition_of(me)) for me in names)
    assert largest <= MAX_NODES_PER_REQUEST
    few = make_nodes(100)
    inventories = make_inventories(names_of(few), place_replicas(few))
    one = max(len(message_codec.encode_message(inventory)) for inventory in inventories.values())
    assert 100 * largest * one < MAX_PARTITION_REPLY_BYTES < MAX_MESSAGE_HEADER_BYTES


@pytest.mark.parametrize(("count", "every"), [(2, 1), (100, 1), (1 + BROADCAST_FANOUT, 1), (300, 3)])
def test_save_costs_one_report_per_node_and_a_bounded_broadcast(count, every):
    names = names_of(make_nodes(count))
    reports, notified, _ = commit_cost(names)
    assert reports == 2 * (count - 1)
    assert notified == math.ceil((count - 1) / every)
    assert notified <= BROADCAST_FANOUT
    assert periods_until_known(names) <= 5


@pytest.mark.parametrize("count", [10, 100, 1000])
def test_pings_do_not_grow_with_the_job(count):
    pings, size, _ = ping_cost(make_nodes(count))
    assert pings == 4
    assert size < 8 << 10


def test_membership_change_moves_few_copies():
    nodes = make_nodes(320)
    before = place_replicas(nodes)
    assert moved_copies(before, place_replicas(nodes[1:])) <= 32
    assert moved_copies(before, before) == 0


def test_table_has_a_number_in_every_row():
    table = measure(64)
    assert len(table) > 20
    assert not [row for row, value in table.items() if not re.search(r"\d", value)]
