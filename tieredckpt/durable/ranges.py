"""Which requests fetch a set of byte ranges: close ones together, long ones in pieces. Pure."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import Buffer

from tieredckpt.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

GAP_BYTES = 1 << 20
"""Bytes nobody asked for cost less than another request up to about here."""


@dataclass(frozen=True)
class Fetch:
    start: int
    stop: int


def plan_fetches(ranges: Iterable[tuple[int, int]], *, gap_bytes: int, most_bytes: int) -> list[Fetch]:
    """Disjoint requests in order that cover every range, none of them longer than ``most_bytes``."""
    runs: list[list[int]] = []
    for start, stop in sorted(ranges):
        if not 0 <= start <= stop:
            raise UsageError(f"[{start}, {stop}) is not a range of bytes")
        if start == stop:
            continue
        if runs and start - runs[-1][1] <= gap_bytes:
            runs[-1][1] = max(runs[-1][1], stop)
        else:
            runs.append([start, stop])
    return [
        Fetch(at, min(at + most_bytes, run_stop))
        for run_start, run_stop in runs
        for at in range(run_start, run_stop, most_bytes)
    ]


def assemble(ranges: Sequence[tuple[int, int]], fetches: Sequence[Fetch], results: Sequence[Buffer]) -> list[Buffer]:
    """The ranges, out of what the fetches returned: views where one fetch holds it all, copies where several do."""
    starts = [fetch.start for fetch in fetches]
    views = [memoryview(result) for result in results]

    def one(start: int, stop: int) -> Buffer:
        if start == stop:
            return b""
        at = bisect_right(starts, start) - 1
        if stop <= fetches[at].stop:
            return views[at][start - starts[at] : stop - starts[at]]
        whole = bytearray(stop - start)
        done = start
        while done < stop:
            upto = min(stop, fetches[at].stop)
            whole[done - start : upto - start] = views[at][done - starts[at] : upto - starts[at]]
            done, at = upto, at + 1
        return whole

    return [one(start, stop) for start, stop in ranges]
