"""Steps that the next run can restore, and the nodes that have them in memory."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import msgspec
import pytest
import torch

from elastic.cli import run
from elastic.cli.common import ElasticScreen
from elastic.control.control_messages import ExitReason, SupervisorEndpoint
from elastic.control.run_directory import LocalRun, RunDirectory
from elastic.control.running_clock import since_boot
from elastic.control.supervisor_client import SupervisorClient
from elastic.errors import ControlPlaneUnavailableError, JobFailedError
from elastic.launcher import CoordinatorSpec, JobEnd
from elastic.supervisor.memory_tier import ResumableSteps, began_ns, newest_step_holders, resumable_steps
from elastic.testing import InMemoryCoordinator
from elastic.workers.train_loop import RecoveryPolicy, RunOutcome
from elastic.workers.train_loop import run as train_loop_run
from elastic.world.scaling_policy import ScalingPolicy
from elastic.world.world_state import StepHolders
from peerstore.store.slot_metadata import JOB_METADATA, SEAL_METADATA
from tests.support.agents import agent_directory, agent_pid, stop_agent, stop_process
from tieredckpt import Checkpointer
from tieredckpt.errors import SettingsError
from tieredckpt.session.session import close_sessions


def local_run(place):
    """Return the record of a job whose secret is in its run directory."""
    return LocalRun("job", "", str(place.write_secret(None)), 1, 0, ("x",), "/", "/logs", 1.0)


class Screen:
    argv = ("run", "train.py")
    codes_by_error = ElasticScreen.codes_by_error

    def __init__(self):
        self.notes = []

    def info(self, text):
        self.notes.append(text)


@pytest.fixture
def place(tmp_path):
    found = RunDirectory(tmp_path, "job")
    found.prepare()
    return found


@pytest.mark.e2e
def test_resumable_steps_come_from_the_agents(agent_dir, place):
    began = time.time_ns()
    with Checkpointer("tiered://old") as ckpt:
        ckpt.save({"w": torch.ones(3)}, 90).wait()
    middle = time.time_ns()
    with Checkpointer("tiered://new") as ckpt:
        for step in (7, 8):
            ckpt.save({"w": torch.ones(3)}, step).wait()
    assert resumable_steps([os.environ, os.environ], middle, place) == ResumableSteps({"new": 8})
    assert resumable_steps([os.environ], began, place) == ResumableSteps({"new": 8, "old": 90})
    nobody = {**os.environ, "TIEREDCKPT_AGENT_DIRECTORY": str(agent_dir / "nobody")}
    assert resumable_steps([nobody], began, place) == ResumableSteps({})


@pytest.mark.e2e
def test_resumable_steps_of_an_earlier_run_count_for_its_job(agent_dir, tmp_path):
    with Checkpointer("tiered://job") as ckpt, Checkpointer("tiered://other") as other:
        ckpt.save({"w": torch.ones(3)}, 819).wait()
        other.save({"w": torch.ones(3)}, 90).wait()
    now = time.time_ns()
    assert resumable_steps([os.environ], now, RunDirectory(tmp_path, "job")) == ResumableSteps({"job": 819})
    assert resumable_steps([os.environ], now, RunDirectory(tmp_path, "third")) == ResumableSteps({})
    own = RunDirectory(agent_dir.parent.parent, agent_dir.parent.name)
    assert resumable_steps([os.environ], now, own) == ResumableSteps({"job": 819, "other": 90})


@pytest.mark.e2e
def test_resumable_steps_include_seals_after_the_clock_was_set_back(agent_dir, place):
    hour_ns = 3600 * 10**9
    began = since_boot(), time.time_ns() + hour_ns  # as it reported when the job began
    with Checkpointer("tiered://new") as ckpt:
        ckpt.save({"w": torch.ones(3)}, 7).wait()
    assert resumable_steps([os.environ], began[1], place) == ResumableSteps({})
    assert resumable_steps([os.environ], began_ns(*began), place) == ResumableSteps({"new": 7})


@pytest.fixture
def three_agents(monkeypatch):
    """Environments of three nodes: n0 has no agent, n1 has step 8 of a job, n2 has step 5."""
    with contextlib.ExitStack() as stack:
        directories = {node: str(stack.enter_context(agent_directory())) for node in ("n0", "n1", "n2")}
        for node, step in (("n1", 8), ("n2", 5)):
            monkeypatch.setenv("TIEREDCKPT_AGENT_DIRECTORY", directories[node])
            with Checkpointer("tiered://job") as ckpt:
                ckpt.save({"w": torch.ones(3)}, step).wait()
            close_sessions()
        yield {node: {**os.environ, "TIEREDCKPT_AGENT_DIRECTORY": directory} for node, directory in directories.items()}


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_steps_of_an_agent_that_does_not_answer_are_unknown(three_agents, place, number):
    assert newest_step_holders(three_agents) == StepHolders(newest=("n1",))
    assert resumable_steps(three_agents.values(), 0, place) == ResumableSteps({"job": 8})
    directory = Path(three_agents["n1"]["TIEREDCKPT_AGENT_DIRECTORY"])
    pid = agent_pid(directory)
    if number == signal.SIGSTOP:
        stop_process(pid)
    else:
        stop_agent(directory, number)
    try:
        assert newest_step_holders(three_agents) == StepHolders(newest=("n2",), unknown=("n1",))
        assert newest_step_holders({"n0": three_agents["n0"]}) == StepHolders()
        assert resumable_steps(three_agents.values(), 0, place) == ResumableSteps({"job": 5}, unanswered=1)
    finally:
        if number == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)


def test_clock_set_ahead_does_not_change_the_start_of_a_job():
    boot_s, wall_ns = since_boot(), time.time_ns()
    assert wall_ns - 10**9 <= began_ns(boot_s, wall_ns) <= wall_ns
    assert began_ns(boot_s, wall_ns, wall=lambda: time.time_ns() + 3600 * 10**9) == wall_ns


def test_message_names_the_job_when_there_are_several():
    assert str(ResumableSteps({})) == ""
    assert str(ResumableSteps({"a": 3})) == "step 3"
    assert str(ResumableSteps({"b": 4, "a": 3})) == "step 3 of a, step 4 of b"


def test_message_says_how_many_agents_may_have_a_later_step():
    message = str(ResumableSteps({"a": 3}, unanswered=2))
    assert message == "step 3 or a later one (2 of this machine's agents did not answer)"
    assert str(ResumableSteps({}, unanswered=2)) == ""


def launched(monkeypatch, place, end, *, steps, raises=None, status=7):
    class Launcher:
        def __init__(self, *_, **__):
            pass

        def run(self):
            if end is not None:
                place.end_file.write_bytes(msgspec.json.encode(end))
            if raises is not None:
                raise raises
            return status

    monkeypatch.setattr(run, "JobLauncher", Launcher)
    monkeypatch.setattr(run, "resumable_steps", lambda environs, since_ns, run: ResumableSteps(steps))
    place.write_secret(b"s" * 32)
    leader = CoordinatorSpec("job", "", "", ScalingPolicy(), 1, True)
    record = LocalRun("job", "", str(place.secret_file), 1, 0, ("x",), "/", "/logs", 1.0)
    screen = Screen()
    try:
        run._launch(screen, place, record, [], leader)
    except JobFailedError:
        assert raises is not None
    return screen.notes


def test_last_message_prefers_the_steps_found_over_the_reported_step(monkeypatch, place):
    end = JobEnd(ExitReason.STOPPED, "SIGTERM", step=4)
    (words,) = launched(monkeypatch, place, end, steps={"a": 9})
    assert words == "stopped: SIGTERM; the same command resumes it from step 9: elastic run train.py"
    (words,) = launched(monkeypatch, place, end, steps={})
    assert words == "stopped: SIGTERM; the same command resumes it from step 4: elastic run train.py"
    (words,) = launched(monkeypatch, place, JobEnd(ExitReason.STOPPED, "SIGTERM"), steps={})
    assert words == "stopped: SIGTERM; the same command resumes it: elastic run train.py"


def test_last_message_of_a_failed_job_has_four_lines(monkeypatch, place):
    end = JobEnd(ExitReason.JOB_FAILED, "rank 0 of n0 reported a fault: ValueError: bad", "2 faults; at most 1", 4)
    (words,) = launched(monkeypatch, place, end, steps={"a": 9}, status=8)
    assert words.splitlines() == [
        "failed: rank 0 of n0 reported a fault: ValueError: bad",
        "attempts: 2 faults; at most 1",
        "resumes from: step 9",
        "command: elastic run train.py",
    ]
    (words,) = launched(monkeypatch, place, end, steps={}, status=8)
    assert "resumes from: step 4 or a newer one\n" in words
    (words,) = launched(monkeypatch, place, JobEnd(ExitReason.JOB_FAILED, "x", "y"), steps={}, status=8)
    assert "resumes from: the newest complete checkpoint of the job\n" in words
    (words,) = launched(monkeypatch, place, JobEnd(ExitReason.JOB_FAILED, "x", "y", -1), steps={}, status=8)
    assert "resumes from: the newest complete checkpoint of the job; this run saved none\n" in words


def test_last_message_of_a_script_that_never_joined_is_its_reason_alone(monkeypatch, place):
    end = JobEnd(ExitReason.NEVER_JOINED, "p.py exited without calling elastic.run; not retried")
    assert launched(monkeypatch, place, end, steps={"a": 9}, status=2) == [end.reason]


def test_last_message_names_the_step_without_a_written_reason(monkeypatch, place):
    (words,) = launched(monkeypatch, place, None, steps={"a": 9})
    assert words == "stopped; the same command resumes it from step 9: elastic run train.py"


def test_last_message_is_printed_when_the_coordinator_died_too_often(monkeypatch, place):
    died = JobFailedError("the coordinator ended 6 times within 60 s")
    (words,) = launched(monkeypatch, place, None, steps={"a": 9}, raises=died)
    assert words.splitlines() == [
        "failed: the coordinator ended 6 times within 60 s",
        "attempts: not retried",
        "resumes from: step 9",
        "command: elastic run train.py",
    ]


def test_missing_supervisor_is_named_in_the_error(tmp_path):
    with pytest.raises(ControlPlaneUnavailableError, match="this node's supervisor does not answer") as caught:
        SupervisorClient(SupervisorEndpoint(tmp_path / "rank.sock", "token"))
    assert "agent" not in str(caught.value)


def test_error_independent_of_the_world_is_not_retried():
    plane, tries = InMemoryCoordinator(1), []

    def train(world):
        tries.append(world.epoch)
        if len(tries) < 3:
            raise SettingsError("both are called A")

    with pytest.raises(JobFailedError, match="both are called A"):
        train_loop_run(train, plane=plane.planes[0], policy=RecoveryPolicy(backend="none"))
    assert tries == [0]


def test_error_dependent_on_the_world_size_is_retried():
    plane, tries = InMemoryCoordinator(1), []

    def train(world):
        tries.append(world.epoch)
        if len(tries) < 2:
            world.mesh((2, -1))

    assert (
        train_loop_run(train, plane=plane.planes[0], policy=RecoveryPolicy(backend="none")).outcome
        is RunOutcome.FINISHED
    )
    assert tries == [0, 1]


@pytest.mark.parametrize(("configured", "expected"), [("", "A"), ("pod-7", None)])
def test_node_and_its_agent_share_a_name(monkeypatch, place, configured, expected):
    monkeypatch.delenv("TIEREDCKPT_AGENT_NODE", raising=False)
    if configured:
        monkeypatch.setenv("TIEREDCKPT_AGENT_NODE", configured)
    options = {"node": "A", "simulate_nodes": None, "agent": True, "coordinator": "", "coordinator_here": False}
    task = run._supervisor_spec(place, local_run(place), "A", {**options, "verbose": 0})
    assert task.environ.get("TIEREDCKPT_AGENT_NODE") == expected
    assert Path(task.directory).name == "A"
    named = run._supervisor_spec(place, local_run(place), os.uname().nodename, {**options, "node": "", "verbose": 0})
    assert "TIEREDCKPT_AGENT_NODE" not in named.environ


def test_simulated_nodes_listen_on_loopback_only(monkeypatch, place):
    monkeypatch.delenv("TIEREDCKPT_AGENT_PEERS", raising=False)
    options = {"node": "", "simulate_nodes": 2, "agent": True, "coordinator": "", "coordinator_here": False}

    def address(**more):
        environ = run._supervisor_spec(place, local_run(place), "n0", {**options, "verbose": 0, **more}).environ
        return environ.get("TIEREDCKPT_AGENT_PEERS")

    assert address() == "127.0.0.1:0"
    assert address(simulate_nodes=None) is None  # other jobs use the agent of the machine
    monkeypatch.setenv("TIEREDCKPT_AGENT_PEERS", "off")
    assert address() is None


def test_single_node_resumes_from_simulated_nodes(monkeypatch, place):
    monkeypatch.delenv("TIEREDCKPT_AGENT_DIRECTORY", raising=False)

    def memory(name="here", **more):
        options = {"node": "", "simulate_nodes": None, "agent": True, "coordinator": "", "coordinator_here": False}
        task = run._supervisor_spec(place, local_run(place), name, {**options, "verbose": 0, **more})
        return task.environ.get("TIEREDCKPT_AGENT_DIRECTORY"), task.environ.get("TIEREDCKPT_AGENT_NODE")

    n0, n8 = place.node_directory("n0") / "agent", place.node_directory("n8") / "agent"
    assert memory() == (None, None)
    assert memory("n0", simulate_nodes=2) == (str(n0), "n0")
    n0.mkdir(parents=True)
    assert memory("n0") == (None, None)  # an agent without steps
    for agent in (n0, n8):
        (agent / "notes").mkdir(parents=True)
        for name in (f"{SEAL_METADATA}slot.job.0.5", f"{JOB_METADATA}job"):
            (agent / "notes" / name).touch()
    (n8 / "agent.sock").touch()
    assert memory() == (str(n8), "n8")  # its socket still exists
    assert memory("n0", simulate_nodes=1) == (str(n0), "n0")
    assert memory(coordinator="10.0.0.1:7") == (None, None)
    monkeypatch.setenv("TIEREDCKPT_AGENT_DIRECTORY", "/elsewhere")
    assert memory() == (None, None)
