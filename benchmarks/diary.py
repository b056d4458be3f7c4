"""Event files of a measured job's ranks, one per process.

Imports only the standard library, so that no contender pays for the imports of another.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Diary:
    """Event file of this process. All processes of a machine share one clock."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def write(self, what: str, **values: Any) -> None:
        self._file.write(json.dumps({"what": what, "at": time.time(), "pid": os.getpid(), **values}) + "\n")


def read_diaries(folder: Path) -> list[Line]:
    """Return the events of all ranks in order of time, without lines that are still being written."""
    found = []
    for path in folder.glob("*.jsonl"):
        found += [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return sorted(found, key=lambda line: float(line["at"]))


def began() -> float:
    """Return the start time of this process, in seconds as from ``time.time``."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - up_s + ticks / os.sysconf("SC_CLK_TCK")
