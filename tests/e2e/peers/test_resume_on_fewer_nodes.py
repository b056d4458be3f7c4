"""A job continues on fewer nodes, and reads the data of the leaving nodes before they are gone."""

from __future__ import annotations

import contextlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from elastic.supervisor.memory_tier import MemoryTierProcess
from tests.e2e.peers.test_node_lost import restore, save
from tests.support.clusters import make_cluster
from tests.support.local_nodes import wait_until

pytestmark = pytest.mark.e2e

NAMES = ["n1", "n2", "n3", "n4"]


def test_job_resumes_after_half_of_the_nodes_leave(ranks):
    with make_cluster(ranks, *NAMES, labels=lambda name: f"rack=r{name[1:]}") as cluster:
        assert cluster.run(NAMES, save, [5, 6]) == ["2 copies in 2 racks"] * 4
        stay = ["n4", "n1"]  # n2 and n3 hold each other's replicas
        for tiers, _ in cluster.run(stay, restore, 6):
            assert set(tiers) == {"memory", "peer"}
        assert cluster.run(stay, save, [7]) == ["2 copies in 2 racks"] * 2
        for name in ("n2", "n3"):  # the job no longer needs them
            cluster[name].lose()
        assert cluster.run(stay, save, [8]) == ["2 copies in 2 racks"] * 2
        assert cluster.run(["n1"], save, [9]) == ["2 copies in 2 racks"]  # n4 has no rank, but still keeps a replica


def test_steps_of_a_single_rank_survive_its_node(ranks):
    with make_cluster(ranks, "n1", "n2", labels=lambda name: f"rack=r{name[1:]}") as cluster:
        cluster.run(["n1", "n2"], save, [5, 6])
        assert cluster.run(["n1"], save, [7, 8]) == ["2 copies in 2 racks"]
        wait_until(lambda: newest_replicated(cluster, "n2") == 8, "n2 knows that it holds the newest step")
        cluster["n1"].lose()
        wait_until(lambda: standing(cluster, "n2", "n1") == "dead", "n2 considers n1 dead")
        ((tiers, _),) = cluster.run(["n2"], restore, 8)
        assert set(tiers) == {"memory"}
        assert cluster.run(["n2"], save, [9], 1) == ["1 copy"]


@pytest.mark.parametrize("left", [pytest.param("n1", marks=pytest.mark.nightly), "n2"])
def test_only_remaining_node_saves_in_any_name_order(ranks, left):
    (lost,) = {"n1", "n2"} - {left}
    with make_cluster(ranks, "n1", "n2", labels=lambda name: f"rack=r{name[1:]}") as cluster:
        assert cluster.run(["n1", "n2"], save, [5, 6]) == ["2 copies in 2 racks"] * 2
        cluster[lost].lose()
        wait_until(lambda: standing(cluster, left, lost) == "dead", "n2 considers n1 dead")
        cluster.run([left], restore, 6)
        assert cluster.run([left], save, [7, 8], 1) == ["1 copy"]
        cluster.run([left], restore, 8)


def test_restore_waits_for_the_node_that_continued_the_job(ranks):
    with make_cluster(ranks, "n1", "n2", labels=lambda name: f"rack=r{name[1:]}") as cluster:
        alone = {"TIEREDCKPT_PEER_COPIES": "1"}
        cluster.run(["n1", "n2"], save, [5, 6], 1, environ=alone)
        cluster.run(["n1"], save, [7, 8], 1, environ=alone)
        wait_until(lambda: roster(cluster, "n2") == roster(cluster, "n1"), "n2 has the roster of n1")
        cluster["n1"].suspend_agent()
        wait_until(lambda: standing(cluster, "n2", "n1") == "dead", "n2 considers n1 dead")
        with ThreadPoolExecutor(1) as aside:
            restored = aside.submit(cluster.run, ["n2"], restore, 8, environ=alone)
            wait_until(lambda: at_work(cluster, "n2") or restored.done(), "a rank has started on the node")
            cluster["n1"].resume_agent()
            ((tiers, _),) = restored.result()
        assert "peer" in tiers


def roster(cluster, name):
    with cluster[name].agent(cluster.job) as agent:
        return agent.cluster_status(cluster.job).member_list_version


def newest_replicated(cluster, name):
    with cluster[name].agent(cluster.job) as agent:
        views = agent.cluster_status(cluster.job).nodes
    return next(view.newest_replicated.version for view in views if view.node.id == name)


def at_work(cluster, name):
    with cluster[name].agent() as agent:
        return next(job.clients for job in agent.store.status().jobs if job.job == cluster.job)


def standing(cluster, asked, node):
    with cluster[asked].agent(cluster.job) as agent:
        return next(view.state for view in agent.cluster_status(cluster.job).nodes if view.node.id == node)


@contextlib.contextmanager
def supervised(cluster, *names):
    """Start the supervisors' agent processes of these nodes in this process."""
    agents = [MemoryTierProcess({**os.environ, **cluster[name].environ}) for name in names]
    try:
        for agent in agents:
            agent.start()
        yield
    finally:
        for agent in agents:
            agent.close()


def test_agents_of_both_leaving_nodes_die_before_they_are_read(ranks):
    with make_cluster(ranks, "n1", "n2", "n3", labels=lambda name: f"rack=r{name[1:]}") as cluster:
        assert cluster.run(["n1", "n2", "n3"], save, [5, 6]) == ["2 copies in 2 racks"] * 3
        with supervised(cluster, "n2", "n3"):
            for name in ("n2", "n3"):
                os.kill(cluster[name].pid, signal.SIGKILL)
            cluster.run(["n1"], restore, 6)
