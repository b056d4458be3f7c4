"""``tieredckpt simulate``: its output and errors, and that the documentation shows the same."""

import json
import re
import shlex
from pathlib import Path

import msgspec
import pytest

from tests.support.synthetic_event_logs import SyntheticJob
from tieredckpt.cli import main
from tieredckpt.goodput import analyse

PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "simulating.md"
QUICK = ["--work", "3d", "--runs", "20"]


@pytest.fixture
def run(capsys):
    def said(*args):
        code = main(["simulate", *map(str, args)])
        out, err = capsys.readouterr()
        return code, out, err

    return said


@pytest.fixture
def answer(run):
    def said(*args):
        code, out, err = run(*args, *QUICK, "--json")
        assert code == 0, err
        return json.loads(out)

    return said


def test_complete_answer_is_consistent(answer):
    said = answer("--gpus", 16384, "--recovery", "45s", "--interval", "10min", "--stall", "2s", "--work", "30d")
    assert said["mtbf_s"] == pytest.approx(11135, rel=1e-3)
    assert said["nodes"] == 2048
    assert said["played"]["standard_errors_apart"] < 4
    assert said["goodput"] == said["played"]["goodput"]
    assert said["played"]["low"] <= said["goodput"] <= said["played"]["high"]
    assert sum(said["played"]["shares"].values()) == pytest.approx(1)
    assert said["best"]["goodput"] == max(one["goodput"] for one in said["curve"])
    assert set(said["policies"]) == {"as asked", "in process, nothing lost", "restart and load"}
    assert said["longest_recovery_s"]["0.99"] == pytest.approx(112, abs=0.5)


def test_default_interval_is_the_best(answer):
    said = answer("--mtbf", "3h/job", "--recovery", "45s")
    assert said["interval_s"] == said["best"]["interval_s"]
    assert said["closed_form"] == said["best"]["goodput"]


def test_same_seed_gives_the_same_answer(run):
    asked = ["--mtbf", "3h/job", "--recovery", "45s", *QUICK]
    assert run(*asked) == run(*asked)
    assert run(*asked) != run(*asked, "--seed", 1)


def test_a_recovery_by_stages(answer):
    said = answer("--mtbf", "3h/job", "--stage", "hydrate=9s", "--stage", "detect=500ms", "--stage", "hydrate=2s")
    assert said["stages_s"] == {"detect": 0.5, "hydrate": 2.0}
    assert said["recovery_s"] == 2.5


def written(folder, events):
    folder.mkdir()
    (folder / "n0.coordinator.jsonl").write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in events))
    return folder


def test_recovery_time_is_read_from_an_event_log(run, answer, tmp_path):
    told = SyntheticJob(faults=5, resizes=0)
    ledger = written(tmp_path / "ledger", told.events)
    past = analyse(told.events)
    said = answer("--mtbf", "3h/job", "--event-log", ledger)
    assert said["recovery_s"] == pytest.approx(past.mttr_s)
    assert said["stall_s"] == pytest.approx(past.save_s.sum_s / past.save_s.count)
    assert next(iter(said["stages_s"])) == "detect"
    faster = answer("--mtbf", "3h/job", "--event-log", ledger, "--stage", "detect=0", "--stall", "1s")
    assert faster["recovery_s"] == pytest.approx(past.mttr_s - said["stages_s"]["detect"])
    assert faster["stall_s"] == 1
    assert "the mean of its 5 recoveries" in run("--mtbf", "3h/job", "--event-log", ledger, *QUICK)[1]


def test_event_log_without_recoveries_is_refused(run, tmp_path):
    quiet = written(tmp_path / "quiet", SyntheticJob(faults=0, resizes=0).events)
    code, _, err = run("--mtbf", "3h/job", "--event-log", quiet)
    assert (code, "--event-log" in err, "--recovery" in err) == (2, True, True)
    assert run("--mtbf", "3h/job", "--event-log", tmp_path / "nowhere")[0] == 3


