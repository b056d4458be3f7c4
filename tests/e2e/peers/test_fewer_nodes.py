"""A job goes on with fewer nodes: what only those that leave have in memory is read from them before they are gone."""

from __future__ import annotations

import pytest

from tests.e2e.peers.test_node_lost import restore, save
from tests.support.clusters import cluster_of

pytestmark = pytest.mark.e2e

NAMES = ["n1", "n2", "n3", "n4"]


def test_half_of_the_nodes_leave_at_once(ranks):
    with cluster_of(ranks, *NAMES, labels=lambda name: f"rack=r{name[1:]}") as cluster:
        assert cluster.run(NAMES, save, [5, 6]) == ["2 copies in 2 racks"] * 4
        stay = ["n4", "n1"]  # n2 and n3 keep each other's copies
        for tiers, _ in cluster.run(stay, restore, 6):
            assert set(tiers) == {"memory", "peer"}
        assert cluster.run(stay, save, [7]) == ["2 copies in 2 racks"] * 2
        for name in ("n2", "n3"):  # nothing hangs on them any more
            cluster[name].lose()
        assert cluster.run(stay, save, [8]) == ["2 copies in 2 racks"] * 2
        assert cluster.run(["n1"], save, [9], 1) == ["1 copy"]
