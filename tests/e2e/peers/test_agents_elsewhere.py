"""Agents that begin again where they cannot have their old port, and agents that hang: told and replaced by ranks."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.e2e.peers.test_node_lost import restore, sharded
from tests.support.agents import agent_pid, end_agent
from tests.support.bits import zeroed
from tests.support.clusters import cluster_of
from tieredckpt import Checkpointer
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
