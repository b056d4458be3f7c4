"""Nodes that fail together, and a node that returns with old data after the job continued."""

from __future__ import annotations

import pytest

from tests.e2e.peers.test_node_lost import restore, save
from tests.support.clusters import make_cluster

pytestmark = pytest.mark.e2e


def test_every_step_is_complete_after_the_loss_of_a_rack(ranks):
    names = ["n1", "n2", "n3", "n4"]
    with make_cluster(ranks, *names, labels=lambda name: "rack=r1" if name in ("n1", "n2") else "rack=r2") as cluster:
        assert cluster.run(names, save, [5, 6]) == ["2 copies in 2 racks"] * 4
        for name in ("n1", "n2"):  # including the leader and the node of the ranks' store
            cluster[name].lose()
        for name in ("n5", "n6"):
            cluster.add(name, "rack=r3")
        where = ["n5", "n3", "n6", "n4"]
        for tiers, nodes in cluster.run(where, restore, 6):
            assert set(tiers) <= {"memory", "peer"}
            assert not {"n1", "n2"} & nodes.keys()


def test_rejoining_node_participates_and_its_abandoned_steps_do_not(cluster):
    everybody, others = ["n1", "n2", "n3"], ["n1", "n2"]
    assert cluster.run(everybody, save, [5, 6]) == ["2 copies in 2 racks"] * 3
    before = inventory(cluster, "n3")
    assert {key.version for key in before} == {5, 6}
    cluster["n3"].kill_agent()
    assert cluster.run(others, save, [6, 7]) == ["2 copies in 2 racks"] * 2
    cluster["n3"].start()
    for tiers, _ in cluster.run(everybody, restore, 7):
        assert set(tiers) <= {"memory", "peer"}
    assert cluster.run(everybody, save, [8]) == ["2 copies in 2 racks"] * 3
    newest = {key for key in inventory(cluster, "n3") if key.version == 8}
    assert newest
    assert min(key.epoch for key in newest) > max(key.epoch for key in before)
    cluster["n1"].lose()
    cluster.add("n4", "rack=r4")
    cluster.run(["n4", "n2", "n3"], restore, 8)


def inventory(cluster, name):
    with cluster[name].agent(cluster.job) as agent:
        return {fact.key for fact in agent.store.list_shards(cluster.job)}
