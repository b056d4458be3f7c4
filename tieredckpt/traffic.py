"""How fast bytes move on a node, from what it has counted at two moments. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from peerstore.records import Group, StoreStatus
from tieredckpt.node import ClusterView, DrainView


@dataclass(frozen=True)
class Moment:
    """What a node has counted by now."""

    at_s: float
    sealed_bytes: float
    sent_bytes: float
    received_bytes: float
    drained: Mapping[Group, int]
    """Bytes uploaded by step: a step that is drained again begins at 0."""

    @classmethod
    def of(cls, at_s: float, view: ClusterView, drains: Iterable[DrainView], state: StoreStatus) -> Moment:
        counted = state.counters
        return cls(
            at_s,
            counted.get("sealed_bytes", 0),
            view.sent_bytes,
            counted.get("copied_in_bytes", 0),
            {one.group: one.bytes_done for one in drains},
        )


@dataclass(frozen=True)
class Rates:
    """Bytes per second."""

    saved: float
    sent: float
    received: float
    drained: float


def rates(before: Sequence[Moment], now: Moment) -> Rates | None:
    """Since the first of ``before``; ``None`` while there is nothing to compare with.

    Counters that are lower than before are those of a new agent: what it counted is all since then.
    """
    moments = [*before, now]
    seconds = now.at_s - moments[0].at_s
    if seconds <= 0:
        return None
    sums = [0.0, 0.0, 0.0, 0.0]
    for one, other in itertools.pairwise(moments):
        sums[0] += _more(one.sealed_bytes, other.sealed_bytes)
        sums[1] += _more(one.sent_bytes, other.sent_bytes)
        sums[2] += _more(one.received_bytes, other.received_bytes)
        sums[3] += sum(_more(one.drained.get(group, 0), done) for group, done in other.drained.items())
    return Rates(*(total / seconds for total in sums))


def _more(before: float, now: float) -> float:
    return now - before if now >= before else now
