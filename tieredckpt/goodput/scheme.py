"""How a job saves, and what a fault costs it. Pure values.

A fault is of one of three kinds, by what it takes with it:

- ``live``: the survivors still hold everything; at most the step that was being computed is lost.
- ``snapshot``: the newest save that is in memory is gone back to.
- ``durable``: memory is gone as well; the newest durable save is gone back to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tieredckpt.errors import UsageError


@dataclass(frozen=True)
class Faults:
    """One kind of faults: how many of all are of it, and how long coming back takes."""

    share: float
    recovery_s: float


@dataclass(frozen=True)
class Scheme:
    """``interval_s`` is work between two saves, without the save's own ``stall_s``."""

    interval_s: float
    stall_s: float
    snapshot: Faults
    live: Faults = Faults(0.0, 0.0)
    durable: Faults = Faults(0.0, 0.0)
    durable_every: int = 1
    """Every so manieth save is durable as well."""
    step_s: float = 0.0
    """What a live fault repeats; 0: nothing. The interval is then a whole number of steps."""

    def __post_init__(self) -> None:
        positive = [("interval_s", self.interval_s)]
        others = [("stall_s", self.stall_s), ("step_s", self.step_s)]
        for name, kind in (("snapshot", self.snapshot), ("live", self.live), ("durable", self.durable)):
            others += [(f"{name}.share", kind.share), (f"{name}.recovery_s", kind.recovery_s)]
        for name, value in positive + others:
            if not math.isfinite(value) or value < 0 or (value == 0 and (name, value) in positive):
                raise UsageError(f"{name} is {value}: it must be a finite number, and not negative")
        total = self.snapshot.share + self.live.share + self.durable.share
        if abs(total - 1) > 1e-9:
            raise UsageError(f"the shares of live, snapshot and durable faults make {total:g}, not 1")
        if self.durable_every < 1:
            raise UsageError(f"durable_every is {self.durable_every}: it must be 1 or more")
        if self.step_s and abs(self.interval_s / self.step_s - self.steps) > 1e-6:
            raise UsageError(
                f"an interval of {self.interval_s:g} s is not a whole number of steps of {self.step_s:g} s"
            )

    @property
    def steps(self) -> int:
        """Steps between two saves; 0 where the length of a step plays no part."""
        return max(1, round(self.interval_s / self.step_s)) if self.step_s else 0

    @property
    def saves(self) -> int:
        """Saves from one that every kind of fault leaves to the next."""
        return self.durable_every if self.durable.share else 1

    @property
    def round_s(self) -> float:
        """Work from one save that every kind of fault leaves to the next."""
        return self.saves * self.interval_s

    @property
    def mean_recovery_s(self) -> float:
        return sum(one.share * one.recovery_s for one in (self.live, self.snapshot, self.durable))

    def every(self, interval_s: float) -> Scheme:
        """With this interval, or the nearest that is whole steps."""
        if self.step_s:
            interval_s = max(1, round(interval_s / self.step_s)) * self.step_s
        return replace(self, interval_s=interval_s)


def restarting(interval_s: float, stall_s: float, recovery_s: float) -> Scheme:
    """Every fault ends all processes; they start again and load the newest checkpoint."""
    return Scheme(interval_s, stall_s, Faults(1.0, recovery_s))
