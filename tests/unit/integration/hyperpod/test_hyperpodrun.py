"""The launcher with an agent whose parser conflicts with an option of the same name in torch."""

from __future__ import annotations

import argparse
import os
import sys
import types

import pytest

from integration.hyperpod import hyperpodrun


class _Agent(types.ModuleType):
    """The used part of ``hyperpod_elastic_agent.run``: torch's parser with its own options added."""

    def __init__(self) -> None:
        super().__init__("hyperpod_elastic_agent.run")
        self.ran: list[argparse.Namespace] = []

    @staticmethod
    def get_args_parser() -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser()
        parser.add_argument("--nnodes", default="1:1")
        parser.add_argument("--rdzv-conf", default="")
        parser.add_argument("--shutdown-timeout", "--shutdown_timeout", type=int, default=None)
        parser.add_argument("script")
        parser.add_argument("script_args", nargs=argparse.REMAINDER)
        return parser

    def run(self, args: argparse.Namespace) -> None:
        self.ran.append(args)

    def main(self, args: list[str]) -> None:
        parser = self.get_args_parser()
        parser.add_argument("--shutdown-timeout", type=int, default=15)
        parser.add_argument("--server-host", default="0.0.0.0")
        self.run(parser.parse_args(args))


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> _Agent:
    one = _Agent()
    monkeypatch.setitem(sys.modules, "hyperpod_elastic_agent", types.ModuleType("hyperpod_elastic_agent"))
    monkeypatch.setitem(sys.modules, "hyperpod_elastic_agent.run", one)
    monkeypatch.setenv("NNODES", "put back afterwards")
    monkeypatch.delenv("NNODES")
    return one


def test_shutdown_timeout_option_overrides_the_default(agent):
    hyperpodrun.main(["--shutdown-timeout", "7", "train.py"])
    hyperpodrun.main(["train.py"])
    assert [args.shutdown_timeout for args in agent.ran] == [7, 15]


def test_nothing_else_is_changed_and_the_module_is_as_before(agent):
    parser, run = agent.get_args_parser, agent.run
    hyperpodrun.main(["--nnodes=2", "train.py", "--loopback"])
    (args,) = agent.ran
    assert args.server_host == "0.0.0.0", "an option of the script is the script's"
    assert args.script_args == ["--loopback"]
    assert args.rdzv_conf == ""
    assert (agent.get_args_parser, agent.run) == (parser, run)


def test_loopback_and_directory(agent, tmp_path):
    hyperpodrun.main(["--loopback", "--rdzv-conf", "timeout=5", f"--resource-config-dir={tmp_path}", "train.py"])
    (args,) = agent.ran
    assert args.server_host == "127.0.0.1"
    assert args.rdzv_conf == f"timeout=5,resource_config_dir={tmp_path}"


@pytest.mark.parametrize(("nnodes", "said"), [("4", "4"), ("2:2", "2")])
def test_nnodes_is_known_to_the_agent(agent, nnodes, said):
    hyperpodrun.main([f"--nnodes={nnodes}", "train.py"])
    assert os.environ["NNODES"] == said


def test_config_directory_with_a_comma_is_refused(agent):
    with pytest.raises(SystemExit, match="comma"):
        hyperpodrun.main(["--resource-config-dir=/a,b", "train.py"])
    assert not agent.ran


def test_missing_agent_package_names_the_command_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "hyperpod_elastic_agent", None)
    monkeypatch.delitem(sys.modules, "hyperpod_elastic_agent.run", raising=False)
    with pytest.raises(SystemExit) as caught:
        hyperpodrun.main(["train.py"])
    assert caught.value.code == 2
    assert "pip install" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "advice"),
    [
        ("hyperpod_elastic_agent", "pip install --no-deps hyperpod-elastic-agent"),
        ("hyperpod_elastic_agent.run", "pip install --no-deps hyperpod-elastic-agent"),
        ("uvicorn", 'pip install fastapi==0.131.0 "uvicorn[standard]" psutil'),
    ],
)
def test_missing_package_is_named_for_installation(monkeypatch, capsys, missing, advice):
    def without(_):
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(hyperpodrun.importlib, "import_module", without)
    with pytest.raises(SystemExit) as caught:
        hyperpodrun.main([])
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(f": {advice}\n")
