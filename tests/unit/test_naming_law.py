"""``.ci/names.py``: ``make check`` fails on public names with two meanings and on modules named by a gerund."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECK = ROOT / ".ci/names.py"


def check(directory: Path) -> tuple[int, str]:
    ran = subprocess.run([sys.executable, str(CHECK)], cwd=directory, capture_output=True, text=True, check=False)
    return ran.returncode, ran.stderr


@pytest.fixture
def packages(tmp_path):
    """The packages as they are, without their contents."""
    for package in ("peerstore", "tieredckpt", "elastic", "integration"):
        for path in (ROOT / package).rglob("*.py"):
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    return tmp_path


def test_the_packages_hold_the_law(packages):
    assert check(packages) == (0, "")


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        (
            "elastic/spare.py",
            "class Checkpointer: ...",
            "Checkpointer stands in 2 places: elastic/spare.py, tieredckpt/",
        ),
        ("elastic/spare.py", "def serve_store(): ...", "serve_store stands in 2 places: elastic/spare.py, peerstore/"),
        ("elastic/heartbeat_loop.py", "", "heartbeat_loop stands in 2 places: elastic/heartbeat_loop.py, peerstore/"),
        ("peerstore/tending.py", "", "peerstore/tending.py: name the module by a noun"),
        ("elastic/cli/__init__.py", '_OWN = {"plan": "elastic.cli.run:plan"}', "`elastic plan` is in elastic.cli.run"),
        ("elastic/spare.py", "# as under HyperPod", "elastic/spare.py names HyperPod; only integration may"),
        ("peerstore/spare.py", 'FILE = "/opt/hyperpod"', "peerstore/spare.py names HyperPod; only integration may"),
        ("integration/hyperpod/elastic_events.py", "", "TWICE lists 'elastic_event_detected', and nothing needs it"),
    ],
)
def test_a_name_that_breaks_the_law_is_reported(packages, file, text, said):
    (packages / file).write_text(text, encoding="utf-8")
    code, printed = check(packages)
    assert (code, said in printed) == (1, True), printed


def test_an_exception_that_nothing_needs_is_reported(packages, tmp_path):
    law = tmp_path / "names.py"
    text = CHECK.read_text(encoding="utf-8")
    law.write_text(text.replace("str] = {}", 'str] = {"elastic/errors.py": "a reason"}'), encoding="utf-8")
    ran = subprocess.run([sys.executable, str(law)], cwd=packages, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (1, "PLATFORM lists 'elastic/errors.py', and nothing needs it\n")
