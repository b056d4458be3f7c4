"""Ranges of a shard and the memory they are to fill, put together and cut. Pure but for the views themselves."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import xxhash

_GAP_BYTES = 64
"""Between two targets, most that is read along with them: what aligns one tensor behind another."""


class Target(NamedTuple):
    """Bytes ``[start, stop)`` of a shard, and where they are to be."""

    start: int
    stop: int
    view: memoryview


class Span(NamedTuple):
    """Bytes ``[start, stop)`` of a shard, and the views they fill one behind the other."""

    start: int
    stop: int
    views: tuple[memoryview, ...]


def join(targets: Iterable[Target]) -> list[Span]:
    """Targets that lie side by side in the shard as one span; a small gap between two goes to a view of its own."""
    found: list[Span] = []
    views: list[memoryview] = []
    first = last = 0
    for start, stop, view in sorted(targets, key=lambda target: target[:2]):
        if start == stop:
            continue
        if not views or not 0 <= start - last <= _GAP_BYTES:
            if views:
                found.append(Span(first, last, tuple(views)))
            first, views = start, []
        elif start > last:
            views.append(memoryview(bytearray(start - last)))
        views.append(view)
        last = stop
    return [*found, Span(first, last, tuple(views))] if views else found


def cut(span: Span, chunk_bytes: int, step_bytes: int) -> Iterable[Span]:
    """The start up to the first chunk, whole chunks ``step_bytes`` at a time, and the rest."""
    start, stop, views = span
    edge = min(stop, -(-start // chunk_bytes) * chunk_bytes)
    last = max(edge, stop // chunk_bytes * chunk_bytes)
    left = deque(views)
    for first, end in itertools.pairwise(sorted({start, edge, *range(edge, last, step_bytes), last, stop})):
        taken: list[memoryview] = []
        missing = end - first
        while missing:
            view = left.popleft()
            if len(view) > missing:
                left.appendleft(view[missing:])
                view = view[:missing]
            taken.append(view)
            missing -= len(view)
        yield Span(first, end, tuple(taken))


def digest(span: Span) -> bytes:
    """Of all its bytes, little-endian."""
    if len(span.views) == 1:
        return xxhash.xxh3_64_digest(span.views[0])[::-1]
    state = xxhash.xxh3_64()
    for view in span.views:
        state.update(view)
    return state.digest()[::-1]
