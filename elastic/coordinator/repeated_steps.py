"""Steps that a silent node sealed in an earlier world, and that a later world does again. No I/O.

A node that is cut off trains on until it learns of the next world. Its newest steps are unknown when the next world
restores, so they are reported when the node is back.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from elastic.control.control_messages import MAX_NODES, NodeStatus, WorldSpec
from peerstore.sizes_and_durations import show_count

log = logging.getLogger(__name__)
_KEPT_WORLDS = 64


class _WorldStart(NamedTuple):
    """Start of a world, as known once one of its ranks has sealed a step."""

    job: str
    base_step: int
    """Step that the world resumed from; -1 for nothing."""
    known: int
    """Newest sealed step that was known when the world formed. The world's ranks report it."""


class _SealedLate(NamedTuple):
    epoch: int
    job: str
    step: int


class RepeatedSteps:
    """Starts of the newest worlds, and the newest step that each node of an earlier world had sealed."""

    def __init__(self) -> None:
        self._starts: dict[int, _WorldStart] = {}
        """By epoch of the world."""
        self._late: dict[str, _SealedLate] = {}
        """By node."""

    def observe(self, status: NodeStatus, newest: WorldSpec) -> None:
        """Log the steps of a node that ``newest`` or a world before it does again."""
        if status.world is None or status.world.epoch > newest.epoch:
            return
        if status.world.epoch < newest.epoch:
            self._observe_late(status, status.world.epoch)
        elif newest.epoch not in self._starts:
            self._observe_start(status, newest)

    def _observe_start(self, status: NodeStatus, newest: WorldSpec) -> None:
        first = next((one for one in status.rank_progress if one is not None and one.base_step is not None), None)
        if first is None or first.base_step is None:
            return
        reached = newest.reached
        known = reached.step if reached is not None and reached.job == first.job else -1
        self._starts[newest.epoch] = start = _WorldStart(first.job, first.base_step, known)
        while len(self._starts) > _KEPT_WORLDS:
            del self._starts[next(iter(self._starts))]
        for node, sealed in self._late.items():
            _report(node, sealed, newest.epoch, start)

    def _observe_late(self, status: NodeStatus, epoch: int) -> None:
        ranks = [one for one in status.rank_progress if one is not None and one.has_sealed and one.sealed >= 0]
        if not ranks:
            return
        newest = max(ranks, key=lambda one: one.sealed)
        sealed, known = _SealedLate(epoch, newest.job, newest.sealed), self._late.pop(status.node, None)
        self._late[status.node] = sealed if known is None else max(sealed, known)
        while len(self._late) > MAX_NODES:
            del self._late[next(iter(self._late))]
        if known is None or sealed > known:
            for world, start in self._starts.items():
                _report(status.node, sealed, world, start)


def _report(node: str, sealed: _SealedLate, world: int, start: _WorldStart) -> None:
    if world <= sealed.epoch or start.job != sealed.job or sealed.step <= max(start.base_step, start.known):
        return
    how = f"resumed from step {start.base_step}" if start.base_step >= 0 else "starts from nothing"
    again = show_count(sealed.step - start.base_step, "step is", "steps are")
    log.warning(
        "%s: node %s was silent and has sealed step %d in world %d. World %d %s without it; %s done again "
        "('tieredckpt ls %s' shows the node's steps)",
        *(sealed.job, node, sealed.step, sealed.epoch, world, how, again, sealed.job),
    )
