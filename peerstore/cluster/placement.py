"""Which nodes keep copies of whose shards. Pure: the same nodes give the same answer to everybody who asks.

What it aims at, the first first:

1. The copies of a shard are in different domains of the innermost level ("rack") while another one has room.
2. Nobody keeps more than its share by memory, and whom larger nodes can serve keeps nothing on a small one.
3. Copies are apart at the outer levels ("zone") too, as far as that overloads nobody.
4. Few sets of nodes, and of racks, are fatal: nodes keep each other's copies in closed cells of ``copies`` nodes,
   made of the same few racks. Two racks that share nothing may fail together.
5. A node or rack that comes or goes changes few others' partners.

The innermost level is a rule and outer ones a wish, because racks fail often and are of like size, while zones fail
seldom, are few and uneven, and a rule would let the smallest one carry the copies of all the others.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from peerstore.cluster.cells import Cell, absorb, cut
from peerstore.cluster.domains import LEVELS, Domains, domains, shares
from peerstore.cluster.nodes import Node, NodeId
from peerstore.cluster.seats import Seats
from peerstore.errors import RequestError

MOST_COPIES = 3


@dataclass(frozen=True)
class Placement:
    """For each node, the nodes that keep copies of its shards, in order of preference."""

    partners: Mapping[NodeId, tuple[NodeId, ...]]

    @functools.cached_property
    def _kept(self) -> Mapping[NodeId, tuple[NodeId, ...]]:
        kept: dict[NodeId, list[NodeId]] = defaultdict(list)
        for node in sorted(self.partners):
            for partner in self.partners[node]:
                kept[partner].append(node)
        return {node: tuple(kept[node]) for node in self.partners}

    def keeps(self, node: NodeId) -> tuple[NodeId, ...]:
        """Whose copies ``node`` keeps."""
        return self._kept[node]

    def copysets(self) -> frozenset[frozenset[NodeId]]:
        """The sets of nodes that hold all copies of some shard: losing all of one at once loses that shard."""
        return frozenset(frozenset((node, *partners)) for node, partners in self.partners.items())


def place(nodes: Collection[Node], *, copies: int = 2, levels: Sequence[str] = LEVELS) -> Placement:
    """Partners for ``copies`` copies of everything, a node's own included; fewer where there are too few nodes.

    ``levels`` are the labels that name failure domains, outermost first.
    """
    if not 1 <= copies <= MOST_COPIES:
        raise RequestError(f"copies is {copies}: choose 1 to {MOST_COPIES}, this node's own included")
    where = domains(nodes, levels)
    wanted = min(copies, len(where.order)) - 1
    if wanted < 1:
        return Placement(dict.fromkeys(sorted(where.order), ()))
    seats = Seats(where, wanted, shares(nodes))
    guests = seats.guests()
    cells, left = apart_cells([node for node in where.order if node not in guests], where, size=wanted + 1)
    seats.ring(cells)
    left = seats.seat(_ordered({*left, *guests}, where), distinct=wanted)
    for distinct in range(wanted, 0, -1):  # fewer domains than copies, or no room in the others
        cells, left = _crowded_cells(left, guests, where, size=wanted + 1, distinct=distinct)
        seats.ring(cells)
        if distinct > 1:
            left = seats.seat(_ordered(left, where), distinct=distinct - 1)
    seats.complete(where.order, partners=wanted)
    return Placement({node: _preferred(node, seats.partners[node], where) for node in sorted(where.order)})


def apart_cells(nodes: Sequence[NodeId], where: Domains, *, size: int) -> tuple[list[Cell], list[NodeId]]:
    """Cells of nodes that are all in different innermost domains, and at outer levels in as many as possible."""
    cells: list[Cell] = []
    left = list(nodes)
    for level in where.levels:
        last = level is where.innermost
        for distinct in range(size, size - 1 if last else 1, -1):
            made, left = cut(
                left, size=size, distinct=distinct, colours=level, units=where.innermost, points=where.points
            )
            if distinct == size:
                made, left = absorb(made, left, size=size, colours=level, points=where.points)
            else:
                made, left = _mix_in(made, left, where, level, size=size)
            cells += made
    return absorb(cells, left, size=size, colours=where.innermost, points=where.points)


def _mix_in(
    cells: Sequence[Cell], left: Sequence[NodeId], where: Domains, level: Mapping[NodeId, str], *, size: int
) -> tuple[list[Cell], list[NodeId]]:
    """Where a cell has fewer domains of ``level`` than nodes, a node can join one that has at most one of its own."""
    known, homeless = list(cells), list[NodeId]()
    for domain in sorted({level[node] for node in left}):
        mixed = [cell for cell in known if sum(level[node] == domain for node in cell) <= 1]
        joined, rest = absorb(
            mixed,
            [node for node in left if level[node] == domain],
            size=size,
            colours=where.innermost,
            points=where.points,
        )
        known = [cell for cell in known if cell not in set(mixed)] + joined
        homeless += rest
    return known, homeless


def _crowded_cells(
    left: Sequence[NodeId], guests: Collection[NodeId], where: Domains, *, size: int, distinct: int
) -> tuple[list[Cell], list[NodeId]]:
    """Cells of nodes in at least ``distinct`` domains, of which some share one; guests stay out."""
    alone = {node: str(node) for node in left}
    members = [node for node in left if node not in guests]
    cells, rest = cut(members, size=size, distinct=distinct, colours=where.innermost, units=alone, points=where.points)
    if distinct == 1:
        cells, rest = absorb(cells, rest, size=size, colours=alone, points=where.points)
    return cells, [*rest, *(node for node in left if node in guests)]


def _ordered(nodes: Collection[NodeId], where: Domains) -> list[NodeId]:
    return sorted(nodes, key=lambda node: (where.points[node], node))


def _preferred(node: NodeId, partners: Sequence[NodeId], where: Domains) -> tuple[NodeId, ...]:
    return tuple(sorted(partners, key=lambda partner: -where.apart(node, partner)))
