"""The desired state that the coordinator sends to each node, and the requests it refuses. Pure."""

from __future__ import annotations

from elastic.control.control_messages import (
    CoordinatorRequest,
    DrainRequest,
    InjectRequest,
    NodeDesired,
    NodeStatus,
    PauseOrder,
    ResizeRequest,
    StatusRequest,
    WorldSpec,
)
from elastic.coordinator.world_reconciler import WorldReconciler


def node_desired(reconciler: WorldReconciler, node: str, now: float) -> NodeDesired:
    """Return the desired state of a node."""
    record = reconciler.nodes[node]
    life, number = record.status.generation, record.status.number
    released = reconciler.released.get(node)
    is_released = (
        released is not None and released.generation == life
    )  # a smaller generation may come from a clock that went back
    formed, broken = _world_of(reconciler, record.status)
    pause = reconciler.pause if formed is not None and formed is reconciler.world_spec else None
    return NodeDesired(
        coordinator=reconciler.incarnation,
        generation=life,
        acknowledged=number,
        world=formed,
        newest_world=None if formed is reconciler.world_spec else reconciler.world_record,
        broken_reason=broken,
        broken_s=None
        if broken is None or formed is not reconciler.world_spec
        else max(0.0, reconciler.leave_until - now),
        pause=None if pause is None else pause_order(reconciler, now),
        pause_target=reconciler.pause_target if pause is not None else None,
        size_request=reconciler.size_request,
        commands=tuple(record.commands),
        run_store=reconciler.is_rootless or (node == reconciler.store_node and not reconciler.settings.store),
        release_reason=released.reason if released is not None and is_released else None,
        force=released.force if released is not None and is_released else False,
        drain_within_s=None if record.drain_deadline is None else max(0.0, record.drain_deadline - now),
        superseded=reconciler.is_superseded(record.status) and not is_released,
        min_generation=reconciler.world.departed.get(node, 0),
        term=reconciler.term,
        exit=reconciler.exit,
        reason=reconciler.reason or record.drain_reason,
        offer_memory=reconciler.progress is not None and node not in reconciler.progress.places,
        standby=reconciler.standby_peers if formed is not None and formed is reconciler.world_spec else (),
        sealed_step=released.sealed_step if released is not None and is_released else reconciler.sealed_step,
    )


def _world_of(reconciler: WorldReconciler, status: NodeStatus) -> tuple[WorldSpec | None, str | None]:
    """Return the world that a node is to know, and the reason if that world is broken.

    A world may break, and the next one form without one of its nodes, before that node receives either message. The
    node still learns that its own world is over. Otherwise its ranks would continue there and never rejoin.
    """
    newest, own = reconciler.world_spec, status.world
    if newest is None:
        return None, None
    if reconciler.progress is not None and status.node in reconciler.progress.places:
        return newest, reconciler.broken_reason
    left = status.broken_reason is not None or status.sealed is not None or status.ready
    if own is None or own.epoch >= newest.epoch or left:
        return None, None
    return own, f"world {own.epoch} is over: {newest.reason}"


def pause_order(reconciler: WorldReconciler, now: float) -> PauseOrder | None:
    pause = reconciler.pause
    if pause is None:
        return None
    return PauseOrder(pause.epoch, pause.reason, max(0.0, pause.deadline_s - now), pause.stop)


def why_refused(reconciler: WorldReconciler, request: CoordinatorRequest) -> str:
    """Return why the request is refused, or ""."""
    policy = reconciler.settings.policy
    if reconciler.is_rejoining and not isinstance(request, StatusRequest):
        return "the coordinator has just started and listens to the nodes: ask again"
    if reconciler.exit is not None and isinstance(request, ResizeRequest | DrainRequest | InjectRequest):
        return f"the job is over: {reconciler.reason}"
    if (
        isinstance(request, ResizeRequest)
        and request.nodes is not None
        and policy.largest_size_within(request.nodes) == 0
    ):
        return f"{request.nodes} nodes are too few: this job runs on {', '.join(map(str, policy.sizes))}"
    if isinstance(request, InjectRequest) and (problem := _why_no_target(reconciler, request)):
        return problem
    if isinstance(request, DrainRequest | InjectRequest):
        named = request.nodes if isinstance(request, DrainRequest) else (request.injection.node,)
        unknown = [node for node in named if node is not None and node not in reconciler.nodes]
        if unknown:
            return f"there is no node {', '.join(unknown)}: the job has {', '.join(reconciler.nodes) or 'none'}"
    return ""


def _why_no_target(reconciler: WorldReconciler, request: InjectRequest) -> str:
    """Return why no rank of the current job matches the fault, or ""."""
    rank, local_rank = request.injection.rank, request.injection.local_rank
    ranks = reconciler.world.size * reconciler.world.nproc
    if rank is not None and reconciler.world_spec is None:
        return f"rank={rank}: the job has no ranks yet"
    if rank is not None and rank >= ranks:
        return f"rank={rank}: the job has {ranks} ranks now, 0 to {ranks - 1}"
    if local_rank is not None and local_rank >= reconciler.world.nproc:
        return f"local_rank={local_rank}: a node has {reconciler.world.nproc} ranks here"
    return ""
