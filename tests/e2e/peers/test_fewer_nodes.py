"""A job goes on with fewer nodes: what only those that leave have in memory is read from them before they are gone."""

from __future__ import annotations

import pytest

from tests.e2e.peers.test_node_lost import restore, save
from tests.support.clusters import cluster_of

pytestmark = pytest.mark.e2e

NAMES = ["n1", "n2", "n3", "n4"]


@pytest.mark.parametrize("stay", [["n1", "n2"], ["n3", "n1"], ["n4", "n1"], ["n4"]], ids="-".join)
def test_half_of_the_nodes_leave_at_once(ranks, stay):
    with cluster_of(ranks, *NAMES, labels=lambda name: f"rack=r{name[1:]}") as cluster:
        assert cluster.run(NAMES, save, [5, 6]) == ["2 copies in 2 racks"] * 4
        for tiers, _ in cluster.run(stay, restore, 6):
            assert set(tiers) <= {"memory", "peer"}
