"""Memory of processes from ``/proc``, and a process that samples the peak.

``python -m benchmarks.proc PID...`` samples until its standard input ends. It then prints the first and the largest sum
of private memory, and the largest shared memory of any process.
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
    """Return private memory, without files and arena pages."""
    return _status(pid, ("RssAnon:",))


def shared_bytes(pid: int) -> int:
    """Return mapped shared memory, including arena pages."""
    return _status(pid, ("RssShmem:",))


def resident_bytes(pid: int) -> int:
    """Return resident memory without shared memory."""
    return _status(pid, ("RssAnon:", "RssFile:"))


def _status(pid: int, names: tuple[str, ...]) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(names))


@dataclass
class Peak:
    """Memory of the watched processes: the first sum and its peak growth."""

    base: int = 0
    grown: int = 0
    shared: int = 0
    """Largest shared memory of any process, not a sum: processes map the same pages."""


@contextlib.contextmanager
def watched(pids: Sequence[int]) -> Iterator[Peak]:
    """Sample the memory of ``pids`` about every millisecond from another process."""
    peak = Peak()
    command = [sys.executable, "-m", "benchmarks.proc", *map(str, pids)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()  # wait for the first sample
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
