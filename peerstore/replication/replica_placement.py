r"""Placement: which nodes store a node's replicas, and which nodes share a parity. Pure.

Copysets are spread across failure domains. The goals, the most important first:

1. The copies of a shard are in different domains of the innermost level ("rack") while another domain has room.
2. No node stores more than its share by memory, and a small node stores nothing if larger nodes can serve its peers.
3. Copies are also apart at the outer levels ("zone"), as far as that overloads no node.
4. Few sets of nodes, and of racks, are fatal. Nodes store each other's copies in closed cells of ``copies`` nodes from
   the same few racks. Two racks that share no cell may fail together.
5. A node or rack that joins or leaves changes few other nodes' partners.

The innermost level is a rule and the outer levels are a preference. Racks fail often and have similar sizes. Zones fail
rarely, are few and uneven, and a rule would make the smallest zone store the copies of all others.

Domains are the leaves of a binary trie over their hashes. From the leaves up, every branch makes as many cells as it
can of the nodes that its two halves could not use. It passes the rest up::

            rest of A..D ── with ──> rest of E..H          nodes that remain here join a finished cell
           /            \
     A with B          C with D                            A and B store each other's copies, node by node
     /      \          /      \
    A        B        C        D                           racks, by hash

A branch whose domains are equal in size and even in number passes nothing up, so changes in it stay in it. A node that
joins or leaves changes at most one cell on each level between its leaf and the root.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from peerstore.errors import RequestError
from peerstore.membership.topology import (
    DEFAULT_DOMAIN_LEVELS,
    FailureDomains,
    NodeId,
    PeerNode,
    failure_domains,
    memory_shares,
    stable_hash,
)

MAX_COPIES = 3


@dataclass(frozen=True)
class ReplicaPlacement:
    """For each node, the nodes that store replicas of its shards, in order of preference."""

    partners: Mapping[NodeId, tuple[NodeId, ...]]

    def copysets(self) -> frozenset[frozenset[NodeId]]:
        """Return the sets of nodes that hold all copies of some shard: losing one set at once loses the shard."""
        return frozenset(frozenset((node, *partners)) for node, partners in self.partners.items())


def place_replicas(
    nodes: Collection[PeerNode], *, copies: int = 2, levels: Sequence[str] = DEFAULT_DOMAIN_LEVELS
) -> ReplicaPlacement:
    """Return partners for ``copies`` copies of every shard, fewer if there are too few nodes.

    ``copies`` includes the node's own copy. ``levels`` are the labels that name failure domains, outermost first.
    """
    if not 1 <= copies <= MAX_COPIES:
        raise RequestError(f"copies is {copies}: choose 1 to {MAX_COPIES}, this node's own included")
    where = failure_domains(nodes, levels)
    wanted = min(copies, len(where.order)) - 1
    if wanted < 1:
        return ReplicaPlacement(dict.fromkeys(sorted(where.order), ()))
    assignment = ReplicaAssignment(where, wanted, memory_shares(nodes))
    guests = assignment.overflow_nodes()
    cells, left = domain_disjoint_cells([node for node in where.order if node not in guests], where, size=wanted + 1)
    assignment.assign_rings(cells)
    left = assignment.assign(_ordered({*left, *guests}, where), distinct=wanted)
    for distinct in range(wanted, 0, -1):  # fewer domains than copies, or no room in other domains
        cells, left = _crowded_cells(left, guests, where, size=wanted + 1, distinct=distinct)
        assignment.assign_rings(cells)
        if distinct > 1:
            left = assignment.assign(_ordered(left, where), distinct=distinct - 1)
    assignment.fill_up(where.order, partners=wanted)
    return ReplicaPlacement(
        {node: _by_distance(node, assignment.partners[node], where) for node in sorted(where.order)}
    )


def domain_disjoint_cells(
    nodes: Sequence[NodeId], where: FailureDomains, *, size: int
) -> tuple[list[Cell], list[NodeId]]:
    """Return cells of nodes in different innermost domains, and in as many outer domains as possible."""
    cells: list[Cell] = []
    left = list(nodes)
    for level in where.levels:
        last = level is where.innermost
        for distinct in range(size, size - 1 if last else 1, -1):
            made, left = make_cells(
                left, size=size, distinct=distinct, colours=level, units=where.innermost, points=where.hashes
            )
            if distinct == size:
                made, left = absorb_leftover(made, left, size=size, colours=level, points=where.hashes)
            else:
                made, left = _mix_in(made, left, where, level, size=size)
            cells += made
    return absorb_leftover(cells, left, size=size, colours=where.innermost, points=where.hashes)


def _mix_in(
    cells: Sequence[Cell], left: Sequence[NodeId], where: FailureDomains, level: Mapping[NodeId, str], *, size: int
) -> tuple[list[Cell], list[NodeId]]:
    """Add remaining nodes to cells that have at most one node of their domain.

    Used where a cell has fewer domains of ``level`` than nodes.
    """
    known, homeless = list(cells), list[NodeId]()
    for domain in sorted({level[node] for node in left}):
        mixed = [cell for cell in known if sum(level[node] == domain for node in cell) <= 1]
        joined, rest = absorb_leftover(
            mixed,
            [node for node in left if level[node] == domain],
            size=size,
            colours=where.innermost,
            points=where.hashes,
        )
        known = [cell for cell in known if cell not in set(mixed)] + joined
        homeless += rest
    return known, homeless


def _crowded_cells(
    left: Sequence[NodeId], guests: Collection[NodeId], where: FailureDomains, *, size: int, distinct: int
) -> tuple[list[Cell], list[NodeId]]:
    """Return cells whose nodes may share domains, and the remaining nodes.

    Each cell has at least ``distinct`` domains. Guests join no cell.
    """
    alone = {node: str(node) for node in left}
    members = [node for node in left if node not in guests]
    cells, rest = make_cells(
        members, size=size, distinct=distinct, colours=where.innermost, units=alone, points=where.hashes
    )
    if distinct == 1:
        cells, rest = absorb_leftover(cells, rest, size=size, colours=alone, points=where.hashes)
    return cells, [*rest, *(node for node in left if node in guests)]


def _ordered(nodes: Collection[NodeId], where: FailureDomains) -> list[NodeId]:
    return sorted(nodes, key=lambda node: (where.hashes[node], node))


def _by_distance(node: NodeId, partners: Sequence[NodeId], where: FailureDomains) -> tuple[NodeId, ...]:
    return tuple(sorted(partners, key=lambda partner: -where.levels_apart(node, partner)))


MAX_SHARE_FACTOR = 3
"""A node has room while it stores less than this many times its share.

