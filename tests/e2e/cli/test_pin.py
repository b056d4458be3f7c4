"""``tieredckpt pin`` and ``unpin``."""

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
    assert "is no longer pinned in the memory tier and the durable tier" in said.out
    assert "was not pinned" in cli("unpin", "llama", 2).out
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


@pytest.mark.parametrize("command", ["pin", "unpin"])
def test_wrong_calls(cli, job, command):
    assert cli(command, "llama").code == 2
    assert cli(command, "llama/step-1", 2).code == 2
    assert cli(command, "llama", 9).code == 3
