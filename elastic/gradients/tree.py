"""The order of a sum: a binary tree over microbatch ids. Its shape depends on how many there are and on nothing else.

::

    level 3              (3,0)                     7 microbatches. A node without a right child is its left child.
    level 2       (2,0)         (2,1)              Who has 2, 3, 4 holds (1,1) and (0,4): what is complete
    level 1    (1,0) (1,1)   (1,2) (1,3)           is summed at once, the rest waits for its sibling.
    level 0    0  1  2  3    4  5  6

"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple):
    """The sum over the microbatches from ``place << level`` up to the next node of that level."""

    level: int
    place: int


class Partials(Generic[T]):
    """Sums of complete subtrees; those of a run of n ids are never more than ``2 * log2(n) + 1``."""

    def __init__(self, leaves: int, add: Callable[[T, T], T]) -> None:
        self._leaves = leaves
        self._depth = max(leaves - 1, 0).bit_length()
        self._add = add
        self._held: dict[Node, T] = {}

    def put(self, node: Node, value: T) -> None:
        """``value``, which may be changed from here on, is the sum of ``node``. Siblings that are there are added."""
        level, place = node
        while level < self._depth:
            right_starts = (place | 1) << level
            if right_starts < self._leaves:
                sibling = self._held.pop(Node(level, place ^ 1), None)
                if sibling is None:
                    break
                value = self._add(sibling, value) if place & 1 else self._add(value, sibling)
            level, place = level + 1, place >> 1
        self._held[Node(level, place)] = value

    def leaf(self, id_: int, value: T) -> None:
        self.put(Node(0, id_), value)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """In the order of the ids they are the sums of."""
        return tuple(sorted(self._held, key=lambda node: node.place << node.level))

    def values(self) -> list[T]:
        return [self._held[node] for node in self.nodes]

    @property
    def root(self) -> T:
        """The sum of everything. ``KeyError`` as long as leaves are missing."""
        return self._held[Node(self._depth, 0)]


def held(ids: Iterable[int], leaves: int) -> tuple[Node, ...]:
    """What is left of these ids when all sums that can be made of them are made."""
    partials = Partials[bool](leaves, lambda *_: True)
    for id_ in ids:
        partials.leaf(id_, True)
    return partials.nodes


def fold(values: Sequence[float]) -> float:
    """The sum of one number for each microbatch."""
    partials = Partials[float](len(values), lambda left, right: left + right)
    for id_, value in enumerate(values):
        partials.leaf(id_, value)
    return partials.root
