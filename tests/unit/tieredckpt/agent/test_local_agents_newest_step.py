"""The agent of this machine that serves a job's steps, if other launchers used another agent."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
from pathlib import Path

import pytest
import torch

from peerstore.errors import AgentUnreachableError, UnavailableError
from peerstore.settings import AgentPaths
from tests.support.agents import agent_pid, stop_agent, stop_process
from tests.support.bits import assert_same_bits
from tieredckpt import Checkpointer
from tieredckpt.agent import local_agents
from tieredckpt.agent.agent_client import NodeAgentClient
from tieredckpt.agent.local_agents import find_agent_directory, settings_of_newest_agent
from tieredckpt.errors import TierUnavailableError, UsageError
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


def test_stopped_own_agent_is_started_for_its_steps(places, monkeypatch):
    saves(monkeypatch, places[0], "local", 5)
    saves(monkeypatch, places[1], "local", 4)
    stop_agent(places[0])
    assert settings_of_newest_agent("local", load_settings()).agent.directory == ""


@pytest.mark.parametrize("older", [False, True], ids=["no other step", "an older step elsewhere"])
def test_exited_simulated_agent_is_started_for_its_steps(places, monkeypatch, older):
    saves(monkeypatch, places[1], "local", 5)
    if older:
        saves(monkeypatch, places[0], "local", 4)
    stop_agent(places[1])
    state = {"w": torch.zeros(3)}
    with Checkpointer("tiered://local") as ckpt:
        assert ckpt.restore(state) == 5
        assert state["w"].tolist() == [5.0] * 3
        assert ckpt.session.settings.agent.node == "n0"


def test_exited_agent_that_cannot_be_started_makes_the_step_unknown(places, monkeypatch):
    saves(monkeypatch, places[0], "local", 4)
    saves(monkeypatch, places[1], "local", 5)
    stop_agent(places[1])
    places[1].chmod(0o777)
    with pytest.raises(TierUnavailableError, match=f"the agent in {places[1]} has exited and cannot be started: "):
        settings_of_newest_agent("local", load_settings())
    assert settings_of_newest_agent("job-of-no-agent", load_settings()).agent.directory == ""


def test_exited_agent_that_may_not_be_started_makes_the_step_unknown(places, monkeypatch):
    saves(monkeypatch, places[1], "local", 5)
    stop_agent(places[1])
    settings = override_settings(load_settings(), agent={"embedded": False})
    advice = f"Start it with `tieredckpt agent --dir {places[1]} --detach`"
    with pytest.raises(TierUnavailableError, match=advice):
        settings_of_newest_agent("local", settings)
    assert settings_of_newest_agent("job-of-no-agent", settings).agent.directory == ""


def test_directory_of_an_exited_agent_with_the_job_is_found(places, monkeypatch):
    job = "exited"  # a name that no other test's agents have, because all agents of this machine are queried
    saves(monkeypatch, places[1], job, 5)
    stop_agent(places[1])
    assert find_agent_directory(load_settings(), job) == places[1]
    assert find_agent_directory(load_settings(), "job-of-no-agent") == places[0]
    saves(monkeypatch, places[2], job, 4)
    assert find_agent_directory(load_settings(), job) == places[2]  # an agent that runs comes first


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
    """A client would retry for 20 s at the first restore of every process."""
    monkeypatch.setattr(local_agents, "NodeAgentClient", lambda *_: pytest.fail("a client waits for an agent"))
    with pytest.raises(AgentUnreachableError):
        local_agents.list_agent_steps("local", load_settings(), tmp_path)


@pytest.mark.parametrize("missed", [0, 1])
def test_read_of_the_kernels_list_that_misses_a_socket_loses_no_agent(tmp_path, monkeypatch, missed):
    """Sockets that close between two parts of one read shift others out of it."""
    read, reads = Path.read_text, []

    def misses_one(path, **options):
        reads.append(path)
        lines = read(path, **options).splitlines()
        return "\n".join(one for one in lines if len(reads) != missed + 1 or str(tmp_path) not in one)

    monkeypatch.setattr(Path, "read_text", misses_one)
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(tmp_path / "agent.sock"))
        assert tmp_path in local_agents.agent_directories()


@contextlib.contextmanager
def stopped(place):
    """Stop the agent of ``place`` in the block."""
    pid = agent_pid(place)
    stop_process(pid)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGCONT)


def test_simulated_agent_that_does_not_answer_makes_the_step_unknown(places, monkeypatch, caplog):
    saves(monkeypatch, places[1], "local", 5)

    def fails(place):
        raise UnavailableError("busy")

    monkeypatch.setattr(local_agents, "_jobs_of", fails)
    with pytest.raises(TierUnavailableError, match=f"the agent in {places[1]} does not answer: busy"):
        settings_of_newest_agent("local", load_settings())
    assert settings_of_newest_agent("job-of-no-agent", load_settings()).agent.directory == ""
    assert f"the steps of another agent are unknown: the agent in {places[1]} does not answer: busy" in caplog.text


@pytest.mark.parametrize("older", [False, True], ids=["no other step", "an older step elsewhere"])
def test_restore_does_not_pass_over_a_stopped_simulated_agent(places, monkeypatch, older):
    saves(monkeypatch, places[1], "local", 5)
    if older:
        saves(monkeypatch, places[2], "local", 4)
    state = {"w": torch.zeros(3)}
    with stopped(places[1]) as pid:
        unknown = pytest.raises(
            TierUnavailableError, match=rf"{places[1]} \(process {pid}\) does not answer.* has 'local'"
        )
        with unknown, Checkpointer("tiered://local") as ckpt:
            ckpt.restore(state)
        with Checkpointer("tiered://nobody") as ckpt:
            assert ckpt.restore({"w": torch.zeros(3)}) == -1
    assert_same_bits({"w": torch.zeros(3)}, state)
    with Checkpointer("tiered://local") as ckpt:
        assert ckpt.restore(state) == 5
    assert_same_bits({"w": torch.full((3,), 5.0)}, state)


def test_commands_choose_a_stopped_agent_only_if_no_other_one_has_the_job(places, monkeypatch):
    """No other test has a job of this name: all agents of the machine are queried."""
    saves(monkeypatch, places[1], "chosen", 5)
    with stopped(places[1]):
        assert find_agent_directory(load_settings(), "chosen") == places[1]
        assert find_agent_directory(load_settings(), "job-of-no-agent") == places[0]
        saves(monkeypatch, places[2], "chosen", 4)
        assert find_agent_directory(load_settings(), "chosen") == places[2]


def test_stopped_own_agent_without_the_job_does_not_hide_another_agent(places, monkeypatch):
    """No other test has a job of this name: all agents of the machine are queried."""
    saves(monkeypatch, places[0], "another", 5)
    saves(monkeypatch, places[1], "hidden", 4)
    with stopped(places[0]):
        assert find_agent_directory(load_settings(), "hidden") == places[1]
        assert find_agent_directory(load_settings(), "another") == places[0]
        assert find_agent_directory(load_settings(), None) == places[0]


def test_restore_from_a_configured_agent_warns_of_a_stopped_one(places, monkeypatch, caplog):
    saves(monkeypatch, places[1], "local", 5)
    monkeypatch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(places[2]))
    with stopped(places[1]) as pid, Checkpointer("tiered://local") as ckpt:
        assert ckpt.restore({"w": torch.zeros(3)}) == -1
    assert f"the agent in {places[1]} (process {pid}) does not answer" in caplog.text


def test_own_agent_stays_unless_another_one_has_a_newer_step(places, monkeypatch):
    saves(monkeypatch, places[0], "local", 5)
    saves(monkeypatch, places[1], "local", 4)
    saves(monkeypatch, places[1], "other", 9)
    assert settings_of_newest_agent("local", load_settings()).agent.directory == ""
    assert settings_of_newest_agent("job-of-no-agent", load_settings()).agent.directory == ""
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


@pytest.fixture
def agent_with_full_queue():
    """A socket that listens in an agent's directory with a full backlog."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory, socket.socket(socket.AF_UNIX) as listener:
        place = AgentPaths(Path(directory))
        listener.bind(str(place.socket))
        listener.listen(0)
        with socket.socket(socket.AF_UNIX) as only:
            only.connect(str(place.socket))
            yield place


def test_search_for_agents_leaves_no_line_in_their_logs(places, monkeypatch):
    saves(monkeypatch, places[1], "searched", 5)
    for _ in range(5):
        assert find_agent_directory(load_settings(), "searched") == places[1]
    stop_agent(places[1])
    assert "the connection of agent ended" not in (places[1] / "agent.log").read_text()


def test_agent_that_accepts_no_connection_is_silent_and_not_absent(agent_with_full_queue):
    assert "accepted no connection" in local_agents._query_agent(agent_with_full_queue.directory).silence
