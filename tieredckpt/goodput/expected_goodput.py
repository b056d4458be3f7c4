"""Expected goodput in closed form: failure rates, costs of saves and faults, best checkpoint interval.

Pure.

A fault has one of three kinds, by the state that it destroys:

- ``live``: the survivors still hold the whole state; at most the current step is lost.
- ``snapshot``: the job restores the newest save in memory.
- ``durable``: memory is lost as well; the job restores the newest durable save.

With one kind of faults goodput is ``T / (M e^{R/M} (e^{(T+d)/M} - 1))`` with interval T, mean time between failures M,
recovery R and stall d. :func:`expected_round_s` generalizes this to several kinds of faults. Between two durable saves
the expected remaining time is a linear function of itself, so it is solved, not iterated. Neither covers spares,
smaller worlds or waiting for a node; ``monte_carlo.py`` simulates them.

A short interval costs many stalls, a long one repeats much work after a fault. Between them goodput has one maximum.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tieredckpt.errors import UsageError

DAY_S = 86400.0


class MtbfUnit(enum.Enum):
    """Object that a mean time between failures refers to."""

    GPU = "gpu"
    NODE = "node"
    JOB = "job"


@dataclass(frozen=True)
class Mtbf:
    """Mean time between failures of one GPU, one node or the whole job."""

    seconds: float
    per: MtbfUnit

    def for_job(self, gpus: int, gpus_per_node: int) -> float:
        """Return the mean time between failures, in seconds, of a job on ``gpus`` GPUs."""
        if self.per is MtbfUnit.JOB:
            return self.seconds
        return self.seconds / (gpus if self.per is MtbfUnit.GPU else gpus / gpus_per_node)


MTBF_PRESETS = {"llama-3": Mtbf(54 * DAY_S * 16384 / 419, MtbfUnit.GPU)}
"""``llama-3``: 419 unexpected interruptions in 54 days on 16,384 GPUs.

