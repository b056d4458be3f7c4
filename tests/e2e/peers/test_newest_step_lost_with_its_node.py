"""A node is lost with the only copy of its part of the newest step."""

from __future__ import annotations

from unittest import mock

import pytest

from tests.e2e.peers.test_node_lost import restore, save
from tieredckpt.checkpointer import restore_with_fallback

pytestmark = pytest.mark.e2e


def restore_with_endless_patience(job, expected):
    with mock.patch.object(restore_with_fallback, "_LONGEST_WAIT_S", 1e9):
        return restore(job, expected)


def test_restore_waits_no_longer_than_the_repeated_work_took(cluster):
    where = ["n1", "n2", "n3"]
    cluster.run(where, save, [5])
    cluster.run(where, save, [6], 1, environ={"TIEREDCKPT_PEER_COPIES": "1"})
    cluster["n2"].lose()
    cluster.add("n4", "rack=r4")
    for tiers, nodes in cluster.run(["n1", "n4", "n3"], restore_with_endless_patience, 5):
        assert set(tiers) <= {"memory", "peer"}
        assert "n2" not in nodes
