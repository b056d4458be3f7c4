"""One answer for every moment, out of claims that overlap: of those that hold, the strongest."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from tieredckpt.goodput.model import Category


class Label(NamedTuple):
    """What a moment was spent on."""

    category: Category
    stage: str = ""
    epoch: int = -1
    ranks: int = 0


class Claim(NamedTuple):
    start: int
    end: int
    weight: int
    """The least one is the strongest."""
    label: Label


class Painted(NamedTuple):
    start: int
    end: int
    label: Label


def paint(claims: Iterable[Claim], start: int, end: int, rest: Label) -> list[Painted]:
    """``[start, end)`` without a gap, neighbours with the same label joined; ``rest`` where nobody claims anything.

    The order of the claims does not matter: of claims as strong as each other the one that began first holds.
    """
    clipped = sorted(
        one._replace(start=max(one.start, start), end=min(one.end, end))
        for one in claims
        if max(one.start, start) < min(one.end, end)
    )
    points = sorted({start, end, *(one.start for one in clipped), *(one.end for one in clipped)})
    painted: list[Painted] = []
    active: list[tuple[int, Claim]] = []
    following = 0
    for left, right in pairwise(points):
        while following < len(clipped) and clipped[following].start <= left:
            heapq.heappush(active, (clipped[following].weight, clipped[following]))
            following += 1
        while active and active[0][1].end <= left:
            heapq.heappop(active)
        label = active[0][1].label if active else rest
        if painted and painted[-1].label == label:
            painted[-1] = painted[-1]._replace(end=right)
        else:
            painted.append(Painted(left, right, label))
    return painted