Source: "The Llama 3 Herd of Models", table 5.
"""


@dataclass(frozen=True)
class FaultCost:
    """One kind of faults: its share of all faults, and the seconds that a recovery takes."""

    share: float
    recovery_s: float


@dataclass(frozen=True)
class CheckpointScheme:
    """Checkpoint scheme of a job.

    ``interval_s``: seconds of work between two saves, without their ``stall_s``.
    """

    interval_s: float
    stall_s: float
    snapshot: FaultCost
    live: FaultCost = FaultCost(0.0, 0.0)
    durable: FaultCost = FaultCost(0.0, 0.0)
    durable_every: int = 1
    """Saves per durable save: every n-th save is durable as well."""
    step_s: float = 0.0
    """Seconds of a step, which a live fault repeats; an interval is a multiple of it.
    0: a live fault repeats nothing."""

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
        if self.step_s and abs(self.interval_s / self.step_s - self.steps_per_interval) > 1e-6:
            raise UsageError(
                f"an interval of {self.interval_s:g} s is not a whole number of steps of {self.step_s:g} s"
            )

    @property
    def steps_per_interval(self) -> int:
        """Steps between two saves. 0: steps have no length."""
        return max(1, round(self.interval_s / self.step_s)) if self.step_s else 0

    @property
    def saves_per_round(self) -> int:
        """Saves per round. A round lasts from one save that survives every kind of fault to the next."""
        return self.durable_every if self.durable.share else 1

    @property
    def round_s(self) -> float:
        """Seconds of work per round."""
        return self.saves_per_round * self.interval_s

    @property
    def mean_recovery_s(self) -> float:
        return sum(one.share * one.recovery_s for one in (self.live, self.snapshot, self.durable))

    def with_interval(self, interval_s: float) -> CheckpointScheme:
        """Return the scheme with this interval, rounded to a multiple of a step."""
        if self.step_s:
            interval_s = max(1, round(interval_s / self.step_s)) * self.step_s
        return replace(self, interval_s=interval_s)


def restart_scheme(interval_s: float, stall_s: float, recovery_s: float) -> CheckpointScheme:
    """Return a scheme in which every fault restarts all processes from the newest checkpoint."""
    return CheckpointScheme(interval_s, stall_s, FaultCost(1.0, recovery_s))


def longest_recovery_s(mtbf_s: float, wanted: float) -> float:
    """Return the longest recovery, in seconds, for goodput ``wanted`` if saves and lost work cost nothing."""
    return -mtbf_s * math.log(wanted)


def expected_goodput(scheme: CheckpointScheme, mtbf_s: float) -> float:
    """Return the long-run share of time in work that is not repeated."""
    spent = expected_round_s(scheme, mtbf_s)
    return scheme.round_s / spent if math.isfinite(spent) else 0.0


def expected_round_s(scheme: CheckpointScheme, mtbf_s: float) -> float:
    """Return the expected seconds of a round. Infinite: the job never completes one."""
    try:
        return _Terms(scheme, mtbf_s).round()
    except (OverflowError, ZeroDivisionError):
        return math.inf


_NEVER = 1e-290
"""Probability below which a fault is ignored: quotients of smaller ones are not representable."""


@dataclass(frozen=True)
class _Piece:
    """A piece of work: its expected remaining time, as a linear function of the time from other states.

    ``left = ahead * (left at its end) + cost + back * (left after snapshot fault) + far * (left after durable fault)``.
    ``ahead + back + far`` is 1. All three are stored: each can be too small to compute it from the others.
    """

    ahead: float
    cost: float
    back: float
    far: float

    def times(self, count: int) -> _Piece:
        factor = _sum(self.back + self.far, count)
        return _Piece(self.ahead**count, self.cost * factor, self.back * factor, self.far * factor)

    def then(self, other: _Piece) -> _Piece:
        back, far = self.back + self.ahead * other.back, self.far + self.ahead * other.far
        return _Piece(self.ahead * other.ahead, self.cost + self.ahead * other.cost, back, far)


class _Terms:
    def __init__(self, scheme: CheckpointScheme, mtbf_s: float) -> None:
        self._scheme = scheme
        self._mtbf_s = mtbf_s
        self._live, self._back, self._far = scheme.live.share, scheme.snapshot.share, scheme.durable.share

    def round(self) -> float:
        scheme, mtbf = self._scheme, self._mtbf_s
        if scheme.step_s:
            piece = self._step(scheme.step_s).times(scheme.steps_per_interval).then(self._step(scheme.stall_s))
        else:
            piece = self._flow(scheme.interval_s + scheme.stall_s)
        cost = far = 0.0
        if piece.back:
            # Expected time left in a snapshot recovery: ``cost + (1 - far) * at_save + far * durable``, from the times
            # left at the last save and in a durable recovery.
            hit = -math.expm1(-scheme.snapshot.recovery_s / mtbf)
            stays = math.exp(-scheme.snapshot.recovery_s / mtbf) + hit * self._far
            cost, far = mtbf * hit / stays, hit * self._far / stays
        # Substituted into the piece, this leads from one save to the next.
        stays = piece.ahead + piece.far + piece.back * far
        ahead, cost, far = (one / stays for one in (piece.ahead, piece.cost + piece.back * cost, stays - piece.ahead))
        # Every fault restarts a durable recovery, which ends at the start of the round.
        once = mtbf * math.expm1(scheme.durable.recovery_s / mtbf) if self._far else 0.0
        factor = _sum(far, scheme.saves_per_round)
        return (cost + far * once) * factor / ahead**scheme.saves_per_round

    def _in_live(self) -> tuple[float, float, float]:
        """Return the expected seconds of a live recovery, and the chances of worse faults in it."""
        hit = -math.expm1(-self._scheme.live.recovery_s / self._mtbf_s)
        stays = math.exp(-self._scheme.live.recovery_s / self._mtbf_s) + hit * (self._back + self._far)
        return self._mtbf_s * hit / stays, hit * self._back / stays, hit * self._far / stays

    def _step(self, length_s: float) -> _Piece:
        """Return the piece for work that a live fault restarts."""
        hit = -math.expm1(-length_s / self._mtbf_s)
        ahead = math.exp(-length_s / self._mtbf_s)
        time, back, far = self._in_live()
        back, far = hit * (self._back + self._live * back), hit * (self._far + self._live * far)
        stays = ahead + back + far
        return _Piece(ahead / stays, hit * (self._mtbf_s + self._live * time) / stays, back / stays, far / stays)

    def _flow(self, length_s: float) -> _Piece:
        """Return the piece for work that a live fault only interrupts."""
        time, back, far = self._in_live()
        slower = 1 + self._live * time / self._mtbf_s
        back, far = self._back + self._live * back, self._far + self._live * far
        ahead = math.exp(-(back + far) * length_s / self._mtbf_s)
        away = -math.expm1(-(back + far) * length_s / self._mtbf_s)
        if away < _NEVER:
            return _Piece(1.0, slower * length_s, 0.0, 0.0)
        cost = slower * self._mtbf_s * (away / (back + far))
        return _Piece(ahead, cost, away * back / (back + far), away * far / (back + far))


def _sum(away: float, count: int) -> float:
    """Return the sum of the first ``count`` terms of ``1 + q + q**2 + ...`` for ``q = 1 - away``."""
    if away >= 1:
        return 1.0
    return -math.expm1(count * math.log1p(-away)) / away if away else float(count)


_CANDIDATES = 400
_GOLDEN = (math.sqrt(5) - 1) / 2
INTERVAL_FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0, 16.0)


def has_best_interval(scheme: CheckpointScheme) -> bool:
    """Return whether a best interval exists: saves cost time, and so does the lack of them."""
    return scheme.live.share < 1 and (scheme.stall_s > 0 or scheme.step_s > 0)


def with_best_interval(scheme: CheckpointScheme, mtbf_s: float) -> CheckpointScheme:
    """Return the scheme with the interval of the highest goodput."""
    tried = sorted(_candidate_schemes(scheme, mtbf_s), key=lambda one: one.interval_s)
    worth = [expected_goodput(one, mtbf_s) for one in tried]
    top = worth.index(max(worth))
    shorter, longer = tried[max(0, top - 1)], tried[min(top + 1, len(tried) - 1)]
    if scheme.step_s:
        return _of_steps(scheme, mtbf_s, shorter.steps_per_interval, longer.steps_per_interval)
    return _between(scheme, mtbf_s, shorter.interval_s, longer.interval_s)


def goodput_by_interval(
    scheme: CheckpointScheme, mtbf_s: float, around: Sequence[float] = INTERVAL_FACTORS
) -> list[tuple[CheckpointScheme, float]]:
    """Return schemes with shorter and longer intervals, each with its expected goodput."""
    schemes = {one.interval_s: one for one in (scheme.with_interval(scheme.interval_s * factor) for factor in around)}
    return [(one, expected_goodput(one, mtbf_s)) for _, one in sorted(schemes.items())]


def _candidate_schemes(scheme: CheckpointScheme, mtbf_s: float) -> Iterator[CheckpointScheme]:
    """Yield candidates around Young's approximation, in multiples of a step.

    Live faults do not count: they need no save.
    """
    near = math.sqrt(2 * max(scheme.stall_s, 1e-6) * mtbf_s / max(1 - scheme.live.share, 1e-15))
    seen = set()
    for number in range(_CANDIDATES):
        one = scheme.with_interval(near * 1000 ** (2 * number / (_CANDIDATES - 1) - 1))
        if one.interval_s not in seen:
            seen.add(one.interval_s)
            yield one


def _of_steps(scheme: CheckpointScheme, mtbf_s: float, low: int, high: int) -> CheckpointScheme:
    """Return the best scheme between ``low`` and ``high`` steps, by ternary search."""

    def worth(steps: int) -> float:
        return expected_goodput(scheme.with_interval(steps * scheme.step_s), mtbf_s)

    while high - low > 2:
        left, right = low + (high - low) // 3, high - (high - low) // 3
        low, high = (low, right) if worth(left) >= worth(right) else (left, high)
    return scheme.with_interval(max(range(low, high + 1), key=worth) * scheme.step_s)


def _between(scheme: CheckpointScheme, mtbf_s: float, low: float, high: float) -> CheckpointScheme:
    """Return the best scheme between two intervals in seconds, by golden section on the logarithm."""

    def worth(at: float) -> float:
        return expected_goodput(scheme.with_interval(math.exp(at)), mtbf_s)

    low, high = math.log(low), math.log(high)
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    for _ in range(60):
        if worth(left) >= worth(right):
            high, right = right, left
            left = high - _GOLDEN * (high - low)
        else:
            low, left = left, right
            right = low + _GOLDEN * (high - low)
    return scheme.with_interval(math.exp((low + high) / 2))
