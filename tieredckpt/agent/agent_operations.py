from __future__ import annotations

import dataclasses

from peerstore.daemon_process import ProcessIdentity
from peerstore.errors import RequestError
from peerstore.rpc import Operation
from tieredckpt.agent import agent_methods as methods
from tieredckpt.agent.agent_api import DrainStatus, ProtectionStatus, ShardReplication
from tieredckpt.agent.agent_methods import (
    MAX_AGENT_WAIT_S,
    MAX_ISOLATION_S,
    AddMetricsRequest,
    ConfigureRequest,
    ListStepsRequest,
    ShardReplicationRequest,
    WaitDurableRequest,
)
from tieredckpt.agent.agent_service import NodeAgentService
from tieredckpt.errors import UsageError
from tieredckpt.settings import Settings, override_settings
from tieredckpt.step_inventory import StepInventory


def agent_operations(node: NodeAgentService) -> dict[str, Operation]:
    """Return the operations that the node agent serves on its socket besides those of the store."""

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

    return dict(
        (
            methods.CONFIGURE.serve(configure),
            methods.CHECK_DURABLE.serve(lambda a, _: node.check_durable(a.job)),
            methods.LIST_STEPS.serve(list_steps),
            methods.STEP_SUMMARY.serve(lambda a, _: node.steps.summary(a.job, a.version_id)),
            methods.STEP_NAMES.serve(lambda a, _: node.steps.names_page(a.job, a.version_id, a.digest, a.start)),
            methods.STEP_PIECES.serve(lambda a, _: node.steps.pieces(a.job, a.version_id, a.rank, a.needs, a.objects)),
            methods.STEP_PARTS.serve(
                lambda a, _: node.steps.parts(a.job, a.version_id, a.parts, item_sizes=a.item_sizes)
            ),
            methods.STEP_LAYOUTS.serve(lambda a, _: node.steps.layouts(a.job, a.version_id, a.layouts, a.tables)),
            methods.QUARANTINE.serve(lambda a, _: node.quarantine(a.job, a.version_id, a.reason)),
            methods.UNQUARANTINE.serve(lambda a, _: node.unquarantine(a.job, a.version_id)),
            methods.DROP_STEPS.serve(
                lambda a, _: node.drop_steps(a.job, a.versions, durable=a.durable, superseded=a.superseded)
            ),
            methods.LOAD_STARTED.serve(
                lambda a, client: node.report_load_started(a.job, a.version_id, a.rank, owner=client)
            ),
            methods.STEP_RESTORED.serve(
                lambda a, client: node.report_restored(a.job, a.version_id, goes_on=a.goes_on, owner=client)
            ),
            methods.LOAD_ENDED.serve(lambda a, client: node.report_load_ended(a.job, stepped=a.stepped, owner=client)),
            methods.JOIN.serve(lambda a, _: node.join_peers(a.job, a.plan)),
            methods.ISOLATE.serve(lambda a, _: node.isolate(min(max(a.seconds, 0.0), MAX_ISOLATION_S))),
            methods.ACCEPT_STANDBY.serve(lambda a, _: node.accept_standby(a.secret)),
            methods.THIS_NODE.serve(lambda *_: node.this_node()),
            methods.KNOWN_PEERS.serve(lambda a, _: node.known_peers(a.job)),
            methods.PEER_CREDENTIALS.serve(lambda a, _: node.peer_credentials(a.job)),
            methods.REPLICATION_STATUS.serve(replication_status),
            methods.CLUSTER.serve(lambda a, _: node.cluster_status(a.job)),
            methods.DRAIN_STATUS.serve(lambda a, _: node.drain_status(a.job)),
            methods.WAIT_DURABLE.serve(wait_durable),
            methods.OBSERVE.serve(add_metrics),
        )
    )
