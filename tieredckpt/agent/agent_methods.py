"""The operations that an agent serves on its socket, with their requests and results.

Client and server use this table.
"""

from __future__ import annotations

from typing import Any

import msgspec

from peerstore.membership.topology import PeerNode
from peerstore.rpc import Method
from peerstore.settings import JobPeersConfig
from peerstore.shard_records import ShardKey, VersionId
from tieredckpt.agent.agent_api import (
    BlobPage,
    ClusterStatus,
    DrainStatus,
    DurableCheck,
    KnownPeers,
    LayoutsPage,
    PieceLocations,
    ProtectionStatus,
    ReaderCredentials,
    ShardLocations,
    ShardReplication,
    StepSummary,
    TensorSliceNeed,
)
from tieredckpt.settings import DurableSettings
from tieredckpt.step_inventory import StepInventory

MAX_AGENT_WAIT_S = 120.0
"""Most seconds that the agent delays one response. A client that waits longer repeats its request."""
MAX_ISOLATION_S = 3600.0
"""Most seconds of a simulated network partition."""


class ConfigureRequest(msgspec.Struct, frozen=True):
    job: str
    durable: DurableSettings
    check: DurableCheck = "none"


class ListStepsRequest(msgspec.Struct, frozen=True):
    job: str
    fresh: bool = False
    patience_s: float = 0.0


class StepNamesRequest(msgspec.Struct, frozen=True):
    """A request for one page of a step's names.

    The first one, with an empty ``digest``, locates the shards again.
    """

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
    superseded: bool = False
    """Whether nodes that wrote no shard of the job also delete all older versions."""


class LoadStartedRequest(msgspec.Struct, frozen=True):
    job: str
    version_id: VersionId
    rank: int


class StepRestoredRequest(msgspec.Struct, frozen=True):
    job: str
    version_id: VersionId
    goes_on: bool
    """Whether the job continues training from it."""


class LoadEndedRequest(msgspec.Struct, frozen=True):
    job: str
    stepped: bool


class AgentJobRequest(msgspec.Struct, frozen=True):
    job: str


class WaitDurableRequest(msgspec.Struct, frozen=True):
    job: str
    version_id: VersionId | None
    timeout_s: float
    before: int | None = None
    """Wait only for the steps before this one."""


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


