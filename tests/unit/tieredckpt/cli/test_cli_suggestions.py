"""A misspelled command, option or job name is reported with the name that is closest to it."""

import pytest

import elastic.cli
import peerstore.cli
import tieredckpt.cli
from elastic.control.run_directory import LocalRun, RunDirectory, describe_no_job
from integration.hyperpod.operator import sim_cli
from peerstore.suggestions import did_you_mean


def test_closest_name_is_suggested():
    assert did_you_mean("stauts", ["stop", "status"]) == " Did you mean 'status'?"
    assert did_you_mean("zzz", ["stop", "status"]) == ""


@pytest.mark.parametrize(
    ("main", "words", "shown"),
    [
        (tieredckpt.cli.main, ["stauts"], "No such command 'stauts'. Did you mean 'status'?"),
        (tieredckpt.cli.main, ["cluster", "shwo"], "No such command 'shwo'. Did you mean 'show'?"),
        (tieredckpt.cli.main, ["ls", "--jsn"], "No such option '--jsn'. Did you mean '--json'?"),
        (tieredckpt.cli.main, ["agent", "stp"], "No such command 'stp'. Did you mean 'stop'?"),
        (tieredckpt.cli.main, ["agent", "--budgt", "3"], "No such option '--budgt'. Did you mean '--budget'?"),
        (tieredckpt.cli.main, ["agent", "stop", "--froce"], "No such option '--froce'. Did you mean '--force'?"),
        (elastic.cli.main, ["joni"], "No such command 'joni'. Did you mean 'join'?"),
        (elastic.cli.main, ["recipe", "jbo"], "No such command 'jbo'. Did you mean 'job'?"),
        (sim_cli.main, ["stauts"], "No such command 'stauts'. Did you mean 'status'?"),
    ],
)
def test_command_line_suggests_commands_and_options(main, words, shown, capsys):
    assert main(words) == 2
    assert shown in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["stats"], "No such command 'stats'. Did you mean 'status'?"),
        (["status", "--jsno"], "No such option '--jsno'. Did you mean '--json'?"),
        (["serve", "--log-level", "inof"], "no such value 'inof' (known are debug, info, warning, error)"),
    ],
)
def test_peerstore_suggests_commands_and_options(words, shown, capsys):
    assert peerstore.cli.main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("peerstore")
    assert len(said.splitlines()) == 1
    assert shown in said


def test_elastic_suggests_a_running_job(tmp_path):
    place = RunDirectory(tmp_path / "runs", "llama-8b")
    place.prepare()
    place.write(LocalRun("llama-8b", "127.0.0.1:1", "", 1, 0, ("train.py",), "/", "/", 1.0))
    assert describe_no_job(place.root, "llama-8").endswith(f"(looked in {place.root}). Did you mean 'llama-8b'?")
    assert "Did you mean" not in describe_no_job(place.root, "other")
