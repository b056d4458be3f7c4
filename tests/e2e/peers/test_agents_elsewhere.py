"""Agents that begin again where they cannot have their old port, and agents that hang: told and replaced by ranks."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from peerstore.errors import PeerStoreError
from tests.e2e.peers.test_node_lost import restore, sharded
from tests.support.agents import agent_pid, end_agent
from tests.support.bits import zeroed
from tests.support.clusters import cluster_of
from tieredckpt import Checkpointer
from tieredckpt.errors import TieredCheckpointError
from tieredckpt.saved import SaveState

pytestmark = pytest.mark.e2e


def save_from_other_ports(job):
    with Checkpointer(job, on_sigterm="ignore") as ckpt:
        ckpt.restore(zeroed(sharded(0)))
        ckpt.save(sharded(5), 5).wait(copies=2, timeout_s=60)
        address = ckpt.session.node.me().address
        dist.barrier()
        end_agent(Path(os.environ["TIEREDCKPT_AGENT_DIRECTORY"]), signal.SIGKILL)
        with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
            dist.barrier()
            saved = ckpt.save(sharded(6), 6)
            saved.wait(copies=2, timeout_s=60)
            assert ckpt.session.node.me().address != address
        return saved.durability


def test_agents_that_lost_their_ports_are_told_to_each_other_by_their_ranks(ranks):
    with cluster_of(ranks, "n1", "n2", labels=lambda name: f"rack=r{name[1:]}") as cluster:
        assert cluster.run(["n1", "n2"], save_from_other_ports) == ["2 copies in 2 racks"] * 2
        cluster.run(["n1", "n2"], restore, 6)


def save_while_the_agent_hangs(job):
    with Checkpointer(job, on_sigterm="ignore") as ckpt:
        ckpt.restore(zeroed(sharded(0)))
        ckpt.save(sharded(5), 5).wait(timeout_s=60)
        pid = agent_pid(Path(os.environ["TIEREDCKPT_AGENT_DIRECTORY"]))
        os.kill(pid, signal.SIGSTOP)
        ckpt.save(sharded(6), 6)
        state = ckpt.save(sharded(7), 7).wait(timeout_s=60)
        return state, agent_pid(Path(os.environ["TIEREDCKPT_AGENT_DIRECTORY"])) != pid


def test_an_agent_that_hangs_is_replaced_and_costs_a_save_at_most(ranks):
    with cluster_of(ranks, "n1") as cluster:
        assert cluster.run(["n1"], save_while_the_agent_hangs) == [(SaveState.SEALED, True)]
        cluster.run(["n1"], restore, 7)


def wait_for_a_stopped_agent(job, url):
    """What each wait of the public surface says while the agent, which is not this process's, is stopped."""
    from tieredckpt.session import open_session

    with Checkpointer(job, durable=url, on_sigterm="ignore") as ckpt:
        ckpt.restore(zeroed(sharded(0)))
        saved = ckpt.save(sharded(5), 5)
        saved.wait("durable", timeout_s=60)
        node = open_session(job, ckpt.settings).node
        (view,) = node.survey(job).views
        key = ckpt._last
        pid = agent_pid(Path(os.environ["TIEREDCKPT_AGENT_DIRECTORY"]))
        os.kill(pid, signal.SIGSTOP)
        said = {}
        try:
            waits = {
                "copies": lambda: saved.wait(copies=2, timeout_s=2.0),
                "durable": lambda: saved.wait("durable", timeout_s=2.0),
                "all durable": lambda: ckpt.wait("durable", timeout_s=2.0),
                "wait_durable": lambda: node.wait_durable(job, None, 2.0),
                "durability": lambda: node.durability(key, copies=2, timeout_s=2.0),
                "status": node.store.status,
                "survey": lambda: node.survey(job, fresh=True),
                "describe": lambda: node.describe(job, view.group),
                "pin": lambda: node.store.pin(key),
                "restore": lambda: ckpt.restore(zeroed(sharded(5))),
            }
            for name, wait in waits.items():
                began = time.monotonic()
                try:
                    found = repr(wait())
                except (TieredCheckpointError, PeerStoreError) as error:
                    found = type(error).__name__
                said[name] = time.monotonic() - began, found
        finally:
            os.kill(pid, signal.SIGCONT)
        return said


def test_every_wait_ends_in_its_time_while_an_agent_is_stopped_that_nobody_may_replace(ranks, tmp_path):
    with cluster_of(ranks, "n1") as cluster:
        cluster["n1"].start()
        environ = {"TIEREDCKPT_AGENT_EMBEDDED": "0"}
        (said,) = cluster.run(["n1"], wait_for_a_stopped_agent, tmp_path.as_uri(), environ=environ)
    bounded = ["copies", "durable", "all durable", "wait_durable", "durability"]
    late = {
        name: seconds for name, (seconds, _) in said.items() if seconds > (2.0 + 1.0 + 2.0 if name in bounded else 40)
    }
    assert late == {}, said  # a second for the way there and back, and two that a busy machine may take
    assert said["all durable"][1] != "True", said