CONFIGURE: Method[ConfigureRequest, None] = Method(
    "configure", ConfigureRequest, type(None), "Store the job's durable settings, or check new ones for loads"
)
CHECK_DURABLE: Method[AgentJobRequest, None] = Method(
    "check_durable", AgentJobRequest, type(None), "Write, read and delete one small object in the job's durable tier"
)
LIST_STEPS: Method[ListStepsRequest, StepInventory] = Method(
    "list_steps", ListStepsRequest, StepInventory, "List the job's steps in all tiers, and the tiers that do not answer"
)
STEP_SUMMARY: Method[StepSummaryRequest, StepSummary] = Method(
    "step_summary",
    StepSummaryRequest,
    StepSummary,
    "Return the parts, layouts and tables of a step; locate its shards again",
)
STEP_NAMES: Method[StepNamesRequest, BlobPage] = Method(
    "step_names", StepNamesRequest, BlobPage, "Return a page of the names in a step"
)
STEP_PIECES: Method[StepPiecesRequest, PieceLocations] = Method(
    "step_pieces", StepPiecesRequest, PieceLocations, "Return the nearest locations of tensor slices and objects"
)
STEP_PARTS: Method[StepPartsRequest, ShardLocations] = Method(
    "step_parts", StepPartsRequest, ShardLocations, "Return shards with their checksums and holders"
)
STEP_LAYOUTS: Method[StepLayoutsRequest, LayoutsPage] = Method(
    "step_layouts", StepLayoutsRequest, LayoutsPage, "Return the packed layouts and tables of a step"
)
QUARANTINE: Method[QuarantineRequest, None] = Method(
    "quarantine", QuarantineRequest, type(None), "Mark a step on this node, so that no load chooses it"
)
UNQUARANTINE: Method[UnquarantineRequest, None] = Method(
    "unquarantine", UnquarantineRequest, type(None), "Remove the mark and the crash count of a step"
)
DROP_STEPS: Method[DropStepsRequest, None] = Method(
    "drop_steps", DropStepsRequest, type(None), "Delete steps from the memory of all nodes and from the durable tier"
)
LOAD_STARTED: Method[LoadStartedRequest, None] = Method(
    "load_started", LoadStartedRequest, type(None), "Report that a rank begins to load a step"
)
STEP_RESTORED: Method[StepRestoredRequest, None] = Method(
    "step_restored", StepRestoredRequest, type(None), "Report that a rank has loaded a step"
)
LOAD_ENDED: Method[LoadEndedRequest, None] = Method(
    "load_ended", LoadEndedRequest, type(None), "Report the first step after a load, or the normal end of the process"
)
JOIN: Method[JoinPeersRequest, None] = Method(
    "join", JoinPeersRequest, type(None), "Exchange replicas of the job's shards with its other nodes"
)
ISOLATE: Method[IsolateRequest, None] = Method(
    "isolate", IsolateRequest, type(None), "Cut this node off from the others for a test"
)
ACCEPT_STANDBY: Method[AcceptStandbyRequest, PeerNode | None] = Method(
    "accept_standby",
    AcceptStandbyRequest,
    PeerNode | None,
    "Accept replicas of jobs with this secret; return this node",
)
THIS_NODE: Method[EmptyRequest, PeerNode | None] = Method(
    "this_node", EmptyRequest, PeerNode | None, "Return the name and address of this node"
)
KNOWN_PEERS: Method[AgentJobRequest, KnownPeers | None] = Method(
    "known_peers", AgentJobRequest, KnownPeers | None, "Return the job's live nodes and its secret"
)
PEER_CREDENTIALS: Method[AgentJobRequest, ReaderCredentials | None] = Method(
    "peer_credentials",
    AgentJobRequest,
    ReaderCredentials | None,
    "Return the name and the secret with which a process reads from other nodes",
)
REPLICATION_STATUS: Method[ShardReplicationRequest, ShardReplication] = Method(
    "replication_status",
    ShardReplicationRequest,
    ShardReplication,
    "Return the copies of a shard, once they suffice or the time is over",
)
CLUSTER: Method[AgentJobRequest, ClusterStatus] = Method(
    "cluster", AgentJobRequest, ClusterStatus, "Return each node of the job with its shards"
)
DRAIN_STATUS: Method[AgentJobRequest, tuple[DrainStatus, ...]] = Method(
    "drain_status", AgentJobRequest, tuple[DrainStatus, ...], "Return the state of each upload to the durable tier"
)
WAIT_DURABLE: Method[WaitDurableRequest, DrainStatus | None] = Method(
    "wait_durable", WaitDurableRequest, DrainStatus | None, "Wait for the upload of one step, or of all"
)
OBSERVE: Method[AddMetricsRequest, ProtectionStatus] = Method(
    "observe", AddMetricsRequest, ProtectionStatus, "Add the trainer's metrics; return the protection of the job"
)

AGENT_METHODS: tuple[Method[Any, Any], ...] = (
    CONFIGURE,
    CHECK_DURABLE,
    LIST_STEPS,
    STEP_SUMMARY,
    STEP_NAMES,
    STEP_PIECES,
    STEP_PARTS,
    STEP_LAYOUTS,
    QUARANTINE,
    UNQUARANTINE,
    DROP_STEPS,
    LOAD_STARTED,
    STEP_RESTORED,
    LOAD_ENDED,
    JOIN,
    ISOLATE,
    ACCEPT_STANDBY,
    THIS_NODE,
    KNOWN_PEERS,
    PEER_CREDENTIALS,
    REPLICATION_STATUS,
    CLUSTER,
    DRAIN_STATUS,
    WAIT_DURABLE,
    OBSERVE,
)
"""All operations that an agent serves besides those of the store."""
