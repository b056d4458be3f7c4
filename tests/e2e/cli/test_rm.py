"""``tieredckpt rm``: one step or a whole job, in one tier or in all."""

import shutil
from dataclasses import replace

import pytest

from tests.support.jobs import CheckpointJob, state_at
from tieredckpt import Checkpointer
from tieredckpt.session.session import close_sessions

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.e2e]


def listed_steps(cli, *more):
    return {line["step"]: line for line in cli("ls", "llama", "--json", *more).json["steps"]}


def test_a_step_is_deleted_from_every_tier(cli, job, tmp_path):
    said = cli("rm", "llama", 3)
    assert said.code == 2
    assert "--yes" in said.err
    assert 3 in listed_steps(cli)
    said = cli("rm", "llama", 3, "--yes", "--json")
    assert said.code == 0, said.err
    assert said.json["deleted_from"] == ["memory", "durable"]
    assert list(listed_steps(cli)) == [1, 2]
    assert not list((tmp_path / "durable").rglob("000000000003*"))
    job.assert_restores(2, tiers={"memory"})
    assert cli("rm", "llama", 3, "--yes").code == 3


def test_a_step_is_deleted_from_the_store_alone(cli, job):
    job.lose_memory()
    rm = ("rm", "llama/step-3", "-y", "--durable", job.settings.durable.url)
    said = cli(*rm)
    assert said.code == 5
    assert "--force" in said.err, "an unreachable agent may be uploading the step"
    assert 3 in listed_steps(cli, "--durable", job.settings.durable.url)
    said = cli(*rm, "--force", "--json")
    assert (said.code, said.json["deleted_from"]) == (0, ["durable"])
    assert "no agent answers" in said.json["not_asked"]
    job.assert_restores(2, tiers={"durable"})


def test_rm_of_a_job_deletes_all_its_steps_everywhere(cli, job, tmp_path):
    close_sessions()
    said = cli("rm", "llama")
    assert said.code == 2
    assert "delete all 3 steps of job 'llama' (1 to 3) from memory (" in said.err
    assert ")? Add --yes" in said.err
    assert [line["step"] for line in cli("ls", "llama", "--json").json["steps"]] == [1, 2, 3]
    in_memory = sum(line["size_bytes"] for line in listed_steps(cli).values() if line["parts_in_memory"])
    stored = sum(path.stat().st_size for path in (tmp_path / "durable").rglob("*.safetensors"))
    said = cli("rm", "llama", "--yes", "--json")
    assert said.code == 0
    assert said.json["steps"] == [1, 2, 3]
    assert said.json["step"] is None
    assert said.json["deleted_from"] == ["memory", "durable"]
    assert said.json["bytes"] == {"memory": in_memory, "durable": stored}
    assert cli("ls", "llama").code == 3
    assert cli("ls", "llama", "--durable", job.settings.durable.url).code == 3
    assert cli("rm", "llama", "--yes").code == 3


def test_rm_refuses_a_job_that_runs(cli, job):
    with job.checkpointer() as ckpt:
        assert ckpt.session.agent is not None
        said = cli("rm", "llama", "--yes")
        assert said.code == 2
        assert "job 'llama' has 1 process on this node: stop the job first" in said.err
        assert cli("rm", "llama", "--yes", "--force").code == 2
    assert [line["step"] for line in cli("ls", "llama", "--json").json["steps"]] == [1, 2, 3]


def test_rm_wrong_calls(cli, job):
    assert cli("rm", "llama").code == 2
    assert cli("rm", "llama/step-1", 2).code == 2
    assert cli("rm", "llama", 9, "--yes").code == 3


def test_rm_dry_run_deletes_nothing(cli, job):
    close_sessions()
    said = cli("rm", "llama", "--dry-run", "--json")
    assert said.code == 0, said.err
    assert said.json["dry_run"]
    assert said.json["steps"] == [1, 2, 3]
    assert said.json["deleted_from"] == ["memory", "durable"]
    assert "would delete all 3 steps of job 'llama' (1 to 3) from memory (" in cli("rm", "llama", "-n").out
    assert list(listed_steps(cli)) == [1, 2, 3]
    job.assert_restores(3, tiers={"memory"})


