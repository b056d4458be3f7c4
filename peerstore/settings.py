"""Settings of a node's store and of a job's replication.

No other module of this package reads the environment.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from peerstore.errors import RequestError
from peerstore.membership.topology import PARTITION_MIN_NODES, MemberList
from peerstore.shard_records import validate_blob_name
from peerstore.sizes_and_durations import parse_size

_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", re.ASCII)


DIRECTORY_ENV = "PEERSTORE_DIR"
"""Directory of the agent of the ``peerstore`` command. Default: ``/dev/shm/peerstore-UID``."""


@dataclass(frozen=True)
class StoreSettings:
    """Settings of one node's store."""

    budget: str = "50%"
    """Arena size: bytes ("64GiB") or a share of this node's memory ("30%")."""
    slots_per_part: int = 2
    """Regular slots of a writer: one with the newest complete version, one for the next."""
    burst_slots: int = 1
    """Extra slots of a writer while older versions cannot be evicted (a slow upload, a reader)."""
    lease_grace_s: float = 30.0
    """Seconds for which a lease survives after its live owner lost the connection."""
    job_ttl_s: float = 86400.0
    """Seconds for which a job's shards are stored after its last process ended.

    A job that was unused for an hour is dropped earlier if another job needs the memory.
    """

    def __post_init__(self) -> None:
        if not parse_budget(self.budget, memory_bytes=1 << 40):
            raise RequestError(f"budget {self.budget!r} keeps nothing: write for example '64GiB' or '30%'")
        if self.slots_per_part < 1 or self.burst_slots < 0:
            raise RequestError(
                f"slots_per_part={self.slots_per_part}, burst_slots={self.burst_slots}: a writer needs at least one "
                "slot. Two slots keep its last version while it writes the next. burst_slots must not be negative"
            )
        for name in ("lease_grace_s", "job_ttl_s"):
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and seconds >= 0):
                raise RequestError(f"{name}={seconds}: write a number of seconds that is not negative")


@dataclass(frozen=True)
class AgentPaths:
    """The directory of one node agent: arena, socket, lock and log."""

    directory: Path
    explicit: bool = False
    """Whether an operator chose the directory, so that root may use its owner's agent."""

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
    def watchdog_lock(self) -> Path:
        return self.directory / "watch.lock"

    @property
    def log(self) -> Path:
        return self.directory / "agent.log"


def default_agent_paths(environ: Mapping[str, str] = os.environ) -> AgentPaths:
    """Return the paths for ``$PEERSTORE_DIR``, or for this user's directory in shared memory."""
    named = environ.get(DIRECTORY_ENV)
    default = Path("/dev/shm") / f"peerstore-{os.getuid()}"  # noqa: S108
    return AgentPaths(Path(named) if named else default, explicit=bool(named))


def parse_budget(text: str, *, memory_bytes: int | None = None) -> int:
    """Return ``text`` ("64GiB", "30%", "123") in bytes.

    A share is of the memory that this process may use.
    """
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
    """Return this machine's memory in bytes, or the control group's limit if that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit_file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(limit_file).read_text()))
        except (OSError, ValueError):
            continue
    return total


MAX_PARITY_GROUP = 31
"""Largest group size. With uneven domains a group has up to twice as many nodes; a parity supports 64."""


JOB_PEERS_BLOB = "peers"
"""Blob with a job's peer configuration, for a restarted agent; other nodes neither read nor write it."""


class BlobAccess(msgspec.Struct, frozen=True):
    """The job's blobs that nodes may read from and write to each other; no other blobs are shared."""

    common: tuple[str, ...] = ()
    """Prefixes of names that contain a hash of the blob: it is equal on all nodes and never changes."""
    own: tuple[str, ...] = ()
    """Prefixes of names that end with a node's id: only that node changes the blob."""

    def is_common(self, name: str) -> bool:
        return name.startswith(self.common)

    def check_readable(self, name: str) -> str:
        """Return ``name`` if nodes may read it; raise :class:`RequestError` if not."""
        if not validate_blob_name(name).startswith((*self.common, *self.own)):
            raise RequestError(f"blob {name} is this node's own: nodes share {self._described}")
        return name

    def check_writable(self, name: str, by: str) -> str:
        """Return ``name`` if node ``by`` may write it; raise :class:`RequestError` if not."""
        if not self.is_common(validate_blob_name(name)) and name not in {first + by for first in self.own}:
            raise RequestError(f"blob {name} is not for node {by} to change: nodes share {self._described}")
        return name

    @property
    def _described(self) -> str:
        return ", ".join(f"{first}*" for first in (*self.common, *self.own)) or "none"


class ReplicationSettings(msgspec.Struct, frozen=True):
    """A job's settings for the protection of its shards."""

    copies: int = 2
    """Number of copies in memory, including the writer's."""
    levels: tuple[str, ...] = ("zone", "rack")
    """Labels of failure domains, the outermost first."""
    streams: int = 2
    """Number of connections for one replica's transfer."""
    bandwidth: int = 0
    """Bytes per second that this node sends for replicas, or reads for its parities; 0: no limit."""
    mode: Literal["mirror", "parity"] = "mirror"
    """Replicas, or parities of groups of nodes: less memory, one lost node per group."""
    parity_group_size: int = 4
    """With parity: one less than the nodes of a group; a parity takes 1/``parity_group_size`` of a shard."""
    partition_min_nodes: int = PARTITION_MIN_NODES
    """Number of nodes from which they query each other by partitions instead of directly."""

    evicts_superseded: bool = True
    """Whether newer versions supersede older ones; false if the owner deletes versions by name."""

    @property
    def requires_replication(self) -> bool:
        """Whether other nodes must protect a version before an older one may be evicted."""
        return self.mode == "parity" or self.copies > 1


class JobPeersConfig(msgspec.Struct, frozen=True):
    """A job's use of several nodes' memory; stored with its shards for a restarted agent."""

    secret: bytes
    settings: ReplicationSettings = ReplicationSettings()
    discovery: str = ""
    """Source of the member list, such as ``static:n1=10.0.0.1:7070``; empty: ``member_list`` is used."""
    member_list: MemberList | None = None

    def __post_init__(self) -> None:
        if not self.discovery and self.member_list is None:
            raise RequestError("a job's nodes have to come from somewhere: give a list of them or a discovery")
        if not 1 <= self.settings.copies <= 3:
            raise RequestError(f"copies={self.settings.copies}: between 1 and 3 copies are kept, the writer's included")
        if not 1 <= self.settings.parity_group_size <= MAX_PARITY_GROUP:
            raise RequestError(
                f"group={self.settings.parity_group_size}: a parity protects 1 to {MAX_PARITY_GROUP} nodes' shards"
            )

    def same_except_members(self, other: JobPeersConfig) -> bool:
        """Return whether only the members differ."""
        return (self.secret, self.settings) == (other.secret, other.settings)
