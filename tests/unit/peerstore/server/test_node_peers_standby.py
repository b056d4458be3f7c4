"""A standby node joins a job only at the request of a node that proves the registered secret."""

from __future__ import annotations

import contextlib

import pytest

from peerstore.membership.topology import member_list
from tests.support.local_nodes import JOB, SECRET, LocalNodes, wait_until
from tests.support.stores import shard_key

OTHER = b"a secret of another job, as long"


@contextlib.contextmanager
def world_of_one(registered):
    """Node n1 has the job's only rank, and lists n2, which has registered this secret or none, as standby."""
    with contextlib.closing(LocalNodes()) as nodes:
        one, two = nodes.add("n1"), nodes.add("n2")
        if registered is not None:
            two.node_peers.accept_standby(registered)
        one.join(nodes.peers_config(member_list=member_list(1, [one.node, two.node], [two.node.id])))
        yield nodes


def wait_copied(nodes, version):
    key = shard_key(version, 0)
    wait_until(lambda: nodes["n2"].holds(key), f"n2 has a replica of version {version}")
    assert nodes["n2"].has_intact_shard(key)
    nodes.wait_replicated(version)


def test_standby_node_joins_and_stores_replicas():
    with world_of_one(SECRET) as nodes:
        nodes["n1"].write(shard_key(1, 0))
        wait_copied(nodes, 1)
        assert nodes["n2"].job_peers.membership.standby == ("n2",)
        assert nodes["n2"].job_peers.settings == nodes.settings


def test_empty_standby_node_joins_again():
    with world_of_one(SECRET) as nodes:
        nodes["n1"].write(shard_key(1, 0))
        wait_copied(nodes, 1)
        nodes.restart("n2", empty=True)
        nodes["n2"].node_peers.accept_standby(SECRET)
        wait_copied(nodes, 1)


@pytest.mark.parametrize("registered", [None, OTHER], ids=["no secret", "another secret"])
def test_node_does_not_join_for_an_unregistered_secret(registered):
    with world_of_one(registered) as nodes:
        server = nodes["n2"].node_peers.server
        wait_until(lambda: server.rejected >= 3, "n2 refuses n1")
        assert nodes["n2"].node_peers.job_peers(JOB) is None


def test_registered_secret_does_not_open_a_job_with_its_own_secret():
    with contextlib.closing(LocalNodes()) as nodes:
        one, two = nodes.add("n1"), nodes.add("n2")
        members = member_list(1, [one.node, two.node])
        two.join(nodes.peers_config(secret=OTHER, member_list=members))
        two.node_peers.accept_standby(SECRET)
        one.join(nodes.peers_config(member_list=members))
        wait_until(lambda: two.node_peers.server.rejected >= 3, "n2 refuses n1")
        assert two.job_peers.credentials.secret == OTHER
        assert one.job_peers.membership.state_of("n2") == "dead"  # never seen
