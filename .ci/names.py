"""Fail when a public name of the packages has two meanings, or cannot be found by its name.

- A public class or function has its name alone over all packages; so has a module.
- A module is named by a noun. A gerund does not say what the module holds.
- A command of ``tieredckpt`` and ``elastic`` is in the file of its name.
- No file of ``elastic``, ``tieredckpt`` and ``peerstore`` names HyperPod. Its formats are read in ``integration``.
- A module of ``peerstore/store`` uses private attributes of ``self`` only, and only ``slot_table.py`` assigns a slot's.
- A file of ``tests/unit`` is in the folder of the module that it tests, and its name begins with the module's name. The
  package's name may stand first, where two packages have a module of the same name. A file that tests a whole folder
  begins with the folder's name.
- The name of a test file is unique, except in folders that are packages.

``TWICE``, ``GERUNDS``, ``ELSEWHERE``, ``PLATFORM`` and ``OTHER_TESTS`` list the exceptions with their reasons. An
exception that nothing needs fails the check.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("peerstore", "tieredckpt", "elastic", "integration")
TWICE = {
    "__init__": "a package",
    "__main__": "a program",
    "errors": "the errors of its package",
    "settings": "the only module of its package that reads the environment",
    "testing": "what its package gives to tests",
    "main": "a program's entry point",
    "tiered": "what a user of a framework writes to activate the tiers",
    "elastic_event_detected": "HyperPod's import path of the same function",
}
GERUNDS = {
    "monitoring": "a command, and what the field calls it",
    "testing": "what the field calls it",
    "framing": "what the field calls it",
    "training": "the training loop of a fine-tuning job",
}
COMMANDS = {"tieredckpt/cli/__init__.py": "_COMMANDS", "elastic/cli/__init__.py": "_OWN"}
ELSEWHERE = {
    "tieredckpt demo": "one line; the demo is a package",
    "tieredckpt unpin": "the other half of pin",
    "elastic join": "elastic run on one more node",
    "elastic coordinator": "elastic run without a node",
    "elastic status": "one request to the coordinator",
    "elastic resize": "one request to the coordinator",
    "elastic drain": "one request to the coordinator",
    "elastic stop": "one request to the coordinator",
    "elastic inject": "one request to the coordinator",
}
PLATFORM: dict[str, str] = {}
"""Files of the lower packages that may name HyperPod."""
MIRRORED = (*PACKAGES, "benchmarks")
OTHER_TESTS = {
    "repository": "tests of the checks, the tools and the test support of this repository",
}


def public_names(path: Path) -> set[str]:
    """Return the public classes and functions that the module defines."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {one.name for one in body if isinstance(one, kinds) and not one.name.startswith("_")}


def commands(path: Path, table: str) -> dict[str, str]:
    """Return the module of each command in the table of that name."""
    for one in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name) and one.targets[0].id == table:
            return {name: place.partition(":")[0] for name, place in ast.literal_eval(one.value).items()}
    raise LookupError(f"{path} has no table {table}")


def mirrored_module(root: Path, test: Path) -> bool:
    """Whether a file of ``tests/unit`` is in its module's folder and begins with its module's name."""
    place = test.relative_to(root / "tests/unit").parent
    folder = root / place
    stem = test.stem.removeprefix("test_")
    subjects = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("__")}
    if (folder / "__init__.py").is_file():
        subjects.add(folder.name)
    starts = {start for name in subjects for start in (name, f"{place.parts[0]}_{name}")}
    return any(stem == start or stem.startswith(f"{start}_") for start in starts)


def store_findings(root: Path) -> Iterator[str]:
    """Yield one line for each attribute in ``peerstore/store`` that belongs to another module."""
    folder = root / "peerstore/store"
    body = ast.parse((folder / "slots.py").read_text(encoding="utf-8")).body
    slot = next(one for one in body if isinstance(one, ast.ClassDef) and one.name == "ArenaSlot")
    fields = {one.target.id for one in slot.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    for path in sorted(folder.glob("*.py")):
        for one in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(one, ast.Attribute) or (isinstance(one.value, ast.Name) and one.value.id == "self"):
                continue
            place = f"{path.relative_to(root)}:{one.lineno}"
            if one.attr.startswith("_") and not one.attr.startswith("__"):
                yield f"{place}: {ast.unparse(one)} is private to another object"
            if isinstance(one.ctx, ast.Store) and one.attr in fields and path.name != "slot_table.py":
                yield f"{place}: {ast.unparse(one)} is assigned; only slot_table.py changes a slot"


def test_file_findings(root: Path) -> Iterator[str]:
    """Yield one line for each misplaced or misnamed test file, and each unused folder in OTHER_TESTS."""
    other: set[str] = set()
    for path in sorted((root / "tests/unit").rglob("test_*.py")):
        place = path.relative_to(root / "tests/unit").parts[0]
        if place in OTHER_TESTS:
            other.add(place)
        elif place not in MIRRORED or not mirrored_module(root, path):
            yield f"{path.relative_to(root)}: begin the name with a module of the mirrored folder"
    for place in sorted(OTHER_TESTS.keys() - other):
        yield f"OTHER_TESTS lists {place!r}, and nothing needs it"
    names: dict[str, list[str]] = defaultdict(list)
    for path in sorted((root / "tests").rglob("test_*.py")):
        if not (path.parent / "__init__.py").exists():
            names[path.name].append(str(path.relative_to(root)))
    for name, places in sorted(names.items()):
        if len(places) > 1:
            yield f"{name} is the name of {len(places)} test files: {', '.join(places)}"


def findings(root: Path) -> Iterator[str]:
    """Yield one line for each name that breaks a rule, and for each exception that nothing needs."""
    modules: dict[str, set[str]] = defaultdict(set)
    platform: set[str] = set()
    names: dict[str, set[str]] = defaultdict(set)
    gerunds: set[str] = set()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            place = str(path.relative_to(root))
            modules[path.stem].add(place)
            if package != "integration" and "hyperpod" in path.read_text(encoding="utf-8").lower():
                platform.add(place)
                if place not in PLATFORM:
                    yield f"{place} names HyperPod; only integration may"
            if path.stem.endswith("ing"):
                gerunds.add(path.stem)
                if path.stem not in GERUNDS:
                    yield f"{place}: name the module by a noun"
            for name in public_names(path):
                names[name].add(place)
    twice = {}
    for found in (modules, names):
        twice |= {name: places for name, places in found.items() if len(places) > 1}
    for name in sorted(twice.keys() - TWICE.keys()):
        yield f"{name} stands in {len(twice[name])} places: {', '.join(sorted(twice[name]))}"
    elsewhere: set[str] = set()
    for file, table in COMMANDS.items():
        program = file.partition("/")[0]
        for command, module in commands(root / file, table).items():
            if module.rpartition(".")[2] != command.replace("-", "_"):
                elsewhere.add(f"{program} {command}")
                if f"{program} {command}" not in ELSEWHERE:
                    yield f"{file}: `{program} {command}` is in {module}; put it into a module of its name"
    lists = (
        ("TWICE", TWICE, twice.keys()),
        ("GERUNDS", GERUNDS, gerunds),
        ("ELSEWHERE", ELSEWHERE, elsewhere),
        ("PLATFORM", PLATFORM, platform),
    )
    for kind, listed, used in lists:
        for name in sorted(listed.keys() - used):
            yield f"{kind} lists {name!r}, and nothing needs it"
    yield from store_findings(root)
    yield from test_file_findings(root)


def main() -> int:
    found = list(findings(Path()))
    for one in found:
        print(one, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
