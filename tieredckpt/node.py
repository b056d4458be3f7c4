"""What a trainer asks of its node: the store, and everything that needs to know what a checkpoint is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

from peerstore.operations import Store
from peerstore.records import Group
from tieredckpt.manifest import Manifest
from tieredckpt.resolve import Candidate, Tier
from tieredckpt.settings import DurableSettings


class StepView(msgspec.Struct, frozen=True):
    """One attempt at one step, as this node can see it."""

    group: Group
    parts: int
    found: dict[int, tuple[Tier, ...]]
    base: int | None = None
    covered: bool = False
    durable: bool = False
    """Its manifest is in the durable tier."""
    quarantined: str = ""
    """Why it must not be loaded."""
    size_bytes: int = 0
    saved_ns: int = 0
    restores: int = 0
    """How often this node's ranks began from it without a newer step since."""
    damaged: dict[int, str] = {}
    """Parts that were found damaged in this node's memory and dropped, and how; kept until a newer step is whole."""

    @property
    def candidate(self) -> Candidate:
        return Candidate(
            self.group, self.parts, self.found, self.base, covered=self.covered or self.durable, damaged=self.damaged
        )


class Survey(msgspec.Struct, frozen=True):
    """Every attempt at every step this node can see, and the tiers it could not ask."""

    views: tuple[StepView, ...]
    unreachable: dict[Tier, str] = {}
    plain: tuple[int, ...] = ()
    """Steps that were written as plain DCP checkpoints to the durable tier while this package was switched off."""
    durable: DurableSettings | None = None
    """Where this job becomes durable, when the agent knows."""


class Described(msgspec.Struct, frozen=True):
    """One step in full: its shards' indexes and layouts, and where each shard is."""

    manifest: Manifest
    found: dict[int, tuple[Tier, ...]]


DrainState = Literal["waiting", "running", "done", "skipped", "failed"]


class DrainView(msgspec.Struct, frozen=True):
    """How far a step is on its way to the durable tier."""

    group: Group
    state: DrainState
    bytes_done: int = 0
    bytes_total: int = 0
    error: str = ""


class Node(Protocol):
    """A node agent, or the same thing inside this process.

    Promises (``tests/contract/test_node.py``):

    - ``survey`` never turns a tier it could not ask into an empty one.
    - ``describe`` gives what it can vouch for: every index in it was checksummed or came from a whole manifest.
    - ``wait_durable`` returns the state after at most ``timeout_s``.
    """

    @property
    def store(self) -> Store: ...
    def configure(self, job: str, durable: DurableSettings) -> None:
        """Where and how this job's steps become durable; remembered by the agent across restarts."""

    def survey(self, job: str, *, fresh: bool = False) -> Survey: ...
    def describe(self, job: str, group: Group) -> Described: ...
    def quarantine(self, job: str, group: Group, reason: str) -> None: ...
    def restored(self, job: str, group: Group, rank: int) -> None:
        """A rank begins from this step; counted until a newer step is sealed."""

    def drains(self, job: str) -> tuple[DrainView, ...]: ...
    def wait_durable(self, job: str, group: Group | None, timeout_s: float) -> DrainView | None:
        """Wait for one step, or (``None``) for all that were begun; the last state seen."""

    def observe(self, job: str, values: Mapping[str, float]) -> None:
        """Add to the agent's metrics what only the trainer can measure."""

    def close(self) -> None: ...
