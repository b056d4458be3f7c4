"""What trainers and their agent say to each other beyond the store's own operations."""

from __future__ import annotations

import msgspec

from peerstore.peers.plan import TeamPlan
from peerstore.records import Group, ShardKey
from tieredckpt.node import Need
from tieredckpt.settings import DurableSettings

LAYOUT, TABLE, DURABLE, QUARANTINE = "layout-zst.", "table-zst.", "durable", "quarantine."
PLAIN_LAYOUT, PLAIN_TABLE = "layout.", "table."
"""As they were kept before they were compressed."""
DAMAGED = "damaged."
"""Prefixes of the blobs this package keeps beside a job's shards."""

MAX_WAIT_S = 120.0
"""The longest the agent keeps one request waiting; a client that wants longer asks again."""
MAX_CUT_S = 3600.0
"""The longest it stays away from other nodes because somebody wants to see what happens then."""


class Configure(msgspec.Struct, frozen=True):
    job: str
    durable: DurableSettings


class AskSurvey(msgspec.Struct, frozen=True):
    job: str
    fresh: bool = False
    patience_s: float = 0.0


class AskNames(msgspec.Struct, frozen=True):
    """A page of what a step has. The first one (``digest`` is empty) looks anew at where its shards are."""

    job: str
    group: Group
    digest: str = ""
    start: int = 0


class AskPieces(msgspec.Struct, frozen=True):
    job: str
    group: Group
    rank: int
    needs: tuple[Need, ...]
    objects: tuple[str, ...]


class AskParts(msgspec.Struct, frozen=True):
    job: str
    group: Group
    parts: tuple[int, ...]
    item_sizes: bool = False


class AskSummary(msgspec.Struct, frozen=True):
    job: str
    group: Group


class AskLayouts(msgspec.Struct, frozen=True):
    job: str
    group: Group
    layouts: tuple[str, ...]
    tables: tuple[str, ...]


class Quarantine(msgspec.Struct, frozen=True):
    job: str
    group: Group
    reason: str


class Lift(msgspec.Struct, frozen=True):
    job: str
    group: Group


class DropSteps(msgspec.Struct, frozen=True):
    job: str
    groups: tuple[Group, ...]


class Loading(msgspec.Struct, frozen=True):
    job: str
    group: Group
    rank: int


class Restored(msgspec.Struct, frozen=True):
    job: str
    group: Group
    rank: int = 0
    """Said for agents of the last release, which count by it."""
    goes_on: bool = True
    """The job goes on from it; trainers of the last release say that as soon as they have loaded."""


class LoadOver(msgspec.Struct, frozen=True):
    job: str
    stepped: bool


class OfJob(msgspec.Struct, frozen=True):
    job: str


class WaitDurable(msgspec.Struct, frozen=True):
    job: str
    group: Group | None
    timeout_s: float


class Join(msgspec.Struct, frozen=True):
    job: str
    plan: TeamPlan


class CutOff(msgspec.Struct, frozen=True):
    seconds: float


class Nothing(msgspec.Struct, frozen=True):
    pass


class AskDurability(msgspec.Struct, frozen=True):
    key: ShardKey
    copies: int
    domains: int
    timeout_s: float


class Observe(msgspec.Struct, frozen=True):
    job: str
    values: dict[str, float]
