"""The desired state that the coordinator sends to each node, and the requests it refuses. Pure."""

from __future__ import annotations

from elastic.control.control_messages import (
    CoordinatorRequest,
    DrainRequest,
    InjectRequest,
    NodeDesired,
    NodeStatus,
    ResizeRequest,
    StatusRequest,
    WorldSpec,
)
from elastic.control.control_plane import NoticeKind
from elastic.control.epoch_state import EpochMessage, EpochState
from elastic.coordinator.job_snapshot import JobSnapshot


def node_desired(snapshot: JobSnapshot, node: str, now: float) -> NodeDesired:
    """Return the desired state of a node."""
    record = snapshot.nodes[node]
    life, number = record.status.generation, record.status.number
    released = snapshot.released.get(node)
    is_released = (
        released is not None and released.generation == life
    )  # a smaller generation may come from a clock that went back
    formed, epoch_state = _world_of(snapshot, record.status)
    is_newest = formed is not None and formed is snapshot.world_spec
    return NodeDesired(
        coordinator=snapshot.incarnation,
        generation=life,
        acknowledged=number,
        world=formed,
        newest_world=None if formed is snapshot.world_spec else snapshot.world_record,
        epoch_state=EpochMessage.of(epoch_state, now),
        size_request=snapshot.size_request,
        commands=tuple(record.commands),
        run_store=snapshot.is_rootless or (node == snapshot.store_node and not snapshot.settings.store),
        release_reason=released.reason if released is not None and is_released else None,
        force=released.force if released is not None and is_released else False,
        drain_within_s=None if record.drain_deadline is None else max(0.0, record.drain_deadline - now),
        superseded=snapshot.is_superseded(record.status) and not is_released,
        min_generation=snapshot.world.departed.get(node, 0),
        term=snapshot.term,
        exit=snapshot.outcome.exit,
        reason=snapshot.outcome.reason or record.drain_reason,
        offer_memory=snapshot.world_spec is not None and node not in snapshot.ranked,
        standby=snapshot.standby_peers if is_newest else (),
        sealed_step=released.sealed_step if released is not None and is_released else snapshot.outcome.sealed_step,
    )


def _world_of(snapshot: JobSnapshot, status: NodeStatus) -> tuple[WorldSpec | None, EpochState]:
    """Return the world to send to a node, and the state of its epoch.

    A world may break, and the next one form without one of its nodes, before that node receives either message. The
    node still learns that its own world is over. Otherwise its ranks would continue there and never rejoin.
    """
    newest, own = snapshot.world_spec, status.world
    if newest is None:
        return None, EpochState()
    if status.node in snapshot.ranked:
        return newest, snapshot.epoch_state
    left = status.epoch_state.broken is not None or status.sealed is not None or status.ready
    if own is None or own.epoch >= newest.epoch or left:
        return None, EpochState()
    return own, EpochState(own.epoch).change(NoticeKind.RESTART, f"world {own.epoch} is over: {newest.reason}")


def why_refused(snapshot: JobSnapshot, request: CoordinatorRequest) -> str:
    """Return why the request is refused, or ""."""
    policy = snapshot.settings.policy
    if snapshot.is_rejoining and not isinstance(request, StatusRequest):
        return "the coordinator has just started and listens to the nodes: ask again"
    if snapshot.outcome.exit is not None and isinstance(request, ResizeRequest | DrainRequest | InjectRequest):
        return f"the job is over: {snapshot.outcome.reason}"
    if (
        isinstance(request, ResizeRequest)
        and request.nodes is not None
        and policy.largest_size_within(request.nodes) == 0
    ):
        return f"{request.nodes} nodes are too few: this job runs on {', '.join(map(str, policy.sizes))}"
    if isinstance(request, InjectRequest) and (problem := _why_no_target(snapshot, request)):
        return problem
    if isinstance(request, DrainRequest | InjectRequest):
        named = request.nodes if isinstance(request, DrainRequest) else (request.injection.node,)
        unknown = [node for node in named if node is not None and node not in snapshot.nodes]
        if unknown:
            return f"there is no node {', '.join(unknown)}: the job has {', '.join(snapshot.nodes) or 'none'}"
    return ""


def _why_no_target(snapshot: JobSnapshot, request: InjectRequest) -> str:
    """Return why no rank of the current job matches the fault, or ""."""
    rank, local_rank = request.injection.rank, request.injection.local_rank
    ranks = snapshot.world.size * snapshot.world.nproc
    if rank is not None and snapshot.world_spec is None:
        return f"rank={rank}: the job has no ranks yet"
    if rank is not None and rank >= ranks:
        return f"rank={rank}: the job has {ranks} ranks now, 0 to {ranks - 1}"
    if local_rank is not None and local_rank >= snapshot.world.nproc:
        return f"local_rank={local_rank}: a node has {snapshot.world.nproc} ranks here"
    return ""
