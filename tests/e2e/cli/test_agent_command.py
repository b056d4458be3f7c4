"""``tieredckpt agent ls``, ``stop`` and ``restart`` on real agents."""

import pytest

from tests.support.agents import agent_pid, stop_agent
from tieredckpt.session.session import close_sessions

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.e2e]


def agent_row(cli, directory):
    (row,) = [one for one in cli("agent", "ls", "--json").json["agents"] if one["directory"] == str(directory)]
    return row


def test_agents_of_the_machine_are_listed(cli, job, agent_dir):
    row = agent_row(cli, agent_dir)
    assert row["process"] == agent_pid(agent_dir)
    assert row["jobs"] == ["llama"]
    assert row["budget_bytes"] == 2 << 30
    assert row["problem"] is None
    assert row["allocated_bytes"] > 0
    assert 0 <= row["age_s"] < 3600
    assert row["ports"] == []
    shown = cli("agent", "ls").out
    assert f"{agent_dir}  " in shown
    assert shown.splitlines()[0].split() == ["DIRECTORY", "PROCESS", "PORTS", "AGE", "JOBS", "MEMORY"]


def test_stopped_agent_leaves_its_checkpoints_to_the_next_one(cli, job, agent_dir):
    close_sessions()
    pid = agent_pid(agent_dir)
    said = cli("agent", "stop", "--json")
    assert (said.code, said.json) == (0, {"directory": str(agent_dir), "process": pid, "discarded_bytes": 0})
    assert agent_pid(agent_dir) is None
    said = cli("agent", "stop")
    assert said.code == 3
    assert f"no agent runs in {agent_dir}" in said.err
    assert "tieredckpt agent ls" in said.err
    job.assert_restores(3, tiers={"memory"})


def test_agent_in_the_background_logs_to_a_file(cli, agent_dir, monkeypatch):
    monkeypatch.chdir(agent_dir.parent)
    said = cli("agent", "--detach", "--dir", agent_dir.name, "--budget", "64MiB")
    pid = agent_pid(agent_dir)
    assert pid is not None
    log = agent_dir / "agent.log"
    assert (said.code, said.err) == (0, "")
    assert said.out == f"the agent in {agent_dir} runs as process {pid} and logs to {log}\n"
    assert f"serves {agent_dir}" in log.read_text()
    again = cli("agent", "--detach", "--dir", agent_dir)
    assert again.code == 2
    assert f"an agent runs in {agent_dir} already, as process {pid}" in again.err
    stop_agent(agent_dir)
    wrong = cli("agent", "--detach", "--dir", agent_dir, "--budget", "nonsense")
    assert wrong.code != 0
    assert "nonsense" in wrong.err


def test_agent_in_use_is_only_stopped_by_force(cli, job, agent_dir):
    with job.checkpointer() as ckpt:
        assert ckpt.session.agent is not None
        said = cli("agent", "stop", "--dir", agent_dir)
        assert said.code == 2
        assert "job 'llama' has 1 process that uses the agent" in said.err
        assert "--force" in said.err
    close_sessions()
    assert cli("agent", "stop", "--dir", agent_dir, "--force").code == 0


def test_restarted_agent_has_new_options_and_the_old_checkpoints(cli, job, agent_dir):
    close_sessions()
    before = agent_pid(agent_dir)
    said = cli("agent", "restart", "--json", "--budget", "3GiB")
    assert said.code == 0, said.err
    assert said.json == {"directory": str(agent_dir), "process": agent_pid(agent_dir), "before": before}
    row = agent_row(cli, agent_dir)
    assert row["process"] != before
    assert row["budget_bytes"] == 3 << 30
    job.assert_restores(3, tiers={"memory"})


def test_ports_of_an_agent_are_listed(cli, job, agent_dir):
    close_sessions()
    assert cli("agent", "restart", "--http", "127.0.0.1:0").code == 0
    port = int((agent_dir / "http").read_text().rpartition(":")[2])
    assert agent_row(cli, agent_dir)["ports"] == [port]


def test_discard_deletes_the_checkpoints_in_memory(cli, job, agent_dir):
    close_sessions()
    said = cli("agent", "stop", "--discard")
    assert said.code == 2
    assert "1 job ('llama')" in said.err
    assert "Add --yes" in said.err
    assert cli("agent", "stop", "--discard", "--force").code == 2
    assert agent_pid(agent_dir) is not None
    kept = sum(path.stat().st_size for path in (agent_dir / "slots").iterdir())
    said = cli("agent", "stop", "--discard", "--yes", "--json")
    assert said.code == 0, said.err
    assert 0 < said.json["discarded_bytes"] <= kept
    assert not (agent_dir / "slots").exists()
    assert not (agent_dir / "notes").exists()
    job.assert_restores(3, tiers={"durable"})


def test_discard_refuses_an_agent_in_use(cli, job, agent_dir):
    with job.checkpointer() as ckpt:
        assert ckpt.session.agent is not None
        said = cli("agent", "stop", "--discard", "--yes")
        assert said.code == 2
        assert "job 'llama' has 1 process that uses the agent" in said.err
        assert agent_pid(agent_dir) is not None
