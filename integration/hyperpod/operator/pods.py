"""Where a job's pods are: agents that somebody else has started, at addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from integration.hyperpod.operator.actions import Event, Wanted
from peerstore.transport.addresses import split_address


class Place(NamedTuple):
    """One pod, without what its agent says."""

    name: str
    group: str
    node: str
    ip: str
    address: str
    """Where its agent listens."""
    node_fault: str = ""
    leaving: bool = False


class Pods(Protocol):
    """Whoever has the pods of a job.

    - A name is never used for two pods.
    - ``keep`` makes pods, as many as are wanted and there is room for, and takes none away.
    - No call waits for a pod.
    """

    can_replace: bool

    def places(self, bad_nodes: Mapping[str, str]) -> Sequence[Place]:
        """All that are there now; ``bad_nodes``: machines with another health than schedulable."""

    def keep(self, wanted: Wanted, bad_nodes: Mapping[str, str]) -> None: ...

    def replace(self, name: str) -> None:
        """Away with it at once."""

    def release(self, name: str) -> None:
        """Its agent may end what it does."""

    def told(self) -> Sequence[Event]:
        """What has happened to pods since the last time."""

    def close(self) -> None: ...


class FixedPods:
    """Agents that run already. They are left to whoever started them, and are a node each by their address."""

    can_replace = False

    def __init__(self, addresses: Sequence[str], group: str) -> None:
        self._places = [Place(one, group, one, split_address(one)[0], one) for one in addresses]

    def places(self, bad_nodes: Mapping[str, str]) -> Sequence[Place]:
        return [one._replace(node_fault=bad_nodes.get(one.node, "")) for one in self._places]

    def keep(self, wanted: Wanted, bad_nodes: Mapping[str, str]) -> None:
        """There are as many as there are."""

    def replace(self, name: str) -> None:
        """None comes for it: it counts again once it is well."""

    def release(self, name: str) -> None:
        """It waits, and may be used again."""

    def told(self) -> Sequence[Event]:
        return ()

    def close(self) -> None:
        """They are not ours."""
