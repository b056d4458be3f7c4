"""``tieredckpt verify`` finds every kind of damage, in every tier, and names it."""

import pytest

from tests.support.jobs import CheckpointJob, durable_settings
from tieredckpt.session.session import close_sessions
from tieredckpt.settings import DurableSettings

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.e2e]


def check_results(said):
    return {(c["step"], c["tier"]): (c["result"], c["damaged_chunks"]) for c in said.json["checks"]}


def test_all_copies_are_good(cli, job):
    said = cli("verify", "llama", "--json")
    assert said.code == 0
    assert said.json["good"]
    expected = {(1, "durable"), (2, "memory"), (2, "durable"), (3, "memory"), (3, "durable")}
    assert check_results(said) == dict.fromkeys(expected, ("good", []))
    assert "5 of 5 copies" in cli("verify", "llama").out


def test_a_flipped_bit_on_disk(cli, job, shard_of, flip_byte_of):
    flip_byte_of(shard_of(2), at=(1 << 20) + 100)
    said = cli("verify", "llama", "--json")
    assert said.code == 4
    assert check_results(said)[2, "durable"] == ("damaged", [1])
    assert check_results(said)[2, "memory"] == ("good", [])
    said = cli("verify", "llama/step-2")
    assert said.code == 4
    assert "chunk 1 of 2: differs from the saved bytes" in said.out
    assert cli("verify", "llama/step-3").code == 0


def test_a_flipped_bit_in_memory(cli, job, slot_of, flip_byte_of):
    flip_byte_of(slot_of(3))
    said = cli("verify", "llama/step-3", "--json")
    assert said.code == 4
    assert check_results(said) == {(3, "memory"): ("damaged", [0]), (3, "durable"): ("good", [])}
    said = cli("verify", "llama/step-3", "--json")
    assert check_results(said)[3, "durable"] == ("good", [])
    assert check_results(said).get((3, "memory"), ("damaged", []))[0] != "good", (
        "the agent still reports the damaged copy as good"
    )
    job.assert_restores(3, tiers={"durable"})


def test_step_lost_to_damage_is_damaged_and_not_absent(cli, agent_dir, slot_of, flip_byte_of):
    job = CheckpointJob(agent_dir, DurableSettings(), "llama")
    job.save(3, durable=False)
    flip_byte_of(slot_of(3))
    assert cli("verify", "llama").code == 4
    (line,) = cli("ls", "llama", "--json").json["steps"]
    assert line["state"] == "damaged"
    assert "chunks changed" in line["damaged"]
    assert cli("inspect", "llama").code == 4
    assert cli("inspect", "llama/step-4").code == 3


def test_a_short_object(cli, job, shard_of):
    path = shard_of(1)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 10)
    said = cli("verify", "llama", "--json")
    assert said.code == 4
    assert check_results(said)[1, "durable"] == ("damaged", [1])


def test_missing_object_is_damage(cli, job, shard_of):
    shard_of(1).unlink()
    said = cli("verify", "llama", "--json")
    assert said.code == 4
    assert check_results(said)[1, "durable"] == ("damaged", [0, 1])
    assert "is missing" in next(c for c in said.json["checks"] if c["step"] == 1)["problem"]


def test_a_damaged_manifest(cli, job, tmp_path, flip_byte_of):
    job.lose_memory()
    (manifest,) = (tmp_path / "durable" / "llama" / "manifests").glob("000000000003*")
    flip_byte_of(manifest, at=20)
    said = cli("verify", "llama", "--durable", job.settings.durable.url, "--json")
    assert said.code == 4
    assert check_results(said)[3, "durable"][0] == "damaged"
    assert check_results(said)[2, "durable"][0] == "good"


def test_a_store_that_does_not_answer_is_unknown_not_good(cli, agent_dir, rclone, monkeypatch):
    job = CheckpointJob(agent_dir, durable_settings(rclone))
    job.save(1)
    close_sessions()
    monkeypatch.setenv("TIEREDCKPT_DURABLE_OPTIONS", "endpoint=http://127.0.0.1:9,region=us-east-1")
    monkeypatch.setenv("TIEREDCKPT_DURABLE_RETRY_S", "0")
    said = cli("verify", job.name, "--durable", "s3://elsewhere/x", "--json")
    assert said.code == 5
    assert not said.json["good"]
    assert check_results(said) == {(1, "memory"): ("good", [])}


def test_compressed_shards_are_verified_too(cli, agent_dir, tmp_path, flip_byte_of):
    import torch

    job = CheckpointJob(agent_dir, DurableSettings(url=f"file://{tmp_path}/durable", compress="zstd"), "packed")
    with job.checkpointer() as ckpt:
        ckpt.save({"zeros": torch.zeros(1 << 20)}, 1).wait("durable")
    assert cli("verify", "packed").code == 0
    (path,) = (tmp_path / "durable").rglob("*.zst")
    flip_byte_of(path, at=path.stat().st_size // 2)
    said = cli("verify", "packed", "--json")
    assert said.code == 4
    assert len(check_results(said)[1, "durable"][1]) == 1
