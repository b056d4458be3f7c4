"""Goodput that is worked out, for faults that come independently of each other and of everything else. Pure.

With one kind of faults it is the formula of :func:`goodput`. :func:`expected_s` is the same for a job whose faults are
of several kinds: between two durable saves the expected time that is left is linear in itself, so it is solved, not
iterated. Neither knows spares, smaller worlds or waiting for a node: those are simulated (``histories.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tieredckpt.goodput.scheme import Scheme


def goodput(*, mtbf_s: float, interval_s: float, stall_s: float, recovery_s: float) -> float:
    """``T / (M e^{R/M} (e^{(T+d)/M} - 1))``: the share of time that is work that stays."""
    try:
        spent = mtbf_s * math.exp(recovery_s / mtbf_s) * math.expm1((interval_s + stall_s) / mtbf_s)
    except OverflowError:
        return 0.0
    return interval_s / spent


def longest_recovery(mtbf_s: float, wanted: float) -> float:
    """How long a recovery may take, in seconds, for this goodput where saves cost nothing and nothing is repeated."""
    return -mtbf_s * math.log(wanted)


def expected_goodput(scheme: Scheme, mtbf_s: float) -> float:
    """The share of time that is work that stays, in the long run."""
    spent = expected_s(scheme, mtbf_s)
    return scheme.round_s / spent if math.isfinite(spent) else 0.0


def expected_s(scheme: Scheme, mtbf_s: float) -> float:
    """The expected time from one save that every kind of fault leaves to the next; infinite where none is reached."""
    try:
        return _Terms(scheme, mtbf_s).round()
    except (OverflowError, ZeroDivisionError):
        return math.inf


_NEVER = 1e-290
"""Chances that are smaller make no difference, and their quotients are no numbers."""


@dataclass(frozen=True)
class _Piece:
    """Time left at the beginning of a piece of work, from what is left elsewhere.

    ``left = ahead * (left at its end) + cost + back * (left, going back to a snapshot) + far * (a durable one)``.
    ``ahead + back + far`` is 1; all three are kept, since each can be too small to be told from 1 minus the others.
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
    def __init__(self, scheme: Scheme, mtbf_s: float) -> None:
        self._scheme = scheme
        self._mtbf_s = mtbf_s
        self._live, self._back, self._far = scheme.live.share, scheme.snapshot.share, scheme.durable.share

    def round(self) -> float:
        scheme, mtbf = self._scheme, self._mtbf_s
        if scheme.step_s:
            piece = self._step(scheme.step_s).times(scheme.steps).then(self._step(scheme.stall_s))
        else:
            piece = self._flow(scheme.interval_s + scheme.stall_s)
        # During a snapshot's recovery: left = cost + (1 - far) * (left at the last save) + far * (in a durable one).
        hit = -math.expm1(-scheme.snapshot.recovery_s / mtbf)
        stays = math.exp(-scheme.snapshot.recovery_s / mtbf) + hit * self._far
        cost, far = mtbf * hit / stays, hit * self._far / stays
        # Put in, that is from one save to the next.
        stays = piece.ahead + piece.far + piece.back * far
        ahead, cost, far = (one / stays for one in (piece.ahead, piece.cost + piece.back * cost, stays - piece.ahead))
        # A durable recovery begins anew with every fault, and ends where the round began.
        once = mtbf * math.expm1(scheme.durable.recovery_s / mtbf) if self._far else 0.0
        factor = _sum(far, scheme.saves)
        return (cost + far * once) * factor / ahead**scheme.saves

    def _in_live(self) -> tuple[float, float, float]:
        """A live recovery: its expected time, and how likely it ends in a snapshot's, or a durable one."""
        hit = -math.expm1(-self._scheme.live.recovery_s / self._mtbf_s)
        stays = math.exp(-self._scheme.live.recovery_s / self._mtbf_s) + hit * (self._back + self._far)
        return self._mtbf_s * hit / stays, hit * self._back / stays, hit * self._far / stays

    def _step(self, length_s: float) -> _Piece:
        """Work that a live fault begins anew."""
        hit = -math.expm1(-length_s / self._mtbf_s)
        ahead = math.exp(-length_s / self._mtbf_s)
        time, back, far = self._in_live()
        back, far = hit * (self._back + self._live * back), hit * (self._far + self._live * far)
        stays = ahead + back + far
        return _Piece(ahead / stays, hit * (self._mtbf_s + self._live * time) / stays, back / stays, far / stays)

    def _flow(self, length_s: float) -> _Piece:
        """Work that a live fault only interrupts."""
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
    """``1 + q + q**2 + ...``, ``count`` of them, for ``q = 1 - away``."""
    if away >= 1:
        return 1.0
    return -math.expm1(count * math.log1p(-away)) / away if away else float(count)
