"""Every command as a user starts it: in an interpreter that has imported nothing.

Most other tests fork from a process that has imported everything (:mod:`tests.support.forked_starts`). They would not
notice a missing import, or an import that comes too early. Other tests that start interpreters are marked
``fresh_starts``.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.fresh_starts]

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    one.name for one in importlib.metadata.distribution("tieredckpt").entry_points if one.group == "console_scripts"
]
MODULES = [
    "tieredckpt", "tieredckpt.agent", "peerstore.cli", "elastic", "integration.hyperpod.hyperpodrun",
    "integration.hyperpod.operator", "integration.hyperpod.demo", "integration.finetune.worker",
    "integration.kubernetes.controller",
]  # fmt: skip
"""Modules that other commands of the project start, or that the documentation starts."""
OF_THE_NIGHT = {"peerstore.cli", "elastic", "integration.kubernetes.controller", "integration.hyperpod.demo"}
"""Modules that also start by a name, and the demo."""


def usage(command: list[str], folder: Path) -> str:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    ended = subprocess.run([*command, "--help"], cwd=folder, env=environ, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.lower()


@pytest.mark.parametrize("name", SCRIPTS)
def test_command_starts_by_its_name(name: str, tmp_path: Path) -> None:
    assert f"usage: {name}" in usage([str(Path(sys.executable).with_name(name))], tmp_path)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in OF_THE_NIGHT else ()) for name in MODULES]
)
def test_command_starts_by_its_module(name: str, tmp_path: Path) -> None:
    if name == "integration.hyperpod.hyperpodrun":
        pytest.importorskip("hyperpod_elastic_agent")
    assert "usage: " in usage([sys.executable, "-m", name], tmp_path)


def test_all_commands_are_tried() -> None:
    assert {"tieredckpt", "peerstore", "elastic"} < set(SCRIPTS)
