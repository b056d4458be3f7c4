"""What goodput a job will have: worked out, and played many times. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tieredckpt.goodput.closed_form import expected_goodput, expected_s
from tieredckpt.goodput.histories import Histories, Nodes, play
from tieredckpt.goodput.scheme import Scheme

MOST_FAULTS = 10_000
"""More faults than this in a run are not played: it would take long, and such a job gets nowhere."""


@dataclass(frozen=True)
class Forecast:
    scheme: Scheme
    nodes: Nodes
    rounds: int
    expected: float
    """The goodput that is worked out; it knows no missing nodes."""
    played: Histories | None

    @property
    def work_s(self) -> float:
        return self.rounds * self.scheme.round_s

    @property
    def goodput(self) -> float:
        return self.expected if self.played is None else self.played.goodput

    @property
    def error(self) -> float:
        """Half of the 95 % interval of the mean that was played."""
        return 0.0 if self.played is None else 1.96 * self.played.error

    @property
    def comparable(self) -> bool:
        """Whether what was played is what was worked out."""
        return self.played is not None and not self.nodes.broken

    @property
    def apart(self) -> float:
        """By how many standard errors the two differ."""
        if self.played is None or not self.played.error:
            return 0.0
        return abs(self.played.goodput - self.expected) / self.played.error


def foretell(scheme: Scheme, nodes: Nodes, *, work_s: float, runs: int, seed: int) -> Forecast:
    """A job that does at least ``work_s`` of work, to the next save that every kind of fault leaves."""
    rounds = max(1, math.ceil(work_s / scheme.round_s - 1e-9))
    faults = rounds * expected_s(scheme, nodes.mtbf_s) / nodes.mtbf_s
    played = play(scheme, nodes, rounds=rounds, runs=runs, seed=seed) if faults <= MOST_FAULTS else None
    return Forecast(scheme, nodes, rounds, expected_goodput(scheme, nodes.mtbf_s), played)
