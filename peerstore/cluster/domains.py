"""Where nodes are: their failure domains, their place in hash order, and how much each of them may keep."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from peerstore.cluster.nodes import Node, NodeId
from peerstore.errors import RequestError

LEVELS = ("zone", "rack")

_SAME = 1 / 8
"""Memory that differs from the usual by less than this is the usual: firmware takes a little, not always as much."""


def point(*words: str) -> int:
    """The same number for the same words, on every machine and in every process."""
    return xxhash.xxh3_64_intdigest("\x1f".join(words).encode())


@dataclass(frozen=True)
class Domains:
    """The nodes of one decision, each with its domains from the outermost level to the innermost."""

    order: tuple[NodeId, ...]
    """In hash order, the order in which all decisions look at nodes."""
    points: Mapping[NodeId, int]
    levels: tuple[Mapping[NodeId, str], ...]

    @property
    def innermost(self) -> Mapping[NodeId, str]:
        return self.levels[-1]

    def apart(self, one: NodeId, other: NodeId) -> int:
        """At how many levels two nodes are in different domains."""
        return sum(names[one] != names[other] for names in self.levels)


def domains(nodes: Collection[Node], levels: Sequence[str]) -> Domains:
    """Domains are nested: rack r1 of zone a is another rack than r1 of zone b.

    A node without a label at the innermost level fails alone. Nodes without a label further out share one unknown
    domain there, because nothing says that they would not fail together.
    """
    if not levels:
        raise RequestError("name at least one level of failure domains, for example rack")
    points = {node.id: point("node", node.id) for node in nodes}
    if len(points) != len(nodes):
        twice = sorted({node.id for node in nodes if sum(other.id == node.id for other in nodes) > 1})
        raise RequestError(f"every node may be given once; these were given more often: {', '.join(twice)}")
    paths: dict[NodeId, str] = dict.fromkeys(points, "")
    nested = []
    for depth, level in enumerate(levels, start=1):
        for node in nodes:
            name = node.label(level) if depth == len(levels) else dict(node.labels).get(level, "")
            paths[node.id] += f"\x1e{name}"
        nested.append(dict(paths))
    return Domains(tuple(sorted(points, key=lambda node: (points[node], node))), points, tuple(nested))


def shares(nodes: Collection[Node]) -> dict[NodeId, float]:
    """How much of all copies each node should keep, 1 being the average: by memory, 1 where that is not known."""
    known = {node.id: node.memory_bytes for node in nodes if node.memory_bytes > 0}
    if not known:
        return dict.fromkeys((node.id for node in nodes), 1.0)
    usual = sorted(known.values())[(len(known) - 1) // 2]
    weights = {node: usual if abs(memory - usual) <= usual * _SAME else memory for node, memory in known.items()}
    total = sum(weights.values())
    return {node.id: weights[node.id] * len(weights) / total if node.id in weights else 1.0 for node in nodes}
