"""The run after a stop restores exactly the version that the ranks sealed, or ends with an error."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest
import torch

from elastic.supervisor.memory_tier import MemoryTierProcess
from tests.support.bits import assert_same_bits
from tieredckpt import Checkpointer, CheckpointNotFoundError
from tieredckpt.agent.agent_client import NodeAgentClient
from tieredckpt.agent.stopped_step import StoppedStep, record_stopped_step, report_last_stop
from tieredckpt.cli.exit_codes import ExitCode
from tieredckpt.session.session import open_session
from tieredckpt.settings import load_settings

pytestmark = pytest.mark.e2e

SCRIPT = """
import os, signal, sys, torch, elastic
from tieredckpt import Checkpointer

total, stop_after, told = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def launcher():
    with open(f"/proc/{os.getppid()}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])

@elastic.recoverable
def train(world):
    state = {"w": torch.zeros(4), "step": 0}
    with Checkpointer("tiered://stopping") as ckpt:
        first = ckpt.restore(state)
        with open(told, "a") as file:
            file.write(f"{first} {int(state['w'][0])}\\n")
        for step in world.steps(first + 1, total, checkpoint=(ckpt, state)):
            state["w"] += 1
            state["step"] = step
            ckpt.save(state, step).wait()
            if step == stop_after and "KILLS_SUPERVISOR" in os.environ:
                os.kill(os.getppid(), signal.SIGKILL)
                signal.pause()
            if step == stop_after:
                os.kill(launcher(), signal.SIGTERM)

train()
"""


@pytest.fixture
def elastic_run(tmp_path, agent_dir):
    """Return a function that runs the script and returns the process and the restored steps."""
    script, told = tmp_path / "train.py", tmp_path / "restored"
    script.write_text(SCRIPT)
    environ = os.environ | {"ELASTIC_RUN_DIRECTORY": str(tmp_path / "run")}

    def run(total, *options, stop_after=-1):
        told.unlink(missing_ok=True)
        words = [*options, str(script), str(total), str(stop_after), str(told)]
        command = [sys.executable, "-m", "elastic", "run", *words]
        done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done, told.read_text().split("\n")[:-1] if told.exists() else []

    return run


@contextlib.contextmanager
def agent():
    with contextlib.closing(NodeAgentClient(load_settings(), "")) as client:
        yield client


def stopped_run(elastic_run):
    """Run and stop a job; return the agent's record of the stop."""
    done, restored = elastic_run(100_000, stop_after=4)
    assert (done.returncode, restored) == (ExitCode.STOPPED, ["-1 0"]), done.stderr
    with agent() as client:
        stopped = report_last_stop(client, "stopping", avoid_after=0).stopped
    assert stopped is not None, done.stderr
    assert stopped.step >= 4
    return stopped


def test_next_run_restores_the_version_that_the_stop_sealed(elastic_run):
    stopped = stopped_run(elastic_run)
    done, restored = elastic_run(stopped.step + 3)
    assert (done.returncode, restored) == (0, [f"{stopped.step} {stopped.step + 1}"]), done.stderr
    done, restored = elastic_run(stopped.step + 5)
    assert (done.returncode, restored) == (0, [f"{stopped.step + 2} {stopped.step + 3}"]), done.stderr


def test_next_run_raises_without_the_sealed_version_unless_overridden(elastic_run):
    stopped = stopped_run(elastic_run)
    with agent() as client:
        views = client.list_steps("stopping", fresh=True).views
        (gone,) = [one.version_id for one in views if one.version_id.version == stopped.step]
        client.store.versions.delete("stopping", [gone])
    done, restored = elastic_run(stopped.step + 3)
    assert (done.returncode, restored) == (ExitCode.JOB_FAILED, []), done.stderr
    assert f"the last run was stopped after its ranks sealed step {stopped.step}@{stopped.epoch}" in done.stderr
    older = stopped.step - 1
    assert f"step {older}@{stopped.epoch} as the newest complete one" in done.stderr
    done, restored = elastic_run(stopped.step + 3, "--resume-from", str(older))
    assert (done.returncode, restored) == (0, [f"{older} {older + 1}"]), done.stderr


def state(value):
    return {"w": torch.full((64,), float(value))}


def save(job, *steps):
    with Checkpointer(f"tiered://{job}") as ckpt:
        for step in steps:
            ckpt.save(state(step), step).wait()
        return ckpt.session.incarnation.current.epoch


def test_higher_step_of_an_older_branch_is_not_restored_after_a_stop(agent_dir):
    """The only live node has a higher step of an older incarnation than the stop sealed."""
    older = save("branches", 8, 9)
    session = open_session("branches", load_settings())
    record_stopped_step(session.agent, "branches", StoppedStep(older + 1000, 7))
    found = state(0)
    with Checkpointer("tiered://branches") as ckpt:
        with pytest.raises(
            CheckpointNotFoundError, match=rf"sealed step 7@{older + 1000}.*step 9@{older} as the newest"
        ):
            ckpt.restore(found)
        assert ckpt.restore(found, 9) == 9  # a caller that names a step overrides the record
    assert_same_bits(found, state(9))


def test_record_of_a_stop_ends_with_the_first_shard_of_a_later_incarnation(agent_dir):
    older = save("continued", 7)
    session = open_session("continued", load_settings())
    record_stopped_step(session.agent, "continued", StoppedStep(older, 7))
    with Checkpointer("tiered://continued") as ckpt:
        found = state(0)
        assert ckpt.restore(found) == 7
        assert_same_bits(found, state(7))
        ckpt.save(state(8), 8).wait()
    found = state(0)
    with Checkpointer("tiered://continued") as ckpt:
        assert ckpt.restore(found) == 8
    assert_same_bits(found, state(8))


def test_agent_directory_without_steps_does_not_hide_the_shared_agent(elastic_run, tmp_path):
    stopped = stopped_run(elastic_run)
    directory = tmp_path / "run" / "train" / "n0" / "agent"
    idle = MemoryTierProcess({**os.environ, "TIEREDCKPT_AGENT_DIRECTORY": str(directory)}, directory.parents[1])
    idle.start()  # as `elastic join` does, before it finds that the run has ended
    try:
        done, restored = elastic_run(stopped.step + 3, "--job", "train", "--node", "n0")
    finally:
        idle.shut_down()
    assert (done.returncode, restored) == (0, [f"{stopped.step} {stopped.step + 1}"]), done.stderr


def test_joined_node_resumes_from_the_agent_that_it_used(elastic_run, tmp_path):
    """The supervisor of the only node is killed, and the node joins again by hand."""
    environ, told = os.environ | {"ELASTIC_RUN_DIRECTORY": str(tmp_path / "run")}, tmp_path / "restored"
    words = ("--job", "lost", "--node", "n0", "--shrink-after", "200", "train.py", "12", "6", str(told))
    elastic = [sys.executable, "-m", "elastic"]
    with subprocess.Popen(
        [*elastic, "run", *words],
        env=environ | {"KILLS_SUPERVISOR": "1"},
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        for line in run.stderr:
            if "supervisor of node n0 is gone" in line:
                break
        joined = subprocess.run(
            [*elastic, "join", "lost", "--node", "n0"],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        output = run.stderr.read()
    assert (joined.returncode, run.returncode) == (0, 0), joined.stderr + output
    assert told.read_text().split("\n")[:-1] == ["-1 0", "6 7"]
