"""Make the environment of ``make test-gpu``: a virtual environment above a Python with torch.

Run it with that Python. It needs the standard library and pip only, works offline from a folder of wheels, and never
installs or upgrades torch.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements/gpu.txt"
OLDEST_PYTHON, NEWEST_PYTHON, OLDEST_TORCH = (3, 10), (3, 13), (2, 11)


def refusal(python: tuple[int, int], torch: str) -> str:
    """Return why ``make test-gpu`` cannot run on this Python and torch; empty when it can."""
    if not OLDEST_PYTHON <= python <= NEWEST_PYTHON:
        return f"Python {python[0]}.{python[1]} is not supported. Use Python 3.10 to 3.13: make test-gpu PYTHON=..."
    if not torch:
        return "This Python has no torch. Name one that has: make test-gpu PYTHON=/path/to/python"
    major, minor = torch.split(".")[:2]
    if (int(major), int(minor)) < OLDEST_TORCH:
        return f"torch {torch} is too old. make test-gpu needs torch 2.11 or later."
    return ""


def packages_of(path: Sequence[str], prefix: str) -> list[str]:
    """Return the folders of ``path`` below ``prefix`` that hold installed packages."""
    return [one for one in path if one.startswith(prefix) and Path(one).name in ("site-packages", "dist-packages")]


def pip_arguments(constraints: Path, wheels: Path | None) -> list[str]:
    """Return pip's arguments for the requirements; with ``wheels``, pip reads that folder and no index."""
    offline = [] if wheels is None else ["--no-index", "--find-links", str(wheels.resolve())]
    return ["install", "-q", "--disable-pip-version-check", *offline, "-c", str(constraints), "-r", str(REQUIREMENTS)]


def install(place: Path, wheels: Path | None) -> Path:
    """Make the environment at ``place`` and return its Python."""
    python = place / "bin/python"
    if not python.exists():
        # Without pip: Debian's Python lacks ensurepip, and the pip next to torch is visible below.
        make = [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", str(place)]
        subprocess.run(make, check=True)
    # A virtual environment on top of another one sees the base installation only. This file adds the other one.
    lower = place / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages/below.pth"
    lower.write_text("".join(f"{one}\n" for one in packages_of(sys.path, sys.prefix)))
    constraints = place / "constraints.txt"
    constraints.write_text(f"torch=={importlib.metadata.version('torch')}\n")
    pip = [str(python), "-m", "pip"]
    environment = {**os.environ, "PIP_REQUIRE_VIRTUALENV": "0", "PIP_NO_INPUT": "1"}
    subprocess.run([*pip, *pip_arguments(constraints, wheels)], check=True, env=environment)
    # The commands and entry points of this repository; its dependencies are in the requirements above.
    package = ["install", "-q", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, *package, "-e", str(ROOT)], check=True, env=environment)
    return python


def main() -> int:
    """Install, and return the exit status: 2 when this Python or its torch is refused."""
    parser = argparse.ArgumentParser(prog="python tests/gpu/install.py", description="Install what test-gpu needs.")
    parser.add_argument("--wheels", type=Path, help="Install from this folder of wheels, without an index.")
    parser.add_argument("--place", type=Path, default=ROOT / "build/gpu/venv", help="Folder of the environment.")
    options = parser.parse_args()
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = ""
    if problem := refusal(sys.version_info[:2], torch):
        print(problem, file=sys.stderr)
        return 2
    if options.wheels is not None and not options.wheels.is_dir():
        print(f"WHEELS={options.wheels} is not a folder.", file=sys.stderr)
        return 2
    print(install(options.place, options.wheels))
    return 0


if __name__ == "__main__":
    sys.exit(main())
