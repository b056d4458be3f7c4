"""Detection of processes that the kernel killed for lack of memory."""

from __future__ import annotations

import contextlib
from pathlib import Path

_CGROUP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
_MACHINE = Path("/proc/vmstat")


class OomDetector:
    """OOM kills in this process's control group and those below it, and on the machine.

    Used when a child process was killed by SIGKILL.
    """

    def __init__(self, cgroup: Path | None = None, machine: Path = _MACHINE) -> None:
        self._cgroup = _events_file() if cgroup is None else cgroup
        self._machine = machine
        self._seen = self._counts()

    def new_kills(self) -> str:
        """Return a description of OOM kills since the last call, or ""."""
        before, self._seen = self._seen, self._counts()
        if self._seen[0] > before[0]:
            return "probably out of memory: the kernel says so of its control group"
        if self._seen[1] > before[1]:
            return "maybe out of memory: the kernel has ended something on this machine for lack of it"
        return ""

    def _counts(self) -> tuple[int, int]:
        return _count(self._cgroup), _count(self._machine)


def _events_file() -> Path:
    """Return the file with the OOM kill count of this process's control group, for cgroup v1 or v2."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = _CGROUP.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for root in (_MOUNT / path.lstrip("/"), _MOUNT):  # a container may see only its own group, as the root
                if (root / "memory.events").exists():
                    return root / "memory.events"
        elif "memory" in controllers.split(","):
            for root in (_MOUNT / "memory" / path.lstrip("/"), _MOUNT / "memory"):
                if (root / "memory.oom_control").exists():
                    return root / "memory.oom_control"
    return _MOUNT / "memory.events"


def _count(file: Path) -> int:
    """Return the kill count in ``file``, or 0 without one."""
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0
