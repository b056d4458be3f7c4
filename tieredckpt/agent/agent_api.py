"""The node agent's interface to its trainers: the protocol, its requests and its replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from peerstore.client.store_api import Store
from peerstore.membership.topology import PeerNode
from peerstore.settings import JobPeersConfig
from peerstore.shard_records import ShardInfo, ShardKey, VersionId
from tieredckpt.errors import CheckpointNotFoundError
from tieredckpt.format.manifest import Manifest, ShardIndex, build_manifest, checked_layout, unpack_blob
from tieredckpt.resolve_step import Tier
from tieredckpt.settings import DurableSettings
from tieredckpt.step_inventory import StepInventory


class PeerSource(msgspec.Struct, frozen=True):
    """Another node that holds a shard."""

    node: str
    address: str


class StepDescription(msgspec.Struct, frozen=True):
    """One step in full: the indexes and layouts of its shards, and their locations."""

    manifest: Manifest
    found: dict[int, tuple[Tier, ...]]
    sources: dict[int, tuple[PeerSource, ...]] = {}
    """Other nodes that hold each part in memory."""


class StateNames(msgspec.Struct, frozen=True):
    """Names of a step's tensors and objects, with the dtype and shape of each tensor."""

    names: list[str]
    dtypes: list[str]
    dtype_of: bytes
    """Index into ``dtypes`` for each tensor, two bytes in native byte order."""
    shapes: list[tuple[int, ...]]
    requires_grad: bytes
    objects: list[str]
    paths: dict[str, tuple[str | int, ...]] | None
    """Path of each name in the nested state dict, as the planner had it.

    Paths equal to the name split at its dots are omitted.
    """
    split: bool
    """Whether the state dict was flattened. Without flattening no paths exist."""
    in_pieces: bytes
    """One byte for each tensor: whether several ranks wrote parts of it."""


class StepSummary(msgspec.Struct, frozen=True):
    """A step without the descriptions of its shards."""

    parts: tuple[int, ...]
    created_ns: int
    writer: str
    layouts: tuple[str, ...]
    tables: tuple[str, ...]
    """Digests, like ``layouts``."""


class BlobPage(msgspec.Struct, frozen=True):
    """One page of a blob that may be too large for a message."""

    digest: str
    """Digest of the whole blob. It differs between pages if the blob changed."""
    size_bytes: int
    data: bytes


TensorSliceNeed = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A requested piece of a tensor: its name, offsets and sizes."""


class PieceLocation(msgspec.Struct, frozen=True, array_like=True):
    """Location of a part of a tensor in a shard."""

    need: int
    """Index in the request of the need that it serves."""
    part: int
    item: int
    """Number of the item that holds a tensor stored as an archive; -1 for other tensors."""
    dtype: str
    itemsize: int
    start: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Offsets of the shard's slice of the tensor."""
    sizes: tuple[int, ...]
    box: tuple[tuple[int, ...], tuple[int, ...]] | None
    """Offsets and sizes of the requested part of that slice; ``None`` for all of it."""


class ItemLocation(msgspec.Struct, frozen=True, array_like=True):
    """A byte string in a shard: bytes ``[start, stop)``, counted from the end of the shard's header."""

    part: int
    number: int
    start: int
    stop: int


class PieceLocations(msgspec.Struct, frozen=True):
    """Locations of the first ``answered`` requested pieces."""

    answered: int
    pieces: list[PieceLocation]
    items: list[ItemLocation]
    """Items that hold ``pieces``, followed by one item for each requested object."""


class ShardLocation(msgspec.Struct, frozen=True):
    """One shard and its locations."""

    index: ShardIndex
    """Index of the shard, without item sizes unless the request includes them."""
    header_bytes: int
    found: tuple[Tier, ...]
    sources: tuple[PeerSource, ...]
    """Other nodes that hold it in memory."""


class ShardLocations(msgspec.Struct, frozen=True):
    """The requested shards that fit into a message: at least one, unless all are lost."""

    parts: list[ShardLocation]
    lost: list[int]
    """Parts that no responding node or store can describe."""


