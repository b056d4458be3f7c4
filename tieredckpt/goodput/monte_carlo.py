"""Expected goodput by simulation of random faults, spares and resizes (numpy).

All nodes of a job fail at the same rate, at any time, also during a recovery. :class:`CheckpointScheme` defines the
work that each kind of fault loses. A fault may remove its node until it is repaired. A spare replaces the node. Without
a spare the job continues with fewer nodes, and below ``min_nodes`` it waits for a repair.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tieredckpt.errors import UsageError
from tieredckpt.goodput.expected_goodput import CheckpointScheme, expected_goodput, expected_round_s

Floats = NDArray[np.float64]
_CLOSE = 1e-7
"""Tolerance for rounding, as a share of an interval, of work that was reset to a save."""


@dataclass(frozen=True)
class SimulatedNodes:
    """Nodes of the simulated job.

    ``mtbf_s``: mean seconds between failures of the whole job, with all nodes.
    """

    mtbf_s: float
    count: int = 1
    spares: int = 0
    min_nodes: int = 1
    """The job waits while it has fewer nodes than this."""
    node_loss_share: float = 0.0
    """Share of faults that remove the node."""
    repair_s: float = 0.0
    """Mean seconds until a removed node is repaired."""
    resize_s: float = 0.0
    """Seconds that the job pauses to add a repaired node."""

    def __post_init__(self) -> None:
        if self.node_loss_share and not self.repair_s:
            raise UsageError("node_loss_share needs repair_s, the mean seconds until a removed node is repaired")
        if not 1 <= self.min_nodes <= self.count:
            raise UsageError(f"min_nodes is {self.min_nodes} and must be from 1 to the job's {self.count} nodes")


@dataclass(frozen=True)
class SimulatedRuns:
    """Times of all runs in seconds, and their numbers of faults. ``work_s``: work of each run."""

    work_s: float
    elapsed: Floats
    faults: Floats
    stalled: Floats
    repeated: Floats
    recovering: Floats
    waiting: Floats
    smaller: Floats
    """Extra seconds because of missing nodes."""

    @property
    def goodput(self) -> float:
        return self.work_s / float(self.elapsed.mean())

    @property
    def standard_error(self) -> float:
        """The standard error of :attr:`goodput`."""
        runs = len(self.elapsed)
        spread = float(self.elapsed.std(ddof=1)) if runs > 1 else 0.0
        return self.goodput * spread / float(self.elapsed.mean()) / runs**0.5

    def percentiles(self, low: float, high: float) -> tuple[float, float]:
        """Return the goodput of single runs at the percentiles ``low`` and ``high``, as shares from 0 to 1."""
        return tuple(self.work_s / float(one) for one in np.quantile(self.elapsed, [1 - low, 1 - high]))  # type: ignore[return-value]


class _Phase(enum.IntEnum):
    WORK = 0
    RECOVER = 1
    WAIT = 2


def simulate_runs(
    scheme: CheckpointScheme, nodes: SimulatedNodes, *, rounds: int, runs: int, seed: int
) -> SimulatedRuns:
    """Simulate ``runs`` histories of a job with ``rounds`` rounds of :class:`CheckpointScheme`."""
    return _Simulation(scheme, nodes, rounds, runs, np.random.default_rng(seed)).run()


class _Simulation:
    """Simulation of all runs as arrays: each turn advances every unfinished run by one event."""

    def __init__(
        self, scheme: CheckpointScheme, nodes: SimulatedNodes, rounds: int, runs: int, rng: np.random.Generator
    ) -> None:
        self._scheme, self._nodes, self._rounds, self._rng = scheme, nodes, rounds, rng
        self._save_s = scheme.interval_s + scheme.stall_s
        self._goal = rounds * scheme.saves_per_round * self._save_s
        self._recovery = np.array([0.0] + [one.recovery_s for one in (scheme.live, scheme.snapshot, scheme.durable)])
        self._kinds = np.array([scheme.live.share, 1 - scheme.durable.share])
        self._done = np.zeros(runs)
        self._phase = np.full(runs, _Phase.WORK)
        self._left = np.zeros(runs)
        self._kind = np.zeros(runs, dtype=np.int64)
        self._up = np.full(runs, nodes.count)
        self._spare = np.full(runs, nodes.spares)
        self._away = np.zeros(runs, dtype=np.int64)
        self._elapsed, self._faults, self._repeated = np.zeros(runs), np.zeros(runs), np.zeros(runs)
        self._recovering, self._waiting, self._smaller = np.zeros(runs), np.zeros(runs), np.zeros(runs)

    def run(self) -> SimulatedRuns:
        while (running := self._done < self._goal).any():
            self._next_event(running)
        rounds = self._rounds * self._scheme.saves_per_round
        return SimulatedRuns(
            work_s=rounds * self._scheme.interval_s,
            elapsed=self._elapsed,
            faults=self._faults,
            stalled=np.full_like(self._elapsed, rounds * self._scheme.stall_s),
            repeated=self._repeated,
            recovering=self._recovering,
            waiting=self._waiting,
            smaller=self._smaller,
        )

    def _next_event(self, running: NDArray[np.bool_]) -> None:
        working, waiting = self._phase == _Phase.WORK, self._phase == _Phase.WAIT
        speed = self._up / self._nodes.count
        often = np.where(waiting, 0.0, speed / self._nodes.mtbf_s)
        back = self._away / self._nodes.repair_s if self._nodes.repair_s else np.zeros_like(often)
        with np.errstate(divide="ignore"):
            until_event = self._rng.standard_exponential(len(often)) / (often + back)
            until_done = np.where(working, (self._goal - self._done) / speed, np.where(waiting, np.inf, self._left))
        happens = running & (until_event < until_done)
        passed = np.where(running, np.minimum(until_event, until_done), 0.0)
        self._advance(passed, working, waiting, speed, running & ~happens)
        comes_back = happens & (self._rng.random(len(often)) * (often + back) < back)
        self._fault(np.flatnonzero(happens & ~comes_back))
        if self._nodes.repair_s:
            self._return_node(np.flatnonzero(comes_back))

    def _advance(
        self,
        passed: Floats,
        working: NDArray[np.bool_],
        waiting: NDArray[np.bool_],
        speed: Floats,
        ended: NDArray[np.bool_],
    ) -> None:
        worked = np.where(working, passed, 0.0)
        self._elapsed += passed
        self._done += worked * speed
        self._smaller += worked * (1 - speed)
        self._waiting += np.where(waiting, passed, 0.0)
        recovering = ~working & ~waiting
        self._recovering += np.where(recovering, passed, 0.0)
        self._left -= np.where(recovering, passed, 0.0)
        self._done[ended & working] = self._goal
        recovered = ended & recovering
        self._phase[recovered] = _Phase.WORK
        self._kind[recovered] = 0

    def _fault(self, runs: NDArray[np.intp]) -> None:
        self._faults[runs] += 1
        kind = 1 + np.searchsorted(self._kinds, self._rng.random(len(runs)), side="right")
        # A fault during the recovery from a worse one loses nothing more.
        self._kind[runs] = np.maximum(self._kind[runs], kind)
        before = self._done[runs]
        self._done[runs] = self._work_after_fault(before, self._kind[runs])
        self._repeated[runs] += before - self._done[runs]
        if self._nodes.node_loss_share:
            self._lose_node(runs[self._rng.random(len(runs)) < self._nodes.node_loss_share])
        self._recover(runs)

    def _work_after_fault(self, done: Floats, kind: NDArray[np.int64]) -> Floats:
        scheme, save_s = self._scheme, self._save_s
        last_save = np.floor(done / save_s + _CLOSE) * save_s
        round_s = scheme.saves_per_round * save_s
        last_round = np.floor(done / round_s + _CLOSE) * round_s
        live = done
        if scheme.step_s:
            since = done - last_save
            at_step = np.floor(since / scheme.step_s + _CLOSE) * scheme.step_s
            live = last_save + np.where(since >= scheme.interval_s, scheme.interval_s, at_step)
        return np.minimum(done, np.choose(kind - 1, [live, last_save, last_round]))

    def _lose_node(self, runs: NDArray[np.intp]) -> None:
        self._away[runs] += 1
        replaced = self._spare[runs] > 0
        self._spare[runs[replaced]] -= 1
        self._up[runs[~replaced]] -= 1

    def _recover(self, runs: NDArray[np.intp]) -> None:
        enough = self._up[runs] >= self._nodes.min_nodes
        self._phase[runs] = np.where(enough, _Phase.RECOVER, _Phase.WAIT)
        self._left[runs] = self._recovery[self._kind[runs]]

    def _return_node(self, runs: NDArray[np.intp]) -> None:
        """Return a repaired node to each run of ``runs``: without a pause while the run waits or recovers."""
        self._away[runs] -= 1
        short = self._up[runs] < self._nodes.count
        self._spare[runs[~short]] += 1
        self._up[runs[short]] += 1
        phase = self._phase[runs]
        self._recover(runs[phase == _Phase.WAIT])
        grows = runs[short & (phase == _Phase.WORK)]
        self._phase[grows] = _Phase.RECOVER
        self._left[grows] = self._nodes.resize_s


MAX_SIMULATED_FAULTS = 10_000
"""Expected faults above which a run is not simulated: such a job makes no progress."""


@dataclass(frozen=True)
class GoodputForecast:
    scheme: CheckpointScheme
    nodes: SimulatedNodes
    rounds: int
    closed_form: float
    """Goodput in closed form, which ignores missing nodes."""
    simulated: SimulatedRuns | None

    @property
    def work_s(self) -> float:
        return self.rounds * self.scheme.round_s

    @property
    def goodput(self) -> float:
        return self.closed_form if self.simulated is None else self.simulated.goodput

    @property
    def confidence_95(self) -> float:
        """Half the width of the 95 % confidence interval of the simulated goodput."""
        return 0.0 if self.simulated is None else 1.96 * self.simulated.standard_error

    @property
    def is_comparable(self) -> bool:
        """Whether simulation and closed form model the same job."""
        return self.simulated is not None and not self.nodes.node_loss_share

    @property
    def deviation_sigmas(self) -> float:
        """Difference between the two, in standard errors of the simulation."""
        if self.simulated is None or not self.simulated.standard_error:
            return 0.0
        return abs(self.simulated.goodput - self.closed_form) / self.simulated.standard_error


def forecast_goodput(
    scheme: CheckpointScheme, nodes: SimulatedNodes, *, work_s: float, runs: int, seed: int
) -> GoodputForecast:
    """Return the forecast for a job with at least ``work_s`` seconds of work, rounded up to whole rounds."""
    rounds = max(1, math.ceil(work_s / scheme.round_s - 1e-9))
    faults = rounds * expected_round_s(scheme, nodes.mtbf_s) / nodes.mtbf_s
    simulated = (
        simulate_runs(scheme, nodes, rounds=rounds, runs=runs, seed=seed) if faults <= MAX_SIMULATED_FAULTS else None
    )
    return GoodputForecast(scheme, nodes, rounds, expected_goodput(scheme, nodes.mtbf_s), simulated)
