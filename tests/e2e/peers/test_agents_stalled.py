"""An agent that is there and answers nobody: the others say what is missing, find somebody else, and take it back."""

import urllib.request

import pytest

from peerstore.cluster.nodes import Node, node_id
from peerstore.cluster.placement import place
from tests.support.agent_jobs import agent_job
from tests.support.neighbours import until

pytestmark = pytest.mark.e2e

NAMES = ("n1", "n2", "n3")


def metric(host, name):
    address = (host.directory / "http").read_text()
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"tieredckpt_{name}")]


@pytest.mark.parametrize("names", [NAMES[:2], NAMES], ids=["no other partner", "another partner"])
def test_a_frozen_partner_is_missed_replaced_where_that_can_be_and_taken_back(names):
    (partner,) = place([Node(node_id(name), "") for name in names], copies=2).partners[node_id("n1")]
    with agent_job(*names) as job:
        job[partner].freeze()
        (mine,) = job.save(1, "n1", parts=1)
        with job["n1"].agent(job.job) as agent:
            at_once = agent.durability(mine)
            assert (at_once.copies, at_once.lacking, at_once.settled) == (1, 1, False)
            assert metric(job["n1"], "shards_lacking_copies") == [1.0]
            others = len(names) - 2
            now = until(lambda: (found := agent.durability(mine)).copies > others and not found.lacking and found)
            assert now.copies == 1 + others
            assert metric(job["n1"], "shards_short_of_copies") == [1.0 - others]
        job[partner].thaw()
        until(lambda: job.sees("n1") == set(names), "it is back")
        (newer,) = job.save(2, "n1", parts=1)
        job.settle(2)
        job.expect([newer])
        with job["n1"].agent(job.job) as agent:
            found = agent.durability(newer)
            assert (found.copies, found.lacking, found.settled) == (2, 0, True)
