"""How a job is, for people and for programs."""

from __future__ import annotations

from elastic.control.desk import Desk, Seen
from elastic.control.messages import Answer, NodeStatus
from elastic.control.ordering import pausing
from elastic.control.plane import Progress
from elastic.rootless.placement import ROOTLESS


def answer(desk: Desk, now: float, *, refused: str = "") -> Answer:
    """All there is to say about the job."""
    world = desk.world
    places = {node: place for place, node in enumerate(world.places)} if world.phase.alive else {}
    nodes = tuple(_node(desk, seen, places.get(node), now) for node, seen in sorted(desk.nodes.items()))
    placed = [node for node in nodes if node.rank is not None]
    return Answer(
        job=desk.settings.job,
        phase=world.phase,
        epoch=world.epoch,
        nodes=nodes,
        nproc=world.nproc,
        goal=world.goal,
        cap=world.cap,
        restarts=world.restarts,
        reason=desk.reason or world.reason,
        step=min((node.step for node in placed), default=-1),
        sealed=min((node.sealed for node in placed), default=-1),
        store=_store(desk),
        wanted=desk.wanted,
        pausing=pausing(desk, now),
        refused=refused,
    )


def _store(desk: Desk) -> str:
    if desk.formed is None:
        return ""
    return f"{ROOTLESS}, on {len(desk.formed.stores)} nodes" if desk.formed.stores else desk.formed.store


def _node(desk: Desk, seen: Seen, place: int | None, now: float) -> NodeStatus:
    says = seen.says
    said = [progress if progress is not None else Progress(-1) for progress in says.steps]
    return NodeStatus(
        node=says.node,
        rank=place,
        state=_state(desk, seen, inside=place is not None),
        seats=says.seats,
        spares=says.spares,
        births=says.births,
        step=min((progress.step for progress in said), default=-1),
        sealed=min((progress.sealed for progress in said), default=-1),
        heard_s=max(0.0, now - seen.heard_at),
    )


def _state(desk: Desk, seen: Seen, *, inside: bool) -> str:
    says = seen.says
    if not seen.connected:
        return "cut off"
    if says.node not in desk.world.members:
        return "leaving"
    if says.finished:
        return "finished"
    if says.leaving_s is not None:
        return "asked back"
    if not inside:
        return "waiting" if says.ready else "starting"
    return "sealed" if says.sealed is not None else "pausing" if desk.pause is not None else "training"
