"""``--help``: one notation for defaults, and exit codes after the options."""

import os
import re

import click
import pytest

import elastic.cli
import tieredckpt.cli
from tieredckpt.cli.help_format import with_help_format

COMMANDS = [*tieredckpt.cli.tieredckpt_cli.list_commands(click.Context(tieredckpt.cli.tieredckpt_cli))]


@pytest.mark.parametrize(
    ("option", "shown"),
    [
        ({"default": 8, "show_default": True, "type": click.IntRange(1), "help": "GPUs."}, "GPUs (default 8).  [x>=1]"),
        ({"default": 24.0, "show_default": True, "type": float, "help": "Hours."}, "Hours (default 24)."),
        ({"default": 0.5, "show_default": True, "type": float}, "(default 0.5)"),
        ({"required": True, "help": "A name."}, "A name.  [required]"),
    ],
)
def test_defaults_have_one_notation(option, shown):
    command = with_help_format(click.Command("c", params=[click.Option(["--x"], **option)]))
    assert re.search(
        rf"--x [A-Z ]*\s+{re.escape(shown)}\n", command.get_help(command.make_context("c", [], resilient_parsing=True))
    )


@pytest.mark.parametrize("words", [[one] for one in COMMANDS] + [["cluster", "enable"], ["cluster", "node-health"]])
def test_no_command_uses_another_notation(words, capsys):
    assert tieredckpt.cli.main([*words, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "[default" not in shown
    assert "default:" not in shown
    if "Exit codes:" in shown:
        assert shown.index("ptions:") < shown.index("Exit codes:") or words == ["cluster"]


@pytest.mark.parametrize("words", [["finetune"], ["recipe", "job"], ["reshard"], ["run"]])
def test_elastic_commands_use_it_too(words, capsys):
    assert elastic.cli.main([*words, "--help"]) == 0
    assert "[default" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (tieredckpt.cli, []),
        (tieredckpt.cli, ["cluster"]),
        (elastic.cli, []),
        (elastic.cli, ["recipe"]),
    ],
    ids=["tieredckpt", "tieredckpt cluster", "elastic", "elastic recipe"],
)
def test_list_of_commands_is_not_cut_at_80_columns(program, words, capsys, monkeypatch):
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_: os.terminal_size((80, 24)))
    assert program.main([*words, "--help"]) == 0
    listed = capsys.readouterr().out.partition("Commands:")[2].partition("Exit codes:")[0]
    assert [line for line in listed.splitlines() if line.endswith("...")] == []
