"""Steps, throughput and pauses of a run, from its ranks' records. Pure functions."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

Line = dict[str, Any]


class Step(NamedTuple):
    """A committed step; of a repeated step, the last run."""

    step: int
    at_s: float
    """Seconds from the first world to the end of the step on its last rank."""
    size: int
    epoch: int
    tokens: int
    loss: str
    """Loss as a hexadecimal float."""


class World(NamedTuple):
    epoch: int
    size: int
    at_s: float
    """Seconds from the first world until the last rank had entered and restored."""
    first: int
    reason: str
    tiers: dict[str, int]
    """Restored bytes of all ranks by tier."""


class Gap(NamedTuple):
    """The time between two consecutive steps."""

    seconds: float
    after: int
    at_s: float
    of: str
    """Reason for the new world between them; empty without a new world."""


def steps_of(lines: Sequence[Line], began: float) -> list[Step]:
    """Return the committed steps in order."""
    done: dict[int, dict[int, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if line["what"] == "step":
            done[line["step"]][line["epoch"]].append(line)
    found = []
    for step, worlds in sorted(done.items()):
        whole = {epoch: those for epoch, those in worlds.items() if len(those) == those[0]["size"]}
        if not whole:
            continue
        epoch, those = max(whole.items())
        if len({line["loss"] for line in those}) > 1:
            raise ValueError(f"ranks do not agree on the loss of step {step}")
        last = max(line["at"] for line in those)
        found.append(Step(step, last - began, those[0]["size"], epoch, those[0]["tokens"], those[0]["loss"]))
    return found


def worlds_of(lines: Sequence[Line], began: float) -> list[World]:
    """Return the worlds that all their ranks entered."""
    entered: dict[int, list[Line]] = defaultdict(list)
    for line in lines:
        if line["what"] == "world":
            entered[line["epoch"]].append(line)
    found = []
    for epoch, those in sorted(entered.items()):
        if len(those) != those[0]["size"]:
            continue
        tiers: dict[str, int] = defaultdict(int)
        for line in those:
            for tier, count in line["tiers"].items():
                tiers[tier] += count
        last = max(those, key=lambda line: line["at"])
        found.append(World(epoch, last["size"], last["at"] - began, last["first"], last["reason"], dict(tiers)))
    return found


def repeated(lines: Iterable[Line]) -> list[int]:
    """Return the steps that ran in more than one world."""
    epochs: dict[int, set[int]] = defaultdict(set)
    for line in lines:
        if line["what"] == "step":
            epochs[line["step"]].add(line["epoch"])
    return [step for step, those in sorted(epochs.items()) if len(those) > 1]


def gaps_of(steps: Sequence[Step], worlds: Sequence[World]) -> list[Gap]:
    """Return the gaps between steps, longest first."""
    reasons = {world.epoch: world.reason for world in worlds}
    gaps = [
        Gap(
            two.at_s - one.at_s,
            one.step,
            one.at_s,
            "; ".join(reasons[epoch] for epoch in range(one.epoch + 1, two.epoch + 1) if epoch in reasons),
        )
        for one, two in itertools.pairwise(steps)
    ]
    return sorted(gaps, key=lambda gap: -gap.seconds)


def by_size(steps: Sequence[Step]) -> dict[int, dict[str, float]]:
    """Return the median tokens per second between two steps of one world, by its number of ranks."""
    rates: dict[int, list[float]] = defaultdict(list)
    for one, two in itertools.pairwise(steps):
        if one.epoch == two.epoch:
            rates[two.size].append(two.tokens / (two.at_s - one.at_s))
    return {
        size: {"steps": len(those), "tokens_per_s": round(statistics.median(those), 1)}
        for size, those in sorted(rates.items())
    }
