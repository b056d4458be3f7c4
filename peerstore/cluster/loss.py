"""How likely it is that some shard loses all its copies when nodes or domains fail at the same time.

    python -m peerstore.cluster.loss --nodes 128 --racks 16 --copies 2

A placement has copysets: sets of nodes that hold all copies of some shard. Of all ways in which k of n nodes can fail
together, those that contain a copyset lose something; so it is a matter of counting, exactly, cell by cell.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from peerstore.cluster.counting import Fatal, TooTangledError, harmless
from peerstore.cluster.domains import LEVELS, domains
from peerstore.cluster.nodes import Node, NodeId
from peerstore.cluster.placement import MOST_COPIES, Placement, place
from peerstore.errors import RequestError

_TRIALS = 20_000
_ERROR = math.sqrt(math.log(2 / 0.05) / (2 * _TRIALS))
_SHOWN_NODES = (1, 2, 3, 4, 8, 16)
_SHOWN_RACKS = (1, 2, 3, 4)

_Thing = TypeVar("_Thing", NodeId, str)


@dataclass(frozen=True)
class Loss:
    """A probability; ``error`` is 0 when it was counted, else what a sample is within of it 19 times out of 20."""

    probability: float
    error: float = 0.0


@dataclass(frozen=True)
class Row:
    what: str
    lost: int
    ours: Loss
    scattered: float


def nodes_lost(placement: Placement, lost: int, *, seed: int = 0) -> Loss:
    """When ``lost`` nodes, any with the same probability, fail together."""
    return _loss(placement.copysets(), sorted(placement.partners), lost, seed=seed)


def domains_lost(
    placement: Placement, nodes: Collection[Node], lost: int, *, levels: Sequence[str] = LEVELS, seed: int = 0
) -> Loss:
    """When ``lost`` whole domains of the innermost of ``levels`` fail together."""
    domain: Mapping[NodeId, str] = domains(nodes, levels).innermost
    fatal = [{domain[node] for node in copyset} for copyset in placement.copysets()]
    return _loss(fatal, sorted(set(domain.values())), lost, seed=seed)


def mirror_pairs(nodes: int, lost: int) -> float:
    """The closed form for an even number of nodes in pairs: who fails must be of different pairs."""
    return 1 - math.comb(nodes // 2, lost) * 2**lost / math.comb(nodes, lost)


def scattered(nodes: int, lost: int, *, copies: int) -> float:
    """Every node has its copies on ``copies - 1`` others chosen by lot: the mean over all such placements."""
    if copies > nodes:
        raise RequestError(f"{nodes} nodes cannot keep {copies} copies apart")
    all_partners_lost = math.comb(lost - 1, copies - 1) / math.comb(nodes - 1, copies - 1) if lost else 0.0
    return 1 - (1 - all_partners_lost) ** lost


def scattered_domains(domain_count: int, size: int, lost: int, *, copies: int) -> float:
    """The same for domains of ``size`` nodes, every node with copies in ``copies - 1`` other domains chosen by lot."""
    if copies > domain_count:
        raise RequestError(f"{domain_count} domains cannot keep {copies} copies apart")
    all_partners_lost = math.comb(lost - 1, copies - 1) / math.comb(domain_count - 1, copies - 1) if lost else 0.0
    return 1 - (1 - all_partners_lost) ** (lost * size)


def table(nodes: int, racks: int, *, copies: int) -> list[Row]:
    """Our placement and a scattered one, for some numbers of nodes and racks that fail together."""
    if racks < 1 or nodes % racks:
        raise RequestError(f"{nodes} nodes do not fill {racks} racks evenly")
    if copies > racks:
        raise RequestError(f"{racks} racks cannot keep {copies} copies apart")
    size = nodes // racks
    cluster = [
        Node(NodeId(f"n{rack}-{index}"), "", (("rack", f"r{rack}"),)) for rack in range(racks) for index in range(size)
    ]
    placement = place(cluster, copies=copies)
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
    """A share of random failures. The error is Hoeffding's, which holds whatever the probability is."""
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
    parser = argparse.ArgumentParser(prog="python -m peerstore.cluster.loss", description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--racks", type=int, default=16)
    parser.add_argument("--copies", type=int, default=2, choices=range(1, MOST_COPIES + 1))
    chosen = parser.parse_args(arguments)
    try:
        print(as_markdown(table(chosen.nodes, chosen.racks, copies=chosen.copies)))
    except RequestError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
