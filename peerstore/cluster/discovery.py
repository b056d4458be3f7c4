"""Where the list of a job's nodes comes from.

``tests/contract/test_discovery.py`` holds every source to what the seam promises.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from peerstore.cluster.addresses import DEFAULT_PORT, check_address, node_at
from peerstore.cluster.node_files import HYPERPOD_FILE, NodesFile, PodResourceConfig
from peerstore.cluster.nodes import Node, node_id, parse_labels
from peerstore.cluster.roster import Roster, roster_of
from peerstore.errors import RequestError, UnavailableError

_NEXT_LABEL = re.compile(r"/(?=[^/=]+=)")


class Discovery(Protocol):
    """Who belongs to a job.

    - ``roster`` asks anew each time and returns all nodes of the job, never some of them and never none.
    - :class:`~peerstore.errors.UnavailableError`: not known right now (not there, half-written, no answer). Ask again,
      and keep to the last roster until then.
    - :class:`~peerstore.errors.RequestError`: what it says cannot be right, and will not be until somebody corrects it.
    - The version rises when the nodes change. Two nodes that were told the same have the same roster.
    """

    def roster(self) -> Roster: ...


class StaticList:
    """``n1=10.0.0.1:7070/rack=r1/zone=a, n2=10.0.0.2:7070``: a list that stays as it is."""

    def __init__(self, text: str) -> None:
        entries = [entry.strip() for entry in text.split(",") if entry.strip()]
        if not entries:
            raise RequestError(
                f"a list of nodes without a node: {text!r}; write for example n1=10.0.0.1:{DEFAULT_PORT}"
            )
        self._roster = roster_of(1, map(_listed, entries))

    def roster(self) -> Roster:
        return self._roster


def _listed(entry: str) -> Node:
    name, equals, rest = entry.partition("=")
    address, *labels = _NEXT_LABEL.split(rest)
    try:
        if not equals:
            raise RequestError("write name=host:port, and /level=name for each failure domain")
        return Node(node_id(name.strip()), check_address(address), parse_labels(",".join(labels)))
    except RequestError as error:
        raise RequestError(f"node {entry!r} in the list: {error}") from error


Resolve = Callable[[str, int], Iterable[str]]


def resolve_by_system(name: str, port: int) -> list[str]:
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [str(address[0]).partition("%")[0] for *_, address in found]


class HeadlessDns:
    """The addresses behind a headless Kubernetes service: a node is called what its address is.

    Where pods have addresses of both families, the IPv4 ones count.

    Such a service should have ``publishNotReadyAddresses: true``: otherwise who is not ready is not in the roster, and
    the quorum is one of those who are.

    DNS knows no versions. The first answer has version 1; a change has the time at which it was seen, in milliseconds,
    so that of two nodes' rosters the one that saw something change last is the newer one.
    """

    def __init__(
        self,
        name: str,
        port: int = DEFAULT_PORT,
        *,
        resolve: Resolve = resolve_by_system,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._name, self._port = name, port
        self._resolve, self._clock = resolve, clock
        self._lock = threading.Lock()
        self._last: Roster | None = None

    def roster(self) -> Roster:
        try:
            addresses = set(self._resolve(self._name, self._port))
        except (OSError, UnicodeError) as error:
            raise UnavailableError(f"{self._name} could not be resolved: {error}") from error
        if not addresses:
            raise UnavailableError(f"{self._name} has no addresses right now")
        old_style = {address for address in addresses if ":" not in address}
        now = roster_of(1, (node_at(address, self._port) for address in old_style or addresses))
        with self._lock:
            if self._last is None:
                self._last = now
            elif self._last.nodes != now.nodes:
                self._last = Roster(max(self._last.version + 1, int(self._clock() * 1000)), now.nodes)
            return self._last


def parse_discovery(text: str) -> Discovery:
    """A source from one line of configuration.

    ``static:n1=10.0.0.1:7070/rack=r1,n2=10.0.0.2:7070``, ``file:/path.json``, ``hyperpod`` or ``hyperpod:/path``,
    ``dns:name:port``. The job's ``torch.distributed`` store is handed over by code.
    """
    kind, colon, rest = text.partition(":")
    if kind == "static":
        return StaticList(rest)
    if kind == "file" and rest:
        return NodesFile(rest)
    if kind == "hyperpod" and (rest or not colon):
        return PodResourceConfig(rest or HYPERPOD_FILE)
    if kind == "dns" and rest:
        name, _, port = check_address(rest if ":" in rest else f"{rest}:{DEFAULT_PORT}").rpartition(":")
        return HeadlessDns(name, int(port))
    raise RequestError(
        f"discovery {text!r} is not known: write static:name=host:port,..., file:/path.json, hyperpod[:/path] "
        "or dns:name:port"
    )
