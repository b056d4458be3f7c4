"""Nodes whose agent cannot start leave the job."""

import contextlib
import threading

import pytest

from elastic.control.control_messages import ExitReason
from elastic.supervisor import memory_tier
from elastic.supervisor.memory_tier import MemoryTierProcess
from peerstore.errors import AgentUnreachableError
from tests.support.control_simulation import ControlSimulation

WHY = "its node agent did not start in 3 attempts: no room"


@pytest.fixture
def attempts(monkeypatch, tmp_path):
    """Make every agent that is started here exit at once."""
    made = []

    def launch(place, *_args, **_options):
        made.append(place)
        raise AgentUnreachableError("the agent ended at once: Traceback\nno room\n")

    monkeypatch.setattr(memory_tier, "connect_or_launch_agent", launch)
    monkeypatch.setattr(memory_tier, "_RETRY_S", 0.0)
    return made


def started(tmp_path, stop=None, **environ):
    failures = []
    place = {"TIEREDCKPT_AGENT_DIRECTORY": str(tmp_path / "agent")}
    MemoryTierProcess({**place, **environ}, stop=stop).start(failures.append)
    return failures


def test_agent_that_cannot_start_is_tried_three_times(attempts, tmp_path):
    assert started(tmp_path) == [WHY]
    assert len(attempts) == 3


@pytest.mark.parametrize("name", ["TIEREDCKPT_ENABLED", "TIEREDCKPT_AGENT_EMBEDDED"])
def test_node_without_an_agent_of_its_own_stays(attempts, tmp_path, name):
    assert started(tmp_path, TIEREDCKPT_DURABLE_URL=f"file://{tmp_path}/durable", **{name: "false"}) == []
    assert attempts == []


def test_supervisor_that_ends_stops_the_attempts(attempts, tmp_path):
    stop = threading.Event()
    stop.set()
    assert started(tmp_path, stop) == []
    assert len(attempts) == 1


def test_job_continues_without_the_node_that_left():
    table = ControlSimulation(2, nproc=1)
    node = table.nodes["n1"]
    node.seats.leave(WHY)
    table.run_without_faults(40)
    table.check_one_world()
    assert table.desk.snapshot().world_spec.ranked_nodes == ("n0",)
    assert (node.seats.exit, node.seats.leave_reason) == (ExitReason.DISMISSED, WHY)


def test_running_job_continues_without_the_node_that_left():
    table = ControlSimulation(2, nproc=1)
    table.run_without_faults(20)
    worlds = table.desk.snapshot().world.epoch
    table.nodes["n1"].seats.leave(WHY)
    table.run_without_faults(60)
    assert table.desk.snapshot().world_spec.ranked_nodes == ("n0",)
    assert table.desk.snapshot().world.epoch == worlds + 1
    assert WHY in table.desk.snapshot().world_spec.reason


def test_job_that_cannot_continue_ends_with_the_reason():
    table = ControlSimulation(1, nproc=1)
    table.nodes["n0"].seats.leave(WHY)
    table.run_without_faults(40)
    assert table.desk.snapshot().outcome.exit is ExitReason.JOB_FAILED
    assert f"n0 left: {WHY}" in table.desk.snapshot().outcome.reason


def test_wrong_setting_is_a_reason_to_leave(attempts, tmp_path):
    (why,) = started(tmp_path, TIEREDCKPT_AGENT_SLOTS_PER_RANK="many")
    assert why.startswith("its settings are wrong: ")
    assert "agent.slots_per_rank" in why or "TIEREDCKPT_AGENT_SLOTS_PER_RANK" in why
    assert attempts == []


def restarts(outcomes, failures, stop=None):
    """Restart an agent once for each outcome, which is whether it starts."""
    remaining = iter(outcomes)

    def launch():
        if not next(remaining):
            raise AgentUnreachableError("the agent ended at once: Traceback\nno room\n")

    relaunch = MemoryTierProcess({}, stop=stop)._reporting_launch(launch, failures.append)
    for starts in outcomes:
        with contextlib.nullcontext() if starts else pytest.raises(AgentUnreachableError):
            relaunch()


def test_agent_that_cannot_restart_is_reported_once(caplog):
    failures = []
    restarts([False] * 5, failures)
    assert failures == ["its node agent died and did not restart in 3 attempts: no room"]
    assert len(caplog.records) == 3


def test_agent_that_restarts_in_time_is_not_reported():
    failures = []
    restarts([False, False, True] * 3, failures)
    assert failures == []


def test_supervisor_that_ends_reports_no_failed_restart():
    failures, stop = [], threading.Event()
    stop.set()
    restarts([False] * 4, failures, stop)
    assert failures == []
