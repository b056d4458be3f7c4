"""What the coordinator tells a node: all that is wanted of it, as it is by now; and what it takes from nobody."""

from __future__ import annotations

from elastic.control.desk import Desk
from elastic.control.messages import Formed, Inject, Leave, NodeHears, NodeSays, Pausing, Question, Resize, Status


def for_node(desk: Desk, node: str, now: float) -> NodeHears:
    """All that is wanted of a node."""
    seen = desk.nodes[node]
    life, number = seen.says.life, seen.says.number
    released = desk.released.get(node)
    is_released = released is not None and released.life == life  # a smaller one may be of a clock that went back
    formed, broken = _world_of(desk, seen.says)
    pause = desk.pause if formed is not None and formed is desk.formed else None
    return NodeHears(
        coordinator=desk.incarnation,
        life=life,
        heard=number,
        formed=formed,
        broken=broken,
        broken_s=None if broken is None or formed is not desk.formed else max(0.0, desk.leave_until - now),
        pausing=None if pause is None else pausing(desk, now),
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


def _world_of(desk: Desk, says: NodeSays) -> tuple[Formed | None, str | None]:
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


def pausing(desk: Desk, now: float) -> Pausing | None:
    pause = desk.pause
    if pause is None:
        return None
    return Pausing(pause.epoch, pause.reason, max(0.0, pause.deadline_s - now), pause.stop)


def refusal(desk: Desk, question: Question) -> str:
    """Why this cannot be had, or ""."""
    policy = desk.settings.policy
    if desk.gathering and not isinstance(question, Status):
        return "the coordinator has just started and listens to the nodes: ask again"
    if desk.over is not None and isinstance(question, Resize | Leave | Inject):
        return f"the job is over: {desk.reason}"
    if isinstance(question, Resize) and question.nodes is not None and policy.at_most(question.nodes) == 0:
        return f"{question.nodes} nodes are too few: this job runs on {', '.join(map(str, policy.sizes))}"
    if isinstance(question, Inject) and (problem := _nowhere(desk, question)):
        return problem
    if isinstance(question, Leave | Inject):
        asked = question.nodes if isinstance(question, Leave) else (question.injection.node,)
        unknown = [node for node in asked if node is not None and node not in desk.nodes]
        if unknown:
            return f"there is no node {', '.join(unknown)}: the job has {', '.join(desk.nodes) or 'none'}"
    return ""


def _nowhere(desk: Desk, question: Inject) -> str:
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
