from __future__ import annotations

import dataclasses

from peerstore.daemon_process import ProcessIdentity
from peerstore.errors import RequestError
from peerstore.membership.topology import PeerNode
from peerstore.rpc import Operation
from tieredckpt.agent.agent_api import (
    MAX_AGENT_WAIT_S,
    MAX_ISOLATION_S,
    AcceptStandbyRequest,
    AddMetricsRequest,
    AgentJobRequest,
    BlobPage,
    ClusterStatus,
    ConfigureRequest,
    DrainStatus,
    DropStepsRequest,
    EmptyRequest,
    IsolateRequest,
    JoinPeersRequest,
    KnownPeers,
    LayoutsPage,
    ListStepsRequest,
    LoadEndedRequest,
    LoadStartedRequest,
    PieceLocations,
    ProtectionStatus,
    QuarantineRequest,
    ReaderCredentials,
    ShardLocations,
    ShardReplication,
    ShardReplicationRequest,
    StepInventory,
    StepLayoutsRequest,
    StepNamesRequest,
    StepPartsRequest,
    StepPiecesRequest,
    StepRestoredRequest,
    StepSummary,
    StepSummaryRequest,
    UnquarantineRequest,
    WaitDurableRequest,
)
from tieredckpt.agent.agent_service import NodeAgentService
from tieredckpt.errors import UsageError
from tieredckpt.settings import Settings, override_settings


def agent_operations(node: NodeAgentService) -> dict[str, Operation]:
    """Return the operations that the node agent serves on its socket besides those of the store."""
    none = type(None)

    def configure(args: ConfigureRequest, client: ProcessIdentity | None) -> None:
        if args.durable.url.startswith("memory:"):
            raise UsageError("a memory:// durable tier would end with the agent: it is for tests in one process")
        override_settings(Settings(), durable=dataclasses.asdict(args.durable))  # raises for an invalid size or number
        node.configure(args.job, args.durable, check=args.check, owner=client)

    def list_steps(args: ListStepsRequest, _: object) -> StepInventory:
        patience_s = min(max(args.patience_s, 0.0), MAX_AGENT_WAIT_S)
        return node.list_steps(args.job, fresh=args.fresh, patience_s=patience_s)

    def wait_durable(args: WaitDurableRequest, _: object) -> DrainStatus | None:
        timeout_s = min(max(args.timeout_s, 0.0), MAX_AGENT_WAIT_S)
        return node.wait_durable(args.job, args.version_id, timeout_s, before=args.before)

    def replication_status(args: ShardReplicationRequest, _: object) -> ShardReplication:
        timeout_s = min(max(args.timeout_s, 0.0), MAX_AGENT_WAIT_S)
        return node.replication_status(args.key, copies=args.copies, domains=args.domains, timeout_s=timeout_s)

    def add_metrics(args: AddMetricsRequest, _: object) -> ProtectionStatus:
        if len(args.values) > 100:
            raise RequestError("too many metrics at once")
        return node.add_metrics(args.job, args.values)

    return {
        "configure": Operation(ConfigureRequest, none, configure),
        "check_durable": Operation(AgentJobRequest, none, lambda a, _: node.check_durable(a.job)),
        "list_steps": Operation(ListStepsRequest, StepInventory, list_steps),
        "step_summary": Operation(
            StepSummaryRequest, StepSummary, lambda a, _: node.steps.summary(a.job, a.version_id)
        ),
        "step_names": Operation(
            StepNamesRequest, BlobPage, lambda a, _: node.steps.names_page(a.job, a.version_id, a.digest, a.start)
        ),
        "step_pieces": Operation(
            StepPiecesRequest,
            PieceLocations,
            lambda a, _: node.steps.pieces(a.job, a.version_id, a.rank, a.needs, a.objects),
        ),
        "step_parts": Operation(
            StepPartsRequest,
            ShardLocations,
            lambda a, _: node.steps.parts(a.job, a.version_id, a.parts, item_sizes=a.item_sizes),
        ),
        "step_layouts": Operation(
            StepLayoutsRequest, LayoutsPage, lambda a, _: node.steps.layouts(a.job, a.version_id, a.layouts, a.tables)
        ),
        "quarantine": Operation(QuarantineRequest, none, lambda a, _: node.quarantine(a.job, a.version_id, a.reason)),
        "unquarantine": Operation(UnquarantineRequest, none, lambda a, _: node.unquarantine(a.job, a.version_id)),
        "drop_steps": Operation(
            DropStepsRequest,
            none,
            lambda a, _: node.drop_steps(a.job, a.versions, durable=a.durable, superseded=a.superseded),
        ),
        "load_started": Operation(
            LoadStartedRequest,
            none,
            lambda a, client: node.report_load_started(a.job, a.version_id, a.rank, owner=client),
        ),
        "step_restored": Operation(
            StepRestoredRequest,
            none,
            lambda a, client: node.report_restored(a.job, a.version_id, goes_on=a.goes_on, owner=client),
        ),
        "load_ended": Operation(
            LoadEndedRequest, none, lambda a, client: node.report_load_ended(a.job, stepped=a.stepped, owner=client)
        ),
        "join": Operation(JoinPeersRequest, none, lambda a, _: node.join_peers(a.job, a.plan)),
        "isolate": Operation(
            IsolateRequest, none, lambda a, _: node.isolate(min(max(a.seconds, 0.0), MAX_ISOLATION_S))
        ),
        "accept_standby": Operation(AcceptStandbyRequest, PeerNode | None, lambda a, _: node.accept_standby(a.secret)),
        "this_node": Operation(EmptyRequest, PeerNode | None, lambda *_: node.this_node()),
        "known_peers": Operation(AgentJobRequest, KnownPeers | None, lambda a, _: node.known_peers(a.job)),
        "peer_credentials": Operation(
            AgentJobRequest, ReaderCredentials | None, lambda a, _: node.peer_credentials(a.job)
        ),
        "replication_status": Operation(ShardReplicationRequest, ShardReplication, replication_status),
        "cluster": Operation(AgentJobRequest, ClusterStatus, lambda a, _: node.cluster_status(a.job)),
        "drain_status": Operation(AgentJobRequest, tuple[DrainStatus, ...], lambda a, _: node.drain_status(a.job)),
        "wait_durable": Operation(WaitDurableRequest, DrainStatus | None, wait_durable),
        "observe": Operation(AddMetricsRequest, ProtectionStatus, add_metrics),
    }
