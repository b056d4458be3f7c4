"""Peers of a stalled agent report the missing data, use other nodes, and accept the agent again."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from peerstore.membership.topology import PeerNode, validate_node_id
from peerstore.peers.peer_client import PeerClient
from peerstore.replication.replica_placement import place_replicas
from peerstore.transport.tcp import TcpTransport
from tests.support.agent_http import get_text
from tests.support.agent_jobs import agent_job
from tests.support.local_nodes import wait_until
from tests.support.severable_proxy import SeverableProxy
from tests.support.stores import MIB, shard_content

pytestmark = pytest.mark.e2e

NAMES = ("n1", "n2", "n3")


def metric(host, name):
    lines = get_text(host.directory, "/metrics").splitlines()
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"tieredckpt_{name}")]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(NAMES[:2], id="no other partner", marks=pytest.mark.nightly),
        pytest.param(NAMES, id="another partner"),
    ],
)
def test_frozen_partner_is_reported_missing_replaced_and_readmitted(names):
    (partner,) = place_replicas([PeerNode(validate_node_id(name), "") for name in names], copies=2).partners[
        validate_node_id("n1")
    ]
    with agent_job(*names) as job:
        job[partner].suspend_agent()
        (mine,) = job.save(1, "n1", parts=1)
        with job["n1"].agent(job.job) as agent:
            at_once = agent.replication_status(mine)
            assert (at_once.copies, at_once.missing_copies, at_once.is_replicated) == (1, 1, False)
            assert metric(job["n1"], "shards_under_replicated") == [1.0]
            others = len(names) - 2
            now = wait_until(
                lambda: (found := agent.replication_status(mine)).copies > others and not found.missing_copies and found
            )
            assert now.copies == 1 + others
            assert metric(job["n1"], "shards_unplaceable") == [1.0 - others]
        job[partner].resume_agent()
        wait_until(lambda: job.alive_nodes("n1") == set(names), "n1 sees all nodes again")
        (newer,) = job.save(2, "n1", parts=1)
        job.wait_replicated(2)
        job.assert_copies([newer])
        with job["n1"].agent(job.job) as agent:
            found = agent.replication_status(newer)
            assert (found.copies, found.missing_copies, found.is_replicated) == (2, 0, True)


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(3 * MIB + 17, id="one piece", marks=pytest.mark.nightly),
        pytest.param(64 * MIB + 5, id="many pieces"),
    ],
)
def test_trickling_source_costs_only_its_share(size):
    with agent_job("n1", "n2") as job, contextlib.ExitStack() as undo:
        (large,) = job.save(1, "n1", parts=1, size_bytes=size)
        job.wait_replicated(1)
        with job["n2"].agent() as agent:
            line = SeverableProxy(int(agent.this_node().address.rpartition(":")[2]))
        reads = undo.enter_context(ThreadPoolExecutor(1))
        undo.enter_context(line.running())
        line.trickle(after_bytes=size // 8)
        with job.prepared_read(large, ["n2", "n1"]) as read:
            read.peers["n2"].close()
            read.peers["n2"] = PeerClient(TcpTransport(), f"127.0.0.1:{line.port}", read.peers["n1"]._credentials)
            data, pulled = reads.submit(read).result(240)  # from the slow source alone it would take days
        assert data == shard_content(large, size)
        assert pulled.failed == {}
        assert pulled.bytes_from["n1"] > 0.75 * size
