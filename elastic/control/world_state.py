"""What the nodes of one world have said in all, counted as they say it: whatever its size, a report costs the same."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from elastic.control.messages import Formed, NodeSays


class _Said(NamedTuple):
    """What counts of one node's newest report."""

    sealed: int | None
    """The least of its ranks; ``None`` where it says nothing of any."""
    paused: int | None
    finished: bool


class WorldState:
    def __init__(self, formed: Formed) -> None:
        self.epoch = formed.epoch
        self.places = {node: place for place, node in enumerate(formed.places)}
        """Which place each of its nodes has."""
        self._said: dict[str, _Said] = {}
        """Of those that know of this world."""
        self._sealed: Counter[int] = Counter()
        self._least: int | None = None
        self._undecided = 0
        """Nodes that have not said where they stand, and have not finished."""
        self._standing = 0
        """Nodes that have said it."""

    @property
    def is_complete(self) -> bool:
        """Whether all its nodes know of it."""
        return len(self._said) == len(self.places)

    @property
    def sealed(self) -> int:
        """The newest step that all ranks have sealed, -1 where there is none or not all are known."""
        return -1 if not self.is_complete or self._least is None else self._least

    @property
    def target(self) -> int | None:
        """The greatest step that any rank said, once all have said one that have not finished."""
        if not self.is_complete or self._undecided or not self._standing:
            return None
        return max(one.paused for one in self._said.values() if one.paused is not None and not one.finished)

    def said(self, says: NodeSays) -> None:
        """A node's newest report; one that does not know of this world counts for nothing here."""
        if says.node not in self.places:
            return
        self.forget(says.node)
        if says.formed is None or says.formed.epoch != self.epoch:
            return
        sealed = min((-1 if one is None else one.sealed for one in says.steps), default=None)
        self._said[says.node] = said = _Said(sealed, says.paused, says.finished)
        self._count(said, 1)
        if sealed is not None:
            self._sealed[sealed] += 1
            self._least = sealed if self._least is None else min(sealed, self._least)

    def forget(self, node: str) -> None:
        said = self._said.pop(node, None)
        if said is None:
            return
        self._count(said, -1)
        if said.sealed is not None:
            self._sealed[said.sealed] -= 1
            if not self._sealed[said.sealed]:
                del self._sealed[said.sealed]
                if said.sealed == self._least:
                    self._least = min(self._sealed, default=None)

    def _count(self, said: _Said, by: int) -> None:
        if not said.finished:
            self._undecided += by * (said.paused is None)
            self._standing += by * (said.paused is not None)
