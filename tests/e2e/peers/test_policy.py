"""What a save must have reached before the next one begins."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tests.support.agent_jobs import agent_job
from tests.support.neighbours import SECRET
from tieredckpt import Checkpointer
from tieredckpt.saved import SaveState
from tieredckpt.settings import override

pytestmark = pytest.mark.e2e


def state_at(step):
    return {"w": torch.full((3 << 18,), float(step))}


@contextlib.contextmanager
def checkpointer(job, require, **memory):
    """On n1, which has one partner."""
    nodes = ",".join(f"{name}={node.address}" for name, node in job.nodes.items())
    peer = {"discovery": f"static:{nodes}", "secret": SECRET.decode(), "require": require}
    settings = override(job["n1"].settings, peer=peer, memory=memory)
    with Checkpointer(job.job, settings=settings, on_sigterm="ignore") as ckpt:
        yield ckpt


def test_no_step_begins_before_the_last_one_has_its_copies():
    with agent_job("n1", "n2") as job, checkpointer(job, "copied") as ckpt:
        last = ckpt.save(state_at(0), 0)
        for step in range(1, 6):
            saved = ckpt.save(state_at(step), step)
            assert last.durability.startswith("2 copies")
            last = saved


@pytest.mark.parametrize(("require", "skipped"), [("copied", True), ("sealed", False)])
def test_while_the_partner_is_away_steps_are_skipped_where_copies_are_required(require, skipped):
    with agent_job("n1", "n2") as job, checkpointer(job, require, wait_s=0.5) as ckpt:
        ckpt.save(state_at(0), 0).wait(copies=2, timeout_s=60)
        job["n2"].freeze()
        assert ckpt.save(state_at(1), 1).wait() is SaveState.SEALED
        next_one = ckpt.save(state_at(2), 2)
        assert (next_one.state is SaveState.SKIPPED) == skipped
        if skipped:
            assert "the last save has 1 copy, 1 on the way after 0.5 s" in str(next_one.error)
        job["n2"].thaw()
        ckpt.save(state_at(3), 3)
        assert ckpt.save(state_at(4), 4).wait(copies=2, timeout_s=60) is SaveState.COPIED
