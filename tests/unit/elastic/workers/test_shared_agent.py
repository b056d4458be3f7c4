"""Simulated nodes do not begin from nothing if another launcher left steps of the job on this machine."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from elastic.settings import SHARED_AGENT_VARIABLE
from elastic.workers.shared_agent import SharedAgentSteps, expect_steps_of_shared_agent
from tests.support.agents import agent_pid, stop_agent, stop_process
from tieredckpt import Checkpointer
from tieredckpt.errors import CheckpointNotFoundError, TierUnavailableError
from tieredckpt.session.session import close_sessions

pytestmark = pytest.mark.e2e


def test_restore_refuses_to_start_from_nothing_and_names_the_step(agent_dir, monkeypatch):
    with Checkpointer("tiered://shared") as ckpt:
        ckpt.save({"w": torch.ones(3)}, 4).wait()
    close_sessions()
    own = agent_dir / "n0"
    monkeypatch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(own))
    monkeypatch.setenv(SHARED_AGENT_VARIABLE, str(agent_dir))
    try:
        refused = pytest.raises(CheckpointNotFoundError, match=f"step 4 is in memory of the agent in {agent_dir}")
        with expect_steps_of_shared_agent(), Checkpointer("tiered://shared") as ckpt, refused:
            ckpt.restore({"w": torch.zeros(3)})
        with expect_steps_of_shared_agent(), Checkpointer("tiered://another") as ckpt:
            assert ckpt.restore({"w": torch.zeros(3)}) == -1
    finally:
        close_sessions()
        stop_agent(own)


def test_absent_shared_agent_expects_nothing(tmp_path):
    assert SharedAgentSteps(tmp_path).expected_step("job") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_restore_refuses_to_start_from_nothing_if_the_agent_is_silent(agent_dir, monkeypatch, number):
    with Checkpointer("tiered://shared") as ckpt:
        ckpt.save({"w": torch.ones(3)}, 4).wait()
    close_sessions()
    own, pid = agent_dir / "n0", agent_pid(agent_dir)
    monkeypatch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(own))
    monkeypatch.setenv(SHARED_AGENT_VARIABLE, str(agent_dir))
    if number == signal.SIGSTOP:
        stop_process(pid)
    else:
        stop_agent(agent_dir, number)
    try:
        refused = pytest.raises(TierUnavailableError, match=f"the agent in {agent_dir} does not answer")
        with expect_steps_of_shared_agent(), Checkpointer("tiered://shared") as ckpt, refused:
            ckpt.restore({"w": torch.zeros(3)})
        with expect_steps_of_shared_agent(), Checkpointer("tiered://another") as ckpt:
            assert ckpt.restore({"w": torch.zeros(3)}) == -1
    finally:
        if number == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
        close_sessions()
        stop_agent(own)
