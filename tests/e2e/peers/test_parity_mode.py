"""Groups of nodes keep parities, from which a lost node's shards are rebuilt."""

from __future__ import annotations

import pytest

from tests.e2e.peers.test_node_lost import restore, save
from tests.support.clusters import make_cluster
from tieredckpt.agent.agent_client import NodeAgentClient

PARITY = {"TIEREDCKPT_PEER_MODE": "parity", "TIEREDCKPT_PEER_PARITY_GROUP_SIZE": "3", "TIEREDCKPT_PEER_LEVELS": "rack"}
NAMES = ("n1", "n2", "n3", "n4")


@pytest.fixture
def four(ranks):
    """Four nodes in four racks."""
    with make_cluster(ranks, *NAMES, labels=lambda name: f"rack=r{name[1:]}") as made:
        yield made


def kept(host, job):
    node = NodeAgentClient(host.settings, job)
    try:
        facts = node.store.list_shards(job)
        return (
            node.store.status().arena.sealed_bytes,
            sum(fact.size_bytes for fact in facts),
            {f.key.part for f in facts},
        )
    finally:
        node.close()


@pytest.mark.parametrize("lost", [pytest.param("n1", marks=pytest.mark.nightly), "n3"])
def test_lost_node_is_rebuilt_from_parity_without_storage(four, lost):
    said = four.run(NAMES, save, [5, 6, 7], environ=PARITY)
    assert said == ["parity over 4 nodes"] * 4
    for part, name in enumerate(NAMES):  # each node also keeps a parity, which is not listed as a shard
        everything, shards, parts = kept(four[name], four.job)
        assert everything > shards
        assert parts == {part}
    four[lost].lose()
    four.add("n5", "rack=r5")
    where = ["n5" if name == lost else name for name in NAMES]
    for tiers, nodes in four.run(where, restore, 7, environ=PARITY):
        assert set(tiers) <= {"memory", "peer"}
        assert lost not in nodes


def test_job_continues_with_fewer_nodes_and_is_protected_again(four):
    four.run(NAMES, save, [1], environ=PARITY)
    four["n2"].lose()
    left = ["n1", "n3", "n4"]
    four.run(left, restore, 1, environ=PARITY)
    assert four.run(left, save, [2], environ=PARITY) == ["parity over 3 nodes"] * 3
    four["n4"].lose()
    for tiers, _ in four.run(["n1", "n3"], restore, 2, environ=PARITY):
        assert set(tiers) <= {"memory", "peer"}
