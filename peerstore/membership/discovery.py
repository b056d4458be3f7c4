"""Sources of a job's member list: static, a file, headless DNS, and sources of other packages.

``tests/contract/test_discovery.py`` tests that every source fulfills :class:`Discovery`.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from peerstore.errors import RequestError, UnavailableError
from peerstore.membership.topology import (
    DEFAULT_PEER_PORT,
    MemberList,
    PeerNode,
    member_list,
    node_from_ip,
    parse_labels,
    validate_address,
    validate_node_id,
)
from peerstore.message_codec import from_json

_NEXT_LABEL = re.compile(r"/(?=[^/=]+=)")


class Discovery(Protocol):
    """Source of a job's member list.

    - ``member_list`` queries the source at each call and returns all nodes of the job, never some or none of them.
    - :class:`~peerstore.errors.UnavailableError`: temporarily unknown (missing, half-written, no response). The caller
      retries, and uses the last member list until then.
    - :class:`~peerstore.errors.RequestError`: the content is wrong and must be corrected.
    - The version rises when the nodes change. Two nodes with the same information have the same member list.
    """

    def member_list(self) -> MemberList: ...


class StaticMembers:
    """A constant list: ``n1=10.0.0.1:7070/rack=r1/zone=a, n2=10.0.0.2:7070``."""

    def __init__(self, text: str) -> None:
        entries = [entry.strip() for entry in text.split(",") if entry.strip()]
        if not entries:
            raise RequestError(
                f"a list of nodes without a node: {text!r}; write for example n1=10.0.0.1:{DEFAULT_PEER_PORT}"
            )
        self._member_list = member_list(1, map(_static_member, entries))

    def member_list(self) -> MemberList:
        return self._member_list


def _static_member(entry: str) -> PeerNode:
    name, equals, rest = entry.partition("=")
    address, *labels = _NEXT_LABEL.split(rest)
    try:
        if not equals:
            raise RequestError("write name=host:port, and /level=name for each failure domain")
        return PeerNode(validate_node_id(name.strip()), validate_address(address), parse_labels(",".join(labels)))
    except RequestError as error:
        raise RequestError(f"node {entry!r} in the list: {error}") from error


HostResolver = Callable[[str, int], Iterable[str]]


def resolve_with_system(name: str, port: int) -> list[str]:
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [str(address[0]).partition("%")[0] for *_, address in found]


class HeadlessServiceDns:
    """The addresses of a headless Kubernetes service; a node's name is its address.

    If pods have addresses of both families, only the IPv4 addresses count.

    The service should have ``publishNotReadyAddresses: true``. Otherwise pods that are not ready are missing from the
    list, and the quorum counts only ready pods.

    DNS has no versions. The first result has version 1. After a change, the version is the time at which this node saw
    it, in milliseconds. So the list of the last node that saw a change is the newest one.
    """

    def __init__(
        self,
        name: str,
        port: int = DEFAULT_PEER_PORT,
        *,
        resolve: HostResolver = resolve_with_system,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._name, self._port = name, port
        self._resolve, self._clock = resolve, clock
        self._lock = threading.Lock()
        self._last: MemberList | None = None

    def member_list(self) -> MemberList:
        try:
            addresses = set(self._resolve(self._name, self._port))
        except (OSError, UnicodeError) as error:
            raise UnavailableError(f"{self._name} could not be resolved: {error}") from error
        if not addresses:
            raise UnavailableError(f"{self._name} has no addresses right now")
        ipv4 = {address for address in addresses if ":" not in address}
        now = member_list(1, (node_from_ip(address, self._port) for address in ipv4 or addresses))
        with self._lock:
            if self._last is None:
                self._last = now
            elif self._last.nodes != now.nodes:
                self._last = msgspec.structs.replace(
                    now, version=max(self._last.version + 1, int(self._clock() * 1000))
                )
            return self._last


DISCOVERY_ENTRY_POINTS = "peerstore.discovery"
"""Group of entry points through which packages add sources."""
DiscoveryFactory = Callable[[str], Discovery]
"""Opens the source. The argument is the text after ``NAME:``, or an empty string."""


def parse_discovery(text: str) -> Discovery:
    """Return the source that one line of configuration names.

    ``static:n1=10.0.0.1:7070/rack=r1,n2=10.0.0.2:7070``, ``file:/path.json``, ``dns:name:port``, or ``NAME`` or
    ``NAME:ARGUMENT`` of a source that an installed package adds. The job's ``torch.distributed`` store is passed by
    code. Raise :class:`~peerstore.errors.RequestError` if no source has that name.
    """
    kind, colon, rest = text.partition(":")
    if kind == "static":
        return StaticMembers(rest)
    if kind == "file" and rest:
        return MembersFile(rest)
    if kind == "dns" and rest:
        name, _, port = validate_address(rest if ":" in rest else f"{rest}:{DEFAULT_PEER_PORT}").rpartition(":")
        return HeadlessServiceDns(name, int(port))
    added = {entry.name: entry for entry in entry_points(group=DISCOVERY_ENTRY_POINTS)}
    if kind in added and (rest or not colon):
        entry = added[kind]
        try:
            opened: DiscoveryFactory = entry.load()
        except (ImportError, AttributeError) as error:
            raise RequestError(f"{entry.value}, which adds discovery {kind!r}, cannot be loaded: {error}") from error
        return opened(rest)
    others = "".join(f", {name}[:...]" for name in sorted(added))
    raise RequestError(
        f"discovery {text!r} is not known: write static:name=host:port,..., file:/path.json, dns:name:port{others}"
    )


_MAX_BYTES = 64 << 20

T = TypeVar("T")


class _FileNode(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    address: str
    labels: dict[str, str] = {}
    memory_bytes: int = 0


class _MembersFileContent(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    nodes: list[_FileNode]


class MembersFile:
    """A JSON file with a versioned list of nodes, read at each call.

    Its format is ``{"version": 3, "nodes": [{"id", "address", "labels": {}, "memory_bytes"}]}``. Each change of the
    file must raise its version and replace it by a rename, so that it is never read half-written.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def member_list(self) -> MemberList:
        content = read_member_json(self._path, _MembersFileContent)
        try:
            return member_list(content.version, map(_from_file, content.nodes))
        except RequestError as error:
            raise RequestError(f"{self._path}: {error}") from error


def _from_file(node: _FileNode) -> PeerNode:
    labels = parse_labels(",".join(f"{level}={name}" for level, name in node.labels.items()))
    return PeerNode(validate_node_id(node.id), validate_address(node.address), labels, node.memory_bytes)


def read_member_json(path: Path, kind: type[T]) -> T:
    """Return the content of a JSON file that lists members.

    Raise :class:`~peerstore.errors.UnavailableError` if the file is missing or half-written, and
    :class:`~peerstore.errors.RequestError` if its content is not such a list.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise RequestError(f"{path} is longer than {_MAX_BYTES >> 20} MiB, so it is not a list of nodes")
        return from_json(text, kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"{path} is not a list of nodes: {error}") from error
    except (OSError, ValueError) as error:
        raise UnavailableError(f"{path} could not be read: {error}") from error
