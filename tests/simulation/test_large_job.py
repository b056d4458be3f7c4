"""Limits of the messages and of the restore work per node in a large job."""

import math

import pytest

from peerstore.commit_protocol import BROADCAST_FANOUT
from tests.simulation.large import DECIDING, TENSORS, run_large_job


def assert_costs_bounded(nodes, ranks, fewer):
    result = run_large_job(nodes, ranks, fewer, print)
    saved, lost, copied, chosen, smaller = result.phases
    for save, count in ((saved, nodes), (smaller, nodes - 1)):
        assert save.sent["report_parts"] <= 3 * ranks * count, "too many reports of sealed and copied parts"
        assert save.sent["commit_decision"] <= 2 * BROADCAST_FANOUT
        assert save.most <= 4 * ranks * count, "too many messages to the commit leader"
    root = math.sqrt(nodes)
    assert chosen.sent["node_inventory"] <= 6 * nodes * root
    assert chosen.sent["partition_inventory"] <= 3 * fewer * root
    assert {*lost.sent, *copied.sent} <= {
        "ping",
        "indirect_ping",
        "offer_replica",
        "replica_chunk",
        "commit_replica",
        "report_parts",
        "commit_decision",
    }
    assert len(result.planned) >= DECIDING
    for planned in result.planned:
        assert planned.pieces <= 3 * ranks * TENSORS
        assert planned.layouts <= nodes * ranks, "a node needs each layout at most once"
    assert result.read


def test_hundreds_of_ranks_lose_a_node_and_resume_with_fewer():
    assert_costs_bounded(72, 3, 56)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_ten_thousand_ranks_lose_a_node_and_resume_with_fewer():
    assert_costs_bounded(1250, 8, 1000)
