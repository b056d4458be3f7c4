"""``tieredckpt quarantine`` and ``rebuild``."""

import pytest

from tests.support.jobs import CheckpointJob
from tieredckpt.session.session import close_sessions
from tieredckpt.settings import DurableSettings

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.e2e]


def quarantine_reason(cli, job, step, *more):
    lines = cli("ls", job, "--json", *more).json["steps"]
    return next(line["quarantined"] for line in lines if line["step"] == step)


def test_quarantined_step_is_not_chosen_until_lifted(cli, job):
    said = cli("quarantine", "llama/step-3", "--reason", "loss was NaN", "--json")
    assert said.code == 0
    assert said.json["marked"] == ["memory", "durable"]
    assert quarantine_reason(cli, "llama", 3) == "loss was NaN"
    assert "loss was NaN" in cli("ls", "llama").out
    job.assert_restores(2, tiers={"memory"})
    close_sessions()
    said = cli("quarantine", "llama/step-3", "--lift", "--json")
    assert said.code == 0
    assert said.json["before"] == ["marked in the durable tier"] or said.json["before"] == ["loss was NaN"]
    assert said.json["now"] == [None]
    job.assert_restores(3, tiers={"memory"})


def test_quarantine_without_an_agent_marks_the_store(cli, job):
    job.lose_memory()
    url = job.settings.durable.url
    said = cli("quarantine", "llama/step-3", "--durable", url, "--json")
    assert said.json["marked"] == ["durable"]
    assert quarantine_reason(cli, "llama", 3, "--durable", url) == "by hand"
    job.assert_restores(2, tiers={"durable"})
    close_sessions()
    assert cli("quarantine", "llama/step-3", "--lift", "--durable", url).code == 0
    assert quarantine_reason(cli, "llama", 3) is None


def test_quarantine_marks_a_step_only_in_memory(cli, agent_dir):
    job = CheckpointJob(agent_dir, DurableSettings(), "near")
    job.save(1, 2, durable=False)
    assert cli("quarantine", "near/step-2", "--json").json["marked"] == ["memory"]
    job.assert_restores(1, tiers={"memory"})


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["llama"], 2), (["llama/step-9"], 3), (["llama/step-1", "--lift", "--reason", "x"], 2), (["other/step-1"], 3)],
)
def test_wrong_calls(cli, job, arguments, code):
    assert cli("quarantine", *arguments).code == code


# -- rebuild ------------------------------------------------------------------------------------------------------


@pytest.fixture
def manifest_of(tmp_path):
    def find(step):
        (path,) = (tmp_path / "durable" / "llama" / "manifests").glob(f"{step:012d}.*.manifest")
        return path

    return find


def test_a_lost_manifest_is_rebuilt_from_the_shards(cli, job, manifest_of):
    job.lose_memory()
    url = job.settings.durable.url
    lost = manifest_of(3)
    lost.unlink()
    job.assert_restores(2, tiers={"durable"})
    job.lose_memory()
    said = cli("rebuild", "llama/step-3", "--durable", url, "--dry-run", "--json")
    assert said.code == 0
    assert not lost.exists()
    said = cli("rebuild", "llama/step-3", "--durable", url, "--json")
    assert said.code == 0
    assert (said.json["parts"], said.json["found"]) == (1, 1)
    assert manifest_of(3).name == lost.name
    job.assert_restores(3, tiers={"durable"})


def test_a_damaged_manifest_is_replaced(cli, job, manifest_of, flip_byte_of):
    job.lose_memory()
    url = job.settings.durable.url
    flip_byte_of(manifest_of(3), at=20)
    assert cli("verify", "llama/step-3", "--durable", url).code == 4
    assert cli("rebuild", "llama/step-3", "--durable", url).code == 0
    assert cli("verify", "llama/step-3", "--durable", url).code == 0
    job.assert_restores(3, tiers={"durable"})


def test_damaged_shards_get_no_manifest(cli, job, manifest_of, shard_of, flip_byte_of):
    manifest_of(2).unlink()
    flip_byte_of(shard_of(2))
    said = cli("rebuild", "llama/step-2")
    assert said.code == 4
    assert "1 chunk of" in said.err


def test_missing_shards_get_no_manifest(cli, job, manifest_of, shard_of):
    manifest_of(2).unlink()
    shard_of(2).unlink()
    assert cli("rebuild", "llama/step-2").code == 4
    assert cli("rebuild", "llama/step-9").code == 3


def save_parts(name, url):
    import torch
    import torch.distributed as dist

    from tieredckpt import Checkpointer

    me = dist.get_rank()
    with Checkpointer(f"tiered://{name}", durable=url) as ckpt:
        ckpt.save({f"own{me}": torch.full((1000,), float(me))}, 4).wait("durable")


def test_too_few_parts_get_no_manifest(cli, agent_dir, durable, ranks, tmp_path):
    ranks.run(2, save_parts, "llama", durable.url)
    (manifest,) = (tmp_path / "durable" / "llama" / "manifests").iterdir()
    manifest.unlink()
    assert cli("rebuild", "llama/step-4", "-n").code == 0
    (index,) = (tmp_path / "durable" / "llama" / "steps").rglob("000001.index")
    index.unlink()
    said = cli("rebuild", "llama/step-4")
    assert said.code == 4
    assert "lacks 1 of 2 parts, and with them own1" in said.err
