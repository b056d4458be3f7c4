"""How often to save. Pure.

A short interval pays many stalls, a long one repeats much work after a fault; between them goodput has one top.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tieredckpt.goodput.closed_form import expected_goodput
from tieredckpt.goodput.scheme import Scheme

_TRIED = 400
_GOLDEN = (math.sqrt(5) - 1) / 2
AROUND = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0, 16.0)


def has_best(scheme: Scheme) -> bool:
    """Whether there is a best interval: saving costs something, and so does not saving."""
    return scheme.live.share < 1 and (scheme.stall_s > 0 or scheme.step_s > 0)


def best(scheme: Scheme, mtbf_s: float) -> Scheme:
    """The same scheme with the interval that has the most goodput."""
    tried = sorted(_lawful(scheme, mtbf_s), key=lambda one: one.interval_s)
    worth = [expected_goodput(one, mtbf_s) for one in tried]
    top = worth.index(max(worth))
    shorter, longer = tried[max(0, top - 1)], tried[min(top + 1, len(tried) - 1)]
    if scheme.step_s:
        return _of_steps(scheme, mtbf_s, shorter.steps, longer.steps)
    return _between(scheme, mtbf_s, shorter.interval_s, longer.interval_s)


def curve(scheme: Scheme, mtbf_s: float, around: Sequence[float] = AROUND) -> list[tuple[Scheme, float]]:
    """Schemes with shorter and longer intervals than this one, and what goodput is expected of each."""
    schemes = {one.interval_s: one for one in (scheme.every(scheme.interval_s * factor) for factor in around)}
    return [(one, expected_goodput(one, mtbf_s)) for _, one in sorted(schemes.items())]


def _lawful(scheme: Scheme, mtbf_s: float) -> Iterator[Scheme]:
    """Candidates around Young's rule of thumb, all of whole steps. Live faults ask for no saves."""
    near = math.sqrt(2 * max(scheme.stall_s, 1e-6) * mtbf_s / max(1 - scheme.live.share, 1e-15))
    seen = set()
    for number in range(_TRIED):
        one = scheme.every(near * 1000 ** (2 * number / (_TRIED - 1) - 1))
        if one.interval_s not in seen:
            seen.add(one.interval_s)
            yield one


def _of_steps(scheme: Scheme, mtbf_s: float, low: int, high: int) -> Scheme:
    """Thirds of the numbers of steps between the two."""

    def worth(steps: int) -> float:
        return expected_goodput(scheme.every(steps * scheme.step_s), mtbf_s)

    while high - low > 2:
        left, right = low + (high - low) // 3, high - (high - low) // 3
        low, high = (low, right) if worth(left) >= worth(right) else (left, high)
    return scheme.every(max(range(low, high + 1), key=worth) * scheme.step_s)


def _between(scheme: Scheme, mtbf_s: float, low: float, high: float) -> Scheme:
    """Golden section in the logarithm of the interval."""

    def worth(at: float) -> float:
        return expected_goodput(scheme.every(math.exp(at)), mtbf_s)

    low, high = math.log(low), math.log(high)
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    for _ in range(60):
        if worth(left) >= worth(right):
            high, right = right, left
            left = high - _GOLDEN * (high - low)
        else:
            low, left = left, right
            right = low + _GOLDEN * (high - low)
    return scheme.every(math.exp((low + high) / 2))