class LayoutsPage(msgspec.Struct, frozen=True):
    """One page of packed layouts and tables by digest, layouts first."""

    layouts: dict[str, bytes]
    tables: dict[str, bytes]
    """Tables that were found. Tables are optional."""
    more: bool
    """Whether some did not fit into this page."""


class ReaderCredentials(msgspec.Struct, frozen=True):
    """Credentials with which a trainer reads directly from other nodes' agents."""

    node: str
    secret: bytes


class KnownPeers(msgspec.Struct, frozen=True):
    """View of a job's nodes from a node that was in an earlier world."""

    secret: bytes
    nodes: tuple[PeerNode, ...]
    """Live nodes that this node sees, including itself."""
    version: int
    """Version of this node's member list; 0 without a list."""
    unreachable: tuple[str, ...] = ()
    """Nodes with ranks that do not answer.

    Empty if this node has a rank or the job's newest replicated step.
    """


class ShardReplication(msgspec.Struct, frozen=True):
    """Redundancy of one of this node's shards in memory."""

    copies: int
    """Live nodes that hold it, including this node."""
    domains: int
    """Number of failure domains of these nodes."""
    level: str
    """Label of a failure domain, for example rack or zone; node without labels."""
    missing_copies: int = 0
    """Number of replicas still to be made."""
    is_replicated: bool = False
    """Whether its step is replicated."""
    problem: str = ""
    """Reason for missing replicas; "" if none are missing."""
    parity_nodes: int = 0
    """Nodes that protect it by parity, including this node.

    With parity, ``copies`` is the equivalent number of copies.
    """


class ClusterNode(msgspec.Struct, frozen=True):
    """One node of a job, and the job's shards in its memory."""

    node: PeerNode
    state: str
    """alive, suspect or dead, as the reporting node sees it."""
    shards: tuple[ShardInfo, ...] = ()
    epoch: int = 0
    newest_replicated: VersionId | None = None
    unreachable: str = ""
    """Why it did not answer, so that its shards are unknown; "" if it answered."""
    path_bytes_per_s: float = 0.0
    """Bytes per second of replicas from the reporting node to this one; 0 before the first replica."""
    verifying: int = 0
    """Shards of a killed agent that are not verified yet. The node may hold more shards than it lists."""
    standby: bool = False
    """Whether it is a standby node: no rank and no vote, but replicas if the other nodes do not suffice."""


class ProtectionStatus(msgspec.Struct, frozen=True):
    """Extent of a job's protection against the loss of a node."""

    step: int
    """Newest step that is replicated or durable; -1 for none."""
    unprotected_since: float | None = None
    """Unix time of the first newer save without protection, or ``None``.

    It is ``None`` while such saves do not exist or their replicas are in progress.
    """
    missed_saves: int = 0
    """Number of this node's saves that were skipped or failed since that step was protected."""
    upload_problem: str = ""
    """Why the last failed upload failed; "" once a later step is durable."""


class ClusterStatus(msgspec.Struct, frozen=True):
    """All nodes of a job, as one of them sees them."""

    job: str
    this_node: str
    """Name of the reporting node."""
    nodes: tuple[ClusterNode, ...]
    member_list_version: int = 0
    """Version of the member list; 0 if the job has no list."""
    quorum: bool = True
    sees: str = ""
    """Text with the number of nodes that the reporting node sees."""
    copies: int = 1
    """Configured copies of each shard, including the writer's."""
    levels: tuple[str, ...] = ()
    """Labels of the failure domains, outermost first."""
    partners: tuple[str, ...] = ()
    """Nodes that store the replicas of the reporting node."""
    sending: str = ""
    """Shard and target node of the replica that is being sent; "" if none is."""
    sent_bytes: int = 0
    """Bytes of replicas that the reporting node has sent since its agent started."""
    lag_s: float = 0.0
    """Seconds from the seal of the shard replicated last to its replica."""
    mode: str = "mirror"
    """mirror or parity."""
    protected: ProtectionStatus | None = None
    """Protection as the reporting node knows it."""


