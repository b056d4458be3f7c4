"""The record and the summary of a run of many seeds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from tests.faults.seed import FaultTiming, SeedOutcome


class FaultLine(msgspec.Struct, frozen=True, tag="fault"):
    seed: int
    hosts: bool
    took: FaultTiming


class SeedLine(msgspec.Struct, frozen=True, tag="seed"):
    """The last line of a seed, which marks it as done."""

    outcome: SeedOutcome


class Record:
    """A file with the outcomes of finished seeds, which a later run continues."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, outcome: SeedOutcome) -> None:
        lines = [FaultLine(outcome.seed, outcome.hosts, one) for one in outcome.took]
        done = SeedLine(msgspec.structs.replace(outcome, took=()))
        text = b"".join(msgspec.json.encode(one) + b"\n" for one in (*lines, done))
        with self._path.open("ab") as file:
            file.write(text)

    def read(self) -> list[SeedOutcome]:
        """Return the outcomes of all finished seeds, with their faults."""
        if not self._path.exists():
            return []
        took: dict[tuple[int, bool], list[FaultTiming]] = defaultdict(list)
        found = []
        for line in self._path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                continue
            one = msgspec.json.decode(line, type=FaultLine | SeedLine)
            if isinstance(one, FaultLine):
                took[one.seed, one.hosts].append(one.took)
            else:
                key = one.outcome.seed, one.outcome.hosts
                found.append(msgspec.structs.replace(one.outcome, took=tuple(took.pop(key, ()))))
        return found


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile by the nearest-rank method."""
    return sorted(values)[max(0, math.ceil(len(values) * share) - 1)]


def quantile_row(name: str, values: Sequence[float]) -> str:
    p50, p90, p99 = (quantile(values, share) for share in (0.5, 0.9, 0.99))
    return f"{name:24} {len(values):6} {p50:8.1f} {p90:8.1f} {p99:8.1f} {max(values):8.1f}"


def summary(outcomes: Sequence[SeedOutcome]) -> str:
    took = [one for outcome in outcomes for one in outcome.took]
    by_kind, by_stage = defaultdict(list), defaultdict(list)
    for one in took:
        if one.seconds is not None:
            by_kind[one.fault.kind.value].append(one.seconds)
        for stage, seconds in one.stages.items():
            by_stage[stage].append(seconds)
    head = f"{{:24}} {'count':>6} {'p50':>8} {'p90':>8} {'p99':>8} {'max':>8}"
    missed, wrong = sum(one.missed for one in outcomes), sum(bool(one.violations) for one in outcomes)
    lines = [
        (
            f"figure: {len(took)} faults in {len(outcomes)} seeds, {missed} more without a target, {wrong} seeds with "
            f"violations; the machine's load {_range_text([one.load for one in outcomes])}"
        ),
        head.format("seconds to a new step"),
        *(quantile_row(name, values) for name, values in sorted(by_kind.items())),
    ]
    if every := [seconds for values in by_kind.values() for seconds in values]:
        lines.append(f"figure: {quantile_row('all, to a new step', every)}")
    lines += [
        head.format("of which, by stage"),
        *(quantile_row(name, values) for name, values in sorted(by_stage.items())),
    ]
    for one in outcomes:
        lines += [f"VIOLATION, seed {one.seed}: {found.rule}: {found.words}" for found in one.violations]
    return "\n".join(lines)


def _range_text(values: Iterable[float]) -> str:
    known = sorted(values)
    return f"{known[0]:.1f} to {known[-1]:.1f}" if known else "unknown"
