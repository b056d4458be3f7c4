"""Agents restarted on another port, and hung agents that the ranks detect and replace."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch.distributed as dist

from peerstore import deadlines
from peerstore.errors import PeerStoreError
from tests.e2e.peers.test_node_lost import restore, sharded
from tests.support.agents import agent_pid, stop_agent, stop_process
from tests.support.bits import zeros_like_state
from tests.support.clusters import make_cluster
from tieredckpt import Checkpointer
from tieredckpt.checkpointer.save_handle import SaveState
from tieredckpt.errors import TieredCheckpointError

pytestmark = pytest.mark.e2e


def save_from_other_ports(job):
    with Checkpointer(job, on_sigterm="ignore") as ckpt:
        ckpt.restore(zeros_like_state(sharded(0)))
        ckpt.save(sharded(5), 5).wait(copies=2, timeout_s=60)
        address = ckpt.session.agent.this_node().address
        dist.barrier()
        stop_agent(Path(os.environ["TIEREDCKPT_AGENT_DIRECTORY"]), signal.SIGKILL)
        with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
            dist.barrier()
            saved = ckpt.save(sharded(6), 6)
            saved.wait(copies=2, timeout_s=60)
            assert ckpt.session.agent.this_node().address != address
        return saved.durability


def test_agents_with_new_ports_are_connected_by_their_ranks(ranks):
    with make_cluster(ranks, "n1", "n2", labels=lambda name: f"rack=r{name[1:]}") as cluster:
        assert cluster.run(["n1", "n2"], save_from_other_ports) == ["2 copies in 2 racks"] * 2
        cluster.run(["n1", "n2"], restore, 6)


def save_while_the_agent_hangs(job):
    with Checkpointer(job, on_sigterm="ignore") as ckpt:
        ckpt.restore(zeros_like_state(sharded(0)))
        ckpt.save(sharded(5), 5).wait(timeout_s=60)
        pid = agent_pid(Path(os.environ["TIEREDCKPT_AGENT_DIRECTORY"]))
        stop_process(pid)
        ckpt.save(sharded(6), 6)
        state = ckpt.save(sharded(7), 7).wait(timeout_s=60)
        return state, agent_pid(Path(os.environ["TIEREDCKPT_AGENT_DIRECTORY"])) != pid


def test_an_agent_that_hangs_is_replaced_and_costs_a_save_at_most(ranks):
    with make_cluster(ranks, "n1") as cluster:
        assert cluster.run(["n1"], save_while_the_agent_hangs) == [(SaveState.SEALED, True)]
        cluster.run(["n1"], restore, 7)


def wait_for_a_stopped_agent(job, url):
    """Return the outcome and duration of each public wait while the agent is stopped."""
    from tieredckpt.session.session import open_session

    with Checkpointer(job, durable=url, durable_every=5, on_sigterm="ignore") as ckpt:
        ckpt.restore(zeros_like_state(sharded(0)))
        durable = ckpt.save(sharded(5), 5)
        durable.wait("durable", timeout_s=60)
        saved = ckpt.save(sharded(6), 6)
        saved.wait(timeout_s=60)
        node = open_session(job, ckpt.settings).agent
        view = node.list_steps(job).views[-1]
        key = ckpt._queue.last_sealed
        pid = agent_pid(Path(os.environ["TIEREDCKPT_AGENT_DIRECTORY"]))
        ckpt.session.stop_watching_agent()  # otherwise this rank would start another agent
        dist.barrier()
        stop_process(pid)
        said = {}
        try:
            waits = {
                "known": lambda: durable.wait("durable", timeout_s=2.0),
                "copies": lambda: saved.wait(copies=2, domains=2, timeout_s=2.0),
                "durable": lambda: saved.wait("durable", timeout_s=2.0),
                "all durable": lambda: ckpt.wait("durable", timeout_s=2.0),
                "wait_durable": lambda: node.wait_durable(job, None, 2.0),
                "durability": lambda: node.replication_status(key, copies=2, timeout_s=2.0),
                "restore": lambda: ckpt.restore(zeros_like_state(sharded(5)), timeout_s=2.0),
            }
            asked = {
                "status": node.store.status,
                "survey": lambda: node.list_steps(job, fresh=True),
                "describe": lambda: node.steps.describe(job, view.version_id),
                "pin": lambda: node.store.pin(key),
                "drains": lambda: node.drain_status(job),
                "cluster": lambda: node.cluster_status(job),
                "lease": lambda: node.store.lease(msgspec.structs.replace(key, version=7), 1000, 1, wait_s=60),
            }
            for name, wait in waits.items():
                dist.barrier()
                said[name] = came_of(wait)
            with ThreadPoolExecutor(len(asked)) as pool:
                said |= zip(asked, pool.map(partial(came_of, within_s=2.0), asked.values()), strict=True)
        finally:
            os.kill(pid, signal.SIGCONT)
        return pid, said


def came_of(wait, within_s=None):
    began = time.monotonic()
    try:
        with deadlines.timeout_scope(within_s):
            found = repr(wait())
    except (TieredCheckpointError, PeerStoreError) as error:
        found = str(error)
    return time.monotonic() - began, found


@pytest.mark.parametrize(
    "embedded", [pytest.param("0", id="not its own"), pytest.param("1", marks=pytest.mark.nightly, id="its own")]
)
def test_every_wait_on_a_stopped_agent_times_out_with_a_reason(ranks, tmp_path, embedded):
    with make_cluster(ranks, "n1", "n2", labels=lambda name: f"rack=r{name[1:]}") as cluster:
        for name in ("n1", "n2"):
            cluster[name].start()
        environ = {"TIEREDCKPT_AGENT_EMBEDDED": embedded}
        for pid, said in cluster.run(["n1", "n2"], wait_for_a_stopped_agent, tmp_path.as_uri(), environ=environ):
            check_that_every_wait_said_why(pid, said)


def check_that_every_wait_said_why(pid, said):
    late = {name: seconds for name, (seconds, _) in said.items() if seconds > 2.0 + 1.0 + 2.0}
    assert late == {}, said  # one second for the round trip, and two for a busy machine
    found = {name: text for name, (_, text) in said.items()}
    assert found.pop("known") == repr(SaveState.DURABLE), "the answer needs no agent"
    assert found.pop("all durable") == "False"
    silent = r"the agent \(process (\d+)\) [\w' ]+: nothing was heard of it for \d\.\d s\. It hangs, .*"
    before = {
        "copies": "whether step 6 has 2 copies in 2 domains is not known after 2.0 s: ",
        "durable": "whether step 6 is durable is not known after 2.0 s: ",
    }
    said_by = {name: re.fullmatch(before.get(name, "(?:.*: )?") + silent, text) for name, text in found.items()}
    assert [name for name, match in said_by.items() if match is None] == [], found
    asked = {name: int(match[1]) for name, match in said_by.items() if match is not None and name != "restore"}
    assert set(asked.values()) == {pid}, "every rank names its own stopped agent"
