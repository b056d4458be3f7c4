"""Commands of other packages: found by entry point, loaded on use, and failing alone."""

import json
import sys

import click
import pytest

import elastic.cli
import tieredckpt.cli
from tieredckpt.cli.exit_codes import ExitCode
from tieredckpt.cli.findings import CheckStatus

WORKS = """
import click

@click.command("greet", help="Say hello.")
@click.argument("name")
def greet(name):
    click.echo(f"hello {name}")
    return 3

text = "not a command"
"""


@pytest.fixture
def added(tmp_path, monkeypatch):
    """Install a distribution with these entry points; modules are (name, text) pairs."""
    names = []

    def install(points, modules=(), *, dist="more", group="tieredckpt.commands"):
        for name, text in modules:
            (tmp_path / f"{name}.py").write_text(text)
            names.append(name)
        info = tmp_path / f"{dist}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.2\n")
        lines = [f"{name} = {value}" for name, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]) + "\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    yield install
    for name in names:
        sys.modules.pop(name, None)


def test_a_plugin_is_a_command_like_any_other(added, capsys):
    added({"greet": "plug_works:greet"}, [("plug_works", WORKS)])
    assert tieredckpt.cli.main(["greet", "you"]) == 3
    assert capsys.readouterr().out == "hello you\n"
    assert tieredckpt.cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "greet" in shown
    assert "Say hello." in shown


def test_both_programs_take_them_each_from_its_own_group(added, capsys):
    added({"greet": "plug_works:greet"}, [("plug_works", WORKS)], group="elastic.commands")
    assert elastic.cli.main(["greet", "you"]) == 3
    assert tieredckpt.cli.main(["greet", "you"]) == ExitCode.USAGE
    assert "No such command" in capsys.readouterr().err


def test_plugin_is_imported_only_when_used(added):
    added({"greet": "plug_ends:greet"}, [("plug_ends", "raise SystemExit('imported')")])
    assert tieredckpt.cli.main(["ls", "--help"]) == 0
    assert "plug_ends" not in sys.modules


@pytest.mark.parametrize(
    ("value", "text", "why"),
    [
        ("plug_absent:greet", None, "No module named 'plug_absent'"),
        ("plug_other:greet", "x = 1", "has no attribute 'greet'"),
        ("plug_raises:greet", "raise ValueError('of this machine')", "of this machine"),
        ("plug_text:text", WORKS, "is no command: 'not a command'"),
    ],
    ids=["absent", "without it", "raises", "of another kind"],
)
def test_broken_plugin_fails_alone(added, capsys, value, text, why):
    added({"greet": value}, [(value.partition(":")[0], text)] if text else [])
    for words in (["greet"], ["greet", "--help"], ["greet", "--some", "thing"]):
        assert tieredckpt.cli.main(words) == ExitCode.USAGE
        said = capsys.readouterr().err
        assert "more 1.2" in said
        assert value in said
        assert why in said
        assert "Traceback" not in said
    assert tieredckpt.cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "greet" in shown
    assert "cannot be loaded" in shown
    assert "whatif" in shown


def test_broken_plugin_reports_json_and_its_origin(added, capsys):
    added({"greet": "plug_raises:greet"}, [("plug_raises", "raise ValueError('of this machine')")])
    assert tieredckpt.cli.main(["greet", "--json", "--debug"]) == ExitCode.USAGE
    said = capsys.readouterr()
    assert json.loads(said.out)["error"]["kind"] == "PluginError"
    assert "ValueError: of this machine" in said.err
    assert "plug_raises.py" in said.err


def test_built_in_command_is_not_replaced(added, capsys):
    added({"ls": "plug_works:greet"}, [("plug_works", WORKS)])
    names = tieredckpt.cli.tieredckpt_cli.list_commands(click.Context(tieredckpt.cli.tieredckpt_cli))
    assert names.count("ls") == 1
    assert tieredckpt.cli.main(["ls", "--help"]) == 0
    assert "Say hello" not in capsys.readouterr().out


def test_two_packages_with_the_same_command_are_reported(added, capsys):
    added({"greet": "plug_works:greet"}, [("plug_works", WORKS)], dist="one")
    added({"greet": "plug_more:greet"}, [("plug_more", WORKS)], dist="two")
    assert tieredckpt.cli.main(["greet", "you"]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "plug_more:greet" in said
    assert "plug_works:greet" in said
    assert "uninstall" in said


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise ImportError('of this machine')", "cannot be loaded: ImportError('of this machine')"),
        ("def check(*_): raise ValueError('of this check')", "failed: ValueError('of this check')"),
    ],
    ids=["not loaded", "raises"],
)
def test_broken_check_of_a_framework_is_a_finding(added, agent_dir, capsys, text, why):
    added({"other": "plug_check:check"}, [("plug_check", text)], group="tieredckpt.framework_checks")
    assert tieredckpt.cli.main(["doctor", "--framework", "other", "--json"]) == ExitCode.FAILED
    (found,) = [one for one in json.loads(capsys.readouterr().out)["findings"] if one["what"] == "other"]
    assert found["verdict"] == CheckStatus.FAILED.value
    assert f"the check of more 1.2 (plug_check:check) {why}" in found["text"]
