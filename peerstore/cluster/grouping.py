"""Cuts a job's nodes into groups that share one parity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from peerstore.cluster.cells import Cell, absorb, cut
from peerstore.cluster.domains import LEVELS, Domains, domains
from peerstore.cluster.nodes import Node, NodeId
from peerstore.errors import RequestError


def groups(nodes: Collection[Node], size: int, *, levels: Sequence[str] = LEVELS) -> tuple[tuple[NodeId, ...], ...]:
    """Disjoint groups of about ``size`` nodes; every node is in one of them, when there are two or more.

    - A group has 2 to ``2 * size - 1`` nodes, and is smaller than ``size`` rather than have two of one domain: with
      four racks and a size of eight there are groups of four.
    - No group has two nodes of one domain of the innermost level when all domains are of one size, or none has more
      than one in ``2 * size - 1`` of the nodes. What a larger domain has too many makes groups of its own.
    - The same nodes give the same groups, whatever their order; a node that comes or goes changes few of them.
    """
    if size < 2:
        raise RequestError(f"a group of {size} cannot share a parity: choose 2 or more")
    where = domains(nodes, levels)
    if len(where.order) < 2:
        return ()
    counted = Counter(where.innermost.values())
    wide = max(2, min(size, len(counted), round(len(where.order) / max(counted.values()))))
    half = max(2, (wide + 1) // 2)
    left = list(where.order)
    cells: list[Cell] = []
    for level in where.levels[:-1]:
        made, left = cut(left, size=wide, distinct=wide, colours=level, units=where.innermost, points=where.points)
        cells += made
    cells, left = _apart(cells, left, where, range(wide, half - 1, -1))
    cells, left = absorb(cells, left, size=wide, colours=where.innermost, points=where.points)
    cells, left = _apart(cells, left, where, range(half - 1, 1, -1))
    return tuple(sorted(tuple(sorted(cell)) for cell in _crowd(cells, left, where, size=size)))


def _apart(cells: list[Cell], left: list[NodeId], where: Domains, sizes: range) -> tuple[list[Cell], list[NodeId]]:
    for size in sizes:
        made, left = cut(
            left, size=size, distinct=size, colours=where.innermost, units=where.innermost, points=where.points
        )
        cells = cells + made
    return cells, left


def _crowd(cells: list[Cell], left: list[NodeId], where: Domains, *, size: int) -> list[Cell]:
    """What is left is of one domain, and nobody else has place for it."""
    alone = {node: str(node) for node in left}
    made, rest = cut(left, size=size, distinct=1, colours=alone, units=alone, points=where.points)
    if len(rest) > 1:
        return [*cells, *made, tuple(rest)]
    made, rest = absorb(made, rest, size=size, colours=alone, points=where.points)
    for node in rest:
        smallest = min(cells, key=lambda cell: (len(cell), cell))
        cells = [cell for cell in cells if cell != smallest] + [(*smallest, node)]
    return cells + made