def test_spares_and_missing_nodes(run, answer):
    asked = ["--gpus", 1024, "--mtbf", "1y/gpu", "--recovery", "1min", "--node-loss", "30%", "--repair", "3d"]
    alone, spares, fewer = (answer(*asked, *more) for more in ([], ["--spares", 20], ["--min-nodes", 100]))
    assert alone["goodput"] < fewer["goodput"] < spares["goodput"]
    assert alone["played"]["standard_errors_apart"] is None
    assert fewer["played"]["shares"]["smaller"] > 0 == fewer["played"]["shares"]["waiting"]
    assert "closed form" in run(*asked, *QUICK)[1]


def test_intervals_are_multiples_of_steps(answer):
    said = answer("--mtbf", "3h/job", "--recovery", "45s", "--step", "7s", "--interval", "1min", "--live-share", "20%")
    assert said["interval_s"] == 63
    assert all(one["interval_s"] % 7 == 0 for one in said["curve"])


def test_memory_loss_lowers_goodput(answer):
    asked = ["--mtbf", "3h/job", "--recovery", "45s", "--interval", "1min"]
    kept = answer(*asked)
    lost = answer(*asked, "--durable-share", "10%", "--durable-every", 60, "--durable-recovery", "10min")
    assert lost["closed_form"] < kept["closed_form"]
    assert lost["recovery_s"] == pytest.approx(0.9 * 45 + 0.1 * 600)


def test_excessive_faults_skip_the_simulation(run):
    code, out, _ = run("--mtbf", "5min/job", "--recovery", "1h", "--interval", "1h", *QUICK)
    assert code == 0
    assert "not played" in out


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([], "--recovery"),
        (["--recovery", "1min"], "--gpus"),
        (["--recovery", "1min", "--event-log", "somewhere"], "--event-log"),
        (["--recovery", "1min", "--stage", "detect=1s", "--mtbf", "1h/job"], "--stage"),
        (["--recovery", "soon"], "--recovery"),
        (["--recovery", "-5s"], "--recovery"),
        (["--stage", "lunch=1h"], "--stage"),
        (["--stage", "detect"], "--stage"),
        (["--mtbf", "1h/rack"], "--mtbf"),
        (["--mtbf", "0/gpu"], "--mtbf"),
        (["--mtbf", "llama-9"], "--mtbf"),
        (["--interval", "0"], "--interval"),
        (["--live-share", "150%"], "--live-share"),
        (["--live-share", "some"], "--live-share"),
        (["--gpus", "100", "--recovery", "1min"], "--gpus"),
        (["--gpus", "0"], "--gpus"),
        (["--gpus", "64", "--recovery", "1min", "--live-share", "60%", "--durable-share", "60%"], "--durable-share"),
        (["--gpus", "64", "--recovery", "1min", "--durable-every", "5"], "--durable-every"),
        (["--gpus", "64", "--recovery", "1min", "--spares", "2"], "--spares"),
        (["--gpus", "64", "--recovery", "1min", "--node-loss", "1%", "--min-nodes", "9"], "--min-nodes"),
        (["--mtbf", "1h/job", "--recovery", "1min", "--node-loss", "1%"], "--gpus"),
        (["--mtbf", "1h/job", "--recovery", "1min", "--stall", "0"], "--stall"),
        (["--mtbf", "1h/job", "--recovery", "1min", "--live-share", "1"], "--interval"),
        (["--runs", "1"], "--runs"),
    ],
)
def test_errors_name_the_option(run, args, named):
    code, out, err = run(*args)
    assert code == 2
    assert named in err
    assert not out


def shown():
    blocks = re.findall(r"```console\n\$ tieredckpt simulate (.*?)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert blocks
    return blocks


@pytest.mark.parametrize(("command", "output"), shown())
def test_documented_examples_match_the_output(run, command, output):
    code, out, err = run(*shlex.split(command))
    assert code == 0, err
    assert [line.rstrip() for line in out.splitlines()] == output.splitlines()


def test_single_fault_is_in_the_singular_and_deviations_name_their_bound(run):
    code, out, _ = run("--gpus", 8, "--mtbf", "30d/job", "--recovery", "1min", "--work", "30d", "--runs", "50")
    assert code == 0
    assert "with 1 fault\n" in "\n".join(line.rstrip() for line in out.splitlines()) + "\n"
    assert "standard errors away, within chance (up to 3)" in out
