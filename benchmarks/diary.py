"""What the ranks of a measured job write down, and when: a file each. Imports nothing that others would pay for."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Diary:
    """This rank's lines. All clocks of a machine are the same one."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def write(self, what: str, **values: Any) -> None:
        self._file.write(json.dumps({"what": what, "at": time.time(), "pid": os.getpid(), **values}) + "\n")


def read_diaries(folder: Path) -> list[Line]:
    """Of all ranks, in order of time; the line that is just being written is not there yet."""
    found = []
    for path in folder.glob("*.jsonl"):
        found += [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return sorted(found, key=lambda line: float(line["at"]))


def began() -> float:
    """When this process was started, as ``time.time`` counts."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - up_s + ticks / os.sysconf("SC_CLK_TCK")
