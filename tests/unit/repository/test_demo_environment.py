"""``requirements/demo.py``: what ``make demo`` installs, and when."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys

import pytest

from tests.nightly.__main__ import ROOT


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("demo_environment", ROOT / "requirements/demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def commands(script, tmp_path, monkeypatch):
    """Commands that the script runs. Here it creates an empty environment, and reads copied requirements."""
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "_HERE", tmp_path / "requirements")
    found = []

    def run(*command):
        found.append(" ".join(command))
        if "venv" in command:
            subprocess.run([*command, "--without-pip"], check=True)

    monkeypatch.setattr(script, "run", run)
    return found


def test_compiled_modules_exist(script):
    assert [name for name in script.COMPILED if importlib.util.find_spec(name) is None] == []


def update(script, tmp_path, monkeypatch, torch, **options):
    monkeypatch.setattr(script, "torch_version", lambda: torch)
    script.Environment(tmp_path / "env").update(**options)


def test_missing_torch_is_installed_once_at_the_pinned_version(script, commands, tmp_path, monkeypatch, capsys):
    update(script, tmp_path, monkeypatch, None)
    torch = [command for command in commands if f"-r {tmp_path / 'requirements/torch.txt'}" in command]
    assert len(torch) == 1
    assert any("-m venv" in command for command in commands)
    assert any(f"-e {tmp_path}" in command for command in commands)
    assert not list(tmp_path.glob("env/lib/*/*/shared_torch.pth"))
    commands.clear()
    capsys.readouterr()
    update(script, tmp_path, monkeypatch, None)
    assert commands == []
    assert capsys.readouterr().out == ""


def test_an_accepted_torch_of_the_calling_python_is_used(script, commands, tmp_path, monkeypatch):
    """Also one in a virtual environment, and a pre-release as in NVIDIA's containers."""
    theirs = tmp_path / "theirs/site-packages"
    (theirs / "torch").mkdir(parents=True)
    (theirs / "torch/__init__.py").touch()
    monkeypatch.syspath_prepend(str(theirs))
    update(script, tmp_path, monkeypatch, "2.9.0a0+50eac811a6.nv25.9")
    assert not any("torch.txt" in command for command in commands)
    ask = [tmp_path / "env/bin/python", "-c", "import torch; print(torch.__file__)"]
    imported = subprocess.run(ask, env={}, capture_output=True, text=True, check=True).stdout
    assert imported.strip() == str(theirs / "torch/__init__.py")


def test_an_old_torch_is_replaced(script, commands, tmp_path, monkeypatch, capsys):
    update(script, tmp_path, monkeypatch, "2.4.1+cu121")
    assert "torch 2.4.1+cu121" in capsys.readouterr().out
    assert any("-r" in command and "torch.txt" in command for command in commands)


def test_changed_requirements_are_installed_into_the_same_environment(script, commands, tmp_path, monkeypatch):
    update(script, tmp_path, monkeypatch, None)
    commands.clear()
    with (tmp_path / "pyproject.toml").open("a") as out:
        out.write("# changed\n")
    update(script, tmp_path, monkeypatch, None)
    assert commands
    assert not any("-m venv" in command for command in commands)


def test_another_torch_version_recreates_the_environment(script, commands, tmp_path, monkeypatch):
    update(script, tmp_path, monkeypatch, "2.12.0")
    commands.clear()
    update(script, tmp_path, monkeypatch, "2.13.0")
    assert "-m venv --clear" in commands[0]


def test_the_agent_of_aws_is_installed_only_for_its_demo(script, commands, tmp_path, monkeypatch):
    update(script, tmp_path, monkeypatch, None)
    assert not any("hyperpod" in command for command in commands)
    commands.clear()
    update(script, tmp_path, monkeypatch, None, hyperpod=True)
    assert "hyperpod-elastic-agent" in commands[-1]
    assert len(commands) == 2
    commands.clear()
    update(script, tmp_path, monkeypatch, None, hyperpod=True)
    assert commands == []


def test_a_failed_installation_is_repeated(script, commands, tmp_path, monkeypatch):
    monkeypatch.setattr(script.Environment, "_install", lambda *_: sys.exit(1))
    with pytest.raises(SystemExit):
        update(script, tmp_path, monkeypatch, None)
    commands.clear()
    with pytest.raises(SystemExit):
        update(script, tmp_path, monkeypatch, None)
    assert "-m venv --clear" in commands[0]


def test_a_command_that_fails_ends_the_script_with_its_status(script):
    with pytest.raises(SystemExit, match="7"):
        script.run(sys.executable, "-c", "raise SystemExit(7)")
