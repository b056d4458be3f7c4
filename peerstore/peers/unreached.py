"""Nodes that were just found not to answer, so that not everybody who asks finds it out anew. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class _Verdict:
    at: float
    address: str
    why: str


class Unreached:
    """Remembers for ``longest_s`` that a node was not reached. Whoever calls sees to it that nobody else does.

    It speaks of nodes that are taken for dead alone: of one that is heard of again, or that is at another address now,
    nothing is remembered.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._verdicts: dict[str, _Verdict] = {}

    def add(self, now: float, node: str, address: str, why: str) -> None:
        self._verdicts[node] = _Verdict(now, address, why)

    def why(self, now: float, node: str, address: str) -> str:
        """Why the node at this address was not reached a moment ago; empty when nothing is known."""
        found = self._verdicts.get(node)
        if found is None:
            return ""
        if found.address != address or not 0 <= now - found.at < self._longest_s:
            del self._verdicts[node]
            return ""
        return found.why

    def keep(self, dead: Callable[[str], bool]) -> None:
        """Forget those that are heard of again."""
        self._verdicts = {node: verdict for node, verdict in self._verdicts.items() if dead(node)}
