"""Scripts of tests as files: ``--forked-starts`` forks a script file, but not code after ``-c``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def run_script(folder: Path, source: str, *words: str, timeout_s: float = 200.0) -> subprocess.CompletedProcess[str]:
    """Write ``source`` to a file in ``folder``, run it in a process of its own, and return how it ended."""
    script = folder / "script.py"
    script.write_text(source)
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *words],
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
