"""``tieredckpt pin``, ``unpin`` and ``rm``."""

import pytest

from tieredckpt.session.session import close_sessions

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.e2e]


def listed_steps(cli, *more):
    return {line["step"]: line for line in cli("ls", "llama", "--json", *more).json["steps"]}


def test_pinned_step_stays_and_an_unpinned_one_expires(cli, job):
    epoch = listed_steps(cli)[2]["epoch"]
    assert cli("pin", "llama", 2, "--json").json == {
        "job": "llama",
        "step": 2,
        "epoch": epoch,
        "kept": True,
        "before": False,
        "marked": ["memory", "durable"],
    }
    assert [step for step, line in listed_steps(cli).items() if line["kept"]] == [2]
    assert "kept until it is unpinned" in cli("ls", "llama").out
    job.save(4, 5, 6, keep_last=1)
    assert {step: line["parts_in_memory"] for step, line in listed_steps(cli).items()}[2] == 1
    assert listed_steps(cli).keys() >= {2, 6}
    assert not listed_steps(cli).keys() & {1, 3}
    close_sessions()
    said = cli("unpin", "llama/step-2")
    assert "not kept any more in the memory tier and the durable tier" in said.out
    assert "was not kept" in cli("unpin", "llama", 2).out
    job.save(7, 8, 9, keep_last=1)
    assert 2 not in listed_steps(cli)


def test_pin_without_an_agent_changes_the_store(cli, job):
    job.lose_memory()
    url = job.settings.durable.url
    assert cli("pin", "llama", 1, "--durable", url, "--json").json["marked"] == ["durable"]
    assert listed_steps(cli, "--durable", url)[1]["kept"]
    said = cli("gc", "llama", "--keep-last", 1, "--durable", url, "--json")
    assert [one["step"] for one in said.json["deleted"]] == [2]
    job.save(4, 5, keep_last=1)
    assert 1 in listed_steps(cli)


def test_a_step_is_deleted_from_every_tier(cli, job, tmp_path):
    assert cli("pin", "llama", 3).code == 0
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
    assert "--force" in said.err, "whoever uploads it now would bring it back, and nobody can be asked"
    assert 3 in listed_steps(cli, "--durable", job.settings.durable.url)
    said = cli(*rm, "--force", "--json")
    assert (said.code, said.json["deleted_from"]) == (0, ["durable"])
    assert "no agent answers" in said.json["not_asked"]
    job.assert_restores(2, tiers={"durable"})


@pytest.mark.parametrize("command", ["pin", "unpin", "rm"])
def test_wrong_calls(cli, job, command):
    assert cli(command, "llama").code == 2
    assert cli(command, "llama/step-1", 2).code == 2
    assert cli(command, "llama", 9, *(["--yes"] if command == "rm" else [])).code == 3


def test_rm_of_a_job_deletes_all_its_steps_everywhere(cli, job):
    close_sessions()
    said = cli("rm", "llama")
    assert said.code == 2
    assert "delete all 3 steps of job 'llama' (1 to 3, " in said.err
    assert "from memory and durable? Add --yes" in said.err
    assert [line["step"] for line in cli("ls", "llama", "--json").json["steps"]] == [1, 2, 3]
    said = cli("rm", "llama", "--yes", "--json")
    assert said.code == 0
    assert said.json["steps"] == [1, 2, 3]
    assert said.json["step"] is None
    assert said.json["deleted_from"] == ["memory", "durable"]
    assert cli("ls", "llama").code == 3
    assert cli("ls", "llama", "--durable", job.settings.durable.url).code == 3
    assert cli("rm", "llama", "--yes").code == 3


def test_rm_refuses_a_job_that_runs(cli, job):
    with job.checkpointer() as ckpt:
        assert ckpt.session.agent is not None
        said = cli("rm", "llama", "--yes")
        assert said.code == 2
        assert "job 'llama' has 1 process on this node" in said.err
    assert [line["step"] for line in cli("ls", "llama", "--json").json["steps"]] == [1, 2, 3]
