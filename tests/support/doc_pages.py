"""Code blocks of the documentation, and the output of their commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_VARYING = (
    (re.compile(r"\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(Z|\.\d+\+00:00)"), "TIME"),
    (re.compile(r"\b\d{13}\b"), "EPOCH"),
    (re.compile(r"\b(?=[0-9a-f]*[a-f])[0-9a-f]{12}\b"), "ID"),
    (re.compile(r"\b\d+(\.\d+)? (KiB|MiB|GiB|TiB|B)\b"), "SIZE"),
    (re.compile(r"\b\d+(\.\d+)? (ms|s|min|h|d)\b( \d+ (s|min|h)\b)?"), "DURATION"),
    (re.compile(r"\b\d+\.\d+\b"), "NUMBER"),
    (re.compile(r"[ \t]+"), " "),
)


class DocPage:
    """A page whose commands run in ``folder``. ``paths`` replaces paths of the page."""

    def __init__(self, name: str, folder: Path, *, paths: Mapping[str, str], **environ: str) -> None:
        text = (ROOT / "docs" / name).read_text()
        for path, other in paths.items():
            text = text.replace(path, other)
        self._blocks = _BLOCK.findall(text)
        self._folder = folder
        self._environ = {**os.environ, **environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self._environ["PATH"] = f"{self._make_commands()}:{os.environ['PATH']}"

    def _make_commands(self) -> Path:
        """Write the commands of an installation, which use this interpreter and this tree."""
        folder = self._folder / "bin"
        folder.mkdir()
        modules = {"python": "", "tieredckpt": "-m tieredckpt", "torchrun": "-m torch.distributed.run"}
        for name, module in modules.items():
            (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
            (folder / name).chmod(0o755)
        return folder

    def block(self, beginning: str) -> str:
        """Return the only block that starts with these words."""
        (found,) = [text for _, text in self._blocks if text.startswith(beginning)]
        return found

    def sessions(self) -> Iterator[tuple[str, str]]:
        """Yield the command lines after a ``$`` and the output that the page shows for each."""
        for kind, text in self._blocks:
            if kind == "console":
                for session in text.removeprefix("$ ").split("\n$ "):
                    command, _, output = session.partition("\n")
                    yield command, output

    def run(self, command: str, *, status: int = 0) -> str:
        """Run a command line and return its output and errors."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self._folder, env=self._environ, text=True, timeout=200, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == status, done.stdout
        return done.stdout

    def check_session(self, command: str, *, status: int = 0) -> None:
        """Run the command of a session and check that it prints what the page shows."""
        (expected,) = [output for shown, output in self.sessions() if shown == command]
        assert_printed(expected, self.run(command, status=status))


def assert_printed(expected: str, output: str) -> None:
    """Check the output of a command; dots in ``expected`` stand for the rest of a line, or for any lines."""
    assert re.fullmatch(_pattern(_without_varying(expected)), _without_varying(output)), (
        f"the page shows\n{expected}\nand the command prints\n{output}"
    )


def _without_varying(text: str) -> str:
    for pattern, word in _VARYING:
        text = pattern.sub(word, text)
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def _pattern(expected: str) -> str:
    lines = []
    for line in expected.splitlines():
        if line == "...":
            lines.append(r"(?:.*\n)*?")
        elif line.endswith("..."):
            lines.append(re.escape(line[:-3]) + r".*\n")
        else:
            lines.append(re.escape(line) + r"\n")
    return "".join(lines)
