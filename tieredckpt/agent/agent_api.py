"""The interface of a node's agent to its trainers: the protocol, its requests and replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from peerstore.membership.topology import PeerNode
from peerstore.server.store_api import Store
from peerstore.settings import JobPeersConfig
from peerstore.shard_records import ExpiredJob, ShardInfo, ShardKey, UnrecognizedSlot, VersionId
from tieredckpt.errors import CheckpointNotFoundError
from tieredckpt.format.manifest import Manifest, ShardIndex, build_manifest, checked_layout, unpack_blob
from tieredckpt.resolve_step import Candidate, Tier
from tieredckpt.settings import DurableSettings


class StepStatus(msgspec.Struct, frozen=True):
    """One attempt at one step, as this node can see it."""

    version_id: VersionId
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
    kept: bool = False
    """Somebody wants it kept."""
    crashed_loads: int = 0
    """How many loads of it have ended their process on this node lately."""
    damaged: dict[int, str] = {}
    """Parts that were found damaged in this node's memory and dropped, and how; kept until a newer step is whole."""

    @property
    def candidate(self) -> Candidate:
        return Candidate(
            self.version_id,
            self.parts,
            self.found,
            self.base,
            covered=self.covered or self.durable,
            damaged=self.damaged,
            saved_ns=self.saved_ns,
        )


class StepInventory(msgspec.Struct, frozen=True):
    """Every attempt at every step this node can see, and the tiers it could not ask."""

    views: tuple[StepStatus, ...]
    unreachable: dict[Tier, str] = {}
    plain: tuple[int, ...] = ()
    """Steps that were written as plain DCP checkpoints to the durable tier while this package was switched off."""
    durable: DurableSettings | None = None
    """Where this job becomes durable, when the agent knows."""
    once_whole: VersionId | None = None
    """The newest version that a node which answers knows to have been whole, whether it still is or not."""
    forgotten: ExpiredJob | None = None
    """When and why this node gave back what it had of the job, where nobody had said so and nothing is whole since."""
    torn: tuple[VersionId, ...] = ()
    """Versions of which a rank left its part out, so that what the others had of it was given up."""
    unrecognized: tuple[UnrecognizedSlot, ...] = ()
    """Slots of the job in this node's memory that this release cannot read."""

    @property
    def newest_complete(self) -> VersionId | None:
        """The newest complete version that is not quarantined."""
        complete = (view.version_id for view in self.views if view.candidate.is_complete and not view.quarantined)
        return max(complete, default=None)


class PeerSource(msgspec.Struct, frozen=True):
    """Another node that holds a shard."""

    node: str
    address: str


class StepDescription(msgspec.Struct, frozen=True):
    """One step in full: its shards' indexes and layouts, and where each shard is."""

    manifest: Manifest
    found: dict[int, tuple[Tier, ...]]
    sources: dict[int, tuple[PeerSource, ...]] = {}
    """The nodes whose memory has a part, other than this one."""


class StateNames(msgspec.Struct, frozen=True):
    """What a step has, by name: a type and a shape for each tensor, and which objects there are."""

    names: list[str]
    dtypes: list[str]
    dtype_of: bytes
    """For each tensor the number of its type, two bytes in this machine's order."""
    shapes: list[tuple[int, ...]]
    requires_grad: bytes
    objects: list[str]
    paths: dict[str, tuple[str | int, ...]] | None
    """Where every name was in the nested state dict, as the planner had it; without those that are the name split at
    its dots."""
    split: bool
    """False: nothing was flattened, and there are no paths."""
    in_pieces: bytes
    """For each tensor whether several ranks have written parts of it."""


class StepSummary(msgspec.Struct, frozen=True):
    """A step without what describes its shards."""

    parts: tuple[int, ...]
    created_ns: int
    writer: str
    layouts: tuple[str, ...]
    tables: tuple[str, ...]
    """Digests, both of them."""


