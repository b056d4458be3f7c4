"""Commands find the agents of jobs on this machine, including those of simulated nodes."""

import pytest

from tests.support.agents import agent_directory, stop_agent
from tests.support.jobs import CheckpointJob
from tests.support.local_nodes import wait_until
from tieredckpt.session.session import close_sessions
from tieredckpt.settings import DurableSettings, Settings

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.e2e]

ONE, OTHER, EXITED = "found-one", "found-other", "found-exited"
"""Names that no other test's agents have, because the command finds all agents on this machine."""


@pytest.fixture
def two_simulated_jobs(monkeypatch):
    """Two jobs with an agent each, and no agent in the default directory."""
    with agent_directory() as one, agent_directory() as other:
        for directory, name, steps in ((one, ONE, (1, 2)), (other, OTHER, (7,))):
            monkeypatch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(directory / "n1" / "agent"))
            monkeypatch.setenv("TIEREDCKPT_AGENT_BUDGET", "256MiB")
            job = CheckpointJob(directory / "n1" / "agent", DurableSettings(), name)
            job.save(*steps, durable=False)
            close_sessions()
        monkeypatch.delenv("TIEREDCKPT_AGENT_DIRECTORY")
        yield one, other
        for directory in (one, other):
            CheckpointJob(directory / "n1" / "agent", DurableSettings()).kill_agent()


def test_agent_of_a_job_is_found_in_any_run_directory(cli, two_simulated_jobs):
    def run(*arguments):
        said = cli(*arguments, "--json")
        assert said.code == (3 if "--each" in arguments else 0), said.out  # 3: a single node has no copies elsewhere
        return said.json

    assert [one["step"] for one in run("ls", ONE)["steps"]] == [1, 2]
    assert [one["step"] for one in run("ls", OTHER)["steps"]] == [7]
    assert run("status", OTHER)["jobs"]
    assert run("status", ONE, "--cluster")["job"] == ONE
    assert run("top", ONE, "--once")
    assert run("whatif", ONE, "--each")["job"] == ONE
    assert run("pin", OTHER, 7)["marked"] == ["memory"]
    assert cli("ls", "job-of-no-agent").code in (3, 5)
    # Without a job, the command shows all agents. Agents of other tests may end between its two requests.
    wait_until(lambda: cli("ls", "--json").json.get("jobs"))


def test_status_names_the_other_directory_that_it_shows(cli, two_simulated_jobs):
    said = wait_until(lambda: (found := cli("status")).out and found)  # an agent of another test may end meanwhile
    assert f"no agent with a job answers in {Settings().agent_directory}, the usual place; using the one in" in said.err
    assert said.err.strip().splitlines()[-1].split()[-1] in said.out


def test_named_agent_is_the_only_one_queried(cli, two_simulated_jobs):
    one, _ = two_simulated_jobs
    assert cli("ls", OTHER, "--agent-dir", one / "n1" / "agent").code == 3


def test_commands_name_the_exited_agent_that_left_steps(cli, monkeypatch):
    with agent_directory() as runs:
        place = runs / "local" / "n0" / "agent"
        monkeypatch.setenv("ELASTIC_RUN_DIRECTORY", str(runs))
        monkeypatch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(place))
        CheckpointJob(place, DurableSettings(), EXITED).save(5, durable=False)
        close_sessions()
        stop_agent(place)
        monkeypatch.delenv("TIEREDCKPT_AGENT_DIRECTORY")
        for command in (("ls", EXITED), ("status", EXITED), ("inspect", f"{EXITED}/step-5"), ("pin", EXITED, 5)):
            shown = cli(*command)
            assert shown.code == 5, shown
            message = " ".join(f"{shown.out} {shown.err}".split())
            assert f"the agent in {place} has exited and left steps of {EXITED!r} in memory" in message
            assert f"`tieredckpt agent --dir {place} --detach`" in message
