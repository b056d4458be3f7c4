"""Commands find the agents of jobs on this machine, including those of simulated nodes."""

import contextlib
import json
import os
import secrets
import signal
from pathlib import Path
from typing import NamedTuple

import pytest

from peerstore.client.store_client import Client
from peerstore.settings import AgentPaths
from peerstore.transport.unix import connect_to_agent
from tests.support.agents import agent_directory, agent_pid, stop_agent, stop_process
from tests.support.jobs import CheckpointJob
from tests.support.local_nodes import wait_until
from tieredckpt.agent.local_agents import AgentJobs
from tieredckpt.cli.command_output import CommandOutput
from tieredckpt.cli.common_options import ANY_JOB, settings_from_options
from tieredckpt.cli.job_list import show_jobs
from tieredckpt.cli.tier_client import open_tier_client
from tieredckpt.session.session import close_sessions
from tieredckpt.settings import DurableSettings, Settings

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.e2e]


def new_job_name(name: str) -> str:
    """Return a name that no other test's agents have, because a command finds all agents on this machine."""
    return f"found-{name}-{secrets.token_hex(4)}"


class SimulatedJob(NamedTuple):
    name: str
    directory: Path

    @property
    def agent(self) -> Path:
        return self.directory / "n1" / "agent"


@pytest.fixture
def two_simulated_jobs(monkeypatch):
    """Two jobs with an agent each, and no agent in the default directory."""
    with agent_directory() as one, agent_directory() as other:
        jobs = SimulatedJob(new_job_name("one"), one), SimulatedJob(new_job_name("other"), other)
        for (name, directory), steps in zip(jobs, ((1, 2), (7,)), strict=True):
            monkeypatch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(directory / "n1" / "agent"))
            monkeypatch.setenv("TIEREDCKPT_AGENT_BUDGET", "256MiB")
            job = CheckpointJob(directory / "n1" / "agent", DurableSettings(), name)
            job.save(*steps, durable=False)
            close_sessions()
        monkeypatch.delenv("TIEREDCKPT_AGENT_DIRECTORY")
        yield jobs
        for directory in (one, other):
            CheckpointJob(directory / "n1" / "agent", DurableSettings()).kill_agent()


def test_agent_of_a_job_is_found_in_any_run_directory(cli, two_simulated_jobs):
    def run(*arguments):
        said = cli(*arguments, "--json")
        assert said.code == (3 if "--each" in arguments else 0), said.out  # 3: a single node has no copies elsewhere
        return said.json

    one, other = two_simulated_jobs
    assert [view["step"] for view in run("ls", one.name)["steps"]] == [1, 2]
    assert [view["step"] for view in run("ls", other.name)["steps"]] == [7]
    assert run("status", other.name)["jobs"]
    assert run("status", one.name, "--cluster")["job"] == one.name
    assert run("top", one.name, "--once")
    assert run("whatif", one.name, "--each")["job"] == one.name
    assert run("pin", other.name, 7)["marked"] == ["memory"]
    assert cli("ls", "job-of-no-agent").code in (3, 5)
    # Without a job, the command shows all agents. Agents of other tests may end between its two requests.
    wait_until(lambda: cli("ls", "--json").json.get("jobs"))


def test_jobs_of_all_agents_are_listed(cli, two_simulated_jobs):
    one, other = two_simulated_jobs
    listed = {row["job"]: row for row in cli("ls", "--json").json["jobs"]}
    assert (listed[one.name]["steps_in_memory"], listed[one.name]["newest_in_memory"]) == (2, 2)
    assert listed[other.name]["newest_in_memory"] == 7
    named = cli("ls", "--agent-dir", other.agent, "--json").json["jobs"]
    assert [row["job"] for row in named] == [other.name]


