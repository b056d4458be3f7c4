"""Create or update the virtual environment of ``make demo``.

It holds torch, tieredckpt in editable mode, and a local S3 server.
If the Python that runs this script already has a torch that tieredckpt accepts, the environment uses that one.
Otherwise it gets the version of ``torch.txt``. A second call installs only what has changed since the first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_HERE = ROOT / "requirements"
_OLDEST_PYTHON = (3, 10)
COMPILED = ("elastic.cli", "elastic.supervisor.supervisor", "elastic.demo.fsdp_trainer", "tieredckpt.agent.__main__")
"""Several processes import these modules at the same time, and more slowly while there is no bytecode."""


def main(words: list[str] | None = None) -> None:
    """Bring the environment up to date; print nothing if it already is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="Folder of the virtual environment.")
    parser.add_argument("--hyperpod", action="store_true", help="Install AWS's agent too, for `make demo-hyperpod`.")
    given = parser.parse_args(words)
    if sys.version_info < _OLDEST_PYTHON:
        oldest = ".".join(map(str, _OLDEST_PYTHON))
        sys.exit(f"The demo needs Python {oldest} or newer. Select one: make demo PYTHON=python{oldest}")
    Environment(given.folder.absolute()).update(hyperpod=given.hyperpod)


class Environment:
    """One virtual environment, and the record of the requirements that it was installed from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin/python"
        self._record = folder / "installed.json"

    def update(self, *, hyperpod: bool = False) -> None:
        found = torch_version()
        shared = found if found is not None and is_accepted(found) else None
        done = self._read()
        began = time.monotonic()
        origin = f"{self.folder}: {sys.executable} {sys.version} torch {shared}"
        if done.get("origin") != origin:
            self._create(found, shared)
            done = {"origin": origin}
        packages = [] if shared else ["torch.txt"]
        package = digest(ROOT / "pyproject.toml", *(_HERE / name for name in (*packages, "demo.txt")))
        if done.get("package") != package:
            self._install(packages)
            done = self._write({**done, "package": package})
            say(f"The environment of the demo is ready after {time.monotonic() - began:.0f} s.")
        agent = digest(_HERE / "aws.txt", _HERE / "aws-agent.txt")
        if hyperpod and done.get("agent") != agent:
            say("Installing AWS's hyperpod-elastic-agent ...")
            self._pip("-r", str(_HERE / "aws-agent.txt"))
            # The agent's metadata rejects newer versions of torch, which it works with.
            self._pip("--no-deps", "-c", str(_HERE / "aws.txt"), "hyperpod-elastic-agent")
            self._write({**done, "agent": agent})

    def _create(self, found: str | None, shared: str | None) -> None:
        say(f"Creating a virtual environment in {self.folder} (Python {sys.version.split()[0]}) ...")
        run(sys.executable, "-m", "venv", "--clear", str(self.folder))
        if shared:
            say(f"It uses torch {shared} of {sys.executable}.")
            # --system-site-packages shows the base interpreter's packages only, and torch may be in a venv.
            places = [place for place in sys.path if Path(place).name in ("site-packages", "dist-packages")]
            lines = [f"import site; site.addsitedir({place!r})\n" for place in places]
            (own,) = self.folder.glob("lib/python*/site-packages")
            (own / "shared_torch.pth").write_text("".join(lines))
        elif found:
            say(f"torch {found} of {sys.executable} is too old for tieredckpt; the demo gets its own.")

    def _install(self, packages: list[str]) -> None:
        if packages:
            (wanted,) = re.findall(r"(?m)^torch==(\S+)", (_HERE / "torch.txt").read_text())
            size = "0.2 GB for a build without CUDA, about 3 GB with it"
            say(f"Installing torch {wanted} ({size}; less than a minute once downloaded) ...")
            self._pip("-r", str(_HERE / "torch.txt"))
        say("Installing tieredckpt and its dependencies (0.1 GB; less than a minute once downloaded) ...")
        pinned = [word for name in packages for word in ("-c", str(_HERE / name))]
        self._pip(*pinned, "-r", str(_HERE / "demo.txt"), "-e", str(ROOT))
        run(str(self.python), "-c", f"import sys; sys.dont_write_bytecode = False; import {', '.join(COMPILED)}")

    def _pip(self, *words: str) -> None:
        """Install; on a terminal pip shows its progress. Compiling only what is imported halves the CPU time."""
        quiet = [] if sys.stdout.isatty() else ["--quiet"]
        pip = (str(self.python), "-m", "pip", "install", "--disable-pip-version-check", "--no-compile")
        run(*pip, *quiet, *words)

    def _read(self) -> dict[str, str]:
        try:
            found = json.loads(self._record.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _write(self, done: dict[str, str]) -> dict[str, str]:
        self._record.write_text(json.dumps(done, indent=2))
        return done


def torch_version() -> str | None:
    """Return the version of torch that this interpreter has, or None."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def is_accepted(version: str) -> bool:
    """Return whether tieredckpt accepts this version of torch."""
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    return numbers(version) >= numbers(oldest)


def numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def digest(*paths: Path) -> str:
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()


def say(line: str) -> None:
    print(line, flush=True)


def run(*command: str) -> None:
    """Run a command; end this process with its status if it fails."""
    status = subprocess.run(command, check=False).returncode  # noqa: S603 - ours
    if status:
        sys.exit(status)


if __name__ == "__main__":
    main()
