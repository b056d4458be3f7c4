"""A node is lost with the only copy of its part of the newest step."""

from __future__ import annotations

import pytest

from tests.e2e.peers.test_node_lost import restore, save

pytestmark = pytest.mark.e2e


def test_restore_waits_no_longer_than_the_repeated_work_took(cluster):
    where = ["n1", "n2", "n3"]
    cluster.run(where, save, [5])
    cluster.run(where, save, [6], 1, environ={"TIEREDCKPT_PEER_COPIES": "1"})
    cluster["n2"].lose()
    cluster.add("n4", "rack=r4")
    endless = {"TIEREDCKPT_PEER_UNREACHABLE_TIMEOUT_S": "1000000"}
    for tiers, nodes in cluster.run(["n1", "n4", "n3"], restore, 5, environ=endless):
        assert set(tiers) <= {"memory", "peer"}
        assert "n2" not in nodes
