"""A package that only an extra installs is named with that extra, in one line."""

import sys

import pytest

import elastic.cli
import tieredckpt.cli
from integration.kubernetes.controller import main as controller
from tieredckpt.cli.exit_codes import ExitCode


@pytest.fixture
def without_extras(monkeypatch):
    for name in ("kubernetes", "transformers", "safetensors"):
        monkeypatch.setitem(sys.modules, name, None)


def test_missing_extra_is_one_line(without_extras, tmp_path, capsys):
    (tmp_path / "data.jsonl").write_text('{"text": "hello"}\n')
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    data, model = str(tmp_path / "data.jsonl"), str(tmp_path)
    code = elastic.cli.main(["finetune", "--model", model, "--data", data, "--output", str(tmp_path / "out")])
    assert code == ExitCode.USAGE
    said = capsys.readouterr().err
    assert said == "elastic: the package transformers is not installed: pip install 'tieredckpt[finetune]'\n"
    assert tieredckpt.cli.main(["cluster", "node-health", "n1"]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert said == "tieredckpt: the package kubernetes is not installed: pip install 'tieredckpt[kubernetes]'\n"


def test_controller_names_its_extra(without_extras, capsys):
    assert controller(["--all-namespaces"]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert (
        said == "hyperpod-controller: the package kubernetes is not installed: pip install 'tieredckpt[kubernetes]'\n"
    )


@pytest.mark.parametrize("args", [["cluster", "--help"], ["cluster", "node-health", "--help"], ["export", "--help"]])
def test_help_needs_no_extra(without_extras, args, capsys):
    assert tieredckpt.cli.main(args) == 0
    assert "Usage: " in capsys.readouterr().out
    assert elastic.cli.main(["finetune", "--help"]) == 0
