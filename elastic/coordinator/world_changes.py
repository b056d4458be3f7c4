"""Changes of a job's world, from its event log: when, why, and how soon the next step ran. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tieredckpt.event_log.event_types import (
    FaultEvent,
    FaultInjected,
    LogEvent,
    ProcessBegan,
    ProcessEnded,
    StageEvent,
    StepEvent,
    StopRequested,
    WorldFormed,
    event_time,
)
from tieredckpt.goodput.analysis import analyse
from tieredckpt.goodput.analysis_result import TransitionRecord
from tieredckpt.goodput.run_history import COORDINATOR_ROLE, to_us

_MOST_DECISIONS = 1000
_MOST_STAGES = 20_000
_MOST_WORLDS = 64
_LAST_STEPS = 3


@dataclass(frozen=True)
class WorldChange:
    """A change to another world, or faults after which no world has formed yet."""

    at_us: int
    """Time of the first fault. Without a fault: the end of the last step, or the decision."""
    epoch: int | None
    """The new world. ``None``: it has not formed yet."""
    how: str
    reason: str
    ranks_before: int
    ranks: int
    faults: tuple[FaultEvent, ...] = ()
    seconds: float | None = None
    """Seconds until the first step of the new world. ``None``: no such step is recorded."""
    stages: tuple[tuple[str, float], ...] = ()
    """Seconds of these by the stage of the slowest ranks."""


class WorldHistory:
    """Events of the newest run that explain its changes of world.

    It keeps the newest events of each kind, so that its memory is bounded.
    """

    def __init__(self) -> None:
        self._clear(0.0)

    def _clear(self, began: float) -> None:
        self._began = began
        self._decisions: deque[LogEvent] = deque(maxlen=_MOST_DECISIONS)
        self._stages: deque[StageEvent] = deque(maxlen=_MOST_STAGES)
        self._steps: dict[int, list[StepEvent]] = {}
        """First and last steps of the newest worlds."""
        self._changes: list[WorldChange] | None = None
        """The result for these events, until an event changes it."""

    def add(self, event: LogEvent) -> None:
        """Add an event of the log. The coordinator's events of a run come before those of its ranks."""
        if event_time(event) < self._began:
            return
        if isinstance(event, StepEvent):
            self._add_step(event)
        elif isinstance(event, StageEvent):
            self._stages.append(event)
            self._changes = None
        elif isinstance(event, ProcessBegan | ProcessEnded):
            if event.who != COORDINATOR_ROLE:
                return
            if isinstance(event, ProcessBegan) and not event.again:
                self._clear(event.at)
            self._decisions.append(event)
            self._changes = None
        elif isinstance(event, WorldFormed | FaultEvent | FaultInjected | StopRequested):
            self._decisions.append(event)
            self._changes = None

    def _add_step(self, event: StepEvent) -> None:
        steps = self._steps.setdefault(event.epoch, [])
        steps.append(event)
        if len(steps) > 1 + _LAST_STEPS:  # later steps of a world that trains change nothing
            steps.sort(key=lambda one: one.began)
            del steps[1]
        else:
            self._changes = None
        while len(self._steps) > _MOST_WORLDS:
            del self._steps[min(self._steps)]

    def changes(self) -> list[WorldChange]:
        """Return the changes of world in order of time."""
        if self._changes is None:
            self._changes = self._analysed()
        return self._changes

    def _analysed(self) -> list[WorldChange]:
        worlds = {one.epoch: one for one in self._decisions if isinstance(one, WorldFormed)}
        faults = [one for one in self._decisions if isinstance(one, FaultEvent)]
        steps = [one for of_world in self._steps.values() for one in of_world]
        analysis = analyse([*self._decisions, *self._stages, *steps])
        records = {one.next_epoch: one for one in analysis.recoveries if one.resumed}
        found: list[WorldChange] = []
        before: WorldFormed | None = None
        for epoch, world in sorted(worlds.items()):
            left = [one for one in faults if _last_epoch(before) <= one.epoch < epoch]
            found.append(_change(before, world, left, records.get(epoch)))
            before = world
        pending = [one for one in faults if one.epoch >= _last_epoch(before)]
        if pending:
            ranks = 0 if before is None else before.ranks
            found.append(WorldChange(_fault_us(pending), None, "", "", ranks, 0, tuple(pending)))
        return found


def _last_epoch(world: WorldFormed | None) -> int:
    return -1 if world is None else world.epoch


def _change(
    before: WorldFormed | None, world: WorldFormed, faults: Sequence[FaultEvent], record: TransitionRecord | None
) -> WorldChange:
    at_us = _fault_us(faults) if faults else to_us(world.at)
    return WorldChange(
        at_us if record is None else record.start_us,
        world.epoch,
        world.how,
        world.reason,
        0 if before is None else before.ranks,
        world.ranks,
        tuple(faults),
        None if record is None else record.seconds,
        () if record is None else tuple(record.stages.items()),
    )


def _fault_us(faults: Sequence[FaultEvent]) -> int:
    return to_us(min(one.at if one.since is None else one.since for one in faults))
