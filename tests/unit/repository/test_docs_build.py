"""``docs/build.py``: ``make docs`` checks every page, each walk of the architecture page, and the settings page."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tieredckpt.settings import Settings, load_settings

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


def all_settings():
    yield "enabled"
    for section in dataclasses.fields(Settings):
        if section.name != "enabled":
            yield from (f"{section.name}.{one.name}" for one in dataclasses.fields(getattr(Settings(), section.name)))


def settings_rows(build):
    """Return the cells of each setting's row, by its key."""
    rows = re.findall(r"^\| `(\w+(?:\.\w+)?)`<br>`\$(TIEREDCKPT_\w+)` \|(.*)\|$", build.settings_page(), re.MULTILINE)
    return {key: [variable, *re.split(r"(?<!\\)\|", cells)] for key, variable, cells in rows}


def test_committed_settings_page_is_generated(build):
    assert (ROOT / "docs/reference/settings.md").read_text() == build.settings_page()


def test_settings_page_describes_every_setting(build):
    rows = settings_rows(build)
    assert [*rows] == [*all_settings()]
    for key, (variable, kind, default, sentence) in rows.items():
        assert variable == "TIEREDCKPT_" + key.upper().replace(".", "_")
        assert kind.strip(), key
        assert default.strip(), key
        assert re.fullmatch(r" [A-Z`].+\. ", sentence), f"{key}: {sentence}"


def test_settings_page_gives_every_number_a_unit_and_its_range(build):
    for key, (_, kind, *_) in settings_rows(build).items():
        if kind.startswith((" integer", " number")):
            assert re.fullmatch(r" (integer|number), (\S+ or more|\S+ to \S+); [\w ]+ ", kind), f"{key}: {kind}"


def test_settings_page_names_variables_and_defaults_that_load(build):
    rows = settings_rows(build).values()
    shown = {variable: default.strip().strip("`").replace("empty", "") for variable, _, default, _ in rows}
    assert load_settings(shown) == Settings()


@pytest.mark.parametrize("old", ["`true`", "starts an agent", "TIEREDCKPT_AGENT_EMBEDDED"])
def test_settings_page_check_reports_an_outdated_page(build, tmp_path, old):
    page = build.Page(tmp_path / "settings.md", [], set())
    page.path.write_text(build.settings_page())
    page.wrong = page.problems.append
    build.check_settings_page(page)
    assert page.problems == []
    page.path.write_text(build.settings_page().replace(old, "old", 1))
    build.check_settings_page(page)
    assert page.problems == ["it does not show the current settings; run `make docs ARGS=--write` to generate it again"]


def test_setting_without_a_docstring_is_refused(build, tmp_path):
    module = tmp_path / "settings.py"
    module.write_text('class S:\n    a: int = 1\n    """One."""\n    b: int = 2\n\nC = "X"\n"""Two."""\n')
    assert build.attribute_docstrings(module) == {"S": "", "S.a": "One.", "C": "Two."}
    with pytest.raises(LookupError, match=r"S\.b has no docstring"):
        build.sentence(build.attribute_docstrings(module), "S.b")


def test_settings_page_lists_the_other_environment_variables(build):
    page = build.settings_page()
    for name in ("TIEREDCKPT_CONFIG", "TIEREDCKPT_CLUSTER", "TIEREDCKPT_EVENT_LOG", "ELASTIC_SECRET", "PEERSTORE_DIR"):
        assert re.search(rf"^\| `\${name}` \| [A-Z`].+\. \|$", page, re.MULTILINE), name
