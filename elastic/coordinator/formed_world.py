"""The newest world as its nodes receive it: specification, totals, breakage, pause and store. No I/O."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from elastic.control.control_messages import NodeStatus, WorldRecord, WorldSpec
from elastic.control.control_plane import NoticeKind
from elastic.control.epoch_state import EpochChange, EpochState
from elastic.coordinator.node_liveness import NodeLiveness, NodeRecord, is_superseded_generation
from elastic.coordinator.node_reports import WorldProgress
from elastic.rendezvous.store_servers import ROOTLESS, store_nodes
from elastic.world.world_state import PauseWorld, RankLost, ReachedStep, StepSealed, WorldPhase, WorldState

log = logging.getLogger(__name__)
replace = msgspec.structs.replace


class FormedWorld:
    """Specification of the newest world, totals over its reports, and the state of its epoch."""

    def __init__(self) -> None:
        self.spec: WorldSpec | None = None
        self.record: WorldRecord | None = None
        """Record of :attr:`spec` for nodes outside the world."""
        self.progress: WorldProgress | None = None
        self.epoch_state = EpochState()
        """How the world changes: its fault, or its pause with the step after which all ranks stop."""

    @property
    def ranked(self) -> Collection[str]:
        """Nodes of the world."""
        return () if self.progress is None else self.progress.places

    @property
    def reached(self) -> ReachedStep | None:
        """The newest step that any rank of this or an earlier world is known to have sealed.

        It may be older than a step of an earlier world, if this world has restored a still older one.
        """
        if self.spec is None or self.progress is None:
            return None
        return self.progress.newest_sealed or self.spec.reached

    def form(self, spec: WorldSpec, reports: Iterable[NodeStatus]) -> None:
        """Start with a new world, and count the reports that its nodes have sent."""
        self.spec, self.epoch_state = spec, EpochState(spec.epoch)
        self.record = _record_of(spec)
        self.progress = WorldProgress(spec)
        for status in reports:
            self.progress.update(status)

    def break_up(self, epoch: int, reason: str, leave_until: float) -> None:
        """Mark this world as broken, and end its pause, if it has this epoch."""
        if self.spec is not None and epoch == self.spec.epoch:
            self.epoch_state = self.epoch_state.change(NoticeKind.RESTART, reason, leave_until).without_pause()

    def pause(self, order: PauseWorld) -> None:
        """Begin a pause, or replace the current one."""
        kind = NoticeKind.STOP if order.stop else NoticeKind.RESIZE
        pause = EpochChange(kind, order.reason, order.deadline_s)
        self.epoch_state = replace(self.epoch_state, pause=pause)

    def name_requester(self, reason: str) -> None:
        """Put the reason of a request in front of the reason of the pause that it caused."""
        pause = self.epoch_state.pause
        if pause is not None:
            named = replace(pause, reason=f"{reason}: {pause.reason}")
            self.epoch_state = replace(self.epoch_state, pause=named)

    def agree_on_target(self) -> bool:
        """Set the step after which all ranks stop, once all have reported one. Return whether it was set."""
        before = self.epoch_state
        if before.pause is None or before.target is not None or self.progress is None:
            return False
        self.epoch_state = before.agree((self.progress.pause_target,))
        if self.epoch_state.target is None:
            return False
        log.info("world %d: all stop after step %d", self.epoch_state.epoch, self.epoch_state.target)
        return True

    def late_ranks(self, nodes: NodeLiveness, now: float) -> list[RankLost]:
        """Return the loss of each rank that has not reached the target by the deadline.

        Ranks that only waited for those are not lost.
        """
        pause, spec = self.epoch_state.pause, self.spec
        if spec is None or pause is None or pause.until is None or now < pause.until:
            return []
        return [
            RankLost(one.node, one.generation, one.spawn_count, local_rank, "it did not stop in time")
            for one in nodes.reports_of(spec)
            if one.world is not None and one.world.epoch == spec.epoch
            for local_rank in one.lagging_ranks
        ]

    def resume_pause(self, reports: Sequence[NodeStatus], world: WorldState, now: float) -> WorldState:
        """Continue the pause that some ranks have received, for all ranks; return the world with that pause."""
        changes = [one.epoch_state.received(now).pause for one in reports]
        pauses = [(one, one.until) for one in changes if one is not None and one.until is not None]
        if not pauses or world.phase is not WorldPhase.RUNNING:
            return world
        pause, until = min(pauses, key=lambda one: (one[0].kind is not NoticeKind.STOP, one[1]))
        self.epoch_state = replace(self.epoch_state, pause=pause)
        return replace(
            world,
            phase=WorldPhase.PAUSING,
            reason=pause.reason,
            pause_deadline_s=until,
            stopping=pause.kind is NoticeKind.STOP,
            next_tick_s=until if world.next_tick_s is None else min(until, world.next_tick_s),
        )

    def sealed_events(self, world: WorldState) -> list[StepSealed]:
        """Return an event for the first step that this world sealed after it restored the requested one."""
        if world.requested_step is None or self.progress is None or not self.progress.has_sealed_step:
            return []
        return [StepSealed(self.progress.epoch)]

    def forget_requested_step(self) -> bool:
        """Remove the requested step and return whether it was set.

        A restarted coordinator must not restore it again.
        """
        if self.spec is None or self.spec.requested_step is None:
            return False
        self.spec = replace(self.spec, requested_step=None)
        self.record = _record_of(self.spec)
        return True


def _record_of(spec: WorldSpec) -> WorldRecord:
    return WorldRecord(spec.epoch, spec.ranked_nodes, spec.requested_step, spec.incarnation_epoch)


class StorePlacement:
    """Where the store of the newest world is: at a fixed address, on one node, or on every node."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.node = ""
        """Node that runs the store, "" for none."""

    @property
    def is_rootless(self) -> bool:
        return self._address == ROOTLESS

    def with_stores(self, spec: WorldSpec, nodes: Mapping[str, NodeRecord]) -> WorldSpec:
        """Return the world with the addresses of its stores, if they are known."""

        def store_of(node: str) -> str:
            record = nodes.get(node)
            return record.status.store if record is not None and record.connected else ""

        if not self.is_rootless:
            return replace(spec, store=self._address or store_of(self.node))
        stores = tuple(map(store_of, store_nodes(spec.epoch, spec.ranked_nodes)))
        return replace(spec, store=stores[0], stores=stores) if all(stores) else spec

    def place(self, nodes: NodeLiveness, world: WorldState, ranked: Collection[str], now: float) -> bool:
        """Choose the node of the store; return whether it is another one than before."""
        if self._address:
            return False
        before, self.node = self.node, self._best_node(nodes, world, ranked, now)
        return self.node != before

    def _best_node(self, nodes: NodeLiveness, world: WorldState, ranked: Collection[str], now: float) -> str:
        """Return the node of the store: the current one while it has a store or no other node has one."""
        current = nodes.records.get(self.node)
        if current is not None and (
            is_superseded_generation(world, current.status) or nodes.is_silent(current, world.members, now)
        ):
            current = None
        if current is not None and current.status.store:
            return self.node
        here = [status for status in nodes.reports() if not is_superseded_generation(world, status)]
        having = [status.node for status in here if status.store]
        if current is not None and not having:
            return self.node
        placed = [status.node for status in here if status.node in ranked]
        return next(iter((*having, *placed, *(status.node for status in here))), "")
