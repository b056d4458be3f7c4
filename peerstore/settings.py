"""What an operator may set about a node's store, and the only place here that reads the environment."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from peerstore.errors import RequestError
from peerstore.units import parse_size

_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", re.ASCII)


@dataclass(frozen=True)
class StoreSettings:
    """How a node keeps shards."""

    budget: str = "50%"
    """Arena size: bytes ("64GiB") or a share of this node's memory ("30%")."""
    slots_per_part: int = 2
    """Slots a writer has in steady state: one with the newest whole version, one to write the next."""
    burst_slots: int = 1
    """Extra slots a writer may get while older versions cannot be given up (a slow upload, a reader)."""
    lease_grace_s: float = 30.0
    """How long a lease survives when its live owner lost the connection."""
    job_ttl_s: float = 86400.0
    """How long a job's shards are kept after its last process went away. Those of jobs that nobody has used for an hour
    go before, where another job needs the room."""

    def __post_init__(self) -> None:
        if not budget_bytes(self.budget, memory_bytes=1 << 40):
            raise RequestError(f"budget {self.budget!r} keeps nothing: write for example '64GiB' or '30%'")
        if self.slots_per_part < 1 or self.burst_slots < 0:
            raise RequestError(
                f"slots_per_part={self.slots_per_part}, burst_slots={self.burst_slots}: a writer needs at least one "
                "slot (two to keep its last version while it writes the next), and no fewer than 0 extra ones"
            )
        for name in ("lease_grace_s", "job_ttl_s"):
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and seconds >= 0):
                raise RequestError(f"{name}={seconds}: write a number of seconds from 0 on")


@dataclass(frozen=True)
class AgentPlace:
    """The directory of one node agent: arena, socket, lock and log."""

    directory: Path
    named: bool = False
    """An operator has chosen the directory: root may use the agent of the user it belongs to."""

    @property
    def socket(self) -> Path:
        return self.directory / "agent.sock"

    @property
    def lock(self) -> Path:
        return self.directory / "agent.lock"

    @property
    def launch_lock(self) -> Path:
        return self.directory / "launch.lock"

    @property
    def watch_lock(self) -> Path:
        return self.directory / "watch.lock"

    @property
    def log(self) -> Path:
        return self.directory / "agent.log"


def default_place(environ: Mapping[str, str] = os.environ) -> AgentPlace:
    """``$PEERSTORE_DIR``, or this user's own directory on the machine's shared memory."""
    named = environ.get("PEERSTORE_DIR")
    default = Path("/dev/shm") / f"peerstore-{os.getuid()}"  # noqa: S108
    return AgentPlace(Path(named) if named else default, named=bool(named))


def budget_bytes(text: str, *, memory_bytes: int | None = None) -> int:
    """``text`` ("64GiB", "30%", "123") in bytes; a share is of the memory this process may use."""
    share = _SHARE.fullmatch(text)
    if share is None:
        try:
            return parse_size(text)
        except ValueError as error:
            raise RequestError(f"budget {error}, or 30%") from error
    percent = float(share[1])
    if not 0 < percent <= 100:
        raise RequestError(f"budget {text!r}: a share is above 0% and at most 100%")
    return int((memory_bytes if memory_bytes is not None else usable_memory_bytes()) * percent / 100)


def usable_memory_bytes() -> int:
    """This machine's memory, or the control group's limit where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit_file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(limit_file).read_text()))
        except (OSError, ValueError):
            continue
    return total
