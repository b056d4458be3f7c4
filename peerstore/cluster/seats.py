"""Who keeps whose copies, while that is being decided: partners found so far, and how much room is left where."""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from peerstore.cluster.cells import Cell
from peerstore.cluster.domains import Domains, point
from peerstore.cluster.nodes import NodeId

ROOM = 3
"""A node has room while it keeps less than this many times its share.

With equal memory that is enough to keep copies apart until one domain has more than three quarters of the nodes.
"""


@dataclass
class Seats:
    """The copies each node keeps, counted against its share of ``each`` copies per node."""

    where: Domains
    each: int
    shares: Mapping[NodeId, float]
    partners: dict[NodeId, list[NodeId]] = field(default_factory=lambda: defaultdict(list))
    load: dict[NodeId, int] = field(default_factory=lambda: defaultdict(int))

    def keep(self, node: NodeId, partner: NodeId) -> None:
        self.partners[node].append(partner)
        self.load[partner] += 1

    def ring(self, cells: Iterable[Cell]) -> None:
        """In a cell everybody keeps the copies of those before it."""
        for cell in cells:
            for node, partner in self._links(self._mixed(cell)):
                self.keep(node, partner)

    def _links(self, cell: Cell) -> list[tuple[NodeId, NodeId]]:
        return [
            (node, cell[(index + step) % len(cell)])
            for index, node in enumerate(cell)
            for step in range(1, self.each + 1)
        ]

    def _mixed(self, cell: Cell) -> Cell:
        """The members of a larger ring in the order in which most have a partner that is apart at all levels."""
        if len(cell) == self.each + 1 or len({self.where.levels[0][node] for node in cell}) in (1, len(cell)):
            return cell
        first, *others = cell

        def mixed(order: Cell) -> tuple[int, int]:
            away = [(node, self.where.apart(node, partner)) for node, partner in self._links(order)]
            return len({node for node, far in away if far == len(self.where.levels)}), sum(far for _, far in away)

        return max(((first, *order) for order in itertools.permutations(others)), key=mixed)

    def allowance(self, node: NodeId, fill: int) -> int:
        """How many copies a node may keep when everybody keeps ``fill`` times its share; hashes decide on fractions."""
        return int(self.shares[node] * fill + self.where.points[node] / 2**64)

    def guests(self) -> set[NodeId]:
        """Nodes of little memory that keep nothing, smallest first: as many as larger ones can serve besides."""
        beyond = (max(0, self.allowance(node, self.each) - self.each) for node in self.shares)
        small = sorted((share, self.where.points[node], node) for node, share in self.shares.items() if share < 1)
        return {node for _, _, node in small[: sum(beyond) // self.each]}

    def seat(self, short: Sequence[NodeId], *, distinct: int) -> list[NodeId]:
        """Find hosts in ``distinct`` other domains for each of ``short``; who did not find that many gets none.

        Everybody gets its share before anybody gets more.
        """
        for fill in range(self.each, ROOM * self.each + 1):
            if not short:
                break
            short = self._fill(short, self.where.innermost, fill=fill, wanted=distinct)
        return list(short)

    def complete(self, short: Sequence[NodeId], *, partners: int) -> None:
        """Find ``partners`` for each of ``short``, wherever there is most room."""
        alone = {node: str(node) for node in self.where.order}
        fill = 0
        while short := [node for node in short if len(self.partners[node]) < partners]:
            fill += 1
            self._fill(short, alone, fill=fill, wanted=1)

    def _fill(self, short: Sequence[NodeId], units: Mapping[NodeId, str], *, fill: int, wanted: int) -> list[NodeId]:
        free: dict[str, list[NodeId]] = defaultdict(list)
        for node in reversed(self.where.order):
            free[units[node]].extend([node] * (self.allowance(node, fill) - self.load[node]))
        ring = sorted((point("host", unit), unit) for unit, hosts in free.items() if hosts)
        start: dict[str, int] = {}
        homeless = []
        for node in short:
            own = units[node]
            if own not in start:
                start[own] = point("guest", own)
            used = {own, *(units[partner] for partner in self.partners[node])}
            found = _next(ring, start[own], wanted, used)
            if len(found) < wanted:
                homeless.append(node)
                continue
            for spot in found:
                hosts = free[spot[1]]
                self.keep(node, hosts.pop())
                if not hosts:
                    del ring[bisect.bisect_left(ring, spot)]
        return homeless


def _next(ring: Sequence[tuple[int, str]], start: int, wanted: int, used: set[str]) -> list[tuple[int, str]]:
    """The first ``wanted`` units after ``start`` that are not ``used``; fewer when there are not so many."""
    first = bisect.bisect_left(ring, (start,))
    found: list[tuple[int, str]] = []
    for step in range(min(len(ring), wanted + len(used))):
        spot = ring[(first + step) % len(ring)]
        if spot[1] not in used:
            found.append(spot)
        if len(found) == wanted:
            break
    return found
