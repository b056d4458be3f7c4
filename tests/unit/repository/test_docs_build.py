"""``docs/build.py``: ``make docs`` checks every page, and each walk of the architecture page for missing code."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GOOD = "| 1 | `peerstore/store/node_store.py` | `NodeStore.seal` calls `ShardSealer` (`shards.py`). |"


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs/build.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def problems(build, tmp_path, monkeypatch, *rows):
    path = tmp_path / "architecture.md"
    path.write_text("\n".join(["### A save", "", "| | file | hand-over |", "|---|---|---|", *rows]))
    page = build.Page(path, [], set())
    monkeypatch.setattr(build.Page, "wrong", lambda self, text: self.problems.append(text))
    build.check_walks(page)
    return page.problems


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("store/node_store.py", "store/no_such.py", "the file peerstore/store/no_such.py does not exist"),
        ("NodeStore.seal", "NodeStore.no_such", "no package defines `NodeStore.no_such`"),
        ("ShardSealer", "NoSuchSealer", "no package defines `NoSuchSealer`"),
        ("NodeStore.seal", "ShardSealer", "the text names no class or function of peerstore/store/node_store.py"),
        ("`shards.py`", "`no_such.py`", "the module no_such.py does not exist"),
    ],
)
def test_walk_check_reports_missing_code(build, tmp_path, monkeypatch, old, new, message):
    found = problems(build, tmp_path, monkeypatch, GOOD.replace(old, new))
    assert f"walk 'A save', row 1: {message}" in found


def test_walk_check_limits_the_number_of_files(build, tmp_path, monkeypatch):
    assert problems(build, tmp_path, monkeypatch, *[GOOD] * 8) == []
    assert problems(build, tmp_path, monkeypatch, *[GOOD] * 9) == ["walk 'A save' has 9 files, and the limit is 8"]


def test_docs_check_covers_the_pages_of_the_root(build):
    assert set(ROOT.glob("*.md")) <= set(build.pages())