class BlobPage(msgspec.Struct, frozen=True):
    """Some bytes of something that may have more than fit into a message."""

    digest: str
    """Of all of it: what is said later may be about something else."""
    size_bytes: int
    data: bytes


TensorSliceNeed = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A piece of a tensor that somebody wants: its name, offsets and sizes."""


class PieceLocation(msgspec.Struct, frozen=True, array_like=True):
    """Part of a tensor in a shard."""

    need: int
    """Which one it is for, by its place in the question."""
    part: int
    item: int
    """For a tensor kept as an archive: the number of the item it is in; else -1."""
    dtype: str
    itemsize: int
    start: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Of what the shard has of the tensor."""
    sizes: tuple[int, ...]
    box: tuple[tuple[int, ...], tuple[int, ...]] | None
    """What of that is wanted; all of it where nothing is said."""


class ItemLocation(msgspec.Struct, frozen=True, array_like=True):
    """A byte string in a shard: bytes ``[start, stop)``, counted from the end of its header."""

    part: int
    number: int
    start: int
    stop: int


class PieceLocations(msgspec.Struct, frozen=True):
    """Where the first ``answered`` of the pieces are that were asked for."""

    answered: int
    pieces: list[PieceLocation]
    items: list[ItemLocation]
    """Those that pieces are in, and one for each object that was asked for, at the end."""


class ShardLocation(msgspec.Struct, frozen=True):
    """One shard, and where it is."""

    index: ShardIndex
    """Without the sizes of its items."""
    header_bytes: int
    found: tuple[Tier, ...]
    sources: tuple[PeerSource, ...]
    """The nodes whose memory has it, other than this one."""


class ShardLocations(msgspec.Struct, frozen=True):
    """As many of the shards that were asked for as fit into a message, at least one unless all others are lost."""

    parts: list[ShardLocation]
    lost: list[int]
    """Nobody who had one of these answers any more."""


class LayoutsPage(msgspec.Struct, frozen=True):
    """Some of the layouts and tables that were asked for, packed, by digest: the layouts first."""

    layouts: dict[str, bytes]
    tables: dict[str, bytes]
    """Those that anybody has: one can do without."""
    more: bool
    """There is more than fitted."""


class ReaderCredentials(msgspec.Struct, frozen=True):
    """What a trainer needs to read from other nodes' agents itself."""

    node: str
    secret: bytes


class KnownPeers(msgspec.Struct, frozen=True):
    """What a node that was in an earlier world of a job knows of it."""

    secret: bytes
    nodes: tuple[PeerNode, ...]
    """Those that live, this one included, as far as it has seen them."""
    version: int
    """Of the list of nodes it goes by."""
    unreachable: tuple[str, ...] = ()
    """Nodes with ranks that do not answer, where this node has neither a rank nor the job's newest step."""


class ShardReplication(msgspec.Struct, frozen=True):
    """How well one shard of this node is kept in memory."""

    copies: int
    """Living nodes that hold it, this one included."""
    domains: int
    """Failure domains they are in."""
    level: str
    """What a failure domain is: rack, zone, or node where nobody said."""
    missing_copies: int = 0
    """Copies that are still on their way."""
    is_replicated: bool = False
    """Every part of the whole step has the copies it was to have."""
    problem: str = ""
    """Why copies are missing."""
    parity_nodes: int = 0
    """Nodes that protect it by parity, this one included; ``copies`` then is how many copies that is as good as."""


class ClusterNode(msgspec.Struct, frozen=True):
    """One of a job's nodes, and what its memory holds of the job."""

    node: PeerNode
    state: str
    """alive, suspect or dead, as the node that was asked sees it."""
    shards: tuple[ShardInfo, ...] = ()
    epoch: int = 0
    newest_replicated: VersionId | None = None
    unreachable: str = ""
    """Why it could not be asked: what it holds is not known then."""
    path_bytes_per_s: float = 0.0
    """How fast copies go there from the node that was asked; 0 when none went yet."""
    verifying: int = 0
    """Shards that a killed agent left there and that are not verified yet: it may hold more than it says."""
    standby: bool = False
    """It has no rank: it holds replicas where the others do not suffice, and has no vote."""


