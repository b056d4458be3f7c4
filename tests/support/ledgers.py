"""Ledgers made by hand: what happened, in seconds from an arbitrary start."""

from __future__ import annotations

from typing import Any

from tieredckpt.ledger.events import (
    Began,
    Ended,
    Event,
    Fault,
    Injected,
    Notice,
    Protection,
    Restored,
    Save,
    Stage,
    Step,
    WorldFormed,
)

START = 1_700_000_000


class Told:
    """What was told so far; every method adds to it."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    @staticmethod
    def us(at: float) -> int:
        return round((START + at) * 1_000_000)

    def add(self, *events: Event) -> Told:
        self.events += events
        return self

    def began(self, at: float, **more: Any) -> Told:
        return self.add(Began(START + at, **{"job": "job", "who": "coordinator", **more}))

    def ended(self, at: float, **more: Any) -> Told:
        return self.add(Ended(START + at, **{"who": "coordinator", "how": "finished", **more}))

    def world(self, at: float, *, epoch: int = 0, ranks: int = 1, how: str = "start", **more: Any) -> Told:
        return self.add(WorldFormed(START + at, epoch, ranks, how=how, **more))

    def steps(self, first: int, count: int, *, at: float, each: float = 1.0, epoch: int = 0, **more: Any) -> Told:
        return self.add(*(Step(epoch, 0, first + n, START + at + n * each, each, **more) for n in range(count)))

    def stage(self, name: str, at: float, took: float, *, epoch: int = 0, rank: int = 0, **more: Any) -> Told:
        return self.add(Stage(epoch, rank, name, START + at, took, **more))

    def fault(self, at: float, *, epoch: int = 0, since: float | None = None, **more: Any) -> Told:
        since = None if since is None else START + since
        return self.add(Fault(START + at, epoch, since=since, **{"kind": "process", "reason": "SIGKILL", **more}))

    def injected(self, at: float, kind: str, **more: Any) -> Told:
        return self.add(Injected(START + at, kind, **more))

    def notice(self, at: float, *, epoch: int = 0, **more: Any) -> Told:
        return self.add(Notice(START + at, epoch, **more))

    def save(self, step: int, *, at: float, took: float, epoch: int = 0) -> Told:
        return self.add(Save(0, step, "staged", START + at, took, epoch))

    def restored(self, step: int, *, at: float, took: float = 0.0, epoch: int = 0, **more: Any) -> Told:
        mode = "snapshot" if step >= 0 else "nothing"
        return self.add(Restored(0, step, mode, START + at, took, epoch=epoch, **more))

    def protection(self, step: int, *, at: float, since: float | None = None, left_out: int = 0) -> Told:
        return self.add(Protection(START + at, step, None if since is None else START + since, left_out))
