"""What a trainer asks of its node: the store, and everything that needs to know what a checkpoint is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

from peerstore.cluster.nodes import Node as PeerNode
from peerstore.operations import Store
from peerstore.peers.plan import TeamPlan
from peerstore.records import Group, ShardFact, ShardKey
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
    crashed_loads: int = 0
    """How many loads of it have ended their process on this node lately."""
    damaged: dict[int, str] = {}
    """Parts that were found damaged in this node's memory and dropped, and how; kept until a newer step is whole."""

    @property
    def candidate(self) -> Candidate:
        return Candidate(
            self.group,
            self.parts,
            self.found,
            self.base,
            covered=self.covered or self.durable,
            damaged=self.damaged,
            saved_ns=self.saved_ns,
        )


class Survey(msgspec.Struct, frozen=True):
    """Every attempt at every step this node can see, and the tiers it could not ask."""

    views: tuple[StepView, ...]
    unreachable: dict[Tier, str] = {}
    plain: tuple[int, ...] = ()
    """Steps that were written as plain DCP checkpoints to the durable tier while this package was switched off."""
    durable: DurableSettings | None = None
    """Where this job becomes durable, when the agent knows."""
    once_whole: Group | None = None
    """The newest version that a node which answers knows to have been whole, whether it still is or not."""


class Source(msgspec.Struct, frozen=True):
    """Another node that holds a shard."""

    node: str
    address: str


class Described(msgspec.Struct, frozen=True):
    """One step in full: its shards' indexes and layouts, and where each shard is."""

    manifest: Manifest
    found: dict[int, tuple[Tier, ...]]
    sources: dict[int, tuple[Source, ...]] = {}
    """The nodes whose memory has a part, other than this one."""


class Passport(msgspec.Struct, frozen=True):
    """What a trainer needs to read from other nodes' agents itself."""

    node: str
    secret: bytes


class Acquaintance(msgspec.Struct, frozen=True):
    """What a node that was in an earlier world of a job knows of it."""

    secret: bytes
    nodes: tuple[PeerNode, ...]
    """Those that live, this one included, as far as it has seen them."""
    version: int
    """Of the list of nodes it goes by."""
    silent: tuple[str, ...] = ()
    """Nodes that the job went on with, without this one, and that do not answer now."""


class Durability(msgspec.Struct, frozen=True):
    """How well one shard of this node is kept in memory."""

    copies: int
    """Living nodes that hold it, this one included."""
    domains: int
    """Failure domains they are in."""
    level: str
    """What a failure domain is: rack, zone, or node where nobody said."""
    lacking: int = 0
    """Copies that are still on their way."""
    settled: bool = False
    """Every part of the whole step has the copies it was to have."""
    trouble: str = ""
    """Why copies are missing."""
    group: int = 0
    """Nodes that protect it by parity, this one included; ``copies`` then is how many copies that is as good as."""


class NodeView(msgspec.Struct, frozen=True):
    """One of a job's nodes, and what its memory holds of the job."""

    node: PeerNode
    standing: str
    """alive, suspect or dead, as the node that was asked sees it."""
    facts: tuple[ShardFact, ...] = ()
    epoch: int = 0
    settled: Group | None = None
    silent: str = ""
    """Why it could not be asked: what it holds is not known then."""
    path_bytes_per_s: float = 0.0
    """How fast copies go there from the node that was asked; 0 when none went yet."""
    verifying: int = 0
    """Shards that a killed agent left there and that are not verified yet: it may hold more than it says."""


class ClusterView(msgspec.Struct, frozen=True):
    """All nodes of a job, as one of them sees them."""

    job: str
    me: str
    """The node that was asked."""
    nodes: tuple[NodeView, ...]
    roster: int = 0
    """Version of the list of nodes; 0 when the job has only this one."""
    quorum: bool = True
    sees: str = ""
    """How many of the nodes are seen, in words."""
    copies: int = 1
    """Copies of each shard that are asked for, the writer's included."""
    levels: tuple[str, ...] = ()
    """Labels that say what fails together, the outermost first."""
    partners: tuple[str, ...] = ()
    """Where copies of what the asked node writes go."""
    sending: str = ""
    """What it sends right now."""
    sent_bytes: int = 0
    """What the asked node has sent for copies since its agent started."""
    lag_s: float = 0.0
    """From the seal of the shard it copied last to that copy."""
    mode: str = "mirror"
    """mirror or parity."""


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

    def survey(self, job: str, *, fresh: bool = False, patience_s: float = 0.0) -> Survey:
        """What there is; waits up to ``patience_s`` for a newer step that other nodes are about to make whole."""

    def describe(self, job: str, group: Group) -> Described: ...
    def quarantine(self, job: str, group: Group, reason: str) -> None:
        """This node does not choose the step any more: it is damaged, or somebody says so."""

    def lift(self, job: str, group: Group) -> None:
        """This node may choose the step again: no mark of it is left here, nor what was counted of it."""

    def loading(self, job: str, group: Group, rank: int) -> None:
        """A rank begins to load this step: where that ends its process, it is counted."""

    def restored(self, job: str, group: Group) -> None:
        """A rank has loaded this step and begins from it."""

    def load_over(self, job: str, *, stepped: bool) -> None:
        """The process that loaded has come to its next step, or ends as it should."""

    def drains(self, job: str) -> tuple[DrainView, ...]: ...
    def wait_durable(self, job: str, group: Group | None, timeout_s: float) -> DrainView | None:
        """Wait for one step, or (``None``) for all that were begun; the last state seen."""

    # -- with the job's other nodes --

    def join(self, job: str, plan: TeamPlan) -> None:
        """Keep copies of this job's shards on other nodes, and theirs here."""

    def me(self) -> PeerNode | None:
        """This node as others reach it; ``None`` when it does not listen."""

    def passport(self, job: str) -> Passport | None: ...
    def acquaintance(self, job: str) -> Acquaintance | None: ...
    def cluster(self, job: str) -> ClusterView: ...
    def durability(self, key: ShardKey, *, copies: int = 0, domains: int = 0, timeout_s: float = 0.0) -> Durability:
        """How well a shard is kept; waits up to ``timeout_s`` for so many copies in so many domains."""

    def observe(self, job: str, values: Mapping[str, float]) -> None:
        """Add to the agent's metrics what only the trainer can measure."""

    def close(self) -> None: ...
