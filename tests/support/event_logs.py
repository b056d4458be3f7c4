"""Event logs built by hand, with times in seconds after an arbitrary start."""

from __future__ import annotations

from typing import Any

from tieredckpt.event_log.event_types import (
    FaultEvent,
    FaultInjected,
    LogEvent,
    ProcessBegan,
    ProcessEnded,
    Protection,
    RestoreEvent,
    SaveEvent,
    StageEvent,
    StepEvent,
    StopRequested,
    WorldFormed,
)

START = 1_700_000_000


class EventLogBuilder:
    """An event log under construction; every method adds events to it."""

    def __init__(self) -> None:
        self.events: list[LogEvent] = []

    @staticmethod
    def microseconds(at: float) -> int:
        return round((START + at) * 1_000_000)

    def add(self, *events: LogEvent) -> EventLogBuilder:
        self.events += events
        return self

    def process_began(self, at: float, **more: Any) -> EventLogBuilder:
        return self.add(ProcessBegan(START + at, **{"job": "job", "who": "coordinator", **more}))

    def process_ended(self, at: float, **more: Any) -> EventLogBuilder:
        return self.add(ProcessEnded(START + at, **{"who": "coordinator", "how": "finished", **more}))

    def world_formed(
        self, at: float, *, epoch: int = 0, ranks: int = 1, how: str = "start", **more: Any
    ) -> EventLogBuilder:
        return self.add(WorldFormed(START + at, epoch, ranks, how=how, **more))

    def steps(
        self, first: int, count: int, *, at: float, each: float = 1.0, epoch: int = 0, **more: Any
    ) -> EventLogBuilder:
        return self.add(*(StepEvent(epoch, 0, first + n, START + at + n * each, each, **more) for n in range(count)))

    def stage(
        self, name: str, at: float, took: float, *, epoch: int = 0, rank: int = 0, **more: Any
    ) -> EventLogBuilder:
        return self.add(StageEvent(epoch, rank, name, START + at, took, **more))

    def fault(self, at: float, *, epoch: int = 0, since: float | None = None, **more: Any) -> EventLogBuilder:
        since = None if since is None else START + since
        return self.add(FaultEvent(START + at, epoch, since=since, **{"kind": "process", "reason": "SIGKILL", **more}))

    def fault_injected(self, at: float, kind: str, **more: Any) -> EventLogBuilder:
        return self.add(FaultInjected(START + at, kind, **more))

    def stop_requested(self, at: float, *, epoch: int = 0, **more: Any) -> EventLogBuilder:
        return self.add(StopRequested(START + at, epoch, **more))

    def save(self, step: int, *, at: float, took: float, epoch: int = 0) -> EventLogBuilder:
        return self.add(SaveEvent(0, step, "staged", START + at, took, epoch))

    def restored(self, step: int, *, at: float, took: float = 0.0, epoch: int = 0, **more: Any) -> EventLogBuilder:
        mode = "snapshot" if step >= 0 else "nothing"
        return self.add(RestoreEvent(0, step, mode, START + at, took, epoch=epoch, **more))

    def protection(self, step: int, *, at: float, since: float | None = None, left_out: int = 0) -> EventLogBuilder:
        return self.add(Protection(START + at, step, None if since is None else START + since, left_out))
