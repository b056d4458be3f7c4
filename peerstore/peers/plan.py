"""What a job asks of its nodes, as it is configured and remembered."""

from __future__ import annotations

from typing import Literal

import msgspec

from peerstore.cluster.lookouts import SPLIT_FROM
from peerstore.cluster.roster import Roster
from peerstore.errors import RequestError
from peerstore.names import blob_name

MOST_IN_GROUP = 31
"""Where domains do not work out, a group may have nearly twice as many nodes; a parity takes 64."""


TEAM = "peers"
"""The blob that remembers a job's team across a restart of the agent; no other node reads or writes it."""


class SharedNames(msgspec.Struct, frozen=True):
    """Which of the small things beside a job's shards nodes may ask of each other and give each other: no others."""

    common: tuple[str, ...] = ()
    """Their names begin so and say what is in them: they are the same everywhere, and stay as they are."""
    own: tuple[str, ...] = ()
    """Their names begin so and end with a node's: that node alone changes them."""

    def is_common(self, name: str) -> bool:
        return name.startswith(self.common)

    def readable(self, name: str) -> str:
        """``name``, or :class:`RequestError`."""
        if not blob_name(name).startswith((*self.common, *self.own)):
            raise RequestError(f"blob {name} is this node's own: nodes share {self._shown}")
        return name

    def writable(self, name: str, by: str) -> str:
        """``name`` where node ``by`` may put it, or :class:`RequestError`."""
        if not self.is_common(blob_name(name)) and name not in {first + by for first in self.own}:
            raise RequestError(f"blob {name} is not for node {by} to change: nodes share {self._shown}")
        return name

    @property
    def _shown(self) -> str:
        return ", ".join(f"{first}*" for first in (*self.common, *self.own)) or "none"


class TeamSettings(msgspec.Struct, frozen=True):
    """What a job asks of its nodes."""

    copies: int = 2
    """Copies in memory in all, the writer's own included."""
    levels: tuple[str, ...] = ("zone", "rack")
    """Labels that say what fails together, the outermost first."""
    streams: int = 2
    """Connections one copy is sent over."""
    bandwidth: int = 0
    """Bytes per second this node sends for the job's copies, or reads for the parities it makes; 0: no limit."""
    mode: Literal["mirror", "parity"] = "mirror"
    """Copies of everything, or parities of groups of nodes: less memory, one lost node per group."""
    group: int = 4
    """With parity: a group has one node more than this, and a parity takes 1/``group`` of a shard."""
    split_from: int = SPLIT_FROM
    """From so many nodes on they look at each other by districts, and do not all ask all others."""

    settles: bool = True
    """Whether versions make older ones superfluous; not where their owner gives them up by name."""

    @property
    def guarded(self) -> bool:
        """Whether other nodes' memory is to hold something before an older version may go."""
        return self.mode == "parity" or self.copies > 1


class TeamPlan(msgspec.Struct, frozen=True):
    """How a job uses the memory of several nodes; kept beside its shards, so that a restarted agent goes on."""

    secret: bytes
    settings: TeamSettings = TeamSettings()
    discovery: str = ""
    """Where the list of nodes comes from, as in ``static:n1=10.0.0.1:7070``; empty: ``roster`` is the list."""
    roster: Roster | None = None

    def __post_init__(self) -> None:
        if not self.discovery and self.roster is None:
            raise RequestError("a job's nodes have to come from somewhere: give a list of them or a discovery")
        if not 1 <= self.settings.copies <= 3:
            raise RequestError(f"copies={self.settings.copies}: between 1 and 3 copies are kept, the writer's included")
        if not 1 <= self.settings.group <= MOST_IN_GROUP:
            raise RequestError(f"group={self.settings.group}: a parity protects 1 to {MOST_IN_GROUP} nodes' shards")

    def like(self, other: TeamPlan) -> bool:
        """Whether only who belongs to the job differs."""
        return (self.secret, self.settings) == (other.secret, other.settings)