DurableCheck = Literal["none", "open", "write"]
"""Check of a configured durable tier. Without a check ("none") the agent stores the settings at once."""
DrainState = Literal["waiting", "running", "done", "skipped", "failed"]


class DrainStatus(msgspec.Struct, frozen=True):
    """Progress of one step's upload to the durable tier."""

    version_id: VersionId
    state: DrainState
    bytes_done: int = 0
    bytes_total: int = 0
    error: str = ""


class StepReader(Protocol):
    """Names, pieces and shards of single steps. Answers come in pages."""

    def describe(self, job: str, group: VersionId) -> StepDescription:
        """Return a full step, for tools. A rank requests the pieces it needs by the three methods that follow."""

    def names(self, job: str, group: VersionId) -> StateNames:
        """Return the names in a step. This locates its shards again; later requests use these locations."""

    def pieces(
        self, job: str, group: VersionId, rank: int, needs: Sequence[TensorSliceNeed], objects: Sequence[str]
    ) -> PieceLocations:
        """Return the nearest locations of the first pieces, one page of them.

        Once all ``needs`` are answered, the page includes ``objects``.
        """

    def parts(self, job: str, group: VersionId, parts: Sequence[int], *, item_sizes: bool = False) -> ShardLocations:
        """Return one page of these shards, with their checksums."""

    def summary(self, job: str, group: VersionId) -> StepSummary: ...
    def layouts(self, job: str, group: VersionId, layouts: Sequence[str], tables: Sequence[str]) -> LayoutsPage: ...


def describe_step(steps: StepReader, job: str, group: VersionId) -> StepDescription:
    """Return the full description of a step, assembled from the pages of ``steps``."""
    summary = steps.summary(job, group)
    locations: list[ShardLocation] = []
    remaining = list(summary.parts)
    while remaining:
        page = steps.parts(job, group, remaining, item_sizes=True)
        locations += page.parts
        done = {location.index.key.part for location in page.parts} | {*page.lost}
        if not done:
            raise CheckpointNotFoundError(
                f"job {job} step {group.version}: none of parts {remaining[:8]} was described"
            )
        remaining = [part for part in remaining if part not in done]
    if not locations:
        raise CheckpointNotFoundError(f"job {job} has no step {group.version} here")
    layouts: dict[str, bytes] = {}
    tables: dict[str, bytes] = {}
    named = {location.index.meta.layout for location in locations}
    missing_layouts, missing_tables = [digest for digest in summary.layouts if digest in named], list(summary.tables)
    while missing_layouts or missing_tables:
        layouts_page = steps.layouts(job, group, missing_layouts, missing_tables)
        if (missing_layouts or layouts_page.more) and not (layouts_page.layouts or layouts_page.tables):
            raise CheckpointNotFoundError(
                f"job {job} step {group.version}: layouts {missing_layouts[:8]} were not described"
            )
        layouts |= {digest: checked_layout(digest, unpack_blob(data)) for digest, data in layouts_page.layouts.items()}
        tables |= {digest: unpack_blob(data) for digest, data in layouts_page.tables.items()}
        missing_layouts = [digest for digest in missing_layouts if digest not in layouts_page.layouts]
        if not missing_layouts and not layouts_page.more:
            break
        missing_tables = [digest for digest in missing_tables if digest not in layouts_page.tables]
    manifest = build_manifest(
        [location.index for location in locations],
        layouts,
        tables,
        created_ns=summary.created_ns,
        writer=summary.writer,
    )
    return StepDescription(
        manifest,
        {location.index.key.part: location.found for location in locations},
        {location.index.key.part: location.sources for location in locations if location.sources},
    )


