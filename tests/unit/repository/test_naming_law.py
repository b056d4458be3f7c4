"""``.ci/names.py``: ``make check`` fails on ambiguous names, gerunds and misplaced test files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CHECK = ROOT / ".ci/names.py"


def check(directory: Path, law: Path = CHECK) -> tuple[int, str]:
    ran = subprocess.run([sys.executable, str(law)], cwd=directory, capture_output=True, text=True, check=False)
    return ran.returncode, ran.stderr


BROKEN = [
    ("elastic/one.py", "class Checkpointer: ...", "Checkpointer stands in 2 places: elastic/one.py, tieredckpt/"),
    ("elastic/two.py", "def serve_store(): ...", "serve_store stands in 2 places: elastic/two.py, peerstore/"),
    ("elastic/heartbeat_loop.py", "", "heartbeat_loop stands in 2 places: elastic/heartbeat_loop.py, peerstore/"),
    ("peerstore/tending.py", "", "peerstore/tending.py: name the module by a noun"),
    ("elastic/cli/__init__.py", '_OWN = {"plan": "elastic.cli.run:plan"}', "`elastic plan` is in elastic.cli.run"),
    ("elastic/three.py", "# as under HyperPod", "elastic/three.py names HyperPod; only integration may"),
    ("peerstore/four.py", 'FILE = "/opt/hyperpod"', "peerstore/four.py names HyperPod; only integration may"),
    ("peerstore/store/five.py", "def wake(table): table._changed.notify()", "five.py:1: table._changed is private"),
    (
        "peerstore/store/six.py",
        "def lose(slot): slot.lease = None",
        "six.py:1: slot.lease is assigned; only",
    ),
    ("integration/hyperpod/elastic_events.py", "", "TWICE lists 'elastic_event_detected', and nothing needs it"),
]
MIRRORING = [
    "tests/unit/peerstore/store/test_arena_sizes.py",
    "tests/unit/peerstore/store/test_peerstore_arena.py",
    "tests/unit/peerstore/store/test_store_threads.py",
]
MISPLACED = [
    "tests/unit/allocator/test_allocator.py",
    "tests/unit/peerstore/allocator/test_arena_limits.py",
    "tests/unit/peerstore/store/test_arenas.py",
    "tests/unit/peerstore/test_arena_places.py",
    "tests/unit/test_arena_names.py",
]


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The packages unchanged, with empty benchmark and test files, and with more test files."""
    root = tmp_path_factory.mktemp("packages")
    for folder in ("peerstore", "tieredckpt", "elastic", "integration", "benchmarks", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            copy = root / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(b"" if folder in ("benchmarks", "tests") else path.read_bytes())
    add_empty(root, MIRRORING)
    return root


def add_empty(root: Path, files: list[str]) -> None:
    for file in files:
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).touch()


@pytest.fixture(scope="module")
def printed_before(packages):
    return check(packages)


@pytest.fixture(scope="module")
def printed(packages, printed_before):
    """Break every rule, and return what one run of the check prints: it reads all files of the packages."""
    for file, text, _ in BROKEN:
        (packages / file).write_text(text, encoding="utf-8")
    add_empty(packages, [*MISPLACED, "tests/e2e/test_swim.py"])
    for path in (packages / "tests/unit/repository").glob("test_*.py"):
        path.unlink()
    law = packages / "names.py"
    text = CHECK.read_text(encoding="utf-8")
    law.write_text(text.replace("str] = {}", 'str] = {"elastic/errors.py": "a reason"}'), encoding="utf-8")
    code, lines = check(packages, law)
    assert code == 1
    return lines


def test_the_packages_and_test_files_that_mirror_a_module_hold_the_law(printed_before):
    assert printed_before == (0, "")


def test_each_name_that_breaks_the_law_is_reported(printed):
    assert [said for _, _, said in BROKEN if said not in printed] == [], printed


def test_test_files_that_break_the_law_are_reported(printed):
    """They mirror no module, or have the name of another file; no others are reported."""
    places = "tests/e2e/test_swim.py, tests/unit/peerstore/membership/test_swim.py"
    assert [line for line in printed.splitlines() if "test_" in line] == [
        *(f"{file}: begin the name with a module of the mirrored folder" for file in MISPLACED),
        f"test_swim.py is the name of 2 test files: {places}",
    ]


def test_exception_that_nothing_needs_is_reported(printed):
    assert "OTHER_TESTS lists 'repository', and nothing needs it" in printed.splitlines()
    assert "PLATFORM lists 'elastic/errors.py', and nothing needs it" in printed.splitlines()
