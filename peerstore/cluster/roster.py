"""Who belongs to a job, and how many of them make a quorum."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from typing import NamedTuple

import msgspec

from peerstore.cluster.nodes import Node, NodeId, node_id
from peerstore.errors import RequestError


class RosterMark(NamedTuple):
    """Which of two rosters is the newer one: compare their marks.

    A higher version always wins. Of two different rosters with one version the one with more nodes wins, because it
    makes a quorum harder, and then the one with the greater digest, so that everybody who has heard of both ends up
    with the same.
    """

    version: int
    nodes: int
    digest: str


class Roster(msgspec.Struct, frozen=True):
    """The nodes of a job, whether anybody has seen them or not. Make one with :func:`roster_of`."""

    version: int
    nodes: tuple[Node, ...]
    """In the order of their ids."""

    def __post_init__(self) -> None:
        if not 0 <= self.version < 1 << 62:
            raise RequestError(f"roster version {self.version} is not allowed: versions count up from 0")
        if not self.nodes:
            raise RequestError("a roster without nodes says nothing: not to know the nodes is another answer")
        for node in self.nodes:
            node_id(node.id)
        for one, next_one in zip(self.nodes, self.nodes[1:], strict=False):
            if one.id >= next_one.id:
                what = "is listed twice" if one.id == next_one.id else f"comes before {next_one.id!r}"
                raise RequestError(f"node {one.id!r} {what}: a roster names each node once, in the order of the ids")

    @property
    def mark(self) -> RosterMark:
        digest = hashlib.blake2b(msgspec.msgpack.encode(self.nodes), digest_size=8).hexdigest()
        return RosterMark(self.version, len(self.nodes), digest)

    def quorum(self, seen: Collection[NodeId]) -> bool:
        """Whether ``seen`` may decide for all: more than half, or exactly half and the lowest id among them.

        Two disjoint sets of nodes never both may. That holds for one roster: while two sides of a partition were
        told different ones, it is for whoever publishes rosters to let go of a node only once it is gone.
        """
        count = sum(1 for node in self.nodes if node.id in seen)
        return 2 * count > len(self.nodes) or (2 * count == len(self.nodes) and self.nodes[0].id in seen)


def roster_of(version: int, nodes: Iterable[Node]) -> Roster:
    return Roster(version, tuple(sorted(nodes)))