class NodeAgentAPI(Protocol):
    """A node agent, in its own process or in this one.

    Guarantees:

    - ``list_steps`` never reports an unreachable tier as an empty one.
    - ``steps.describe`` returns only indexes that were checksummed or come from a complete manifest.
    - ``wait_durable`` returns the state after at most ``timeout_s``.
    """

    @property
    def store(self) -> Store: ...
    @property
    def steps(self) -> StepReader: ...
    def configure(self, job: str, durable: DurableSettings, *, check: DurableCheck = "none") -> None:
        """Set the job's durable tier. The agent stores the settings and uses them again after a restart.

        With ``check``, the agent only reads from a changed URL, until the calling process exits or configures another
        one. Uploads still use the stored settings. A wrong URL raises :class:`UsageError`, a directory that cannot be
        created raises :class:`DurableRefusedError`. With ``"write"``, a store that rejects an object also raises
        :class:`DurableRefusedError`, and an unreachable store raises :class:`TierUnavailableError`.
        """

    def check_durable(self, job: str) -> None:
        """Write, read and delete one small object in the job's durable tier; raise as :meth:`configure` does."""

    def list_steps(self, job: str, *, fresh: bool = False, patience_s: float = 0.0) -> StepInventory:
        """Return all steps; wait up to ``patience_s`` for a newer step that other nodes are committing."""

    def quarantine(self, job: str, group: VersionId, reason: str) -> None:
        """Mark a damaged or unwanted step, so that this node no longer chooses it."""

    def unquarantine(self, job: str, group: VersionId) -> None:
        """Remove this node's mark and the crash count of a step, so that the node may choose it again."""

    def drop_steps(
        self, job: str, groups: Sequence[VersionId], *, durable: bool = True, superseded: bool = False
    ) -> None:
        """Delete these steps from the memory of all nodes.

        With ``durable``, also delete them from the durable tier. With ``superseded``, nodes that wrote no shard of the
        job also delete all older steps from their memory.

        :class:`TierUnavailableError` names the nodes and the store that did not answer: they may still have the steps.
        """

    def report_load_started(self, job: str, group: VersionId, rank: int) -> None:
        """Report that a rank begins to load this step. The agent counts the load if it crashes the process."""

    def report_restored(self, job: str, group: VersionId, *, goes_on: bool) -> None:
        """Report that a rank has loaded this step.

        With ``goes_on`` it continues training there, so newer steps belong to a branch that the job leaves. A process
        that may only inspect the step does not set it.
        """

    def report_load_ended(self, job: str, *, stepped: bool) -> None:
        """Report that the process reached the step after its load (``stepped``), or exits normally."""

    def drain_status(self, job: str) -> tuple[DrainStatus, ...]: ...
    def wait_durable(
        self, job: str, group: VersionId | None, timeout_s: float, *, before: int | None = None
    ) -> DrainStatus | None:
        """Wait for the upload of one step, or of all started steps for ``None``; return the last state seen.

        ``before``: only the steps before this one.
        """

    def join_peers(self, job: str, plan: JobPeersConfig) -> None:
        """Exchange replicas of this job's shards with its other nodes."""

    def this_node(self) -> PeerNode | None:
        """Return this node's name and address, or ``None`` if the agent does not listen for other nodes."""

    def peer_credentials(self, job: str) -> ReaderCredentials | None: ...
    def known_peers(self, job: str) -> KnownPeers | None: ...
    def cluster_status(self, job: str) -> ClusterStatus: ...
    def replication_status(
        self, key: ShardKey, *, copies: int = 0, domains: int = 0, timeout_s: float = 0.0
    ) -> ShardReplication:
        """Return a shard's redundancy, after at most ``timeout_s`` or once it has ``copies`` in ``domains``."""

    def add_metrics(self, job: str, values: Mapping[str, float]) -> ProtectionStatus | None:
        """Add the trainer's metrics to the agent's; return the job's protection.

        Return ``None`` if the agent does not answer.
        """

    def close(self) -> None: ...


LAYOUT_BLOB_PREFIX, TABLE_BLOB_PREFIX, DURABLE_SETTINGS_BLOB, QUARANTINE_BLOB_PREFIX = (
    "layout-zst.",
    "table-zst.",
    "durable",
    "quarantine.",
)
CHECKED_SETTINGS_BLOB, DAMAGED_BLOB_PREFIX = "durable-checked", "damaged."
"""Names and name prefixes of the blobs that this package stores with a job's shards."""
