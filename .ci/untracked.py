"""Fail when this checkout has source files that a clone lacks.

Python imports them and tests read them here, so the other checks pass in this checkout and fail in a clone. A file
counts when its directory has tracked files, ``.gitignore`` does not list it, and its suffix is one of tracked files. A
user's own ignore rules do not hide it. Compiled modules outside ``__pycache__`` count because Python imports them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import PurePath

_COMPILED = {".pyc", ".so"}


def _files(*options: str) -> list[PurePath]:
    command = ["git", "ls-files", "-z", *options]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [PurePath(name) for name in printed.split("\0") if name]


def untracked() -> list[PurePath]:
    """Return the files of the current directory's checkout that git should track."""
    tracked = _files()
    folders, suffixes = {path.parts[0] for path in tracked}, {path.suffix for path in tracked} | _COMPILED
    others = _files("--others", "--exclude-per-directory=.gitignore")
    return [path for path in others if (len(path.parts) == 1 or path.parts[0] in folders) and path.suffix in suffixes]


def main() -> int:
    found = untracked()
    for path in found:
        print(f"{path}: git does not track this file. Run git add, move it, or list it in .gitignore.", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