With equal memory this separates copies until one domain has more than three quarters of the nodes.
"""


@dataclass
class ReplicaAssignment:
    """The copies that each node stores, compared with its share of ``each`` copies per node."""

    where: FailureDomains
    each: int
    shares: Mapping[NodeId, float]
    partners: dict[NodeId, list[NodeId]] = field(default_factory=lambda: defaultdict(list))
    load: dict[NodeId, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, node: NodeId, partner: NodeId) -> None:
        self.partners[node].append(partner)
        self.load[partner] += 1

    def assign_rings(self, cells: Iterable[Cell]) -> None:
        """Make each node of a cell the partner of the ``each`` nodes before it in the ring."""
        for cell in cells:
            for node, partner in self._links(self._best_ring_order(cell)):
                self.add(node, partner)

    def _links(self, cell: Cell) -> list[tuple[NodeId, NodeId]]:
        return [
            (node, cell[(index + step) % len(cell)])
            for index, node in enumerate(cell)
            for step in range(1, self.each + 1)
        ]

    def _best_ring_order(self, cell: Cell) -> Cell:
        """Return a larger ring's nodes in the order in which most have a partner that is apart at all levels."""
        if len(cell) == self.each + 1 or len({self.where.levels[0][node] for node in cell}) in (1, len(cell)):
            return cell
        first, *others = cell

        def mixed(order: Cell) -> tuple[int, int]:
            away = [(node, self.where.levels_apart(node, partner)) for node, partner in self._links(order)]
            return len({node for node, far in away if far == len(self.where.levels)}), sum(far for _, far in away)

        return max(((first, *order) for order in itertools.permutations(others)), key=mixed)

    def allowance(self, node: NodeId, fill: int) -> int:
        """Return the number of copies that a node may store if every node stores ``fill`` times its share.

        Hashes decide on fractions.
        """
        return int(self.shares[node] * fill + self.where.hashes[node] / 2**64)

    def overflow_nodes(self) -> set[NodeId]:
        """Return the nodes that store nothing: the smallest nodes that larger nodes can replace."""
        beyond = (max(0, self.allowance(node, self.each) - self.each) for node in self.shares)
        small = sorted((share, self.where.hashes[node], node) for node, share in self.shares.items() if share < 1)
        return {node for _, _, node in small[: sum(beyond) // self.each]}

    def assign(self, short: Sequence[NodeId], *, distinct: int) -> list[NodeId]:
        """Assign hosts in ``distinct`` other domains to each node; return the nodes without enough hosts.

        Such a node gets no host. Every node's share is used before any node stores more.
        """
        for fill in range(self.each, MAX_SHARE_FACTOR * self.each + 1):
            if not short:
                break
            short = self._fill(short, self.where.innermost, fill=fill, wanted=distinct)
        return list(short)

    def fill_up(self, short: Sequence[NodeId], *, partners: int) -> None:
        """Assign ``partners`` hosts to each of ``short``, on the nodes with most room, regardless of domains."""
        alone = {node: str(node) for node in self.where.order}
        fill = 0
        while short := [node for node in short if len(self.partners[node]) < partners]:
            fill += 1
            self._fill(short, alone, fill=fill, wanted=1)

    def _fill(self, short: Sequence[NodeId], units: Mapping[NodeId, str], *, fill: int, wanted: int) -> list[NodeId]:
        free: dict[str, list[NodeId]] = defaultdict(list)
        for node in reversed(self.where.order):
            free[units[node]].extend([node] * (self.allowance(node, fill) - self.load[node]))
        ring = sorted((stable_hash("host", unit), unit) for unit, hosts in free.items() if hosts)
        start: dict[str, int] = {}
        homeless = []
        for node in short:
            own = units[node]
            if own not in start:
                start[own] = stable_hash("guest", own)
            used = {own, *(units[partner] for partner in self.partners[node])}
            found = _next_units(ring, start[own], wanted, used)
            if len(found) < wanted:
                homeless.append(node)
                continue
            for entry in found:
                hosts = free[entry[1]]
                self.add(node, hosts.pop())
                if not hosts:
                    del ring[bisect.bisect_left(ring, entry)]
        return homeless


def _next_units(ring: Sequence[tuple[int, str]], start: int, wanted: int, used: set[str]) -> list[tuple[int, str]]:
    """Return up to ``wanted`` units after ``start`` that are not ``used``."""
    first = bisect.bisect_left(ring, (start,))
    found: list[tuple[int, str]] = []
    for step in range(min(len(ring), wanted + len(used))):
        entry = ring[(first + step) % len(ring)]
        if entry[1] not in used:
            found.append(entry)
        if len(found) == wanted:
            break
    return found


Cell = tuple[NodeId, ...]
HashPoints = Mapping[NodeId, int]
_BLOCK = 64
_SPREAD, _ALL = 0x9E3779B97F4A7C15, (1 << 64) - 1
_Pool = dict[str, dict[str, list[NodeId]]]  # color -> unit -> nodes without a cell


def make_cells(
    nodes: Iterable[NodeId],
    *,
    size: int,
    distinct: int,
    colours: Mapping[NodeId, str],
    units: Mapping[NodeId, str],
    points: HashPoints,
) -> tuple[list[Cell], list[NodeId]]:
    """Return cells of ``size`` nodes from different units, and the remaining nodes.

    Each cell has at least ``distinct`` colors. Units lie within colors (racks within zones). Whole units
    are combined, so that few of them share copies.
    """
    members: dict[str, list[NodeId]] = defaultdict(list)
    for node in nodes:
        members[units[node]].append(node)
    if len({colours[found[0]] for found in members.values()}) < distinct or len(members) < size:
        return [], [node for found in members.values() for node in found]
    leaves = sorted((stable_hash("unit", unit), unit) for unit in members)
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
    """Return the index that splits sorted hashes at their highest differing bit, and the next bit.

    The search starts at ``bit`` and goes down.
    """
    middle = first
    while middle in (first, last) and bit >= 0:
        middle = bisect.bisect_left(leaves, ((leaves[first][0] >> bit | 1) << bit,), first, last)
        bit -= 1
    return (first + 1 if middle in (first, last) else middle), bit  # two names may have the same hash


def _use_up(pool: _Pool, cells: list[Cell], *, size: int, distinct: int, points: HashPoints) -> None:
    """Make cells of ``pool`` until it has too few colors or units for another one."""
    while chosen := _choose(pool, size=size, distinct=distinct):
        rows: list[Cell] = [(node,) for node in pool[chosen[0][0]][chosen[0][1]]]
        rest: dict[str, list[NodeId]] = defaultdict(list)
        for index, (colour, unit) in enumerate(chosen[1:], start=1):
            rows, single, rest[unit] = extend_cells(rows, pool[colour][unit], points)
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
    """Return the units of the next cells: of as many colors as possible, then of the largest color."""
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


def extend_cells(
    rows: Iterable[Cell], nodes: Iterable[NodeId], points: HashPoints
) -> tuple[list[Cell], list[Cell], list[NodeId]]:
    """Add one of ``nodes`` to each row; return the longer rows, and the rows and nodes without a match.

    The closest pair is matched first, then the closest of the rest, and so on. A row that leaves then frees one node,
    and few other rows are closer to it than to their own node. Nodes are first compared within blocks, which are
    branches of a trie, because comparing all pairs would take too long.
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
    rows: list[Cell], nodes: list[NodeId], longer: list[Cell], points: HashPoints
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


def absorb_leftover(
    cells: Sequence[Cell],
    left: Iterable[NodeId],
    *,
    size: int,
    colours: Mapping[NodeId, str],
    points: HashPoints,
) -> tuple[list[Cell], list[NodeId]]:
    """Add leftover nodes to cells without their color; return the cells and the remaining nodes.

    With ``size`` 2, a cell a-b and two nodes c and c' of one color become a-c and b-c', which keeps cells small.
    Otherwise a node joins a cell, which becomes a ring of one more, up to ``2 * size - 1``.
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
        # All nodes of one color join cells of the same few domains, so that fewer domains share copies.
        near = [alike[found] for found in sorted(alike, key=lambda found: stable_hash("absorb", colour, *found))]
        couples, single = _couples(odd, points) if size == 2 else ([], odd)
        for heads in near:
            pairs = [head for head in heads if len(kept[head]) == 2]
            given, couples, _ = extend_cells(couples, pairs, points) if couples else ([], couples, [])
            for one, other, head in given:
                first, second = sorted(kept.pop(head), key=colours.__getitem__)
                kept[first], kept[second] = (first, one), (second, other)
        rows: list[Cell] = [(node,) for node in [*single, *(node for couple in couples for node in couple)]]
        for heads in near:
            whole = [head for head in heads if colour not in map(colours.__getitem__, kept[head])]
            joined, rows, _ = extend_cells(rows, whole, points) if rows else ([], rows, [])
            for node, head in joined:
                kept[head] = (*kept[head], node)
        homeless += [node for row in rows for node in row]
    return list(kept.values()), homeless


def _couples(nodes: Iterable[NodeId], points: HashPoints) -> tuple[list[Cell], list[NodeId]]:
    alone = {node: str(node) for node in nodes}
    return make_cells(alone, size=2, distinct=1, colours=alone, units=alone, points=points)


def parity_groups(
    nodes: Collection[PeerNode], size: int, *, levels: Sequence[str] = DEFAULT_DOMAIN_LEVELS
) -> tuple[tuple[NodeId, ...], ...]:
    """Return disjoint groups of about ``size`` nodes, which include every node if there are two or more.

    - A group has 2 to ``2 * size - 1`` nodes. It is smaller than ``size`` rather than have two nodes of one domain:
      with four racks and a size of eight, groups have four nodes.
    - No group has two nodes of one innermost domain if all domains have the same size. The same holds if no domain has
      more than one in ``2 * size - 1`` of the nodes. The excess nodes of a larger domain form separate groups.
    - The groups do not depend on the order of the nodes. A node that joins or leaves changes few groups.
    """
    if size < 2:
        raise RequestError(f"a group of {size} cannot share a parity: choose 2 or more")
    where = failure_domains(nodes, levels)
    if len(where.order) < 2:
        return ()
    counted = Counter(where.innermost.values())
    wide = max(2, min(size, len(counted), round(len(where.order) / max(counted.values()))))
    half = max(2, (wide + 1) // 2)
    left = list(where.order)
    cells: list[Cell] = []
    for level in where.levels[:-1]:
        made, left = make_cells(
            left, size=wide, distinct=wide, colours=level, units=where.innermost, points=where.hashes
        )
        cells += made
    cells, left = _disjoint_groups(cells, left, where, range(wide, half - 1, -1))
    cells, left = absorb_leftover(cells, left, size=wide, colours=where.innermost, points=where.hashes)
    cells, left = _disjoint_groups(cells, left, where, range(half - 1, 1, -1))
    return tuple(sorted(tuple(sorted(cell)) for cell in _group_remaining(cells, left, where, size=size)))


def _disjoint_groups(
    cells: list[Cell], left: list[NodeId], where: FailureDomains, sizes: range
) -> tuple[list[Cell], list[NodeId]]:
    for size in sizes:
        made, left = make_cells(
            left, size=size, distinct=size, colours=where.innermost, units=where.innermost, points=where.hashes
        )
        cells = cells + made
    return cells, left


def _group_remaining(cells: list[Cell], left: list[NodeId], where: FailureDomains, *, size: int) -> list[Cell]:
    """Group the remaining nodes, which share one domain and fit into no other group."""
    alone = {node: str(node) for node in left}
    made, rest = make_cells(left, size=size, distinct=1, colours=alone, units=alone, points=where.hashes)
    if len(rest) > 1:
        return [*cells, *made, tuple(rest)]
    made, rest = absorb_leftover(made, rest, size=size, colours=alone, points=where.hashes)
    for node in rest:
        smallest = min(cells, key=lambda cell: (len(cell), cell))
        cells = [cell for cell in cells if cell != smallest] + [(*smallest, node)]
    return cells + made
