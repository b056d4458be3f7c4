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


def node_desired(desk: WorldReconciler, node: str, now: float) -> NodeDesired:
    """All that is wanted of a node."""
    seen = desk.nodes[node]
    life, number = seen.says.life, seen.says.number
    released = desk.released.get(node)
    is_released = released is not None and released.life == life  # a smaller one may be of a clock that went back
    formed, broken = _world_of(desk, seen.says)
    pause = desk.pause if formed is not None and formed is desk.formed else None
    return NodeDesired(
        coordinator=desk.incarnation,
        life=life,
        heard=number,
        formed=formed,
        broken=broken,
        broken_s=None if broken is None or formed is not desk.formed else max(0.0, desk.leave_until - now),
        pausing=None if pause is None else pause_order(desk, now),
        target=desk.target if pause is not None else None,
        wish=desk.wish,
        commands=tuple(seen.commands),
        keep_store=desk.is_rootless or (node == desk.keeper and not desk.settings.store),
        release=released.reason if released is not None and is_released else None,
        cut=released.cut if released is not None and is_released else False,
        leave_s=None if seen.leave_by is None else max(0.0, seen.leave_by - now),
        life_over=desk.is_past(seen.says) and not is_released,
        above=desk.world.gone.get(node, 0),
        term=desk.term,
        over=desk.over,
        reason=desk.reason or seen.leave_reason,
    )


def _world_of(desk: WorldReconciler, says: NodeStatus) -> tuple[WorldSpec | None, str | None]:
    """The world that a node is to know of, and why it is broken.

    A world may break and the next one begin without a node of it before that node hears of either: it is still told
    that its own is over. Else its ranks would go on there, and it would not come back.
    """
    newest, own = desk.formed, says.formed
    if newest is None:
        return None, None
    if desk.state is not None and says.node in desk.state.places:
        return newest, desk.broken
    left = says.broken is not None or says.sealed is not None or says.ready
    if own is None or own.epoch >= newest.epoch or left:
        return None, None
    return own, f"world {own.epoch} is over: {newest.reason}"


def pause_order(desk: WorldReconciler, now: float) -> PauseOrder | None:
    pause = desk.pause
    if pause is None:
        return None
    return PauseOrder(pause.epoch, pause.reason, max(0.0, pause.deadline_s - now), pause.stop)


def why_refused(desk: WorldReconciler, question: CoordinatorRequest) -> str:
    """Why this cannot be had, or ""."""
    policy = desk.settings.policy
    if desk.gathering and not isinstance(question, StatusRequest):
        return "the coordinator has just started and listens to the nodes: ask again"
    if desk.over is not None and isinstance(question, ResizeRequest | DrainRequest | InjectRequest):
        return f"the job is over: {desk.reason}"
    if isinstance(question, ResizeRequest) and question.nodes is not None and policy.at_most(question.nodes) == 0:
        return f"{question.nodes} nodes are too few: this job runs on {', '.join(map(str, policy.sizes))}"
    if isinstance(question, InjectRequest) and (problem := _nowhere(desk, question)):
        return problem
    if isinstance(question, DrainRequest | InjectRequest):
        asked = question.nodes if isinstance(question, DrainRequest) else (question.injection.node,)
        unknown = [node for node in asked if node is not None and node not in desk.nodes]
        if unknown:
            return f"there is no node {', '.join(unknown)}: the job has {', '.join(desk.nodes) or 'none'}"
    return ""


def _nowhere(desk: WorldReconciler, question: InjectRequest) -> str:
    """Why a fault could happen to nobody, as the job is now."""
    rank, local_rank = question.injection.rank, question.injection.local_rank
    ranks = desk.world.size * desk.world.nproc
    if rank is not None and desk.formed is None:
        return f"rank={rank}: the job has no ranks yet"
    if rank is not None and rank >= ranks:
        return f"rank={rank}: the job has {ranks} ranks now, 0 to {ranks - 1}"
    if local_rank is not None and local_rank >= desk.world.nproc:
        return f"local_rank={local_rank}: a node has {desk.world.nproc} ranks here"
    return ""