class ProtectionStatus(msgspec.Struct, frozen=True):
    """How much of a job the loss of a node would cost."""

    step: int
    """The newest step that other nodes have all the copies of that it was to have, or that is durable; -1 for none."""
    unprotected_since: float | None = None
    """Unix time of the first newer save that is not; ``None`` while all of them are, or are on their way."""
    missed_saves: int = 0
    """Saves of this node's ranks that were skipped or failed since then."""
    upload_problem: str = ""
    """Why the step that failed to upload last is not durable; "" once a later one is."""


class ClusterStatus(msgspec.Struct, frozen=True):
    """All nodes of a job, as one of them sees them."""

    job: str
    this_node: str
    """The node that was asked."""
    nodes: tuple[ClusterNode, ...]
    member_list_version: int = 0
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
    protected: ProtectionStatus | None = None
    """As the node that was asked knows it."""


DurableCheck = Literal["none", "open", "write"]
"""What a durable tier must allow that a process names; with "none" the agent remembers it."""
DrainState = Literal["waiting", "running", "done", "skipped", "failed"]


class DrainStatus(msgspec.Struct, frozen=True):
    """How far a step is on its way to the durable tier."""

    version_id: VersionId
    state: DrainState
    bytes_done: int = 0
    bytes_total: int = 0
    error: str = ""


class StepDescriptionPages(Protocol):
    """Who describes a step in as many answers as it takes."""

    def step_summary(self, job: str, group: VersionId) -> StepSummary: ...
    def step_parts(
        self, job: str, group: VersionId, parts: Sequence[int], *, item_sizes: bool = False
    ) -> ShardLocations: ...
    def step_layouts(
        self, job: str, group: VersionId, layouts: Sequence[str], tables: Sequence[str]
    ) -> LayoutsPage: ...


def describe_step(node: StepDescriptionPages, job: str, group: VersionId) -> StepDescription:
    """All of a step, put together."""
    summary = node.step_summary(job, group)
    places: list[ShardLocation] = []
    left = list(summary.parts)
    while left:
        said = node.step_parts(job, group, left, item_sizes=True)
        places += said.parts
        done = {place.index.key.part for place in said.parts} | {*said.lost}
        if not done:
            raise CheckpointNotFoundError(f"job {job} step {group.version}: none of parts {left[:8]} was described")
        left = [part for part in left if part not in done]
    if not places:
        raise CheckpointNotFoundError(f"job {job} has no step {group.version} here")
    layouts: dict[str, bytes] = {}
    tables: dict[str, bytes] = {}
    named = {place.index.meta.layout for place in places}
    rest, optional = [digest for digest in summary.layouts if digest in named], list(summary.tables)
    while rest or optional:
        some = node.step_layouts(job, group, rest, optional)
        if (rest or some.more) and not (some.layouts or some.tables):
            raise CheckpointNotFoundError(f"job {job} step {group.version}: layouts {rest[:8]} were not described")
        layouts |= {digest: checked_layout(digest, unpack_blob(data)) for digest, data in some.layouts.items()}
        tables |= {digest: unpack_blob(data) for digest, data in some.tables.items()}
        rest = [digest for digest in rest if digest not in some.layouts]
        if not rest and not some.more:
            break
        optional = [digest for digest in optional if digest not in some.tables]
    manifest = build_manifest(
        [place.index for place in places], layouts, tables, created_ns=summary.created_ns, writer=summary.writer
    )
    return StepDescription(
        manifest,
        {place.index.key.part: place.found for place in places},
        {place.index.key.part: place.sources for place in places if place.sources},
    )


