"""Replication and hydration with NIXL as the transport."""

from __future__ import annotations

import pytest

from tests.e2e.peers.test_node_lost import restore, save
from tests.support.channel_pairs import nixl_missing_reason
from tests.support.clusters import Cluster

pytestmark = pytest.mark.skipif(bool(nixl_missing_reason()), reason=nixl_missing_reason())


def test_lost_node_is_restored_over_nixl(ranks):
    cluster = Cluster(ranks)
    try:
        for name in ("n1", "n2"):
            cluster.add(name, f"rack={name}", transport="nixl")
        assert cluster.run(["n1", "n2"], save, [5, 6]) == ["2 copies in 2 racks"] * 2
        cluster["n2"].lose()
        cluster.add("n3", "rack=n3", transport="nixl")
        for tiers, nodes in cluster.run(["n1", "n3"], restore, 6):
            assert set(tiers) <= {"memory", "peer"}
            assert "n2" not in nodes
    finally:
        cluster.close()
