"""Simulated nodes do not begin from nothing if another launcher left steps of the job on this machine."""

from __future__ import annotations

import pytest
import torch

from elastic.settings import SHARED_AGENT_VARIABLE
from elastic.workers.shared_agent import SharedAgentSteps, expect_steps_of_shared_agent
from tests.support.agents import stop_agent
from tieredckpt import Checkpointer
from tieredckpt.errors import CheckpointNotFoundError
from tieredckpt.session.session import close_sessions

pytestmark = pytest.mark.e2e


def test_restore_refuses_to_begin_anew_and_names_the_step(agent_dir, monkeypatch):
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
