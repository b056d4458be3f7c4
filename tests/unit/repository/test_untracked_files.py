"""``.ci/untracked.py``: ``make check`` fails on source files that a clone would lack."""

import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[3] / ".ci/untracked.py"


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "package").mkdir()
    for name in ("package/a.py", "package/data.yaml", "notes.md"):
        (tmp_path / name).write_text("")
    (tmp_path / ".gitignore").write_text("__pycache__/\n/build/\n")
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def check(folder):
    return subprocess.run([sys.executable, CHECK], cwd=folder, capture_output=True, text=True)


def write(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")


@pytest.mark.parametrize("ignored", [False, True])
def test_untracked_sources_fail_the_check_even_if_the_user_ignores_them(checkout, ignored):
    names = ["conftest.py", "package/b.py", "package/b.pyc", "package/b.so", "package/b.yaml", "package/new/b.py"]
    for name in names:
        write(checkout / name)
    if ignored:
        (checkout / ".git/info/exclude").write_text("*\n")
    done = check(checkout)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"{name}: git does not track this file. Run git add, move it, or list it in .gitignore." for name in names
    ]
    subprocess.run(["git", "add", "--force", *names], cwd=checkout, check=True)
    assert check(checkout).returncode == 0


def test_caches_builds_and_editor_files_pass_the_check(checkout):
    for name in ("package/__pycache__/b.pyc", "build/b.py", "scratch/b.py", "package/a.py.swp", ".idea/x.yaml"):
        write(checkout / name)
    done = check(checkout)
    assert (done.returncode, done.stderr) == (0, "")


def test_directory_without_a_repository_fails_the_check(tmp_path):
    assert check(tmp_path).returncode != 0
