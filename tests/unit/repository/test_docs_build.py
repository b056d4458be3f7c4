"""``docs/build.py`` checks the pages and generates the reference pages."""

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
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs/build.py")
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def settings(build):
    return sys.modules["settings_page"]


@pytest.fixture(scope="module")
def reference(build):
    return sys.modules["reference_pages"]


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


def test_folder_check_reports_unlisted_and_missing_folders(build, tmp_path, monkeypatch):
    listed = (ROOT / "docs/architecture.md").read_text()
    path = tmp_path / "architecture.md"
    path.write_text(listed.replace("  restore  ", "  restores "))
    page = build.Page(path, [], set())
    monkeypatch.setattr(build.Page, "wrong", lambda self, text: self.problems.append(text))
    build.check_folders(page)
    assert page.problems == [
        "the folder tieredckpt/restore is not listed",
        "the folder tieredckpt/restores does not exist",
    ]


def test_docs_check_covers_the_pages_of_the_root(build):
    assert set(ROOT.glob("*.md")) <= set(build.pages())


def all_settings():
    yield "enabled"
    for section in dataclasses.fields(Settings):
        if section.name != "enabled":
            yield from (f"{section.name}.{one.name}" for one in dataclasses.fields(getattr(Settings(), section.name)))


def settings_rows(settings):
    """Return the cells of each setting's row, by its key."""
    rows = re.findall(
        r"^\| `(\w+(?:\.\w+)?)`<br>`\$(TIEREDCKPT_\w+)` \|(.*)\|$", settings.settings_page(), re.MULTILINE
    )
    return {key: [variable, *re.split(r"(?<!\\)\|", cells)] for key, variable, cells in rows}


def test_committed_reference_pages_are_generated(reference):
    for path, text in reference.generated_pages().items():
        assert path.read_text() == text, path.name


def test_settings_page_describes_every_setting(settings):
    rows = settings_rows(settings)
    assert [*rows] == [*all_settings()]
    for key, (variable, kind, default, sentence) in rows.items():
        assert variable == "TIEREDCKPT_" + key.upper().replace(".", "_")
        assert kind.strip(), key
        assert default.strip(), key
        assert re.fullmatch(r" [A-Z`].+\. ", sentence), f"{key}: {sentence}"


def test_settings_page_gives_every_number_a_unit_and_its_range(settings):
    for key, (_, kind, *_) in settings_rows(settings).items():
        if kind.startswith((" integer", " number")):
            assert re.fullmatch(r" (integer|number), (\S+ or more|\S+ to \S+); [\w ]+ ", kind), f"{key}: {kind}"


def test_settings_page_names_variables_and_defaults_that_load(settings):
    rows = settings_rows(settings).values()
    shown = {variable: default.strip().strip("`").replace("empty", "") for variable, _, default, _ in rows}
    assert load_settings(shown) == Settings()


def test_generated_page_check_reports_an_outdated_page(build, tmp_path):
    page = build.Page(tmp_path / "settings.md", [], set())
    page.wrong = page.problems.append
    page.path.write_text("now")
    build.check_generated(page, "now")
    assert page.problems == []
    build.check_generated(page, "later")
    assert page.problems == ["it is not what the code says now; run `make docs ARGS=--write` to generate it again"]


def test_setting_without_a_docstring_is_refused(settings, tmp_path):
    module = tmp_path / "settings.py"
    module.write_text('class S:\n    a: int = 1\n    """One."""\n    b: int = 2\n\nC = "X"\n"""Two."""\n')
    assert settings.attribute_docstrings(module) == {"S": "", "S.a": "One.", "C": "Two."}
    with pytest.raises(LookupError, match=r"S\.b has no docstring"):
        settings.sentence(settings.attribute_docstrings(module), "S.b")


def test_settings_page_lists_the_other_environment_variables(settings):
    page = settings.settings_page()
    for name in ("TIEREDCKPT_CONFIG", "TIEREDCKPT_CLUSTER", "TIEREDCKPT_EVENT_LOG", "ELASTIC_SECRET", "PEERSTORE_DIR"):
        assert re.search(rf"^\| `\${name}` \| [A-Z`].+\. \|$", page, re.MULTILINE), name


def test_errors_page_names_importable_errors(reference):
    places = re.findall(r"^\| `([\w.]+)\.(\w+)` \|", reference.errors_page(), re.MULTILINE)
    assert len(places) > 50
    for module, name in places:
        assert issubclass(getattr(importlib.import_module(module), name), BaseException)


def test_reference_texts_name_exactly_the_errors_of_the_code(reference):
    with pytest.raises(LookupError, match=r"ERRORS .* lacks \['B'\], and has \['C'\] too many"):
        reference.compare("ERRORS", {"A", "B"}, {"A": "", "C": ""})


def test_generated_part_replaces_the_text_between_its_markers(reference, tmp_path):
    page = tmp_path / "cli.md"
    page.write_text(f"# A\n\n{reference.BEGIN}\nold\n{reference.END}\n\nlast\n")
    assert reference.with_part(page, "new") == f"# A\n\n{reference.BEGIN}\n\nnew\n\n{reference.END}\n\nlast\n"


@pytest.mark.parametrize("markers", [(), ("BEGIN",), ("END",)])
def test_page_without_both_markers_is_refused(reference, tmp_path, markers):
    page = tmp_path / "cli.md"
    page.write_text("\n".join(["# A", *(getattr(reference, marker) for marker in markers)]))
    with pytest.raises(LookupError, match=r"cli\.md has no "):
        reference.with_part(page, "new")


def test_commands_part_lists_every_command_with_its_options(reference):
    part = reference.commands_part()
    for name, program in reference.programs().items():
        for command in program.list_commands(None):
            assert f"\n### {name} {command}" in part
    assert "| `--nnodes" in part
    assert "| `--budget` |" in part


def test_errors_page_has_each_exit_code_and_its_errors(reference):
    page = reference.errors_page()
    assert re.search(r"^\| 5 \| .* \| `TierUnavailableError`, ", page, re.MULTILINE)
    assert re.search(r"^\| 8 \| .* \| `JobFailedError` \|$", page, re.MULTILINE)


def test_metrics_page_finds_families_of_all_shapes(reference, tmp_path):
    module = tmp_path / "collector.py"
    module.write_text(
        "def collect():\n"
        "    for name, text in (('a', ''), ('b', '')):\n"
        "        yield GaugeMetricFamily(f't_{name}', text)\n"
        "    tables: dict = {'c': ''}\n"
        "    for kind, families in ((CounterMetricFamily, tables),):\n"
        "        for name, text in families.items():\n"
        "            yield kind(f't_{name}', text, labels=['job'])\n"
        "    yield GaugeMetricFamily('t_d', '', labels=['job', 'node'])\n"
    )
    assert [tuple(one) for one in reference.metrics_of(module)] == [
        ("t_a", "gauge", ()),
        ("t_b", "gauge", ()),
        ("t_c_total", "counter", ("job",)),
        ("t_d", "gauge", ("job", "node")),
    ]
