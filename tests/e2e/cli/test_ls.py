"""``tieredckpt ls`` against the real agent and real stores."""

import shutil

import pytest

from tests.support.jobs import CheckpointJob, bucket_url, durable_settings
from tieredckpt.session.session import close_sessions
from tieredckpt.settings import DurableSettings

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.e2e]


def test_steps_are_listed_by_tier(cli, job):
    said = cli("ls", "llama", "--json")
    assert said.code == 0
    steps = {line["step"]: line for line in said.json["steps"]}
    assert list(steps) == [1, 2, 3]
    assert [steps[n]["tiers"] for n in (1, 2, 3)] == [["durable"], ["memory", "durable"], ["memory", "durable"]]
    assert [steps[n]["copies"] for n in (1, 2, 3)] == [1, 2, 2]
    assert all(line["complete"] and line["state"] == "complete" and line["parts"] == 1 for line in steps.values())
    assert steps[1]["size_bytes"] == steps[3]["size_bytes"] > 1 << 20
    assert 0 <= steps[3]["age_s"] <= steps[1]["age_s"] < 300
    assert said.json["durable"] == job.settings.durable.url
    assert said.json["unreachable"] == {}


def test_table_matches_the_json(cli, job):
    said = cli("ls", "tiered://llama")
    lines = said.out.splitlines()
    assert lines[0] == f"llama  durable tier {job.settings.durable.url}"
    assert lines[1].split() == ["STEP", "STATE", "MEMORY", "DURABLE", "COPIES", "SIZE", "AGE", "NOTE"]
    assert lines[2].split()[:5] == ["1", "complete", "-", "yes", "1"]
    assert lines[4].split()[:7] == ["3", "complete", "1", "of", "1", "yes", "2"]


def test_single_step_is_listed(cli, job):
    assert [line["step"] for line in cli("ls", "llama/step-2", "--json").json["steps"]] == [2]


def test_without_an_agent_the_durable_tier_is_read_directly(cli, job):
    job.lose_memory()
    said = cli("ls", "llama", "--durable", job.settings.durable.url, "--json")
    assert said.code == 0
    assert [(line["step"], line["tiers"]) for line in said.json["steps"]] == [(n, ["durable"]) for n in (1, 2, 3)]
    assert "no agent answers" in said.json["unreachable"]["memory"]
    assert not job.agent_dir.exists(), "ls starts no agent"


def test_ls_fails_without_agent_and_store(cli, agent_dir):
    said = cli("ls", "llama")
    assert said.code == 5
    assert "no agent answers" in said.err
    assert "so the durable tier of job 'llama' is unknown" in said.err
    assert "--durable" in said.err
    assert "Traceback" not in said.err


def test_an_absent_job_is_not_found(cli, job):
    said = cli("ls", "other", "--json")
    assert said.code == 3
    assert said.json["error"]["kind"] == "CheckpointNotFoundError"
    assert said.json["error"]["exit"] == 3
    assert [state["job"] for state in cli("ls", "--json").json["jobs"]] == ["llama"], "ls records no job"


@pytest.mark.parametrize("name", ["a/b/c", "../x", "llama/step-x", "s3://b/x"])
def test_a_wrong_name_is_a_usage_error(cli, agent_dir, name):
    assert cli("ls", name).code == 2


def test_a_refused_store_is_named(cli, agent_dir, rclone, monkeypatch):
    job = CheckpointJob(agent_dir, durable_settings(rclone))
    job.save(1)
    close_sessions()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    monkeypatch.setenv("TIEREDCKPT_DURABLE_OPTIONS", f"endpoint={rclone.endpoint},region=us-east-1")
    said = cli("ls", job.name, "--durable", bucket_url(), "--json")
    assert said.code == 5
    assert "durable" in said.json["unreachable"]
    assert [line["step"] for line in said.json["steps"]] == [1]


@pytest.fixture(params=["rclone", "moto"])
def server(request):
    return request.getfixturevalue(request.param)


