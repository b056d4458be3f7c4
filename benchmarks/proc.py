"""Memory of processes, as the kernel counts it; and a process that watches for the peak.

``python -m benchmarks.proc PID...`` samples until its standard input ends, then prints the first and the greatest sum
of private memory, and the most shared memory that one of them had mapped.
"""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_EVERY_S = 0.001


def private_bytes(pid: int) -> int:
    """Memory of its own: neither files nor the arena's pages."""
    return _status(pid, ("RssAnon:",))


def shared_bytes(pid: int) -> int:
    """Pages of the arena, and of whatever else is shared, that it has mapped."""
    return _status(pid, ("RssShmem:",))


def resident_bytes(pid: int) -> int:
    """Everything but shared memory."""
    return _status(pid, ("RssAnon:", "RssFile:"))


def _status(pid: int, names: tuple[str, ...]) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(names))


@dataclass
class Peak:
    """The first sum of all watched processes, and how much more it became."""

    base: int = 0
    grown: int = 0
    shared: int = 0
    """Of the process that had most shared memory mapped: processes map the same."""


@contextlib.contextmanager
def watched(pids: Sequence[int]) -> Iterator[Peak]:
    """While the block runs, another process looks at ``pids`` every millisecond or so."""
    peak = Peak()
    command = [sys.executable, "-m", "benchmarks.proc", *map(str, pids)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()  # it has its first sample
        yield peak
        out, _ = process.communicate("")
    peak.base, most, peak.shared = map(int, out.split())
    peak.grown = most - peak.base


def _watch(pids: Sequence[int]) -> None:
    base = most = sum(map(private_bytes, pids))
    shared = max(map(shared_bytes, pids))
    print("watching", flush=True)
    while not select.select([sys.stdin], [], [], _EVERY_S)[0]:
        most = max(most, sum(map(private_bytes, pids)))
        shared = max(shared, *map(shared_bytes, pids))
    print(base, most, shared)


if __name__ == "__main__":
    _watch([int(pid) for pid in sys.argv[1:]])
