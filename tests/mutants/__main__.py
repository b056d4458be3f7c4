"""``python -m tests.mutants [WORDS]``: check that each mutant fails its test in a copy of the tree.

The tests must first pass without a mutant. With WORDS only mutants whose names contain one of them run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.mutants import MUTANTS, PACKAGES, ROOT, Mutant

_LIMIT_S = 600.0
_FAILED = 1
"""pytest's exit status if a test failed; other nonzero statuses are errors of the run."""


@contextmanager
def copy_repository() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tieredckpt-mutants-") as folder:
        for name in (*PACKAGES, "tests"):
            shutil.copytree(ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        yield Path(folder)


def try_mutant(root: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Return pytest's exit status and the last lines of its output."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not nightly", *tests]
    environ = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=root, env=environ, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return -1, f"timed out after {_LIMIT_S:g} s"
    return done.returncode, "\n".join(done.stdout.splitlines()[-5:])


def survival_reason(mutant: Mutant) -> str:
    """Return why the mutant survives, or an empty string if its test failed."""
    with copy_repository() as root:
        mutant.apply(root)
        status, said = try_mutant(root, [mutant.test])
    return "" if status == _FAILED else f"pytest ended with {status}: {said}"


def main(words: Sequence[str]) -> int:
    wanted = [one for one in MUTANTS if not words or any(word in one.name for word in words)]
    if not wanted:
        sys.exit(f"no mutant has one of {words} in its name")
    with copy_repository() as root:
        status, said = try_mutant(root, sorted({one.test for one in wanted}))
    if status:
        print(f"the tests fail without a mutant: {said}")
        return 1
    survivors = 0
    for one in wanted:
        why = survival_reason(one)
        print(f"{'SURVIVES' if why else 'caught  '}  {one.name}" + (f"\n{why}" if why else ""), flush=True)
        survivors += bool(why)
    print(f"{len(wanted) - survivors} of {len(wanted)} mutants are caught")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
