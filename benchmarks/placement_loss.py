"""Probability that simultaneous failures lose every replica of some shard.

    python -m benchmarks.placement_loss --nodes 128 --racks 16 --copies 2

docs/explanation/placement.md quotes the results.

A **copyset** is a set of nodes that holds all copies of some shard. A failure of k of n nodes loses data if the failed
nodes contain a copyset. The probability is an exact count of these sets, where counting is feasible.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from peerstore.errors import RequestError
from peerstore.membership.topology import DEFAULT_DOMAIN_LEVELS, NodeId, PeerNode, failure_domains
from peerstore.replication.replica_placement import MAX_COPIES, ReplicaPlacement, place_replicas

Fatal = frozenset[frozenset[int]]
"""Sets of members that must not fail together."""

_WORK = 100_000
"""Number of fatal sets to examine before sampling instead: one or two seconds."""


class TooTangledError(Exception):
    """The fatal sets overlap too much for an exact count."""


class _Memo(dict[Fatal, list[int]]):
    work = 0


def harmless(fatal: Fatal, count: int, lost: int) -> int:
    """Return the number of sets of ``lost`` out of ``count`` members that contain no set of ``fatal``.

    Disjoint parts are counted separately, as polynomials: the i-th coefficient is the number of harmless sets of i
    members. Their product is the count of the whole.
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
        names = dict(zip(things, range(len(things)), strict=True))  # same structure, same memo entry
        bound += len(things)
        renamed = frozenset(frozenset(names[thing] for thing in members) for members in part)
        alike[tuple(_polynomial(renamed, lost, memo))] += 1
    result = _power([1, 1], count - bound, lost)
    for polynomial, times in alike.items():
        result = _times(result, _power(polynomial, times, lost), lost)
    return result[lost] if lost < len(result) else 0


def _polynomial(fatal: Fatal, lost: int, memo: _Memo) -> list[int]:
    """Count harmless sets by size, split by the member that is in most fatal sets."""
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
    """Return the sets that contain no other set."""
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
    """Yield the connected components: groups of sets that share members, directly or indirectly."""
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


_TRIALS = 20_000
_ERROR = math.sqrt(math.log(2 / 0.05) / (2 * _TRIALS))
_SHOWN_NODES = (1, 2, 3, 4, 8, 16)
_SHOWN_RACKS = (1, 2, 3, 4)

_Thing = TypeVar("_Thing", NodeId, str)


@dataclass(frozen=True)
class Loss:
    """A probability, with the half-width of its 95% confidence interval; 0 for an exact count."""

    probability: float
    error: float = 0.0


@dataclass(frozen=True)
class Row:
    what: str
    lost: int
    ours: Loss
    scattered: float


def nodes_lost(placement: ReplicaPlacement, lost: int, *, seed: int = 0) -> Loss:
    """Return the loss probability if ``lost`` uniformly random nodes fail together."""
    return _loss(placement.copysets(), sorted(placement.partners), lost, seed=seed)


def domains_lost(
    placement: ReplicaPlacement,
    nodes: Collection[PeerNode],
    lost: int,
    *,
    levels: Sequence[str] = DEFAULT_DOMAIN_LEVELS,
    seed: int = 0,
) -> Loss:
    """Return the loss probability if ``lost`` domains of the innermost of ``levels`` fail together."""
    domain: Mapping[NodeId, str] = failure_domains(nodes, levels).innermost
    fatal = [{domain[node] for node in copyset} for copyset in placement.copysets()]
    return _loss(fatal, sorted(set(domain.values())), lost, seed=seed)


def scattered(nodes: int, lost: int, *, copies: int) -> float:
    """Return the mean loss over random placements of each node's ``copies - 1`` other copies."""
    if copies > nodes:
        raise RequestError(f"{nodes} nodes cannot keep {copies} copies apart")
    all_partners_lost = math.comb(lost - 1, copies - 1) / math.comb(nodes - 1, copies - 1) if lost else 0.0
    return 1 - (1 - all_partners_lost) ** lost


