"""``tieredckpt doctor`` with real agents, directories and servers, working and broken."""

import shutil

import pytest

from peerstore.client.agent_launcher import connect_or_launch_agent
from tests.support.jobs import CheckpointJob, bucket_url, durable_settings
from tieredckpt.agent.agent_client import agent_command, agent_environment
from tieredckpt.session.session import close_sessions
from tieredckpt.settings import DurableSettings
from tieredckpt.tensors.device import accelerator

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.e2e]


def verdicts(said):
    return {one["what"]: one["verdict"] for one in said.json["findings"]}


def finding_text(said, what):
    return next(one["text"] for one in said.json["findings"] if one["what"] == what)


def test_doctor_passes_on_an_unconfigured_node(cli, agent_dir):
    said = cli("doctor", "--json")
    assert said.code == 0
    assert said.json["well"]
    assert verdicts(said) == {
        "settings": "good",
        "shared memory": "good",
        "memory budget": "good",
        "agent": "note",
        "durable tier": "note",
        "NCCL environment": "good",
    }
    assert not agent_dir.exists()
    left = {row["lost"]: row["left"] for row in said.json["survival"]}
    assert left["this node or its memory"] == "nothing: there is no durable tier"
    assert left["the agent, killed"].startswith("the newest sealed step")


def test_environment_that_prevents_nccl_recovery_is_named_with_its_reason(cli, agent_dir, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    said = cli("doctor", "--json")
    assert said.code == 0, "a job without in-process recovery does not need it"
    assert verdicts(said)["NCCL environment"] == "note"
    assert finding_text(said, "NCCL environment").startswith(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=3: NCCL's watchdog would end"
    )


def test_framework_is_checked_with_its_version_and_settings(cli, agent_dir, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NAME", "pretrain")
    said = cli("doctor", "--framework", "lightning", "--json")
    assert said.code == 0
    assert (verdicts(said)["lightning"], verdicts(said)["Slurm"]) == ("good", "note")
    assert "at least 2.6 is needed" in finding_text(said, "lightning")
    assert "requeues the job when SIGUSR1 arrives" in finding_text(said, "Slurm")


def test_unusable_setting_of_a_framework_is_a_failure(cli, agent_dir, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_AGENT_PEERS", "off")
    said = cli("doctor", "--framework", "torchft", "--json")
    assert said.code == 1
    assert (verdicts(said)["torchft"], verdicts(said)["peers"]) == ("good", "bad")


def test_unknown_framework_is_a_usage_error_with_a_suggestion(cli, agent_dir):
    said = cli("doctor", "--framework", "ligthning")
    assert said.code == 2
    assert "there is no framework 'ligthning'. Did you mean 'lightning'? Known: accelerate, lightning" in said.err


@pytest.mark.skipif(accelerator().device_count() > 0, reason="there is an accelerator")
def test_gpu_checks_fail_without_an_accelerator(cli, agent_dir):
    said = cli("doctor", "--gpu", "--json")
    assert said.code == 1
    assert (verdicts(said)["device"], verdicts(said)["device checks"]) == ("bad", "note")
    assert "reports no accelerator" in finding_text(said, "device")


def test_doctor_passes_with_an_agent_and_a_directory(cli, job, tmp_path):
    said = cli("doctor", "--json")
    assert said.code == 0
    assert verdicts(said)["agent"] == "good"
    assert str(job.agent_dir) in finding_text(said, "agent")
    assert verdicts(said)["durable tier"] == "good", "the agent reports the tier"
    assert verdicts(said)["conditional put"] == "good"
    assert not list((tmp_path / "durable").glob(".doctor*"))
    assert "if this is lost" in cli("doctor").out.lower()


@pytest.fixture(params=["rclone", "moto"])
def server(request):
    return request.getfixturevalue(request.param)


def test_a_bucket(cli, agent_dir, server):
    job = CheckpointJob(agent_dir, durable_settings(server))
    job.save(1)
    said = cli("doctor", "--bandwidth", "--size", "6MiB", "--json")
    assert said.code == 0, said.out
    found = verdicts(said)
    assert found["credentials"] == "good"
    assert finding_text(said, "credentials") == "AKTI...ST from env, region us-east-1"
    assert found["durable tier"] == "good"
    assert found["conditional put"] == ("good" if server.keeps_conditions else "note")
    assert found["clock"] == "good"
    assert found["checksums"] in ("good", "note")
    assert found["bandwidth"] == "good"
    assert "6.0 MiB in" in finding_text(said, "bandwidth")
    with server.client() as client:
        prefix = job.settings.durable.url.split("/", 3)[3]
        keys = [one["Key"] for one in client.list_objects_v2(Bucket="checkpoints", Prefix=prefix)["Contents"]]
    assert not [key for key in keys if "doctor" in key or "probe" in key]


def test_doctor_fails_for_a_missing_bucket(cli, agent_dir, rclone, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_DURABLE_OPTIONS", f"endpoint={rclone.endpoint},region=us-east-1")
    said = cli("doctor", "--durable", "s3://no-such-bucket/x", "--json")
    assert said.code == 1
    assert verdicts(said)["durable tier"] == "bad"


def test_wrong_credentials(cli, agent_dir, rclone, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_DURABLE_OPTIONS", f"endpoint={rclone.endpoint},region=us-east-1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    said = cli("doctor", "--durable", bucket_url(), "--json")
    assert said.code == 1
    assert verdicts(said)["durable tier"] == "bad"
    assert "allow" in cli("doctor", "--durable", bucket_url()).out


def test_doctor_fails_if_only_the_agents_credentials_are_wrong(cli, agent_dir, rclone, monkeypatch):
    job = CheckpointJob(agent_dir, durable_settings(rclone))
    job.save(1)
    close_sessions()
    job.kill_agent()
    with monkeypatch.context() as wrong:
        wrong.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        place = job.settings.agent_place
        connect_or_launch_agent(place, agent_command(job.settings), environ=agent_environment()).close()
    said = cli("doctor", "--json")
    assert said.code == 1
    found = verdicts(said)
    assert (found["agent's uploads"], found["durable tier"], found["credentials"]) == ("bad", "good", "good")
    assert job.settings.durable.url in finding_text(said, "agent's uploads")
    assert "tieredckpt agent restart --dir" in cli("doctor").out


def test_wrong_shell_credentials_are_a_note_if_the_agent_can_upload(cli, agent_dir, rclone, monkeypatch):
    job = CheckpointJob(agent_dir, durable_settings(rclone))
    job.save(1)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    said = cli("doctor", "--json")
    assert said.code == 0, said.out
    assert (verdicts(said)["agent's uploads"], verdicts(said)["durable tier"]) == ("good", "note")
    assert "The agent, which uploads, has access" in finding_text(said, "durable tier")
    assert cli("doctor", "--durable", bucket_url(), "--json").code == 1, "the agent does not use this URL"


def test_no_credentials(cli, agent_dir, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    said = cli("doctor", "--durable", "s3://bucket/x", "--json")
    assert said.code == 1
    assert verdicts(said)["credentials"] == "bad"


def test_doctor_fails_for_an_arena_outside_memory_or_too_small(cli, tmp_path, monkeypatch, agent_dir):
    assert verdicts(cli("doctor", "--agent-dir", tmp_path / "x", "--json"))["shared memory"] == "bad"
    monkeypatch.setenv("TIEREDCKPT_AGENT_BUDGET", "900TiB")
    said = cli("doctor", "--json")
    assert said.code == 1
    assert verdicts(said)["shared memory"] == verdicts(said)["memory budget"] == "bad"


def test_doctor_fails_without_an_agent(cli, agent_dir, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_AGENT_EMBEDDED", "0")
    said = cli("doctor", "--json")
    assert said.code == 1
    assert verdicts(said)["agent"] == "bad"


def test_a_killed_agents_slots_are_mentioned(cli, job):
    from tieredckpt.session.session import close_sessions

    close_sessions()
    job.kill_agent()
    said = cli("doctor", "--json")
    assert "slots of the last one are there" in finding_text(said, "agent")


def test_wrong_settings(cli, agent_dir, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_AGENT_BUDGE", "1GiB")
    said = cli("doctor", "--json")
    assert said.code == 1
    assert verdicts(said) == {"settings": "bad"}
    assert cli("ls").code == 2


def test_doctor_reports_a_failed_upload(cli, agent_dir, tmp_path):
    store = tmp_path / "store"
    job = CheckpointJob(agent_dir, DurableSettings(url=f"file://{store}", retry_s=0.0))
    with job.checkpointer() as ckpt:
        ckpt.save({"x": 1}, 1).wait("durable")
        shutil.rmtree(store)
        store.write_text("not a directory")
        ckpt.save({"x": 2}, 2).wait()
        ckpt.wait("durable", timeout_s=1)
    said = cli("doctor", "--json")
    assert said.code == 1
    assert verdicts(said)["durable tier"] == "bad"


def test_job_without_a_durable_tier_is_not_promised_another_jobs(cli, agent_dir, tmp_path):
    stores = {name: f"file://{tmp_path}/{name}" for name in ("one", "two")}
    for name, url in stores.items():
        CheckpointJob(agent_dir, DurableSettings(url=url, every=5), name).save(5)
        close_sessions()
    CheckpointJob(agent_dir, DurableSettings(), "memory").save(1, durable=False)
    said = cli("doctor", "--json")
    assert said.code == 0
    left = {row["jobs"]: row["left"] for row in said.json["survival"] if row["lost"] == "this node or its memory"}
    assert left == {"memory": "nothing: there is no durable tier"} | {
        name: f"the newest durable step (one step in 5 is uploaded) in {url}" for name, url in stores.items()
    }
    texts = [one["text"] for one in said.json["findings"] if one["what"] == "durable tier"]
    assert "none for job memory: lost with this node's memory" in texts
    assert all(any(text.startswith(f"{url}: writes") for text in texts) for url in stores.values())
    assert "JOBS" in cli("doctor").out


def test_doctor_leaves_nothing_in_a_failing_store(cli, agent_dir, rclone, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_DURABLE_OPTIONS", f"endpoint={rclone.endpoint},region=us-east-1")
    said = cli("doctor", "--durable", "s3://no-such-bucket/x", "--json")
    left = {row["lost"]: row["left"] for row in said.json["survival"]}
    assert left["this node or its memory"].startswith("nothing as it is now: s3://no-such-bucket/x does not work")
    assert left["all nodes of the job"] == left["this node or its memory"]
    assert left["the store"].startswith("the newest sealed step")


def test_doctor_accepts_the_region_variables_of_other_sdks(cli, agent_dir, rclone, monkeypatch):
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    monkeypatch.setenv("TIEREDCKPT_DURABLE_OPTIONS", f"endpoint={rclone.endpoint}")
    said = cli("doctor", "--durable", "s3://checkpoints/region", "--json")
    assert "region eu-north-1" in finding_text(said, "credentials")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-south-2")
    assert "region eu-south-2" in finding_text(
        cli("doctor", "--durable", "s3://checkpoints/region", "--json"), "credentials"
    )
