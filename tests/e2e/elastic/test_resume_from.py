"""``elastic run --resume-from``: the first world restores the requested step, or the job ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.agents import stop_agent
from tieredckpt.cli.exit_codes import ExitCode

pytestmark = pytest.mark.e2e

SCRIPT = """
import os, signal, sys, torch, elastic
from tieredckpt import Checkpointer

@elastic.recoverable
def train(world):
    state = {"w": torch.zeros(4), "step": 0}
    with Checkpointer("tiered://branching") as ckpt:
        first = ckpt.restore(state)
        with open(sys.argv[2], "a") as file:
            file.write(f"{first} {int(state['w'][0])}\\n")
        if world.epoch == 0 and first == 1 and os.environ.get("DIES"):
            os.kill(os.getpid(), signal.SIGKILL)
        for step in world.steps(first + 1, int(sys.argv[1])):
            state["w"] += 1
            state["step"] = step
            ckpt.save(state, step).wait()
            ckpt.wait("durable")

train()
"""


@pytest.fixture
def elastic_run(tmp_path, agent_dir):
    """Return a function that trains up to a step and returns the process and its restored steps."""
    script, told = tmp_path / "train.py", tmp_path / "restored"
    script.write_text(SCRIPT)
    environ = os.environ | {
        "TIEREDCKPT_AGENT_DIRECTORY": str(agent_dir),
        "TIEREDCKPT_DURABLE_URL": f"file://{tmp_path}/durable",
        "TIEREDCKPT_DURABLE_EVERY": "1",
        "TIEREDCKPT_DURABLE_KEEP_LAST": "0",
        "ELASTIC_RUN_DIRECTORY": str(tmp_path / "run"),
    }

    def run(total, *options, **more):
        told.unlink(missing_ok=True)
        command = [sys.executable, "-m", "elastic", "run", *options, str(script), str(total), str(told)]
        done = subprocess.run(command, env=environ | more, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done, told.read_text().split("\n")[:-1] if told.exists() else []

    yield run
    stop_agent(agent_dir)


def test_first_world_restores_the_requested_step_or_the_job_ends(elastic_run):
    done, restored = elastic_run(4)
    assert (done.returncode, restored) == (0, ["-1 0"]), done.stderr
    done, restored = elastic_run(5, "--resume-from", "1")
    assert (done.returncode, restored) == (0, ["1 2"]), done.stderr
    assert (
        "step 1 was restored, which leaves complete newer steps behind: steps 3, 2 of epoch"
        in done.stdout + done.stderr
    )
    done, restored = elastic_run(6, "--resume-from", "9")
    assert (done.returncode, restored) == (ExitCode.JOB_FAILED, [])
    assert "elastic run --resume-from 9: " in done.stderr
    assert "there are steps 0, 1, 2, 3, 4" in done.stderr
    assert "not retried" in done.stderr
    command = next(line for line in done.stderr.splitlines() if line.startswith("command: "))
    assert "--resume-from" not in command
    done, restored = elastic_run(6)
    assert (done.returncode, restored) == (0, ["4 5"]), done.stderr


def test_requested_step_is_restored_again_if_a_rank_dies_before_a_seal(elastic_run):
    done, restored = elastic_run(4)
    assert (done.returncode, restored) == (0, ["-1 0"]), done.stderr
    done, restored = elastic_run(5, "--resume-from", "1", DIES="1")
    assert (done.returncode, restored) == (0, ["1 2", "1 2"]), done.stderr
    done, restored = elastic_run(6)
    assert (done.returncode, restored) == (0, ["4 5"]), done.stderr