def scattered_domains(domain_count: int, size: int, lost: int, *, copies: int) -> float:
    """Return the mean loss over random placements in ``copies - 1`` other domains of ``size`` nodes."""
    if copies > domain_count:
        raise RequestError(f"{domain_count} domains cannot keep {copies} copies apart")
    all_partners_lost = math.comb(lost - 1, copies - 1) / math.comb(domain_count - 1, copies - 1) if lost else 0.0
    return 1 - (1 - all_partners_lost) ** (lost * size)


def table(nodes: int, racks: int, *, copies: int) -> list[Row]:
    """Compare our placement with a random one, for several numbers of failed nodes and racks."""
    if racks < 1 or nodes % racks:
        raise RequestError(f"{nodes} nodes do not fill {racks} racks evenly")
    if copies > racks:
        raise RequestError(f"{racks} racks cannot keep {copies} copies apart")
    size = nodes // racks
    cluster = [
        PeerNode(NodeId(f"n{rack}-{index}"), "", (("rack", f"r{rack}"),))
        for rack in range(racks)
        for index in range(size)
    ]
    placement = place_replicas(cluster, copies=copies)
    rows = [
        Row("nodes", lost, nodes_lost(placement, lost), scattered(nodes, lost, copies=copies))
        for lost in _SHOWN_NODES
        if lost <= nodes
    ]
    return rows + [
        Row("racks", lost, domains_lost(placement, cluster, lost), scattered_domains(racks, size, lost, copies=copies))
        for lost in _SHOWN_RACKS
        if lost <= racks
    ]


def as_markdown(rows: Iterable[Row]) -> str:
    lines = ["| fail together | P(loss) | scattered | times less |", "|---|---|---|---|"]
    for row in rows:
        less = f"{row.scattered / row.ours.probability:.1f}" if row.ours.probability else "-"
        sampled = f" ± {_percent(row.ours.error)}" if row.ours.error else ""
        what = f"{row.lost} {row.what[:-1] if row.lost == 1 else row.what}"
        lines.append(f"| {what} | {_percent(row.ours.probability)}{sampled} | {_percent(row.scattered)} | {less} |")
    return "\n".join(lines)


def _percent(probability: float) -> str:
    return f"{100 * probability:.3g} %"


def _loss(copysets: Iterable[Iterable[_Thing]], everything: Sequence[_Thing], lost: int, *, seed: int) -> Loss:
    if not 0 <= lost <= len(everything):
        raise RequestError(f"{lost} of {len(everything)} cannot fail together")
    number = {thing: index for index, thing in enumerate(everything)}
    fatal = frozenset(frozenset(number[thing] for thing in copyset) for copyset in copysets)
    total = math.comb(len(everything), lost)
    try:
        return Loss((total - harmless(fatal, len(everything), lost)) / total)
    except TooTangledError:
        return _sampled(fatal, len(everything), lost, seed=seed)


def _sampled(fatal: Fatal, count: int, lost: int, *, seed: int) -> Loss:
    """Estimate the loss from random failures, with Hoeffding's error bound."""
    draw = random.Random(seed)
    containing: dict[int, list[frozenset[int]]] = defaultdict(list)
    for copyset in fatal:
        containing[min(copyset)].append(copyset)
    hits = 0
    for _ in range(_TRIALS):
        failed = set(draw.sample(range(count), lost))
        hits += any(copyset <= failed for thing in failed for copyset in containing[thing])
    return Loss(hits / _TRIALS, _ERROR)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement_loss", description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--racks", type=int, default=16)
    parser.add_argument("--copies", type=int, default=2, choices=range(1, MAX_COPIES + 1))
    chosen = parser.parse_args(arguments)
    try:
        print(as_markdown(table(chosen.nodes, chosen.racks, copies=chosen.copies)))
    except RequestError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
