"""Counts the ways in which some of many things can fail together without a fatal set among them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

Fatal = frozenset[frozenset[int]]
"""Sets of things that must not fail together."""

_WORK = 100_000
"""How many fatal sets are looked at before giving up: a second or two."""


class TooTangledError(Exception):
    """The fatal sets hang together in too many ways to be counted one by one."""


class _Memo(dict[Fatal, list[int]]):
    work = 0


def harmless(fatal: Fatal, count: int, lost: int) -> int:
    """How many sets of ``lost`` out of ``count`` things contain none of ``fatal``.

    Parts that share nothing are counted each for itself, as a polynomial whose i-th coefficient says how many of its
    sets of i things are harmless; together they are the product.
    """
    fatal = _minimal(fatal)
    sizes = Counter(map(len, fatal))
    if lost <= min(sizes, default=count + 1):
        return math.comb(count, lost) - sizes[lost]
    memo = _Memo()
    alike: Counter[tuple[int, ...]] = Counter()
    bound = 0
    for part in _parts(fatal):
        things = sorted(frozenset().union(*part))
        names = dict(zip(things, range(len(things)), strict=True))  # parts of one form are then one entry of the memo
        bound += len(things)
        renamed = frozenset(frozenset(names[thing] for thing in members) for members in part)
        alike[tuple(_polynomial(renamed, lost, memo))] += 1
    result = _power([1, 1], count - bound, lost)
    for polynomial, times in alike.items():
        result = _times(result, _power(polynomial, times, lost), lost)
    return result[lost] if lost < len(result) else 0


def _polynomial(fatal: Fatal, lost: int, memo: _Memo) -> list[int]:
    """By size, the harmless sets with, and those without, the thing that is in most fatal sets."""
    if fatal in memo:
        return memo[fatal]
    if not fatal or frozenset() in fatal:
        return [0] if fatal else [1]
    memo.work += len(fatal)
    if memo.work > _WORK:
        raise TooTangledError
    counted = Counter(thing for members in fatal for thing in members)
    most = max(counted, key=lambda thing: (counted[thing], -thing))
    fails = _minimal(frozenset(members - {most} for members in fatal))
    survives = frozenset(members for members in fatal if most not in members)
    with_it = [0, *_product(fails, len(counted) - 1, lost, memo)]
    without = _product(survives, len(counted) - 1, lost, memo)
    longer, shorter = sorted((with_it, without), key=len, reverse=True)
    memo[fatal] = [a + (shorter[i] if i < len(shorter) else 0) for i, a in enumerate(longer)][: lost + 1]
    return memo[fatal]


def _product(fatal: Fatal, count: int, lost: int, memo: _Memo) -> list[int]:
    found = [1]
    for part in _parts(fatal):
        count -= len(frozenset().union(*part))
        found = _times(found, _polynomial(part, lost, memo), lost)
    return _times(found, _power([1, 1], count, lost), lost)


def _minimal(fatal: Fatal) -> Fatal:
    """Without the sets that contain another."""
    kept: set[frozenset[int]] = set()
    by_thing: dict[int, list[frozenset[int]]] = defaultdict(list)
    for members in sorted(fatal, key=len):
        if not members:
            return frozenset([members])
        if not any(smaller <= members for thing in members for smaller in by_thing[thing]):
            kept.add(members)
            for thing in members:
                by_thing[thing].append(members)
    return frozenset(kept)


def _parts(fatal: Fatal) -> Iterable[Fatal]:
    """Sets that have things in common, directly or through others, together."""
    by_thing: dict[int, list[frozenset[int]]] = defaultdict(list)
    for members in fatal:
        for thing in members:
            by_thing[thing].append(members)
    unseen = set(fatal)
    while unseen:
        part = {unseen.pop()}
        waiting = list(part)
        while waiting:
            for thing in waiting.pop():
                for members in by_thing.pop(thing, ()):
                    if members not in part:
                        part.add(members)
                        waiting.append(members)
        unseen -= part
        yield frozenset(part)


def _times(one: Sequence[int], other: Sequence[int], most: int) -> list[int]:
    found = [0] * min(len(one) + len(other) - 1, most + 1)
    for i, a in enumerate(one[: most + 1]):
        for j, b in enumerate(other[: most + 1 - i]):
            found[i + j] += a * b
    return found


def _power(polynomial: Sequence[int], times: int, most: int) -> list[int]:
    found, square = [1], list(polynomial)
    while times:
        if times & 1:
            found = _times(found, square, most)
        square = _times(square, square, most)
        times >>= 1
    return found
