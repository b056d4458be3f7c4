"""Commands on a job with a branch that a later run left behind."""

import pytest

from tests.support.bits import zeros_like_state
from tests.support.jobs import state_at
from tieredckpt.dcp.tiered_reader import TieredReader
from tieredckpt.session.session import close_sessions

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.e2e]


def listed_steps(cli):
    return cli("ls", "branched", "--json").json["steps"]


def epochs_of(cli, step):
    return [row["epoch"] for row in listed_steps(cli) if row["step"] == step]


def test_steps_that_a_later_run_left_behind_are_marked(cli, branched_job):
    current = max(epochs_of(cli, 3))
    left = {"epoch": current, "continued_from": 2}
    found = {(row["step"], row["epoch"] == current): row["left_behind"] for row in listed_steps(cli)}
    assert found == {(1, False): None, (2, False): None, (3, False): left, (4, False): left, (3, True): None}
    lines = [line for line in cli("ls", "branched").out.splitlines() if "left behind" in line]
    assert [line.split()[0] for line in lines] == ["3", "4"]
    assert all(f"left behind: epoch {current} continued from step 2" in line for line in lines)
    (row,) = cli("ls", f"branched/step-3@{current}", "--json").json["steps"]
    assert row["left_behind"] is None


def test_pinned_step_of_a_branch_survives_eviction(cli, branched_job):
    (left,) = epochs_of(cli, 4)
    said = cli("pin", "branched", f"4@{left}", "--json")
    assert (said.code, said.json["epoch"], said.json["marked"]) == (0, left, ["memory", "durable"]), said.err
    assert [(row["step"], row["epoch"]) for row in listed_steps(cli) if row["kept"]] == [(4, left)]
    branched_job.save(4, 5, 6, 7, keep_last=1)
    kept = {(row["step"], row["epoch"]): row["tiers"] for row in listed_steps(cli)}
    assert kept[4, left] == ["memory", "durable"]
    assert [step for step, epoch in kept if epoch == left] == [4]
    assert epochs_of(cli, 4) == [left]
    close_sessions()
    assert cli("unpin", "branched", 4, "--epoch", left).code == 0
    branched_job.save(8, 9, keep_last=1)
    assert epochs_of(cli, 4) == []


def test_one_attempt_at_a_step_is_pinned_in_memory(cli, branched_job):
    (left,) = epochs_of(cli, 4)
    assert cli("pin", "branched", 4).code == 0
    branched_job.save(4, keep_last=9)
    said = cli("pin", "branched", 4)
    assert said.code == 2
    assert f"the same step of epoch {left} is pinned" in said.err
    assert f"tieredckpt unpin branched/step-4@{left}" in said.err
    assert cli("unpin", f"branched/step-4@{left}").code == 0
    assert cli("pin", "branched", 4).code == 0
    assert [row["epoch"] for row in listed_steps(cli) if row["kept"]] == [max(epochs_of(cli, 4))]


def test_commands_say_which_epoch_they_choose(cli, branched_job, tmp_path):
    left, current = epochs_of(cli, 3)
    for command in (("inspect", "branched/step-3"), ("export", "branched/step-3", tmp_path / "new.safetensors")):
        said = cli(*command, "--json")
        assert said.json["epoch"] == current
        assert f"was saved by epochs {left}, {current}: using that of epoch {current}" in " ".join(said.err.split())
        assert f"branched/step-3@{left}" in said.err
    for command in (("inspect", f"branched/step-3@{left}"), ("export", f"branched/step-3@{left}", tmp_path / "old.st")):
        said = cli(*command, "--json")
        assert (said.json["epoch"], said.err) == (left, "")
    assert {check["epoch"] for check in cli("verify", f"branched/step-3@{left}", "--json").json["checks"]} == {left}
    assert {check["epoch"] for check in cli("verify", "branched/step-3", "--json").json["checks"]} == {left, current}
    assert "EPOCH" in cli("verify", "branched/step-3").out
    said = cli("inspect", "branched/step-3@7")
    assert said.code == 3
    assert f"3@{left}, 3@{current}" in " ".join(said.err.split())


def test_reader_loads_the_epoch_of_its_url(cli, branched_job):
    import torch.distributed.checkpoint as dcp

    left, current = epochs_of(cli, 3)
    for url, epoch in ((f"tiered://branched/step-3@{left}", left), ("tiered://branched/step-3", current)):
        reader = TieredReader(url, settings=branched_job.settings)
        dcp.load(zeros_like_state(state_at(3)), storage_reader=reader)
        assert reader.report.version_id.epoch == epoch


def test_restore_names_newer_steps_of_another_branch(cli, branched_job, caplog):
    (left,) = epochs_of(cli, 4)
    with branched_job.checkpointer() as ckpt:
        assert ckpt.restore(zeros_like_state(state_at(3))) == 3
        assert [(one.version, one.epoch) for one in ckpt.last_restore.newer_steps] == [(4, left)]
        (warning,) = (text for text in caplog.messages if "newer steps behind" in text)
        assert "branched: step 3 was restored" in warning
        assert f"step 4 of epoch {left} (step 4: this node's memory, the durable tier)" in warning
        assert "The job does 1 step again" in warning
        assert f"tieredckpt pin branched 4@{left}" in warning
        assert f"elastic run --resume-from 4@{left}" in warning
        caplog.clear()
        assert ckpt.restore(zeros_like_state(state_at(1)), 1) == 1
        (warning,) = (text for text in caplog.messages if "newer steps behind" in text)
        assert f"steps 4, 3, 2 of epoch {left}; step 3 of epoch" in warning
        assert "The job does 3 steps again" in warning
        caplog.clear()
        assert ckpt.restore(zeros_like_state(state_at(4)), 4) == 4
        assert ckpt.last_restore.newer_steps == ()
        assert not [text for text in caplog.messages if "newer steps behind" in text]
