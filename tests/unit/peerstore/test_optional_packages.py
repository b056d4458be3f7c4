"""The error of a missing optional package, and the files that may import one."""

import ast
import pickle
import re
import sys
import types
from pathlib import Path

import pytest

from peerstore.errors import MissingPackageError, RequestError
from peerstore.optional_packages import missing_package_error, optional_imports

ROOT = Path(__file__).parents[3]


def test_missing_package_error_is_an_import_error_and_can_be_pickled():
    error = missing_package_error("the parser", "yaml", "pyyaml")
    assert isinstance(error, ImportError)
    assert isinstance(error, RequestError)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (MissingPackageError, "the parser needs the yaml package: pip install pyyaml")


def test_missing_module_of_a_package_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "absent", None)
    with pytest.raises(MissingPackageError, match=r"^it needs the absent package: pip install absent$"):  # noqa: SIM117
        with optional_imports("it"):
            import absent.part  # noqa: F401


def test_installed_package_of_another_version_is_not_called_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "old", types.ModuleType("old"))
    text = r"^it needs the old package in another version \(.*old\.part.*\): pip install 'x\[y\]'$"
    with pytest.raises(MissingPackageError, match=text), optional_imports("it", "'x[y]'"):
        import old.part  # noqa: F401


@pytest.mark.parametrize("module", ["peerstore.absent", "integration.absent"])
def test_missing_module_of_this_distribution_is_a_defect(module):
    with pytest.raises(ModuleNotFoundError) as caught, optional_imports("it"):
        __import__(module)
    assert type(caught.value) is ModuleNotFoundError


def optional_packages():
    """Return the import names of the packages that only extras install."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    return {re.split("[>=]", name)[0] for name in re.findall(r'"([^"]+)"', section)} | {"nixl_cu12", "nixl_cu13"}


def imported_packages(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


def test_every_file_that_imports_an_optional_package_names_its_extra():
    files = [
        path for name in ("peerstore", "tieredckpt", "elastic", "integration") for path in (ROOT / name).rglob("*.py")
    ]
    packages = optional_packages()
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    found = [
        path
        for path, text in texts.items()
        if any(name in text for name in packages) and packages & set(imported_packages(text))
    ]
    guarded = [
        path
        for path in found
        if any("optional_imports(" in part.read_text() for part in (path, path.parent / "__init__.py"))
    ]
    assert len(found) >= 8
    assert found == guarded
