"""What has happened on a node, from two of its reports: the events that :func:`elastic.world.decide.decide` knows."""

from __future__ import annotations

from collections.abc import Iterator

from elastic.control.messages import Formed, NodeSays, Request
from elastic.control.plane import Want
from elastic.world.events import (
    CapacityAskedBack,
    Event,
    NodeFinished,
    NodeJoined,
    NodeLeft,
    NodeReady,
    NodeReport,
    NodeSealed,
    RankFault,
    RankLost,
    ResizeAsked,
    StopAsked,
)


def between(before: NodeSays | None, says: NodeSays, now: float) -> Iterator[Event]:
    """In the order in which it can have happened. ``before`` is the report before, of the same life or none."""
    node, life, epoch = says.node, says.life, _epoch(says.formed)
    if before is None:
        yield NodeJoined(node, life, says.seats, says.births, says.spares)
    new = before is None or _epoch(before.formed) != epoch
    if says.sealed is not None and (new or before is None or before.sealed != says.sealed):
        yield NodeSealed(node, life, epoch, says.sealed)
    if says.finished and (new or before is None or not before.finished):
        yield NodeFinished(node, life, epoch)
    if says.leaving_s is not None and (before is None or before.leaving_s is None):
        yield CapacityAskedBack((node,), now + says.leaving_s, says.leaving)
    if before is None or (before.births, before.lost) != (says.births, says.lost):
        for lost in says.lost:
            yield RankLost(node, life, says.births, lost.local_rank, lost.reason)
    if new or before is None or before.faults != says.faults:
        for fault in says.faults:
            yield RankFault(node, life, epoch, fault.local_rank, fault.reason, fault.final)
    if says.ready and (new or before is None or not before.ready or _stock(before) != _stock(says)):
        yield NodeReady(node, life, says.births, epoch, says.spares)
    if says.goodbye:
        yield NodeLeft(node, life, says.goodbye)


def asked(request: Request, says: NodeSays, now: float) -> Event:
    """What a rank's request is to the world."""
    if request.want is Want.STOP:
        return StopAsked(request.reason, None if request.deadline_s is None else now + request.deadline_s)
    if request.want is Want.RESTART:
        return RankFault(says.node, says.life, _epoch(says.formed), 0, request.reason)
    return ResizeAsked(request.nodes, request.reason)


def remembered(says: NodeSays) -> NodeReport:
    """What a coordinator that starts again learns from a node, but for what it is to decide upon: that comes after."""
    formed = says.formed
    return NodeReport(
        node=says.node,
        life=says.life,
        seats=says.seats,
        births=says.births,
        spares=says.spares,
        epoch=_epoch(formed),
        places=() if formed is None else formed.places,
        restarts=0 if formed is None else formed.restarts,
    )


def _epoch(formed: Formed | None) -> int:
    return -1 if formed is None else formed.epoch


def _stock(says: NodeSays) -> tuple[int, int]:
    return says.births, says.spares
