"""A node agent runs as long as its node's supervisor, even if the node is in no world."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import subprocess
import sys

import pytest

from elastic.fault_injection.fault_actions import kill_agent
from elastic.supervisor.memory_tier import MemoryTierProcess
from peerstore.daemon_process import process_start_time
from peerstore.settings import AgentPaths
from tests.support.agents import agent_directory, agent_pid, stop_agent, wait_process_ended
from tests.support.local_nodes import wait_until

pytestmark = pytest.mark.e2e


@contextlib.contextmanager
def started():
    """Start the agent of a node without ranks, which exits when unused; yield it and its process."""
    with agent_directory() as directory:
        environ = {
            "TIEREDCKPT_AGENT_DIRECTORY": str(directory),
            "TIEREDCKPT_AGENT_BUDGET": "16MiB",
            "TIEREDCKPT_AGENT_LINGER_S": "0",
        }
        agent = MemoryTierProcess(environ)
        try:
            agent.start()
            pid = agent_pid(directory)
            assert pid is not None
            yield agent, pid
        finally:
            agent.close()


def test_agent_runs_as_long_as_its_supervisor():
    with started() as (agent, pid):
        for _ in range(2):  # agents that started later end first
            with started() as (other, gone):
                other.close()
                wait_process_ended(gone)
            assert process_start_time(pid) >= 0
        agent.close()
        wait_process_ended(pid)


def test_existing_agent_survives_a_second_supervisor():
    with started() as (first, pid):
        second = MemoryTierProcess(first._environ)
        second.start()
        first.close()
        with started() as (other, gone):
            other.close()
            wait_process_ended(gone)
        assert process_start_time(pid) >= 0
        assert second.kept_directory is None
        second.shut_down()  # the second handle must not stop this agent, which exits once it is unused
        wait_process_ended(pid)


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(signal.SIGKILL, id="it dies", marks=pytest.mark.nightly),
        pytest.param(signal.SIGSTOP, id="it hangs"),
    ],
)
def test_unused_agent_is_replaced(end):
    with started() as (agent, pid):
        os.kill(pid, end)
        directory = agent.kept_directory
        wait_until(lambda: agent_pid(directory) not in (None, pid), "another agent runs")
        wait_process_ended(pid)
        agent.shut_down()


def test_offered_agent_is_offered_again_after_it_died():
    with started() as (agent, pid):
        agent._environ["TIEREDCKPT_PEER_SECRET"] = "a secret that all nodes share, 32"
        offers = queue.SimpleQueue()
        agent.offer_memory(offers.put)
        first = offers.get(timeout=200)
        os.kill(pid, signal.SIGKILL)
        assert offers.get(timeout=200) == first  # the new agent listens on the port that other nodes know
        agent.shut_down()


@pytest.mark.parametrize("peer", [{}, {"COPIES": "1"}, {"DISCOVERY": "off"}], ids=["no secret", "one copy", "no peers"])
def test_agent_without_a_use_for_it_is_not_offered(peer):
    with started() as (agent, _):
        secret = {"SECRET": "a secret that all nodes share, 32"} if peer else {}
        agent._environ.update({f"TIEREDCKPT_PEER_{name}": value for name, value in {**secret, **peer}.items()})
        offers = []
        agent.offer_memory(offers.append)
        assert offers == []


def test_stopped_agent_is_not_restarted(caplog):
    with started() as (agent, _):
        directory = agent.kept_directory
        with caplog.at_level(logging.DEBUG, "peerstore.client.agent_launcher"):
            stop_agent(directory)
            wait_until(
                lambda: len(caplog.records) > 1 or agent_pid(directory), "the supervisor notices the missing agent"
            )
        assert agent_pid(directory) is None


LOOKS_AFTER = """
import fcntl, sys
with open(sys.argv[1], "r+b") as lock:
    fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
"""


def test_ranks_leave_the_agent_to_their_supervisor():
    """Otherwise both would restart the agent, and for different reasons."""
    with started() as (agent, _):
        lock = AgentPaths(agent.kept_directory).watchdog_lock
        rank = subprocess.run([sys.executable, "-c", LOOKS_AFTER, str(lock)], capture_output=True, check=False)
        assert b"BlockingIOError" in rank.stderr, rank.stderr
        agent.close()
        rank = subprocess.run([sys.executable, "-c", LOOKS_AFTER, str(lock)], capture_output=True, check=False)
        assert rank.returncode == 0, "the ranks may restart the agent after the supervisor's end"


@pytest.mark.parametrize("own", [True, False])
def test_agent_that_outlived_its_supervisor_ends_with_its_job(own):
    with agent_directory() as directory:
        environ = {
            "TIEREDCKPT_AGENT_DIRECTORY": str(directory),
            "TIEREDCKPT_AGENT_BUDGET": "16MiB",
            "TIEREDCKPT_AGENT_LINGER_S": "3600",
        }
        with contextlib.closing(MemoryTierProcess(environ)) as killed:
            killed.start()
            pid = agent_pid(directory)
            assert pid is not None
            second = MemoryTierProcess(environ, directory.parent if own else directory.parent / "another")
            second.start()
        second.shut_down()
        if own:
            wait_process_ended(pid)
        else:  # the agent may serve other jobs
            assert process_start_time(pid) >= 0


def test_process_with_the_agents_reused_pid_is_not_killed():
    """The agent is dead, but its directory still has its PID, which another process has now."""
    with started() as (agent, pid), subprocess.Popen(["sleep", "600"]) as innocent:
        try:
            directory = agent.kept_directory
            agent.close()
            os.kill(pid, signal.SIGKILL)
            wait_process_ended(pid)
            AgentPaths(directory).lock.write_text(str(innocent.pid))
            agent.shut_down()
            kill_agent({"TIEREDCKPT_AGENT_DIRECTORY": str(directory)})
        finally:
            innocent.send_signal(signal.SIGUSR1)  # fails if the process was killed before
        assert innocent.wait(20) == -signal.SIGUSR1
