"""Contributing guide, issue forms, commit hooks, citation file and wheel metadata."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
PACKAGES = ("peerstore", "tieredckpt", "elastic", "integration")
FORMS = ("bug_report.yml", "feature_request.yml")
BUILD = "import setuptools.build_meta as build; print(build.prepare_metadata_for_build_wheel('out'))"


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def links(name):
    return set(re.findall(r"\]\((?![a-z]+:)([^)#]+)", text(name)))


def code(name):
    """Return the inline code of a page."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text(name), flags=re.DOTALL | re.MULTILINE))


def form(name):
    return yaml.safe_load(text(f".github/ISSUE_TEMPLATE/{name}"))


def hooks():
    [repository] = yaml.safe_load(text(".pre-commit-config.yaml"))["repos"]
    assert repository["repo"] == "local"
    return {hook["id"]: hook for hook in repository["hooks"]}


@pytest.fixture(scope="module")
def metadata(tmp_path_factory):
    """The metadata that setuptools writes into a wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    (folder / "out").mkdir()
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=folder, capture_output=True, text=True, check=True)
    return Distribution.at(folder / "out" / done.stdout.split()[-1]).metadata


def test_readme_links_to_the_project_files():
    assert {"CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "CHANGELOG.md"} <= links("README.md")


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md"])
def test_links_of_project_files_lead_to_files(name):
    assert [link for link in sorted(links(name)) if not (ROOT / link).exists()] == []


def test_contributing_names_existing_paths():
    named = {one for one in code("CONTRIBUTING.md") if re.fullmatch(r"[\w.-]*(/[\w.-]*)+|[\w.-]+\.(py|toml|ini)", one)}
    assert len(named) > 20
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_contributing_names_existing_code():
    named = {one for one in code("CONTRIBUTING.md") if re.fullmatch(r"[A-Z]\w+|_?[a-z]\w*_\w+", one)}
    folders = (*PACKAGES, "tests/support", "tests/contract")
    modules = [path.read_text(encoding="utf-8") for folder in folders for path in (ROOT / folder).rglob("*.py")]
    defined = re.findall(
        r"^ *(?:class|def) (\w+)|^(?:\w+, )*(?:\w+ = )?([A-Z]+)\b(?:: .*)? = ", "\n".join(modules), re.MULTILINE
    )
    assert len(named) > 10
    assert named - {name for pair in defined for name in pair} == {"None"}


def test_contributing_names_existing_entry_point_groups():
    named = {one for one in code("CONTRIBUTING.md") if re.fullmatch(r"(peerstore|tieredckpt|elastic)\.[a-z_]+", one)}
    groups = set(re.findall(r'^\[project\.entry-points\."([\w.]+)"\]', text("pyproject.toml"), re.MULTILINE))
    assert named
    assert named <= groups


@pytest.mark.parametrize("name", FORMS)
def test_issue_form_has_the_required_fields(name):
    found = form(name)
    assert found.keys() <= {"name", "description", "title", "labels", "body"}
    assert found["name"]
    assert found["description"]
    fields = [one for one in found["body"] if one["type"] != "markdown"]
    ids = [one["id"] for one in fields]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"[a-z-]+", one) for one in ids)
    for one in found["body"]:
        assert one["type"] in ("markdown", "input", "textarea", "dropdown", "checkboxes")
        assert one["attributes"]["value" if one["type"] == "markdown" else "label"]
    for one in fields:
        options = one["attributes"].get("options", [])
        assert bool(options) == (one["type"] in ("dropdown", "checkboxes"))


def test_issue_forms_send_vulnerabilities_to_the_security_page():
    assert "SECURITY.md" in str(form("bug_report.yml")["body"])
    assert form("config.yml") == {"blank_issues_enabled": False}


def test_bug_report_names_existing_commands():
    from tieredckpt.cli import tieredckpt_cli

    named = re.findall(r"`tieredckpt ([a-z]+)", text(".github/ISSUE_TEMPLATE/bug_report.yml"))
    assert named
    assert set(named) <= tieredckpt_cli.builtin_commands.keys()


def test_pull_request_template_names_existing_make_targets():
    named = re.findall(r"`make ([a-z-]+)", text(".github/pull_request_template.md"))
    assert named
    assert set(named) <= set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))


def test_commit_hooks_run_commands_of_make_check():
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", text("Makefile"), re.MULTILINE)
    checks = [line.strip().replace("$(BIN)", ".tox/py/bin") for line in recipe[1].splitlines()]
    assert hooks().keys() == {"ruff-check", "ruff-format", "names", "words"}
    for hook in hooks().values():
        assert hook["language"] == "system"
        command = f"{hook['entry']} ." if hook.get("pass_filenames", True) else hook["entry"]
        assert command in checks


@pytest.mark.parametrize(("hook", "bad"), [("ruff-check", "import os\n"), ("ruff-format", "x=1\n")])
def test_commit_hook_fails_on_a_bad_file(tmp_path, hook, bad):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "tests").mkdir()
    file = tmp_path / "tests/test_one.py"
    program, *arguments = hooks()[hook]["entry"].split()
    command = [Path(sys.executable).parent / Path(program).name, *arguments, file]
    file.write_text('"""A test."""\n')
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 0
    file.write_text(f'"""A test."""\n\n{bad}')
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 1


def test_wheel_metadata_is_complete(metadata):
    assert metadata["Author"] == "the tieredckpt authors"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["Keywords"]


def test_wheel_classifiers_name_the_tested_python_versions(metadata):
    tested = re.findall(r"py3(\d+)", re.search(r"^env_list = (.*)", text("tox.ini"), re.MULTILINE)[1])
    named = [one.rpartition(" ")[2] for one in metadata.get_all("Classifier") if re.search(r":: 3\.\d+$", one)]
    assert named == [f"3.{minor}" for minor in tested]
    assert metadata["Requires-Python"] == f">=3.{tested[0]}"


def test_extras_in_texts_and_messages_are_those_of_the_wheel(metadata):
    extras = set(metadata.get_all("Provides-Extra"))
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    files += [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    found = [re.findall(r"(?:tieredckpt|'\.)\[([a-z0-9,]+)\]", path.read_text(encoding="utf-8")) for path in files]
    assert {extra for each in found for group in each for extra in group.split(",")} <= extras
    assert extras <= set(code("README.md"))


def test_citation_matches_the_wheel(metadata):
    citation = yaml.safe_load(text("CITATION.cff"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["title"] == metadata["Name"]
    assert citation["version"] == metadata["Version"]
    assert citation["license"] == metadata["License-Expression"]
    assert [author["name"] for author in citation["authors"]] == [metadata["Author"]]
    assert citation["message"]


def test_test_folders_do_not_shadow_optional_packages():
    """Pytest makes each folder with tests or a ``conftest.py`` importable, and a folder in it a package."""
    files = [path for path in (ROOT / "tests").rglob("*.py") if path.name == "conftest.py" or path.match("test_*.py")]
    optional = {name for path in files for name in re.findall(r'importorskip\("(\w+)"', path.read_text())}
    importable = {path.parent for path in files if not (path.parent / "__init__.py").exists()}
    assert {"ray", "torchtitan"} <= optional
    assert not [folder / name for folder in importable for name in optional if (folder / name).exists()]
