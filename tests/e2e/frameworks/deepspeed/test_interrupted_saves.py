"""DeepSpeed's folders as steps: killed and terminated ranks, incomplete saves and retention."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")
with warnings.catch_warnings():  # its optional packages, and torch's own warnings
    warnings.simplefilter("ignore")
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

from tests.support.crashes import crash_environ
from tests.support.deepspeed_training import (
    STEPS,
    TORN_BYTES,
    URL,
    kill_self,
    limit_files,
    states,
    terminate_self,
    train,
)
from tests.support.local_nodes import wait_until
from tieredckpt import Checkpointer

pytestmark = pytest.mark.e2e


def complete_steps(**options):
    with Checkpointer(URL, on_sigterm="ignore", **options) as ckpt:
        return {one.step: one.is_complete for one in ckpt.steps()}


def assert_resumes_after(zygote, folder, step, undisturbed):
    """Run the training again: it resumes after ``step`` and ends as the undisturbed run."""
    again = zygote.run_ranks(2, train, str(folder))
    state = states(undisturbed[0])[step]
    assert {one.lines[0] for one in again} == {f"first {step} {state}"}
    assert [one.result for one in again] == [one.result for one in undisturbed]


def run_until_rank_1_ends(zygote, *args, environ=None):
    """Run two ranks until the second one ends, and kill the first one, as a launcher does."""
    running = zygote.start_world(2, train, *args, environ=environ)
    try:
        status = running[1].wait().status
        running[0].kill(signal.SIGTERM if status == -signal.SIGTERM else signal.SIGKILL)
        running[0].wait(may_fail=True)  # its collectives may fail before the signal arrives
    finally:
        for one in running:
            one.kill_if_alive()
    return status


def test_killed_ranks_resume_bit_equal(agent_dir, deepspeed_zygote, tmp_path, undisturbed):
    assert len(states(undisturbed[0])) == STEPS
    killed = {(rank, "saved 3"): kill_self for rank in range(2)}
    first = deepspeed_zygote.run_ranks(2, train, str(tmp_path), 1, killed)
    assert [one.status for one in first] == [-signal.SIGKILL] * 2
    assert_resumes_after(deepspeed_zygote, tmp_path, 3, undisturbed)


def test_rank_killed_while_it_saves_the_folder(agent_dir, deepspeed_zygote, tmp_path, undisturbed):
    crash = {1: crash_environ("stage.half:3")}
    assert run_until_rank_1_ends(deepspeed_zygote, str(tmp_path), environ=crash) == -signal.SIGKILL
    steps = complete_steps()
    assert steps[2]
    assert not steps.get(3)
    assert_resumes_after(deepspeed_zygote, tmp_path, 2, undisturbed)


def test_rank_killed_while_deepspeed_writes_a_file(agent_dir, deepspeed_zygote, tmp_path, undisturbed):
    status = run_until_rank_1_ends(deepspeed_zygote, str(tmp_path), 1, {(1, "trained 3"): limit_files})
    assert status == -signal.SIGXFSZ
    torn = [one for one in Path(tmp_path, "node1").rglob("*.pt") if one.stat().st_size == TORN_BYTES]
    assert len(torn) == 1
    assert max(complete_steps()) == 2
    assert_resumes_after(deepspeed_zygote, tmp_path, 2, undisturbed)


def test_sigterm_of_one_rank_saves_the_same_step_on_all_ranks(agent_dir, deepspeed_zygote, tmp_path, undisturbed):
    status = run_until_rank_1_ends(deepspeed_zygote, str(tmp_path), 1, {(1, "saved 1"): terminate_self})
    assert status == -signal.SIGTERM
    steps = complete_steps()
    assert steps[max(steps)]
    assert 2 <= max(steps) < STEPS
    assert_resumes_after(deepspeed_zygote, tmp_path, max(steps), undisturbed)


def test_retention_drops_older_folders(agent_dir, deepspeed_zygote, tmp_path):
    options = {"durable": f"file://{tmp_path}/store", "keep_last": 2, "on_busy": "wait"}
    deepspeed_zygote.run_ranks(2, train, str(tmp_path), 1, None, options)
    with Checkpointer(URL, on_sigterm="ignore", **options) as ckpt:
        assert ckpt.wait("durable")

        def steps_in(tier):
            return [one.step for one in ckpt.steps() if tier in one.tiers]

        wait_until(lambda: len(steps_in("durable")) == 2, "two durable steps are left")
        assert steps_in("durable")[-1] == STEPS
        assert steps_in("memory")[-2:] == [STEPS - 1, STEPS]
        assert len(steps_in("memory")) <= 3, "two slots and one for a burst"
        for step in steps_in("durable"):
            assert ckpt.restore_directory(tmp_path / f"back{step}", step) == step
            assert (tmp_path / f"back{step}" / "latest").exists()
