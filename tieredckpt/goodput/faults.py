"""When each fault happened, and what was injected that it came of."""

from __future__ import annotations

from collections.abc import Sequence

from tieredckpt.goodput.model import FaultView
from tieredckpt.goodput.runs import Way, us
from tieredckpt.ledger.events import Fault, Injected, Stage


def views_of(way: Way, injections: Sequence[Injected], known: Sequence[Stage]) -> tuple[FaultView, ...]:
    """In order of time. An injection is the cause of one fault, the first that fits it.

    What broke a world happened before any of its ranks knew: ``known`` says when they did.
    """
    left = sorted(injections, key=lambda one: one.at)
    firsts: dict[int, float] = {}
    for stage in known:
        firsts[stage.epoch] = min(stage.began, firsts.get(stage.epoch, stage.began))
    found = []
    for fault in sorted(way.faults, key=lambda one: (one.at, one.node, one.local_rank)):
        fitting = [one for one in left if _fits(one, fault)]
        cause = fitting[-1] if fitting else None
        if cause is not None:
            left.remove(cause)
        since = fault.at if fault.since is None else fault.since
        at = min(since, fault.at, firsts.pop(fault.epoch, fault.at))
        found.append(
            FaultView(
                us(at if cause is None else cause.at),
                us(fault.at),
                fault.epoch,
                fault.node,
                fault.local_rank,
                fault.kind,
                fault.reason,
                "" if cause is None else cause.kind,
            )
        )
    return tuple(sorted(found, key=lambda one: (one.at_us, one.noticed_us)))


def _fits(injected: Injected, fault: Fault) -> bool:
    """Whether the one may have led to the other, as far as each says where it was."""
    return (
        injected.at <= fault.at
        and injected.epoch in (-1, fault.epoch)
        and (not injected.node or not fault.node or injected.node == fault.node)
        and (injected.local_rank < 0 or fault.local_rank < 0 or injected.local_rank == fault.local_rank)
    )
