"""Steps that a caller pins, requires to be durable, or releases."""

import os
import shutil
import signal

import pytest
import torch

from tests.support.agents import stop_agent
from tests.support.bits import assert_same_bits, zeros_like_state
from tests.support.jobs import CheckpointJob
from tests.support.local_nodes import wait_until
from tieredckpt import Checkpointer, CheckpointNotFoundError
from tieredckpt.checkpointer.save_handle import SaveState
from tieredckpt.errors import UsageError
from tieredckpt.session.session import close_sessions
from tieredckpt.settings import DurableSettings

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

JOB = "tiered://keeping"


def state_at(step, size=1000):
    return {"w": torch.full((size,), float(step)), "step": step}


def in_memory(ckpt):
    return [one.step for one in ckpt.steps() if "memory" in one.tiers]


def expect(ckpt, step):
    found = zeros_like_state(state_at(step))
    assert ckpt.restore(found, step) == step
    assert_same_bits(state_at(step), found)


def test_repeated_save_of_a_step_evicts_no_other(agent_dir):
    with Checkpointer(JOB) as ckpt:
        for step in (10, 12, 12):
            ckpt.save(state_at(step), step).wait()
        assert 10 in in_memory(ckpt)
        for _ in range(4):
            ckpt.save(state_at(12), 12).wait()
        assert 10 in in_memory(ckpt)
        assert len(in_memory(ckpt)) <= 4, "superseded attempts were not evicted"
        ckpt.save(state_at(13), 13).wait()
        ckpt.save(state_at(14), 14).wait()
        assert 13 in in_memory(ckpt)


def test_pinned_step_stays_while_newer_ones_expire(agent_dir, monkeypatch):
    with Checkpointer(JOB, every=5) as ckpt:
        ckpt.restore(state_at(0))
        assert ckpt.save(state_at(3), 3).state is SaveState.NOT_DUE
        ckpt.save(state_at(4), 4, keep=True).wait()
        for step in range(5, 60, 5):
            ckpt.save(state_at(step), step).wait()
        ckpt.save(state_at(61), 61, keep=True).wait()
        for step in range(65, 100, 5):
            ckpt.save(state_at(step), step).wait()
        steps = in_memory(ckpt)
        assert steps[:2] == [4, 61]
        assert len(steps) >= 4, "pinned steps do not count"
    close_sessions()
    stop_agent(agent_dir, signal.SIGKILL)
    with Checkpointer(JOB, every=5) as ckpt:
        for step in range(100, 130, 5):
            ckpt.save(state_at(step), step).wait()
        expect(ckpt, 4)
        expect(ckpt, 61)


def test_save_reports_that_only_pinned_steps_remain(agent_dir, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_AGENT_BUDGET", "10MiB")
    size = 3 * (1 << 20) // 4
    with Checkpointer(JOB) as ckpt:
        for step in (1, 2):
            ckpt.save(state_at(step, size), step, keep=True).wait()
        ckpt.save(state_at(3, size), 3).wait()
        saved = ckpt.save(state_at(4, size), 4)
        assert not saved.ok
        assert "hold versions that are pinned (1, 2): unpin them (tieredckpt unpin)" in str(saved.error)
        assert ckpt.drop(2)
        ckpt.save(state_at(5, size), 5).wait()
        assert in_memory(ckpt) == [1, 3, 5]


def test_dropped_step_is_gone_from_every_tier(agent_dir, tmp_path):
    with Checkpointer(JOB, durable=f"file://{tmp_path}/store") as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state_at(step), step, keep=step == 2).wait("durable")
        assert ckpt.drop(2)
        assert not ckpt.drop(2)
        assert [one.step for one in ckpt.steps()] == [1, 3]
        with pytest.raises(CheckpointNotFoundError):
            ckpt.restore(state_at(2), 2)
        assert not list((tmp_path / "store").rglob("*000000000002*"))
        assert ckpt.drop(3)
        found = zeros_like_state(state_at(1))
        assert ckpt.restore(found) == 1
        assert ckpt.drop(1)
        assert ckpt.restore(found) == -1, "the caller dropped both steps"


def test_drop_that_would_revive_abandoned_steps_is_refused(agent_dir, tmp_path):
    with Checkpointer(JOB, durable=f"file://{tmp_path}/store") as ckpt:
        for step in (10, 20):
            ckpt.save(state_at(step), step).wait("durable")
        ckpt.restore(state_at(0), 10)
        ckpt.save(state_at(11), 11).wait("durable")
        with pytest.raises(UsageError, match="the abandoned steps 20"):
            ckpt.drop(11)
        assert ckpt.drop(20)
        assert ckpt.drop(11)
        assert ckpt.restore(state_at(0)) == 10


def test_required_durable_step_is_not_skipped_for_another(agent_dir, tmp_path):
    store = tmp_path / "store"
    with Checkpointer(JOB, durable=f"file://{store}", every=1, durable_every=100) as ckpt:
        ckpt.save(state_at(1), 1).wait()
        shutil.rmtree(store, ignore_errors=True)
        store.write_text("in the way")
        for step in (2, 3, 4, 5, 6):
            ckpt.save(state_at(step), step, durable=step == 2).wait()
        view = next(view for view in ckpt.session.agent.drain_status("keeping") if view.version_id.version == 2)
        assert view.state in ("waiting", "running", "failed"), view


def test_required_steps_are_not_displaced_by_newer_ones(agent_dir, tmp_path):
    """The store takes one step at a time: optional steps may be skipped, required ones never."""
    job = CheckpointJob(agent_dir, DurableSettings(url=f"file://{tmp_path}/store", bandwidth="2MiB"), "many")
    size = 1 << 18
    with job.checkpointer(on_busy="wait") as ckpt:
        handles = []
        for step in range(1, 7):
            handles.append(ckpt.save(state_at(step, size), step, durable=step == 2))
            handles[-1].wait()
        assert handles[1].wait("durable", timeout_s=60) is SaveState.DURABLE
        assert ckpt.wait("durable", timeout_s=60)
        durable = [one.step for one in ckpt.steps() if "durable" in one.tiers]
        assert 2 in durable


def test_durable_save_requires_a_durable_tier(agent_dir):
    with Checkpointer(JOB) as ckpt, pytest.raises(UsageError, match="has no durable tier for step 3"):
        ckpt.save(state_at(3), 3, durable=True)


def test_durable_retention_skips_pinned_steps(agent_dir, tmp_path):
    url = f"file://{tmp_path}/store"
    with Checkpointer(JOB, durable=url, keep_last=2) as ckpt:
        for step in range(1, 7):
            ckpt.save(state_at(step), step, keep=step in (2, 5)).wait("durable")
        wait_until(lambda: stored(tmp_path / "store") == [2, 4, 5, 6], "unpinned steps are deleted after the last save")
    close_sessions()
    stop_agent(agent_dir, signal.SIGKILL)
    assert stored(tmp_path / "store") == [2, 4, 5, 6]


def stored(store):
    names = (name for _, _, names in os.walk(store) for name in names)  # unlike ``rglob``, tolerates concurrent deletes
    return sorted(int(name.partition(".")[0]) for name in names if name.endswith(".manifest"))