def test_a_bucket_without_agent(cli, agent_dir, server, monkeypatch):
    job = CheckpointJob(agent_dir, durable_settings(server))
    job.save(7)
    job.lose_memory()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    said = cli("ls", job.name, "--durable", job.settings.durable.url, "--json")
    assert [(line["step"], line["complete"]) for line in said.json["steps"]] == [(7, True)]


def test_all_jobs_of_the_node(cli, job, agent_dir, durable):
    CheckpointJob(agent_dir, durable, "other").save(9)
    said = cli("ls", "--json")
    assert said.code == 0
    jobs = {row["job"]: row for row in said.json["jobs"]}
    assert {name: row["newest_in_memory"] for name, row in jobs.items()} == {"llama": 3, "other": 9}
    assert jobs["llama"]["steps_in_memory"] == 2
    said = cli("ls", "--durable", durable.url, "--json")
    assert {row["job"]: row["durable_steps"] for row in said.json["jobs"]} == {"llama": 3, "other": 1}
    assert "llama" in cli("ls").out


def test_jobs_are_listed_with_the_durable_steps_that_the_agent_knows(cli, job, agent_dir):
    CheckpointJob(agent_dir, DurableSettings(), "memory").save(9, durable=False)
    rows = {row["job"]: row for row in cli("ls", "--json").json["jobs"]}
    assert (rows["llama"]["durable_steps"], rows["llama"]["newest_durable"]) == (3, 3)
    assert (rows["memory"]["durable_steps"], rows["memory"]["newest_durable"]) == (None, None)
    lines = cli("ls").out.splitlines()
    assert lines[0].split("  ")[0] == "JOB"
    assert "NEWEST IN MEMORY" in lines[0]
    assert "NEWEST DURABLE" in lines[0]
    assert lines[1].split()[:5] == ["llama", "2", "3", "3", "3"]


def test_unreachable_durable_steps_are_unknown(cli, agent_dir, tmp_path):
    store = tmp_path / "store"
    CheckpointJob(agent_dir, DurableSettings(url=f"file://{store}", retry_s=0.0), "away").save(1)
    shutil.rmtree(store)
    store.symlink_to(store)
    listed = cli("ls", "--json")
    (row,) = listed.json["jobs"]
    assert (row["durable_steps"], listed.code) == (None, 5)
    assert str(store) in row["durable_unreachable"]
    shown = cli("ls").out
    assert "away's durable tier unavailable:" in shown
    assert shown.splitlines()[1].split()[:4] == ["away", "1", "1", "?"]


def test_a_damaged_manifest_is_shown(cli, job, tmp_path, flip_byte_of):
    job.lose_memory()
    (manifest,) = (tmp_path / "durable" / "llama" / "manifests").glob("000000000003*")
    flip_byte_of(manifest, at=20)
    lines = {
        line["step"]: line for line in cli("ls", "llama", "--durable", job.settings.durable.url, "--json").json["steps"]
    }
    assert lines[3]["state"] == "damaged"
    assert not lines[3]["complete"]
    assert lines[2]["complete"]


def test_two_attempts_at_a_step_are_distinguished(cli, agent_dir, durable):
    job = CheckpointJob(agent_dir, durable, "twice")
    job.save(1)
    close_sessions()
    job.save(1)
    said = cli("ls", "twice", "--json")
    first, second = said.json["steps"]
    assert (first["step"], second["step"]) == (1, 1)
    assert first["epoch"] < second["epoch"]
    assert "ATTEMPT" in cli("ls", "twice").out


@pytest.mark.parametrize("command", ["ls", "status", "inspect", "rm", "pin"])
def test_misspelled_job_is_reported_with_the_one_that_was_meant(cli, job, command):
    said = cli(command, "lama", *(["2"] if command in ("rm", "pin") else []))
    assert said.code == 3
    assert "Did you mean 'llama'?" in said.err
