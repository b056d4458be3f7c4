"""Commands report a stopped agent by name and do not wait for it."""

import os
import signal

import pytest

from tests.support.agents import agent_pid, stop_process
from tests.support.jobs import CheckpointJob
from tieredckpt.session.session import close_sessions
from tieredckpt.settings import DurableSettings

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.e2e]


@pytest.fixture
def hung(agent_dir):
    """Return the process of a stopped agent that holds a step."""
    CheckpointJob(agent_dir, DurableSettings(), "hung").save(1, durable=False)
    close_sessions()
    pid = agent_pid(agent_dir)
    stop_process(pid)
    yield pid
    if agent_pid(agent_dir) == pid:
        os.kill(pid, signal.SIGCONT)


def silent(directory, pid):
    return f"the agent in {directory} (process {pid}) does not answer"


@pytest.mark.parametrize("words", [("status",), ("status", "hung"), ("ls",), ("ls", "hung"), ("top", "--once")])
def test_command_names_the_hung_agent(cli, agent_dir, hung, words):
    said = cli(*words)
    assert said.code == 5
    assert silent(agent_dir, hung) in said.err.replace("\n", " ")


@pytest.mark.parametrize("words", [("status",), ("ls",), ("ls", "hung")])
def test_command_advises_to_restart_a_hung_agent(cli, agent_dir, hung, words):
    said = " ".join(cli(*words).err.split())
    assert f"`tieredckpt agent restart --dir {agent_dir}`" in said
    assert "start one with" not in said
    assert "start an agent" not in said


def test_restart_replaces_a_hung_agent_and_keeps_its_steps(cli, agent_dir, hung):
    said = cli("agent", "restart", "--json", "--dir", agent_dir)
    assert said.json["before"] == hung
    assert said.json["process"] == agent_pid(agent_dir) != hung
    assert [one["step"] for one in cli("ls", "hung", "--json").json["steps"]] == [1]


def test_hung_agent_in_the_usual_place_is_not_passed_over(cli, agent_dir, hung, monkeypatch):
    monkeypatch.setattr("tieredckpt.settings.Settings.agent_directory", property(lambda _: agent_dir))
    monkeypatch.delenv("TIEREDCKPT_AGENT_DIRECTORY")
    assert silent(agent_dir, hung) in cli("status").err.replace("\n", " ")


def test_hung_agent_is_listed(cli, agent_dir, hung):
    (row,) = [one for one in cli("agent", "ls", "--json").json["agents"] if one["directory"] == str(agent_dir)]
    assert row["process"] == hung
    assert silent(agent_dir, hung) in row["problem"]


def test_hung_agent_is_not_reported_as_absent(cli, agent_dir, hung):
    said = cli("agent", "stop")
    assert said.code == 5
    assert silent(agent_dir, hung) in said.err.replace("\n", " ")
    assert f"kill -9 {hung}" in said.err.replace("\n", " ")
