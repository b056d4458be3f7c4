"""What one node keeps of each other node of its job."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from peerstore.cluster.gossip import Rumour, Standing
from peerstore.cluster.nodes import Node, NodeId
from peerstore.errors import RequestError

_NAMED = 8


@dataclass(frozen=True)
class MembershipSettings:
    """How fast a dead node is noticed, and how much is sent for it."""

    heartbeat_s: float = 1.0
    """How often :meth:`Membership.tick` is called."""
    ping_timeout_s: float = 1.0
    suspect_after: int = 3
    """Pings in a row without an answer until a node is suspected."""
    dead_after_s: float = 5.0
    """How long a suspected node has to refute it in a job of up to 32 nodes. Larger ones get more, as news takes
    longer: twice that for 1,024 nodes."""
    neighbours: int = 3
    """How many living nodes each node watches, and is watched by."""
    gossip_max: int = 48
    """How many nodes one message tells about."""

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "ping_timeout_s", "dead_after_s"):
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and seconds > 0):
                raise RequestError(f"{name}={seconds}: write a number of seconds above 0")
        for name, least in (("suspect_after", 1), ("neighbours", 1), ("gossip_max", 4)):
            if getattr(self, name) < least:
                raise RequestError(f"{name}={getattr(self, name)}: write a number from {least} on")


@dataclass(slots=True)
class Member:
    listed: Node
    """As the roster has it."""
    patience: int
    rumour: Rumour | None = None
    since: float = 0.0
    heard_at: float = -math.inf
    """When it spoke to this node itself."""
    misses: int = 0
    accused: bool = False
    """Suspected by this node, which has had no answer from it since."""

    @property
    def standing(self) -> Standing:
        return self.rumour.standing if self.rumour else Standing.DEAD

    @property
    def node(self) -> Node:
        """As it describes itself, and where it says nothing as the roster does."""
        if self.rumour is None:
            return self.listed
        said, listed = self.rumour.node, self.listed
        return Node(
            said.id,
            said.address or listed.address,
            said.labels or listed.labels,
            said.memory_bytes or listed.memory_bytes,
        )


def ring_from(me: NodeId, others: Iterable[NodeId]) -> tuple[NodeId, ...]:
    """The others in the order of a ring on which everybody agrees, from ``me`` on."""

    def place(name: NodeId) -> tuple[bytes, str]:
        return hashlib.blake2b(name.encode(), digest_size=8).digest(), name

    mine = place(me)
    return tuple(sorted(others, key=lambda name: (place(name) < mine, place(name))))


def describe(me: NodeId | None, others: Mapping[NodeId, Member], now: float, objection: str) -> str:
    """Whom a node sees and whom not, for people. ``me`` is ``None`` when it does not belong to the job itself."""
    seen, missing = ([me] if me is not None else []), []
    for name, member in sorted(others.items()):
        if member.standing is Standing.ALIVE:
            seen.append(name)
        elif member.rumour is None:
            missing.append(f"{name} (never seen)")
        else:
            what = "suspected" if member.standing is Standing.SUSPECT else "dead"
            missing.append(f"{name} ({what} for {max(0.0, now - member.since):.0f} s)")
    total = len(others) + (me is not None)
    text = f"sees {len(seen)} of {total} nodes: {_listed(sorted(seen)) or 'none'}"
    if missing:
        text += f"; not {_listed(missing)}"
    return f"{text}; {objection}" if objection else text


def _listed(names: Iterable[str]) -> str:
    all_names = list(names)
    more = len(all_names) - _NAMED
    return ", ".join(all_names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