class NodeAgentAPI(Protocol):
    """A node agent, or the same thing inside this process.

    Promises:

    - ``list_steps`` never turns a tier it could not ask into an empty one.
    - ``describe_step`` gives what it can vouch for: every index in it was checksummed or came from a whole manifest.
    - ``wait_durable`` returns the state after at most ``timeout_s``.
    """

    @property
    def store(self) -> Store: ...
    def configure(self, job: str, durable: DurableSettings, *, check: DurableCheck = "none") -> None:
        """Set where and how this job's steps become durable; the agent remembers it across restarts.

        With ``check``, a changed URL is only read, while the calling process runs and names no other one. Uploads stay
        with the remembered one. A wrong URL (:class:`UsageError`) and a directory that cannot be created raise. With
        ``"write"``, so does a store that takes no object (:class:`DurableRefusedError`) or does not answer
        (:class:`TierUnavailableError`).
        """

    def list_steps(self, job: str, *, fresh: bool = False, patience_s: float = 0.0) -> StepInventory:
        """What there is; waits up to ``patience_s`` for a newer step that other nodes are about to make whole."""

    def describe_step(self, job: str, group: VersionId) -> StepDescription:
        """All of a step: for tools. A rank asks for what it needs by the three methods that follow."""

    def step_names(self, job: str, group: VersionId) -> StateNames:
        """What the step has. Looks anew at where its shards are; the answers to the next questions go by that."""

    def step_pieces(
        self, job: str, group: VersionId, rank: int, needs: Sequence[TensorSliceNeed], objects: Sequence[str]
    ) -> PieceLocations:
        """Where some of these pieces and, once all needs are answered, these objects are, nearest first."""

    def step_parts(self, job: str, group: VersionId, parts: Sequence[int]) -> ShardLocations:
        """Some of these shards, with their checksums."""

    def quarantine(self, job: str, group: VersionId, reason: str) -> None:
        """This node does not choose the step any more: it is damaged, or somebody says so."""

    def unquarantine(self, job: str, group: VersionId) -> None:
        """This node may choose the step again: no mark of it is left here, nor what was counted of it."""

    def drop_steps(self, job: str, groups: Sequence[VersionId], *, durable: bool = True) -> None:
        """Delete these steps from the memory of all nodes, and from the durable tier unless ``durable`` is false.

        :class:`TierUnavailableError` names the nodes and the store that did not answer: they may still have the steps.
        """

    def report_load_started(self, job: str, group: VersionId, rank: int) -> None:
        """A rank begins to load this step: where that ends its process, it is counted."""

    def report_restored(self, job: str, group: VersionId, *, goes_on: bool) -> None:
        """A rank has loaded this step. ``goes_on``: it trains on from there, so that what is newer is of a past that
        the job leaves; not said of who may only have looked.
        """

    def report_load_ended(self, job: str, *, stepped: bool) -> None:
        """The process that loaded has come to its next step, or ends as it should."""

    def drain_status(self, job: str) -> tuple[DrainStatus, ...]: ...
    def wait_durable(self, job: str, group: VersionId | None, timeout_s: float) -> DrainStatus | None:
        """Wait for one step, or (``None``) for all that were begun; the last state seen."""

    # -- with the job's other nodes --

    def join_peers(self, job: str, plan: JobPeersConfig) -> None:
        """Keep copies of this job's shards on other nodes, and theirs here."""

    def this_node(self) -> PeerNode | None:
        """This node as others reach it; ``None`` when it does not listen."""

    def peer_credentials(self, job: str) -> ReaderCredentials | None: ...
    def known_peers(self, job: str) -> KnownPeers | None: ...
    def cluster_status(self, job: str) -> ClusterStatus: ...
    def replication_status(
        self, key: ShardKey, *, copies: int = 0, domains: int = 0, timeout_s: float = 0.0
    ) -> ShardReplication:
        """How well a shard is kept; waits up to ``timeout_s`` for so many copies in so many domains."""

    def add_metrics(self, job: str, values: Mapping[str, float]) -> ProtectionStatus | None:
        """Add to the agent's metrics what only the trainer can measure; up to which step the job is protected, as the
        agent knows it then. ``None`` where it did not answer.
        """

    def close(self) -> None: ...