def test_agent_that_ends_during_a_listing_hides_no_other_jobs(two_simulated_jobs, capsys):
    one, other = two_simulated_jobs
    screen = CommandOutput("tieredckpt")
    screen.as_json = True
    with open_tier_client(settings_from_options(one.agent, None, ANY_JOB)) as client:
        CheckpointJob(one.agent, DurableSettings()).kill_agent()
        code = show_jobs(screen, client, None, [AgentJobs(other.agent, {other.name: True}, "")])
    listed = json.loads(capsys.readouterr().out)
    assert (code, [row["job"] for row in listed["jobs"]]) == (5, [other.name])
    assert list(listed["unreachable_agents"]) == [str(one.agent)]


def test_jobs_of_a_silent_agent_are_listed_as_unknown(cli, two_simulated_jobs):
    _, other = two_simulated_jobs
    pid = agent_pid(other.agent)
    stop_process(pid)
    try:
        listed, shown = cli("ls", "--json"), cli("ls")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (listed.code, shown.code) == (5, 5)
    assert other.name not in [row["job"] for row in listed.json["jobs"]]
    assert listed.json["unreachable_agents"][str(other.agent)]["jobs"] == [other.name]
    assert f"steps of {other.name} are unknown" in " ".join(shown.out.split())


def test_status_names_the_other_directory_that_it_shows(cli, two_simulated_jobs):
    said = wait_until(lambda: (found := cli("status")).out and found)  # an agent of another test may end meanwhile
    assert f"no agent with a job answers in {Settings().agent_directory}, the usual place; using the one in" in said.err
    assert said.err.strip().splitlines()[-1].split()[-1] in said.out


def test_named_agent_is_the_only_one_queried(cli, two_simulated_jobs):
    one, other = two_simulated_jobs
    assert cli("ls", other.name, "--agent-dir", one.agent).code == 3


def test_agent_with_steps_precedes_an_agent_with_only_a_process_of_the_job(cli, two_simulated_jobs):
    one, other = two_simulated_jobs
    with (
        contextlib.closing(Client(lambda: connect_to_agent(AgentPaths(one.agent).socket), job=other.name)),
        contextlib.closing(Client(lambda: connect_to_agent(AgentPaths(other.agent).socket), job=one.name)),
    ):
        for job, steps in ((one, [1, 2]), (other, [7])):
            assert [view["step"] for view in cli("ls", job.name, "--json").json["steps"]] == steps


def test_silent_agent_with_steps_precedes_an_agent_without_steps(cli, two_simulated_jobs):
    one, other = two_simulated_jobs
    pid = agent_pid(other.agent)
    stop_process(pid)
    try:
        with contextlib.closing(Client(lambda: connect_to_agent(AgentPaths(one.agent).socket), job=other.name)):
            shown = cli("ls", other.name)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert shown.code == 5, shown
    assert str(other.agent) in "".join(f"{shown.out}{shown.err}".split())


def test_agent_with_only_a_process_of_the_job_is_found(cli, two_simulated_jobs):
    one, _ = two_simulated_jobs
    name = new_job_name("new")
    with contextlib.closing(Client(lambda: connect_to_agent(AgentPaths(one.agent).socket), job=name)):
        assert [job["job"] for job in cli("status", name, "--json").json["jobs"]] == [name]


def test_commands_name_the_exited_agent_that_left_steps(cli, monkeypatch):
    exited = new_job_name("exited")
    with agent_directory() as runs:
        place = runs / "local" / "n0" / "agent"
        monkeypatch.setenv("ELASTIC_RUN_DIRECTORY", str(runs))
        monkeypatch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(place))
        CheckpointJob(place, DurableSettings(), exited).save(5, durable=False)
        close_sessions()
        stop_agent(place)
        monkeypatch.delenv("TIEREDCKPT_AGENT_DIRECTORY")
        for command in (("ls", exited), ("status", exited), ("inspect", f"{exited}/step-5"), ("pin", exited, 5)):
            shown = cli(*command)
            assert shown.code == 5, shown
            message = " ".join(f"{shown.out} {shown.err}".split())
            assert f"the agent in {place} has exited and left steps of {exited!r} in memory" in message
            assert f"`tieredckpt agent --dir {place} --detach`" in message
