"""Nodes that belong to a job and were not met yet. Pure: times in, answers out."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from peerstore.cluster.members import MembershipSettings
from peerstore.cluster.nodes import Node
from peerstore.cluster.roster import Roster


class Newcomers:
    """Who was announced and is neither known to live nor, for as long as it takes to find out, taken for dead.

    Without them the first version would be protected by nobody, before a node has met its partners.
    """

    def __init__(self, settings: MembershipSettings) -> None:
        self._longest_s = settings.dead_after_s + settings.suspect_after * (
            settings.heartbeat_s + settings.ping_timeout_s
        )
        self._nodes: dict[str, Node] = {}
        self._until = float("-inf")

    def announce(self, now: float, roster: Roster, living: Iterable[Node]) -> None:
        """A new roster is in use; some of its nodes are known to live already."""
        seen = {node.id for node in living}
        self._nodes = {node.id: node for node in roster.nodes if node.id not in seen}
        self._until = now + self._longest_s

    def among(self, now: float, living: Collection[Node]) -> dict[str, Node]:
        """The living, and the newcomers. Those that are met are none any more: they may die like any other."""
        found: dict[str, Node] = {node.id: node for node in living}
        if self._nodes:
            self._nodes = {name: node for name, node in self._nodes.items() if name not in found}
            if now < self._until:
                found |= {str(name): node for name, node in self._nodes.items()}
            else:
                self._nodes = {}
        return found

    @property
    def awaited(self) -> bool:
        """Whether anybody may be missing among the living."""
        return bool(self._nodes)

    def met(self, now: float, living: Iterable[Node]) -> bool:
        """Whether all were met, or waited for long enough, to say who lives and who does not."""
        return not self._nodes or now >= self._until or not self._nodes.keys() - {node.id for node in living}

    def waits_for(self, now: float, node: str) -> bool:
        """Whether a node that does not live by what is known may just not have been met yet."""
        return node in self._nodes and now < self._until
