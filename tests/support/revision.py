"""The git revision of a directory's working tree."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path


def revision(root: Path) -> str:
    """Return the commit id, with a hash of uncommitted changes.

    Outside a git repository return ``"unknown"``.
    """
    git = ("git", "-C", str(root))
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode:
        return "unknown"
    changed = subprocess.run([*git, "diff", "HEAD"], capture_output=True, check=True).stdout
    return head.stdout.strip() + (f" with changes {hashlib.sha256(changed).hexdigest()[:8]}" if changed else "")