def test_rm_keeps_pinned_steps(cli, job):
    close_sessions()
    assert cli("pin", "llama", 3).code == 0
    said = cli("rm", "llama", 3, "--yes")
    assert said.code == 2
    assert "step 3 of job 'llama' is pinned" in said.err
    assert "--pinned" in said.err
    said = cli("rm", "llama", "--yes", "--json")
    assert said.code == 0, said.err
    assert said.json["steps"] == [1, 2]
    assert said.json["pinned"] == [3]
    assert list(listed_steps(cli)) == [3]
    job.assert_restores(3, tiers={"memory"})
    close_sessions()
    assert cli("rm", "llama", "--yes").code == 2
    assert cli("rm", "llama", "--yes", "--pinned").code == 0
    assert cli("ls", "llama").code == 3


def test_rm_of_the_memory_tier_leaves_the_durable_steps(cli, job):
    close_sessions()
    said = cli("rm", "llama", "--tier", "memory", "--yes", "--json")
    assert said.code == 0, said.err
    assert said.json["steps"] == [2, 3]
    assert said.json["deleted_from"] == ["memory"]
    assert said.json["bytes"]["durable"] == 0
    assert {step: line["parts_in_memory"] for step, line in listed_steps(cli).items()} == {1: 0, 2: 0, 3: 0}
    job.assert_restores(3, tiers={"durable"})


def test_rm_of_the_durable_tier_leaves_the_steps_in_memory(cli, job, tmp_path):
    close_sessions()
    said = cli("rm", "llama", "--tier", "durable", "--yes", "--json")
    assert said.code == 0, said.err
    assert said.json["steps"] == [1, 2, 3]
    assert said.json["deleted_from"] == ["durable"]
    assert said.json["bytes"]["memory"] == 0
    assert not list((tmp_path / "durable").rglob("*.safetensors"))
    assert list(listed_steps(cli)) == [2, 3]
    job.assert_restores(3, tiers={"memory"})
    close_sessions()
    said = cli("rm", "llama", "--tier", "durable", "--yes")
    assert said.code == 3
    assert "the durable tier has no step of tiered://llama" in said.err


def save_plain(job, *steps):
    """Save plain checkpoints, with the package disabled."""
    settings = replace(job.settings, enabled=False)
    with Checkpointer(f"tiered://{job.name}", settings=settings, on_sigterm="ignore") as ckpt:
        for step in steps:
            assert ckpt.save(state_at(step), step, durable=True).ok


def plain_bytes(tmp_path, *steps):
    folders = [tmp_path / "durable" / "llama" / f"step-{step}" for step in steps]
    return sum(path.stat().st_size for folder in folders for path in folder.iterdir())


def test_rm_deletes_the_plain_checkpoint_of_a_step(cli, job, tmp_path):
    save_plain(job, 3, 5)
    folder = tmp_path / "durable" / "llama" / "step-5"
    (folder / "notes.txt").write_text("written by another program")
    size = plain_bytes(tmp_path, 5) - (folder / "notes.txt").stat().st_size
    said = cli("rm", "llama", 5)
    assert said.code == 2
    assert "delete the plain checkpoint tiered://llama/step-5 from durable (" in said.err
    said = cli("rm", "llama", 5, "--dry-run")
    assert "would delete the plain checkpoint tiered://llama/step-5 from durable (" in said.out
    assert cli("ls", "llama", "--json").json["plain_steps"] == [3, 5]
    said = cli("rm", "llama", 5, "--yes", "--json")
    assert said.code == 0, said.err
    assert said.json["steps"] == []
    assert said.json["plain_steps"] == [5]
    assert said.json["attempts"] == 0
    assert said.json["deleted_from"] == ["durable"]
    assert said.json["bytes"] == {"memory": 0, "durable": size}
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert cli("rm", "llama", 5, "--yes").code == 3
    job.assert_restores(3, tiers={"memory"})


def test_rm_deletes_both_kinds_of_a_step(cli, job, tmp_path):
    save_plain(job, 3)
    said = cli("rm", "llama/step-3", "--dry-run", "--json")
    assert (said.json["steps"], said.json["plain_steps"]) == ([3], [3])
    said = cli("rm", "llama/step-3", "--yes")
    assert said.code == 0, said.err
    assert "deleted tiered://llama/step-3 with its plain checkpoint from memory (" in said.out
    assert cli("ls", "llama", "--json").json["plain_steps"] == []
    assert list(listed_steps(cli)) == [1, 2]
    job.assert_restores(2, tiers={"memory"})


