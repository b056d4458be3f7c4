"""What an analysis knows while it is being made."""

from __future__ import annotations

from dataclasses import dataclass, field

from tieredckpt.goodput.counting import Done
from tieredckpt.goodput.model import Category, FaultView, Interval
from tieredckpt.goodput.runs import Run, Way
from tieredckpt.ledger.events import Stage


@dataclass
class Told:
    """A way, with what was found out about it."""

    way: Way
    faults: tuple[FaultView, ...]
    stages: list[Stage]
    began: int
    slow_us: int = 0
    """How much longer its world's first step took than one usually does."""
    steps_lost: int = 0
    lost_us: int = 0


@dataclass
class Findings:
    """All of it."""

    job: str
    runs: list[Run]
    done: list[Done]
    complaints: tuple[str, ...]
    told: list[Told] = field(default_factory=list)
    timeline: list[Interval] = field(default_factory=list)
    spent: dict[tuple[Category, str], list[int]] = field(default_factory=dict)
    """What ranks spent in a stage, each of them in each world."""
