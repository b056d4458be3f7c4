"""Which agent of this machine a job's steps are read from, if another launcher has used another agent."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from peerstore.errors import AgentUnreachableError, UnavailableError
from tests.support.agents import agent_pid, stop_agent, stop_process
from tieredckpt import Checkpointer
from tieredckpt.agent import local_agents
from tieredckpt.agent.agent_client import NodeAgentClient
from tieredckpt.agent.local_agents import settings_of_newest_agent
from tieredckpt.errors import UsageError
from tieredckpt.session.session import close_sessions, open_session
from tieredckpt.settings import Settings, load_settings, override_settings

pytestmark = pytest.mark.e2e


@pytest.fixture
def places(agent_dir, monkeypatch):
    """The directories of three agents: the default of this machine, and those of two simulated nodes."""
    found = [agent_dir / name for name in ("default", "runs/local/n0/agent", "runs/local/n1/agent")]
    for place in found:
        place.parent.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("ELASTIC_RUN_DIRECTORY", str(agent_dir / "runs"))
    original = Settings.agent_directory.fget
    monkeypatch.setattr(
        Settings, "agent_directory", property(lambda one: original(one) if one.agent.directory else found[0])
    )
    yield found
    close_sessions()
    for place in found:
        stop_agent(place)


def saves(monkeypatch, place, job, *steps):
    monkeypatch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(place))
    with Checkpointer(f"tiered://{job}") as ckpt:
        for step in steps:
            ckpt.save({"w": torch.full((3,), float(step))}, step).wait()
    close_sessions()
    monkeypatch.delenv("TIEREDCKPT_AGENT_DIRECTORY")


def test_restore_finds_the_newest_step_in_another_agent(places, monkeypatch):
    saves(monkeypatch, places[0], "local", 1, 2)
    saves(monkeypatch, places[1], "local", 5)
    saves(monkeypatch, places[2], "local", 4)
    state = {"w": torch.zeros(3)}
    with Checkpointer("tiered://local") as ckpt:
        assert ckpt.restore(state) == 5
        assert state["w"].tolist() == [5.0] * 3
        ckpt.save(state, 6).wait()
        assert ckpt.session.settings.agent.directory == str(places[1])
    assert settings_of_newest_agent("local", load_settings()).agent.directory == str(places[1])


def test_own_agent_that_has_ended_is_started_for_what_it_left(places, monkeypatch):
    saves(monkeypatch, places[0], "local", 5)
    saves(monkeypatch, places[1], "local", 4)
    stop_agent(places[0])
    assert settings_of_newest_agent("local", load_settings()).agent.directory == ""


def test_no_other_agent_is_used_where_the_own_one_cannot_answer(places, monkeypatch, caplog):
    saves(monkeypatch, places[0], "local", 5)
    saves(monkeypatch, places[1], "local", 6)

    def fails(job, settings, directory):
        raise UnavailableError("busy")

    monkeypatch.setattr(local_agents, "list_agent_steps", fails)
    assert settings_of_newest_agent("local", load_settings()).agent.directory == ""
    assert "no other agent is used: busy" in caplog.text


def test_session_that_cannot_be_opened_leaves_no_connection(places, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(places[0]))
    closed = []
    monkeypatch.setattr(NodeAgentClient, "close", lambda client: closed.append(client.store.close()))
    with pytest.raises(UsageError, match="gopher"):
        open_session("local", override_settings(load_settings(), durable={"url": "gopher://x/y"}))
    assert len(closed) == 1


def test_agents_in_chosen_directories_are_not_used(places, monkeypatch, tmp_path):
    saves(monkeypatch, places[1], "local", 5)
    monkeypatch.setenv("ELASTIC_RUN_DIRECTORY", str(tmp_path))
    assert settings_of_newest_agent("local", load_settings()).agent.directory == ""


def test_absent_agent_is_not_waited_for(tmp_path, monkeypatch):
    """A client would try again for 20 s, at the first restore of every process."""
    monkeypatch.setattr(local_agents, "NodeAgentClient", lambda *_: pytest.fail("a client waits for an agent"))
    with pytest.raises(AgentUnreachableError):
        local_agents.list_agent_steps("local", load_settings(), tmp_path)


def test_simulated_agent_that_does_not_answer_is_reported(places, monkeypatch, caplog):
    saves(monkeypatch, places[1], "local", 5)

    def fails(place):
        raise UnavailableError("busy")

    monkeypatch.setattr(local_agents, "_jobs_of", fails)
    assert settings_of_newest_agent("local", load_settings()).agent.directory == ""
    assert f"the steps of another agent are unknown: the agent in {places[1]} does not answer: busy" in caplog.text


def test_simulated_agents_that_hang_are_passed_over(places, monkeypatch, caplog):
    saves(monkeypatch, places[1], "local", 5)
    saves(monkeypatch, places[2], "local", 4)
    hung = agent_pid(places[1])
    stop_process(hung)
    try:
        assert settings_of_newest_agent("local", load_settings()).agent.directory == str(places[2])
    finally:
        os.kill(hung, signal.SIGCONT)
    assert f"the agent in {places[1]} (process {hung}) does not answer: no greeting within" in caplog.text
    assert "It hangs or was stopped" in caplog.text


def test_own_agent_stays_unless_another_one_has_a_newer_step(places, monkeypatch):
    saves(monkeypatch, places[0], "local", 5)
    saves(monkeypatch, places[1], "local", 4)
    saves(monkeypatch, places[1], "other", 9)
    assert settings_of_newest_agent("local", load_settings()).agent.directory == ""
    assert settings_of_newest_agent("nobody", load_settings()).agent.directory == ""
    monkeypatch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(places[2]))
    assert settings_of_newest_agent("other", load_settings()).agent.directory == str(places[2])


def test_restore_from_a_configured_agent_warns_of_a_step_in_another_one(places, monkeypatch, caplog):
    saves(monkeypatch, places[1], "local", 5)
    monkeypatch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(places[2]))
    with Checkpointer("tiered://local") as ckpt:
        assert ckpt.restore({"w": torch.zeros(3)}) == -1
    assert f"The agent in {places[1]} has step 5 of it" in caplog.text
    assert f"TIEREDCKPT_AGENT_DIRECTORY={places[1]} to restore that step" in caplog.text
    caplog.clear()
    with Checkpointer("tiered://another") as ckpt:
        assert ckpt.restore({"w": torch.zeros(3)}) == -1
    assert "has step" not in caplog.text
