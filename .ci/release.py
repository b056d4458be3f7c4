"""``make release-check``: build an sdist and a wheel, and use them in clean environments.

They are built from a clone, and the wheel from the sdist. A node agent must run without torch, as in its image. The
README's loop must train and resume with each distribution.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "build/release"
PACKAGES = ("peerstore", "tieredckpt", "elastic", "integration")
_LOOP = re.compile(r"<!-- examples/loop\.py -->\n```python\n(.*?)```", re.DOTALL)
_REQUIRED = re.compile(r"^Requires-Dist: (?!torch\b)([^;\n]+)$", re.MULTILINE)
"""Requirements of the wheel but torch and those of extras, which have markers."""


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", default="", help="Requirement of torch (default that of requirements/torch.txt).")
    asked = parser.parse_args(words)
    torch = [asked.torch] if asked.torch else ["-r", str(ROOT / "requirements/torch.txt")]
    shutil.rmtree(PLACE, ignore_errors=True)
    sdist, wheel = build(PLACE / "clone", PLACE / "dist")
    check_files(wheel)
    check_agent(wheel, PLACE / "agent")
    check_loop((wheel, sdist), PLACE / "user", torch)
    say(f"{wheel.name} and {sdist.name} in {PLACE / 'dist'} are good")


def build(clone: Path, dist: Path) -> tuple[Path, Path]:
    """Build from a clone of ``HEAD``, and return the sdist and the wheel."""
    say("Building an sdist and a wheel from a clone ...")
    run("git", "clone", "--quiet", str(ROOT), str(clone))
    tools = environment(PLACE / "tools")
    pip(tools, "-r", str(ROOT / "requirements/release.txt"))
    run(tools, "-m", "build", "--outdir", str(dist), str(clone), quiet=True)
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    run(tools, "-m", "twine", "--no-color", "check", "--strict", str(sdist), str(wheel))
    return sdist, wheel


def check_files(wheel: Path) -> None:
    """Compare the wheel with the files of the packages that git tracks."""
    command = ["git", "ls-files", *PACKAGES]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    expected = {name for name in listed.stdout.split("\n") if name}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    if found != expected:
        sys.exit(f"The wheel lacks {sorted(expected - found)}, and has {sorted(found - expected)} too many")
    say(f"The wheel has the {len(found)} files of the packages")


def check_agent(wheel: Path, folder: Path) -> None:
    """Run an agent and its commands in an environment without torch."""
    say("Installing the wheel without torch ...")
    python = environment(folder)
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        pip(python, *_REQUIRED.findall(archive.read(metadata).decode()))
    pip(python, "--no-deps", str(wheel))
    environ = agent_environ()
    command = str(folder / "bin/tieredckpt")
    run(command, "agent", "--detach", "--dir", environ["TIEREDCKPT_AGENT_DIRECTORY"], environ=environ)
    try:
        for words in (("status",), ("ls",), ("doctor",)):
            run(command, *words, environ=environ, quiet=True)
    finally:
        run(command, "agent", "stop", environ=environ)
        shutil.rmtree(environ["TIEREDCKPT_AGENT_DIRECTORY"], ignore_errors=True)
    refused = subprocess.run(
        [command, "export", "llama", "out"], capture_output=True, text=True, env=environ, check=False
    )
    if refused.returncode != 2 or "pip install torch" not in refused.stderr:
        sys.exit(f"`tieredckpt export` without torch ended with {refused.returncode}: {refused.stderr}")


def check_loop(distributions: tuple[Path, ...], folder: Path, torch: list[str]) -> None:
    """Train with the README's loop: each distribution resumes the steps of the one before."""
    say("Installing torch ...")
    python = environment(folder)
    pip(python, *torch)
    found = _LOOP.search((ROOT / "README.md").read_text(encoding="utf-8"))
    if found is None:
        sys.exit("README.md has no loop")
    script, environ, first = folder / "loop.py", agent_environ(), 0
    script.write_text(found[1], encoding="utf-8")
    try:
        for distribution in distributions:
            say(f"Installing {distribution.name} ...")
            pip(python, "--force-reinstall", "--no-deps", str(distribution))
            pip(python, str(distribution))
            for _ in range(2):
                out = subprocess.run([python, str(script)], capture_output=True, text=True, env=environ, check=False)
                print(out.stdout, end="", flush=True)
                if out.returncode or f"starting at step {first}\n" not in out.stdout:
                    sys.exit(f"{distribution.name}: the loop did not start at step {first}: {out.stderr}")
                first += 20
            run(str(folder / "bin/tieredckpt"), "agent", "stop", environ=environ)
    finally:
        shutil.rmtree(environ["TIEREDCKPT_AGENT_DIRECTORY"], ignore_errors=True)


def agent_environ() -> dict[str, str]:
    """Return an environment in which the checkout is not importable, with an agent directory of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TIEREDCKPT_"))}
    memory = tempfile.mkdtemp(prefix="tieredckpt-release-", dir="/dev/shm")
    return kept | {"TIEREDCKPT_AGENT_DIRECTORY": memory}


def environment(folder: Path) -> str:
    """Create a virtual environment, and return its Python."""
    run(sys.executable, "-m", "venv", "--clear", str(folder))
    return str(folder / "bin/python")


def pip(python: str, *words: str) -> None:
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words)


def say(line: str) -> None:
    print(line, flush=True)


def run(*command: str, environ: dict[str, str] | None = None, quiet: bool = False) -> None:
    """Run a command outside the checkout; end this process with its output and status if it fails."""
    out = subprocess.PIPE if quiet else None
    done = subprocess.run(command, cwd=PLACE.parent, env=environ, stdout=out, stderr=out, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout or ''}{done.stderr or ''}{' '.join(command)} ended with status {done.returncode}")


if __name__ == "__main__":
    main()
