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
    StepInventory,
    StepSummary,
    TensorSliceNeed,
)
from tieredckpt.settings import DurableSettings

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


CONFIGURE: Method[ConfigureRequest, None] = Method("configure", ConfigureRequest, type(None))
CHECK_DURABLE: Method[AgentJobRequest, None] = Method("check_durable", AgentJobRequest, type(None))
LIST_STEPS: Method[ListStepsRequest, StepInventory] = Method("list_steps", ListStepsRequest, StepInventory)
STEP_SUMMARY: Method[StepSummaryRequest, StepSummary] = Method("step_summary", StepSummaryRequest, StepSummary)
STEP_NAMES: Method[StepNamesRequest, BlobPage] = Method("step_names", StepNamesRequest, BlobPage)
STEP_PIECES: Method[StepPiecesRequest, PieceLocations] = Method("step_pieces", StepPiecesRequest, PieceLocations)
STEP_PARTS: Method[StepPartsRequest, ShardLocations] = Method("step_parts", StepPartsRequest, ShardLocations)
STEP_LAYOUTS: Method[StepLayoutsRequest, LayoutsPage] = Method("step_layouts", StepLayoutsRequest, LayoutsPage)
QUARANTINE: Method[QuarantineRequest, None] = Method("quarantine", QuarantineRequest, type(None))
UNQUARANTINE: Method[UnquarantineRequest, None] = Method("unquarantine", UnquarantineRequest, type(None))
DROP_STEPS: Method[DropStepsRequest, None] = Method("drop_steps", DropStepsRequest, type(None))
LOAD_STARTED: Method[LoadStartedRequest, None] = Method("load_started", LoadStartedRequest, type(None))
STEP_RESTORED: Method[StepRestoredRequest, None] = Method("step_restored", StepRestoredRequest, type(None))
LOAD_ENDED: Method[LoadEndedRequest, None] = Method("load_ended", LoadEndedRequest, type(None))
JOIN: Method[JoinPeersRequest, None] = Method("join", JoinPeersRequest, type(None))
ISOLATE: Method[IsolateRequest, None] = Method("isolate", IsolateRequest, type(None))
ACCEPT_STANDBY: Method[AcceptStandbyRequest, PeerNode | None] = Method(
    "accept_standby", AcceptStandbyRequest, PeerNode | None
)
THIS_NODE: Method[EmptyRequest, PeerNode | None] = Method("this_node", EmptyRequest, PeerNode | None)
KNOWN_PEERS: Method[AgentJobRequest, KnownPeers | None] = Method("known_peers", AgentJobRequest, KnownPeers | None)
PEER_CREDENTIALS: Method[AgentJobRequest, ReaderCredentials | None] = Method(
    "peer_credentials", AgentJobRequest, ReaderCredentials | None
)
REPLICATION_STATUS: Method[ShardReplicationRequest, ShardReplication] = Method(
    "replication_status", ShardReplicationRequest, ShardReplication
)
CLUSTER: Method[AgentJobRequest, ClusterStatus] = Method("cluster", AgentJobRequest, ClusterStatus)
DRAIN_STATUS: Method[AgentJobRequest, tuple[DrainStatus, ...]] = Method(
    "drain_status", AgentJobRequest, tuple[DrainStatus, ...]
)
WAIT_DURABLE: Method[WaitDurableRequest, DrainStatus | None] = Method(
    "wait_durable", WaitDurableRequest, DrainStatus | None
)
OBSERVE: Method[AddMetricsRequest, ProtectionStatus] = Method("observe", AddMetricsRequest, ProtectionStatus)

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
