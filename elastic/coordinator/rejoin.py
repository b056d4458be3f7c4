"""Waits before a decision: for the reports after a restart, and for the newest step at the start.

No I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from elastic.control.control_messages import NodeStatus, WorldRecord, WorldSpec
from elastic.coordinator import node_reports
from elastic.coordinator.node_liveness import NodeRecord
from elastic.world.scaling_policy import ScalingPolicy
from elastic.world.world_state import RankFault, StepHolders, WorldEvent

log = logging.getLogger(__name__)
_NAMED = 4


def _shortened(names: Sequence[str]) -> str:
    """Return the first few names and the number of the others."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


@dataclass(frozen=True)
class CollectedReports:
    """Reports from which a restarted coordinator resumes."""

    reports: Sequence[NodeStatus]
    newest: WorldSpec | None
    """Newest world of a node that reports."""
    lost_world: WorldRecord | None
    """A newer world, which only nodes outside it know."""

    def inside(self) -> list[NodeStatus]:
        """Return the reports of nodes in the newest world."""
        if self.newest is None:
            return []
        epoch = self.newest.epoch
        return [one for one in self.reports if one.world is not None and one.world.epoch == epoch]

    def faults(self) -> list[WorldEvent]:
        """Return a fault of each node whose world is broken."""
        return [
            RankFault(one.node, one.generation, -1 if one.world is None else one.world.epoch, 0, broken.reason)
            for one in self.inside()
            if (broken := one.epoch_state.broken) is not None
        ]

    def events(self, now: float) -> list[WorldEvent]:
        """Return the events in the nodes' reports, without those of joining."""
        found: list[WorldEvent] = []
        for one in self.reports:
            joined = msgspec.structs.replace(
                one,
                sealed=None,
                checkpoint=None,
                finished=False,
                ready=False,
                drain_within_s=None,
                exited_ranks=(),
                faulty_ranks=(),
            )
            found += node_reports.events_between(joined, one, now)
        return found


class Rejoin:
    """Wait of a restarted coordinator until all nodes of the newest world have reported, or a timeout."""

    def __init__(self, policy: ScalingPolicy, timeout_s: float, *, is_active: bool) -> None:
        self.is_active = is_active
        self._policy, self._timeout_s = policy, timeout_s
        self._deadline: float | None = None
        self._warned_of: WorldRecord | None = None

    def collect(self, reports: Sequence[NodeStatus], now: float) -> CollectedReports | None:
        """Return the reports and end the wait, or return ``None`` while it continues."""
        newest = max((one.world for one in reports if one.world is not None), key=lambda one: one.epoch, default=None)
        here = {one.node for one in reports}
        records = [one.newest_world for one in reports if one.newest_world is not None]
        lost_world = max(records, key=lambda one: one.epoch, default=None)
        if lost_world is not None and newest is not None and lost_world.epoch <= newest.epoch:
            lost_world = None
        if reports and self._deadline is None:
            self._deadline = now + self._timeout_s
        collect_by = self._deadline
        if lost_world is not None and collect_by is not None and here.isdisjoint(lost_world.nodes):
            collect_by += max(0.0, self._policy.lost_state_timeout_s - self._timeout_s)
            self._warn_state_lost(lost_world, collect_by - now)
        if not self._is_complete(here, newest, lost_world) and (collect_by is None or now < collect_by):
            return None
        self.is_active = False
        return CollectedReports(reports, newest, lost_world)

    def _is_complete(self, here: Collection[str], newest: WorldSpec | None, lost_world: WorldRecord | None) -> bool:
        """Whether no further report is expected."""
        expected = {
            *(() if newest is None else newest.ranked_nodes),
            *(() if lost_world is None else lost_world.nodes),
        }
        return expected.issubset(here) and (newest is not None or len(here) >= self._policy.max_replicas)

    def _warn_state_lost(self, record: WorldRecord, left_s: float) -> None:
        """Log that no node of the newest world has reported, once for the wait and once for its end."""
        names = _shortened(record.nodes)
        if left_s <= 0:
            log.error(
                "no node of the newest world (%d: %s) has reported in %g s: the job continues from the newest "
                "step of the other nodes. It repeats the later steps",
                *(record.epoch, names, self._policy.lost_state_timeout_s),
            )
        elif self._warned_of != record:
            self._warned_of = record
            log.warning(
                "no node of the newest world (%d: %s) has reported: waiting %.0f s for one "
                "(lost_state_timeout_s). Without them the job would resume from an older step",
                *(record.epoch, names, left_s),
            )


class HolderWait:
    """Wait of the first world for the newest step; all nodes are held back meanwhile."""

    def __init__(self, holders: StepHolders, timeout_s: float) -> None:
        self._holders, self._timeout_s = holders, timeout_s
        self._held_back: set[str] = set()
        """Nodes that have reported, and that the first world does not use before the wait is over."""
        self._deadline: float | None = None
        self._has_timed_out = False

    def holds_back(self, node: str, nodes: Mapping[str, NodeRecord], epoch: int, now: float) -> bool:
        """Whether the node, which has reported, has to wait. Remembers it if so."""
        if not self._held_back and not self._is_waiting(nodes, epoch, now):
            return False
        self._held_back.add(node)
        return True

    def admitted(self, nodes: Mapping[str, NodeRecord], epoch: int, now: float) -> list[NodeStatus]:
        """Return the held-back nodes' reports once, when the wait is over: first the holders'."""
        if not self._held_back or self._is_waiting(nodes, epoch, now):
            return []
        admitted, self._held_back = sorted(self._held_back), set()
        admitted.sort(key=lambda node: node not in self._holders.newest)
        return [nodes[node].status for node in admitted if node in nodes]

    def _is_waiting(self, nodes: Mapping[str, NodeRecord], epoch: int, now: float) -> bool:
        """Whether a node with the newest step is not ready yet. Logs the start and the failure of the wait."""
        if epoch >= 0 or self._has_timed_out:
            return False
        missing = self._holders.missing({name for name, record in nodes.items() if record.status.ready})
        if not missing:
            return False
        if self._deadline is None:
            self._deadline = now + self._timeout_s
            log.warning(
                "the first world waits up to %g s for %s, which may have the newest step",
                *(self._timeout_s, _shortened(missing)),
            )
        if now < self._deadline:
            return True
        self._has_timed_out = True
        log.error(
            "%s, which may have the newest step, was not ready in %g s: the job starts without it and may repeat steps",
            *(_shortened(missing), self._timeout_s),
        )
        return False
