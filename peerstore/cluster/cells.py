r"""Cuts a set of nodes into cells of a few nodes that fail apart, so that a coming or going node moves few others.

Domains are the leaves of a binary trie over their hashes. From the leaves up, every branch makes as many cells as it
can of what its two halves could not use, and hands up the rest::

            rest of A..D ── with ──> rest of E..H          what is left here joins a finished cell
           /            \
     A with B          C with D                            A and B keep each other's copies, node by node
     /      \          /      \
    A        B        C        D                           racks, by hash

A branch whose domains are equal in size and even in number leaves nothing, so what happens in it stays in it; a node
that comes or goes changes at most one cell on each level between its leaf and the root.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from peerstore.cluster.domains import point
from peerstore.cluster.nodes import NodeId

Cell = tuple[NodeId, ...]
Points = Mapping[NodeId, int]
_BLOCK = 64
_SPREAD, _ALL = 0x9E3779B97F4A7C15, (1 << 64) - 1
_Pool = dict[str, dict[str, list[NodeId]]]  # colour -> unit -> nodes that are in no cell yet


def cut(
    nodes: Iterable[NodeId],
    *,
    size: int,
    distinct: int,
    colours: Mapping[NodeId, str],
    units: Mapping[NodeId, str],
    points: Points,
) -> tuple[list[Cell], list[NodeId]]:
    """Cells of ``size`` nodes, each from another unit and from ``distinct`` colours or more; and who is left.

    Units lie within colours (racks within zones). Whole units meet whole units, so that few of them share copies.
    """
    members: dict[str, list[NodeId]] = defaultdict(list)
    for node in nodes:
        members[units[node]].append(node)
    if len({colours[found[0]] for found in members.values()}) < distinct or len(members) < size:
        return [], [node for found in members.values() for node in found]
    leaves = sorted((point("unit", unit), unit) for unit in members)
    cells: list[Cell] = []

    def branch(first: int, last: int, bit: int) -> _Pool:
        if last - first == 1:
            unit = leaves[first][1]
            return {colours[members[unit][0]]: {unit: members[unit]}}
        middle, bit = _middle(leaves, first, last, bit)
        pool = branch(first, middle, bit)
        for colour, found in branch(middle, last, bit).items():
            pool.setdefault(colour, {}).update(found)
        _use_up(pool, cells, size=size, distinct=distinct, points=points)
        return pool

    pool = branch(0, len(leaves), 63)
    return cells, [node for found in pool.values() for unit in found.values() for node in unit]


def _middle(
    leaves: Sequence[tuple[int, str] | tuple[int, NodeId, Cell]], first: int, last: int, bit: int
) -> tuple[int, int]:
    """Where the highest bit from ``bit`` down that differs between sorted hashes changes, and the next bit."""
    middle = first
    while middle in (first, last) and bit >= 0:
        middle = bisect.bisect_left(leaves, ((leaves[first][0] >> bit | 1) << bit,), first, last)
        bit -= 1
    return (first + 1 if middle in (first, last) else middle), bit  # two names may have one hash


def _use_up(pool: _Pool, cells: list[Cell], *, size: int, distinct: int, points: Points) -> None:
    """Make cells of ``pool`` until it has not enough colours or units for another one."""
    while chosen := _choose(pool, size=size, distinct=distinct):
        rows: list[Cell] = [(node,) for node in pool[chosen[0][0]][chosen[0][1]]]
        rest: dict[str, list[NodeId]] = defaultdict(list)
        for index, (colour, unit) in enumerate(chosen[1:], start=1):
            rows, single, rest[unit] = match(rows, pool[colour][unit], points)
            for row in single:
                for (_, back), node in zip(chosen[:index], row, strict=True):
                    rest[back].append(node)
        cells.extend(rows)
        for colour, unit in chosen:
            if rest[unit]:
                pool[colour][unit] = rest[unit]
            else:
                del pool[colour][unit]
            if not pool[colour]:
                del pool[colour]


def _choose(pool: _Pool, *, size: int, distinct: int) -> list[tuple[str, str]]:
    """The units that meet next: of as many colours as there are, then more of the colour with most nodes."""
    if len(pool) < distinct:
        return []
    chosen = [(colour, next(iter(units))) for colour, units in pool.items()][:size]
    for colour, units in (
        sorted(pool.items(), key=lambda item: (-sum(map(len, item[1].values())), item[0])) if len(chosen) < size else ()
    ):
        for unit in units:
            if len(chosen) < size and (colour, unit) not in chosen:
                chosen.append((colour, unit))
        if len(chosen) == size:
            break
    return chosen if len(chosen) == size else []


def match(rows: Iterable[Cell], nodes: Iterable[NodeId], points: Points) -> tuple[list[Cell], list[Cell], list[NodeId]]:
    """Lengthen each row by one of ``nodes``; and the rows and nodes for which there was no other.

    The closest two go together, then the closest of the rest, and so on: a row that goes frees one node, which is
    further from all others than what they have, except from few. Only near nodes are compared first, in blocks that
    are branches of a trie, for comparing all with all would take too long.
    """
    leaves = sorted([(points[row[0]], row[0], row) for row in rows] + [(points[node], node, ()) for node in nodes])
    longer: list[Cell] = []

    def branch(first: int, last: int, bit: int) -> tuple[list[Cell], list[NodeId]]:
        if last - first <= _BLOCK:
            block = leaves[first:last]
            found, free = [row for _, _, row in block if row], [node for _, node, row in block if not row]
        else:
            middle, bit = _middle(leaves, first, last, bit)
            (found, free), (more_rows, more_nodes) = branch(first, middle, bit), branch(middle, last, bit)
            found, free = found + more_rows, free + more_nodes
        return _closest(found, free, longer, points)

    return longer, *branch(0, len(leaves), 63)


def _closest(
    rows: list[Cell], nodes: list[NodeId], longer: list[Cell], points: Points
) -> tuple[list[Cell], list[NodeId]]:
    if not rows or not nodes:
        return rows, nodes
    edges = sorted(
        ((points[row[0]] ^ points[node]) * _SPREAD & _ALL, i, j)
        for i, row in enumerate(rows)
        for j, node in enumerate(nodes)
    )
    free_rows, free_nodes = dict(enumerate(rows)), dict(enumerate(nodes))
    for _, i, j in edges:
        if i in free_rows and j in free_nodes:
            longer.append((*free_rows.pop(i), free_nodes.pop(j)))
            if not free_rows or not free_nodes:
                break
    return list(free_rows.values()), list(free_nodes.values())


def absorb(
    cells: Sequence[Cell],
    left: Iterable[NodeId],
    *,
    size: int,
    colours: Mapping[NodeId, str],
    points: Points,
) -> tuple[list[Cell], list[NodeId]]:
    """Give the nodes that ``cut`` left a place in cells without their colour; and who found none.

    Pairs are re-cut as long as there are two such nodes: a-b and the odd c, c' become a-c and b-c', and no cell is
    larger than it must be. Otherwise a node joins a cell, which becomes a ring of one more, up to ``2 * size - 1``.
    """
    by_colour: dict[str, list[NodeId]] = defaultdict(list)
    for node in left:
        by_colour[colours[node]].append(node)
    kept = {cell[0]: cell for cell in cells}
    homeless: list[NodeId] = []
    for colour, odd in sorted(by_colour.items()):
        alike: dict[tuple[str, ...], list[NodeId]] = defaultdict(list)
        for head, cell in kept.items():
            found = tuple(sorted(colours[node] for node in cell))
            if len(cell) < 2 * size - 1 and colour not in found:
                alike[found].append(head)
        # the same few cells' domains for all nodes of one colour: fewer domains have copies of each other
        near = [alike[found] for found in sorted(alike, key=lambda found: point("absorb", colour, *found))]
        couples, single = _couples(odd, points) if size == 2 else ([], odd)
        for heads in near:
            pairs = [head for head in heads if len(kept[head]) == 2]
            given, couples, _ = match(couples, pairs, points) if couples else ([], couples, [])
            for one, other, head in given:
                first, second = sorted(kept.pop(head), key=colours.__getitem__)
                kept[first], kept[second] = (first, one), (second, other)
        rows: list[Cell] = [(node,) for node in [*single, *(node for couple in couples for node in couple)]]
        for heads in near:
            whole = [head for head in heads if colour not in map(colours.__getitem__, kept[head])]
            joined, rows, _ = match(rows, whole, points) if rows else ([], rows, [])
            for node, head in joined:
                kept[head] = (*kept[head], node)
        homeless += [node for row in rows for node in row]
    return list(kept.values()), homeless


def _couples(nodes: Iterable[NodeId], points: Points) -> tuple[list[Cell], list[NodeId]]:
    alone = {node: str(node) for node in nodes}
    return cut(alone, size=2, distinct=1, colours=alone, units=alone, points=points)
