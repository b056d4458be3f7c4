"""What a run of the past says about runs to come: from its ledger."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tieredckpt.errors import UsageError
from tieredckpt.goodput import Analysis, Category, analyse
from tieredckpt.ledger import read_ledger
from tieredckpt.ledger.events import STAGES


@dataclass(frozen=True)
class Measured:
    """Means, since what a recovery takes on average is what goodput depends on."""

    recoveries: int
    stages: dict[str, float]
    """Seconds; their sum is the mean recovery."""
    stall_s: float | None
    """What a save held training up; ``None`` where there was none."""


def measure(directory: Path) -> Measured:
    """Of a ledger, as errors of :func:`read_ledger`; a run that never recovered says nothing about recoveries."""
    read = read_ledger(directory)
    found = of(analyse(read.events))
    if not found.recoveries:
        raise UsageError(f"--from {directory}: nothing was recovered from in that run; say --recovery or --stage")
    return found


def of(analysis: Analysis) -> Measured:
    """The same of an analysis."""
    ways = [way for way in analysis.recoveries if way.category is Category.RECOVERY and way.resumed]
    order = {name: place for place, name in enumerate(STAGES)}
    names = sorted({name for way in ways for name in way.stages}, key=lambda name: (order.get(name, len(order)), name))
    stages = {name: sum(way.stages.get(name, 0.0) for way in ways) / len(ways) for name in names}
    saves = analysis.save_s
    return Measured(len(ways), stages, saves.sum_s / saves.count if saves.count else None)