def test_rm_of_a_job_deletes_its_plain_checkpoints(cli, job, tmp_path):
    save_plain(job, 4, 6)
    close_sessions()
    said = cli("rm", "llama")
    assert "delete all 5 steps of job 'llama' (1 to 6) with 2 plain checkpoints (4 to 6) from memory (" in said.err
    said = cli("rm", "llama", "--yes", "--json")
    assert said.code == 0, said.err
    assert (said.json["steps"], said.json["plain_steps"]) == ([1, 2, 3], [4, 6])
    assert cli("ls", "llama").code == 3
    assert cli("ls", "llama", "--durable", job.settings.durable.url).code == 3


def test_rm_of_a_job_with_only_plain_checkpoints(cli, agent_dir, durable):
    job = CheckpointJob(agent_dir, durable, "llama")
    save_plain(job, 4, 6)
    assert not agent_dir.exists()
    rm = ("rm", "llama", "-y", "--durable", durable.url)
    said = cli(*rm)
    assert said.code == 0, said.err
    assert "deleted all 2 steps of job 'llama' (4 to 6), all plain checkpoints, from durable (" in said.out
    assert "memory was not searched: no agent answers" in said.out
    assert cli("ls", "llama", "--durable", durable.url).code == 3


def test_rm_needs_force_if_an_agent_may_upload_steps(cli, job, tmp_path):
    save_plain(job, 4)
    job.lose_memory()
    durable = ("--durable", job.settings.durable.url)
    rm = ("rm", "llama/step-4", "-y", *durable)
    assert cli(*rm).code == 5
    shutil.rmtree(tmp_path / "durable" / "llama" / "manifests")  # as during the upload of the first step
    assert cli("rm", "llama", "-y", *durable).code == 5
    said = cli(*rm)
    assert said.code == 5
    assert "--force" in said.err
    assert cli("ls", "llama", "--json", *durable).json["plain_steps"] == [4]
    assert cli(*rm, "--force").code == 0
    assert cli("ls", "llama", *durable).code == 3


def test_rm_of_the_memory_tier_keeps_plain_checkpoints(cli, job):
    save_plain(job, 3, 4)
    close_sessions()
    assert cli("rm", "llama", 4, "--tier", "memory", "--yes").code == 3
    said = cli("rm", "llama", "--tier", "memory", "--yes", "--json")
    assert said.json["plain_steps"] == []
    assert cli("ls", "llama", "--json").json["plain_steps"] == [3, 4]
    said = cli("rm", "llama", "--tier", "durable", "--yes", "--json")
    assert said.code == 0, said.err
    assert (said.json["steps"], said.json["plain_steps"]) == ([1, 2, 3], [3, 4])
    assert cli("ls", "llama", "--durable", job.settings.durable.url).code == 3


def test_rm_keeps_the_plain_checkpoint_of_a_pinned_step(cli, job):
    save_plain(job, 3, 4)
    close_sessions()
    assert cli("pin", "llama/step-3").code == 0
    assert cli("rm", "llama", 3, "--yes").code == 2
    said = cli("rm", "llama", "--yes", "--json")
    assert said.code == 0, said.err
    assert (said.json["steps"], said.json["plain_steps"], said.json["pinned"]) == ([1, 2], [4], [3])
    assert cli("ls", "llama", "--json").json["plain_steps"] == [3]
    close_sessions()
    assert cli("rm", "llama", "--yes", "--pinned").code == 0
    assert cli("ls", "llama").code == 3


def test_rm_of_an_epoch_keeps_plain_checkpoints(cli, job):
    save_plain(job, 3)
    epoch = listed_steps(cli)[3]["epoch"]
    said = cli("rm", f"llama/step-3@{epoch}", "--yes", "--json")
    assert said.code == 0, said.err
    assert said.json["plain_steps"] == []
    assert cli("ls", "llama", "--json").json["plain_steps"] == [3]
