"""A rank restarts a node's agent that dies or hangs, but not one that was stopped."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from peerstore.transport.unix import connect_to_agent
from tests.e2e.peers.test_node_lost import restore, sharded
from tests.support.agents import agent_pid, stop_agent
from tests.support.bits import zeros_like_state
from tests.support.clusters import make_cluster
from tests.support.local_nodes import wait_until
from tieredckpt import Checkpointer, TieredReader

pytestmark = pytest.mark.e2e

WATCH = "peerstore-watch"


def agent_directory():
    return Path(os.environ["TIEREDCKPT_AGENT_DIRECTORY"])


def watch_threads():
    return [thread for thread in threading.enumerate() if thread.name == WATCH]


def holds_parts(agent, job, node, step):
    """Return whether another node sees this node alive with parts of a step."""
    seen = {one.node.id: one for one in agent.cluster_status(job).nodes}
    return seen[node].state == "alive" and step in {fact.key.version for fact in seen[node].shards}


def end_other_agent(job, end):
    """Kill or stop the agent of rank 1, which no process calls, and observe it from rank 0."""
    with Checkpointer(job, on_sigterm="ignore") as ckpt:
        ckpt.restore(zeros_like_state(sharded(0)))
        ckpt.save(sharded(5), 5).wait(copies=2, timeout_s=60)
        node, known, pid = ckpt.session.agent, ckpt.session.job, agent_pid(agent_directory())
        if dist.get_rank() == 1:
            os.kill(pid, end)
            wait_until(
                lambda: agent_pid(agent_directory()) not in (None, pid),
                "another agent runs, although no process called it",
            )
        dist.barrier()
        if dist.get_rank() == 0:
            wait_until(lambda: holds_parts(node, known, "n2", 5), "the agent's replicas count again")
        dist.barrier()
        ckpt.save(sharded(6), 6).wait(copies=2, timeout_s=60)
        assert len(watch_threads()) == 1
    assert watch_threads() == [], "a closed checkpointer leaves no watch thread"


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(signal.SIGKILL, id="it dies", marks=pytest.mark.nightly),
        pytest.param(signal.SIGSTOP, id="it hangs"),
    ],
)
def test_dead_unused_agent_is_replaced_during_training(ranks, end):
    with make_cluster(ranks, "n1", "n2", labels=lambda name: f"rack=r{name[1:]}") as cluster:
        cluster.run(["n1", "n2"], end_other_agent, end)
        cluster.run(["n1", "n2"], restore, 6)


class LogRecorder(logging.Handler):
    def __init__(self):
        super().__init__()
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())


def end_own_agent(job):
    noticed, watch = LogRecorder(), logging.getLogger("peerstore.client.agent_launcher")
    watch.addHandler(noticed)
    watch.setLevel(logging.DEBUG)
    with Checkpointer(job, on_sigterm="ignore") as ckpt:
        ckpt.restore(zeros_like_state(sharded(0)))
        ckpt.save(sharded(5), 5).wait(timeout_s=60)
        ckpt.session.slots.wait_until_prepared()  # which also needs an agent
        ckpt.session.add_metrics(saves=0)
        stop_agent(agent_directory(), signal.SIGTERM)
        ckpt.session.add_metrics(saves=1)  # like a thread that finishes a moment later
        wait_until(lambda: len(noticed.said) > 1 or agent_pid(agent_directory()), "the rank notices the missing agent")
        assert agent_pid(agent_directory()) is None
        assert not (agent_directory() / "agent.sock").exists()
        ckpt.save(sharded(6), 6).wait(timeout_s=60)  # a save that needs an agent starts one
        pid = agent_pid(agent_directory())
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: agent_pid(agent_directory()) not in (None, pid), "the rank replaces the killed agent")


def test_stopped_agent_is_not_restarted_until_needed(ranks):
    with make_cluster(ranks, "n1") as cluster:
        cluster.run(["n1"], end_own_agent)
        cluster.run(["n1"], restore, 6)


def leave_watch_to_other(job):
    ckpt = Checkpointer(job, on_sigterm="ignore")
    ckpt.restore(zeros_like_state(sharded(0)))
    ckpt.save(sharded(5), 5).wait(timeout_s=60)
    assert len(watch_threads()) == 1
    pid = agent_pid(agent_directory())
    for leaving in (0, 1):
        if dist.get_rank() == leaving:
            ckpt.close()
            assert watch_threads() == []
        dist.barrier()
        if leaving == 0 and dist.get_rank() == 1:
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: agent_pid(agent_directory()) not in (None, pid), "the remaining rank replaces the agent")
        dist.barrier()


def test_one_process_per_node_watches_the_agent_and_is_replaced(ranks):
    with make_cluster(ranks, "n1") as cluster:
        cluster.run(["n1", "n1"], leave_watch_to_other)


def save_with_foreign_agent(job):
    with Checkpointer(job, on_sigterm="ignore") as ckpt:
        ckpt.restore(zeros_like_state(sharded(0)))
        ckpt.save(sharded(5), 5).wait(timeout_s=60)
        return len(watch_threads())


def only_read(job):
    TieredReader(job).read_metadata()
    with Checkpointer(job, on_sigterm="ignore") as ckpt:
        assert ckpt.restore(zeros_like_state(sharded(5))) == 5
        return len(watch_threads())


def test_externally_managed_agents_are_not_watched_and_readers_watch_none(ranks):
    with make_cluster(ranks, "n1") as cluster:
        cluster["n1"].start()
        environ = {"TIEREDCKPT_AGENT_EMBEDDED": "0"}
        assert cluster.run(["n1"], save_with_foreign_agent, environ=environ) == [0]
        assert cluster.run(["n1"], only_read) == [0]
        connect_to_agent(cluster["n1"].directory / "agent.sock").close()
