"""Replication that a save must reach before the next save starts."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tests.support.agent_jobs import agent_job
from tests.support.local_nodes import SECRET
from tieredckpt import Checkpointer
from tieredckpt.checkpointer.save_handle import SaveState
from tieredckpt.settings import override_settings

pytestmark = pytest.mark.e2e


def state_at(step):
    return {"w": torch.full((3 << 18,), float(step))}


@contextlib.contextmanager
def checkpointer(job, require, **memory):
    """Yield a checkpointer on n1, which has one partner."""
    nodes = ",".join(f"{name}={node.address}" for name, node in job.nodes.items())
    peer = {"discovery": f"static:{nodes}", "secret": SECRET.decode(), "require": require}
    settings = override_settings(job["n1"].settings, peer=peer, memory=memory)
    with Checkpointer(job.job, settings=settings, on_sigterm="ignore") as ckpt:
        yield ckpt


def test_save_waits_for_the_copies_of_the_previous_step():
    with agent_job("n1", "n2") as job, checkpointer(job, "copied") as ckpt:
        last = ckpt.save(state_at(0), 0)
        for step in range(1, 6):
            saved = ckpt.save(state_at(step), step)
            assert last.durability.startswith("2 copies")
            last = saved


def test_required_replication_saves_no_step_without_the_partner():
    with agent_job("n1", "n2") as job, checkpointer(job, "copied", wait_s=0.5) as ckpt:
        ckpt.save(state_at(0), 0).wait(copies=2, timeout_s=60)
        job["n2"].suspend_agent()
        last = ckpt.save(state_at(1), 1)
        assert last.wait() is SaveState.SEALED
        refused = ckpt.save(state_at(2), 2)
        assert refused.state is SaveState.SKIPPED
        assert "the last save has 1 copy, 1 on the way after 0.5 s" in str(refused.error)
        job["n2"].resume_agent()
        assert last.wait(copies=2, timeout_s=60) is SaveState.COPIED
        assert ckpt.save(state_at(3), 3).wait(copies=2, timeout_s=60) is SaveState.COPIED


def test_optional_replication_saves_steps_without_the_partner():
    with agent_job("n1", "n2") as job, checkpointer(job, "sealed") as ckpt:
        ckpt.save(state_at(0), 0).wait(copies=2, timeout_s=60)
        job["n2"].suspend_agent()
        assert [ckpt.save(state_at(step), step).wait() for step in (1, 2)] == [SaveState.SEALED] * 2
        job["n2"].resume_agent()


def test_copies_are_not_awaited_without_another_node():
    with agent_job("n1", "n2") as job, checkpointer(job, "copied", wait_s=3600) as ckpt:  # longer than a test may take
        ckpt.save(state_at(0), 0).wait(copies=2, timeout_s=60)
        job["n2"].lose()
        ckpt.save(state_at(1), 1).wait()
        assert ckpt.save(state_at(2), 2).wait() is SaveState.SEALED
