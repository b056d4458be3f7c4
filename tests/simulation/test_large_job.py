"""A job of many nodes, message by message: what one node gets and does for all grows no faster than the job."""

import math

import pytest

from peerstore.commit_protocol import BROADCAST_FANOUT
from tests.simulation.large import DECIDING, TENSORS, run_large_job


def assert_costs_bounded(nodes, ranks, fewer):
    story = run_large_job(nodes, ranks, fewer, print)
    saved, lost, copied, chosen, smaller = story.phases
    for save, count in ((saved, nodes), (smaller, nodes - 1)):
        assert save.sent["report_parts"] <= 3 * ranks * count, "a word for each part sealed, and each copied"
        assert save.sent["commit_decision"] <= 2 * BROADCAST_FANOUT
        assert save.most <= 4 * ranks * count, "all of it is the one that counts"
    own_district, beyond = math.sqrt(nodes), math.sqrt(nodes)
    assert chosen.sent["node_inventory"] <= 6 * nodes * own_district
    assert chosen.sent["partition_inventory"] <= 3 * fewer * beyond
    assert {*lost.sent, *copied.sent} <= {
        "ping",
        "indirect_ping",
        "offer_replica",
        "replica_chunk",
        "commit_replica",
        "report_parts",
        "commit_decision",
    }
    assert len(story.planned) >= DECIDING
    for planned in story.planned:
        assert planned.pieces <= 3 * ranks * TENSORS
        assert planned.layouts <= nodes * ranks, "each once a node, whatever its ranks want"
    assert story.read


def test_hundreds_of_ranks_lose_a_node_and_resume_with_fewer():
    assert_costs_bounded(72, 3, 56)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_ten_thousand_ranks_lose_a_node_and_resume_with_fewer():
    assert_costs_bounded(1250, 8, 1000)