LAYOUT_BLOB_PREFIX, TABLE_BLOB_PREFIX, DURABLE_SETTINGS_BLOB, QUARANTINE_BLOB_PREFIX = (
    "layout-zst.",
    "table-zst.",
    "durable",
    "quarantine.",
)
CHECKED_SETTINGS_BLOB, DAMAGED_BLOB_PREFIX = "durable-checked", "damaged."
"""Prefixes of the blobs this package keeps beside a job's shards."""

MAX_AGENT_WAIT_S = 120.0
"""The longest the agent keeps one request waiting; a client that wants longer asks again."""
MAX_ISOLATION_S = 3600.0
"""The longest it stays away from other nodes because somebody wants to see what happens then."""


class ConfigureRequest(msgspec.Struct, frozen=True):
    job: str
    durable: DurableSettings
    check: DurableCheck = "none"


class ListStepsRequest(msgspec.Struct, frozen=True):
    job: str
    fresh: bool = False
    patience_s: float = 0.0


class StepNamesRequest(msgspec.Struct, frozen=True):
    """A page of what a step has. The first one (``digest`` is empty) looks anew at where its shards are."""

    job: str
    version_id: VersionId
    digest: str = ""
    start: int = 0


class StepPiecesRequest(msgspec.Struct, frozen=True):
    job: str
    version_id: VersionId
    rank: int
    needs: tuple[TensorSliceNeed, ...]
    objects: tuple[str, ...]


class StepPartsRequest(msgspec.Struct, frozen=True):
    job: str
    version_id: VersionId
    parts: tuple[int, ...]
    item_sizes: bool = False


class StepSummaryRequest(msgspec.Struct, frozen=True):
    job: str
    version_id: VersionId


class StepLayoutsRequest(msgspec.Struct, frozen=True):
    job: str
    version_id: VersionId
    layouts: tuple[str, ...]
    tables: tuple[str, ...]


class QuarantineRequest(msgspec.Struct, frozen=True):
    job: str
    version_id: VersionId
    reason: str


class UnquarantineRequest(msgspec.Struct, frozen=True):
    job: str
    version_id: VersionId


class DropStepsRequest(msgspec.Struct, frozen=True):
    job: str
    versions: tuple[VersionId, ...]
    durable: bool = True
    """Whether the durable tier's copies are deleted too."""


class LoadStartedRequest(msgspec.Struct, frozen=True):
    job: str
    version_id: VersionId
    rank: int


class StepRestoredRequest(msgspec.Struct, frozen=True):
    job: str
    version_id: VersionId
    goes_on: bool
    """The job goes on from it."""


class LoadEndedRequest(msgspec.Struct, frozen=True):
    job: str
    stepped: bool


class AgentJobRequest(msgspec.Struct, frozen=True):
    job: str


class WaitDurableRequest(msgspec.Struct, frozen=True):
    job: str
    version_id: VersionId | None
    timeout_s: float


class JoinPeersRequest(msgspec.Struct, frozen=True):
    job: str
    plan: JobPeersConfig


class IsolateRequest(msgspec.Struct, frozen=True):
    seconds: float


class AcceptStandbyRequest(msgspec.Struct, frozen=True):
    secret: bytes
    """Secret of the jobs that this node may join as a standby node."""


class EmptyRequest(msgspec.Struct, frozen=True):
    pass


class ShardReplicationRequest(msgspec.Struct, frozen=True):
    key: ShardKey
    copies: int
    domains: int
    timeout_s: float


class AddMetricsRequest(msgspec.Struct, frozen=True):
    job: str
    values: dict[str, float]
