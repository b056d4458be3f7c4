"""Nodes, addresses, failure domains, and the versioned member list with its quorum, partitions and delegates. Pure.

The nodes are cut into about ``sqrt(n)`` partitions of about ``sqrt(n)`` nodes. In its own partition a node looks at
everybody itself; of every other one it asks a member to do that for it, its delegate there::

    partition 0   a  b  c  d        b asks f for e f g h, and k for i j k l; f looks at e g h, once for all
    partition 1   e  f  g  h        who ask at one time. So every node sends, and gets, about 2 * sqrt(n) messages.
    partition 2   i  j  k  l

Whoever has the same nodes cuts in the same way. A node that comes or goes changes its own partition alone; each time
the job has become four times as large, every partition is cut in two.
"""

from __future__ import annotations

import hashlib
import ipaddress
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NewType

import msgspec
import xxhash

from peerstore.errors import InvalidNameError, RequestError

NodeId = NewType("NodeId", str)

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")


class PeerNode(msgspec.Struct, frozen=True, order=True):
    """One node agent: what it is called, where it listens, and what it would fail together with."""

    id: NodeId
    address: str
    """``host:port`` where its agent listens for other agents; "" when it does not."""
    labels: tuple[tuple[str, str], ...] = ()
    """Its failure domains by level, sorted by level: ``(("rack", "r1"), ("zone", "a"))``."""
    memory_bytes: int = 0
    """Its arena's budget; 0 when it is not known, which counts as much as any other."""

    def failure_domain(self, level: str) -> str:
        """Its failure domain at ``level``. A node nobody labelled fails alone."""
        return next((name for known, name in self.labels if known == level), f"node:{self.id}")


def validate_node_id(text: str) -> NodeId:
    """``text`` as a node's name, or :class:`InvalidNameError` that says what is allowed."""
    if not isinstance(text, str) or not _NODE.fullmatch(text):
        raise InvalidNameError(
            f"node name {text!r} is not allowed: use 1 to 128 letters, digits, '.', '_' or '-', "
            "the first one a letter or a digit"
        )
    return NodeId(text)


def parse_labels(text: str) -> tuple[tuple[str, str], ...]:
    """``rack=r1,zone=a`` as labels."""
    labels: dict[str, str] = {}
    for pair in filter(None, text.split(",")):
        level, _, name = pair.partition("=")
        if not _LABEL.fullmatch(level) or not _LABEL.fullmatch(name):
            raise InvalidNameError(f"label {pair!r} is not allowed: write for example rack=r1,zone=a")
        if level in labels:
            raise InvalidNameError(f"label {level!r} is given twice in {text!r}")
        labels[level] = name
    return tuple(sorted(labels.items()))


DEFAULT_PEER_PORT = 7070

_HOST = re.compile(r"\[[0-9A-Fa-f:.]+\]|[^\s:/\[\],=]+")


def validate_address(text: str) -> str:
    """``host:port`` (``[::1]:7070`` for IPv6) as it is, or :class:`RequestError`."""
    host, _, port = text.rpartition(":")
    if not _HOST.fullmatch(host) or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise RequestError(
            f"address {text!r} is not allowed: write host:port, for example 10.0.0.1:{DEFAULT_PEER_PORT}"
        )
    return text


def node_from_ip(address: str, port: int) -> PeerNode:
    """The node at an IP address that has no other name: ``10.0.0.1``, ``fd00-0000-…`` for IPv6."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        raise RequestError(f"{address!r} is not an IP address") from None
    if isinstance(found, ipaddress.IPv6Address):
        return PeerNode(validate_node_id(found.exploded.replace(":", "-")), validate_address(f"[{found}]:{port}"))
    return PeerNode(validate_node_id(str(found)), validate_address(f"{found}:{port}"))


DomainLabels = tuple[tuple[str, str], ...]

_LAYERS = tuple(f"topology.k8s.aws/network-node-layer-{layer}" for layer in (4, 3, 2, 1))
"""AWS counts its network from the top; the last layer there is is the one the machine is attached to."""
_LEVELS = ("rack", "switch", "spine")
_OTHERS = {
    "topology.k8s.aws/zone-id": "zone",  # where a cluster has no names for its zones
    "topology.kubernetes.io/zone": "zone",
    "topology.k8s.aws/ultraserver-id": "ultraserver",
}
_OURS = dict.fromkeys((*_LEVELS, *_OTHERS.values()))
_FILE = "file:"
_LINE = re.compile(r'([^=\s]+)=("(?:[^"\\]|\\.)*")')


def labels_from_kubernetes(labels: Mapping[str, str]) -> DomainLabels:
    """``rack`` (what the machine is attached to), ``switch`` and ``spine`` above it, ``zone``: those that are told.

    Works for plain Kubernetes and for managed clusters, which use the same labels. A label with one of our
    own names overrides them. All other labels are ignored.
    """
    told = filter(None, (labels.get(layer) for layer in _LAYERS))
    found = dict(zip(_LEVELS, told, strict=False))
    found.update({ours: labels[theirs] for theirs, ours in _OTHERS.items() if labels.get(theirs)})
    found.update({ours: labels[ours] for ours in _OURS if labels.get(ours)})
    return parse_labels(",".join(f"{level}={name}" for level, name in found.items()))


def load_node_labels(text: str) -> DomainLabels:
    """``rack=r1,zone=a``, or ``file:/path`` to the labels of a Kubernetes node or pod.

    The file is what ``kubectl get node NAME -o json`` prints, the labels alone as JSON, or what the downward API
    writes for ``metadata.labels``.
    """
    if not text.startswith(_FILE):
        return parse_labels(text)
    path = Path(text.removeprefix(_FILE))
    try:
        return labels_from_kubernetes(_told(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RequestError) as error:
        raise RequestError(f"the labels in {path} cannot be used: {error}") from error


def _told(text: str) -> Mapping[str, str]:
    if text.lstrip().startswith("{"):
        told = json.loads(text)
        about = told.get("metadata")
        labels = about.get("labels") if isinstance(about, dict) else told
    else:
        labels = dict(map(_line, filter(None, map(str.strip, text.splitlines()))))
    if not isinstance(labels, dict) or not all(isinstance(name, str) for name in labels.values()):
        raise ValueError("that is neither a node with labels, nor names of labels and their values")
    return labels


def _line(line: str) -> tuple[str, str]:
    found = _LINE.fullmatch(line)
    if found is None:
        raise ValueError(f'a line is not of the form NAME="VALUE": {line[:80]!r}')
    return found[1], json.loads(found[2])


DEFAULT_DOMAIN_LEVELS = ("zone", "rack")

_SAME = 1 / 8
"""Memory that differs from the usual by less than this is the usual: firmware takes a little, not always as much."""


def stable_hash(*words: str) -> int:
    """The same number for the same words, on every machine and in every process."""
    return xxhash.xxh3_64_intdigest("\x1f".join(words).encode())


@dataclass(frozen=True)
class FailureDomains:
    """The nodes of one decision, each with its domains from the outermost level to the innermost."""

    order: tuple[NodeId, ...]
    """In hash order, the order in which all decisions look at nodes."""
    hashes: Mapping[NodeId, int]
    levels: tuple[Mapping[NodeId, str], ...]

    @property
    def innermost(self) -> Mapping[NodeId, str]:
        return self.levels[-1]

    def levels_apart(self, one: NodeId, other: NodeId) -> int:
        """At how many levels two nodes are in different domains."""
        return sum(names[one] != names[other] for names in self.levels)


def failure_domains(nodes: Collection[PeerNode], levels: Sequence[str]) -> FailureDomains:
    """Domains are nested: rack r1 of zone a is another rack than r1 of zone b.

    A node without a label at the innermost level fails alone. Nodes without a label further out share one unknown
    domain there, because nothing says that they would not fail together.
    """
    if not levels:
        raise RequestError("name at least one level of failure domains, for example rack")
    points = {node.id: stable_hash("node", node.id) for node in nodes}
    if len(points) != len(nodes):
        twice = sorted({node.id for node in nodes if sum(other.id == node.id for other in nodes) > 1})
        raise RequestError(f"every node may be given once; these were given more often: {', '.join(twice)}")
    paths: dict[NodeId, str] = dict.fromkeys(points, "")
    nested = []
    for depth, level in enumerate(levels, start=1):
        for node in nodes:
            name = node.failure_domain(level) if depth == len(levels) else dict(node.labels).get(level, "")
            paths[node.id] += f"\x1e{name}"
        nested.append(dict(paths))
    return FailureDomains(tuple(sorted(points, key=lambda node: (points[node], node))), points, tuple(nested))


def memory_shares(nodes: Collection[PeerNode]) -> dict[NodeId, float]:
    """How much of all copies each node should keep, 1 being the average: by memory, 1 where that is not known."""
    known = {node.id: node.memory_bytes for node in nodes if node.memory_bytes > 0}
    if not known:
        return dict.fromkeys((node.id for node in nodes), 1.0)
    usual = sorted(known.values())[(len(known) - 1) // 2]
    weights = {node: usual if abs(memory - usual) <= usual * _SAME else memory for node, memory in known.items()}
    total = sum(weights.values())
    return {node.id: weights[node.id] * len(weights) / total if node.id in weights else 1.0 for node in nodes}


class MemberListVersion(NamedTuple):
    """Which of two member lists is the newer one: compare their marks.

    A higher version always wins. Of two different rosters with one version the one with more voters wins, because it
    makes a quorum harder, and then the one with the greater digest, so that everybody who has heard of both ends up
    with the same.
    """

    version: int
    voters: int
    digest: str


class MemberList(msgspec.Struct, frozen=True):
    """The nodes of a job, whether anybody has seen them or not. Make one with :func:`member_list`."""

    version: int
    nodes: tuple[PeerNode, ...]
    """In the order of their ids."""
    standby: tuple[NodeId, ...] = ()
    """Nodes without a rank, in order: they hold replicas where the others do not suffice, and have no vote."""

    def __post_init__(self) -> None:
        if not 0 <= self.version < 1 << 62:
            raise RequestError(f"member list version {self.version} is not allowed: versions count up from 0")
        if not self.nodes:
            raise RequestError("a member list without nodes says nothing: not to know the nodes is another answer")
        for node in self.nodes:
            validate_node_id(node.id)
        for one, next_one in zip(self.nodes, self.nodes[1:], strict=False):
            if one.id >= next_one.id:
                what = "is listed twice" if one.id == next_one.id else f"comes before {next_one.id!r}"
                raise RequestError(f"node {one.id!r} {what}: a roster names each node once, in the order of the ids")
        if any(one >= next_one for one, next_one in itertools.pairwise(self.standby)):
            raise RequestError("a roster names each standby node once, in the order of the ids")
        if strangers := sorted(set(self.standby) - {node.id for node in self.nodes}):
            raise RequestError(f"standby node {strangers[0]!r} is not in the roster")
        if len(self.standby) == len(self.nodes):
            raise RequestError("a roster of standby nodes alone has nobody who may decide")

    @property
    def voters(self) -> int:
        """The number of nodes that count for the quorum."""
        return len(self.nodes) - len(self.standby)

    @property
    def list_version(self) -> MemberListVersion:
        digest = hashlib.blake2b(msgspec.msgpack.encode((self.nodes, self.standby)), digest_size=8).hexdigest()
        return MemberListVersion(self.version, self.voters, digest)

    def has_quorum(self, seen: Collection[NodeId]) -> bool:
        """Whether ``seen`` may decide for all: more than half, or exactly half and the lowest id among them.

        Two disjoint sets of nodes never both may. That holds for one member list: while two sides of a partition were
        told different ones, it is for whoever publishes member lists to let go of a node only once it is gone.
        """
        voters = [node.id for node in self.nodes if node.id not in self.standby]
        count = sum(1 for node in voters if node in seen)
        return 2 * count > len(voters) or (2 * count == len(voters) and voters[0] in seen)


def member_list(version: int, nodes: Iterable[PeerNode], standby: Iterable[NodeId] = ()) -> MemberList:
    return MemberList(version, tuple(sorted(nodes)), tuple(sorted(standby)))


PARTITION_MIN_NODES = 64
"""With fewer nodes everybody is asked directly: that is one message a node, and no way round."""
MAX_DELEGATES = 3
"""How many members of a partition are asked before its nodes are looked at directly."""
_POINT_BITS = 64


class NodePartitions:
    """The nodes of a job, cut into partitions."""

    def __init__(self, nodes: Collection[str], *, split_from: int = PARTITION_MIN_NODES) -> None:
        self._bits = len(nodes).bit_length() // 2 if len(nodes) >= split_from else 0
        cut: dict[int, list[tuple[int, str]]] = {}
        for node in nodes:
            cut.setdefault(self._number(stable_hash(node)), []).append((stable_hash(node), node))
        self._members = {number: tuple(node for _, node in sorted(cut[number])) for number in sorted(cut)}

    def partition_of(self, node: str) -> tuple[str, ...]:
        """All members of the partition in which ``node`` is, or would be."""
        return self._members.get(self._number(stable_hash(node)), ())

    def other_partitions(self, node: str) -> list[tuple[str, ...]]:
        """The members of every other partition, in the order in which ``node`` asks them to be its delegate.

        Each node begins with another member, so that as many ask the one as the other.
        """
        mine, begin = self._number(stable_hash(node)), stable_hash(node) & 0xFFFFFFFF
        return [_turned(members, begin) for number, members in self._members.items() if number != mine]

    def _number(self, place: int) -> int:
        return place >> (_POINT_BITS - self._bits)


class DelegateCandidates:
    """One partition that somebody else is to look at: whom to ask next."""

    def __init__(self, members: Sequence[str], *, gone: Callable[[str], bool]) -> None:
        self.members = tuple(members)
        self._gone = gone
        self._next = self._delegates()

    def next_delegate(self) -> str | None:
        """The next delegate; ``None`` when nobody else is asked."""
        return next(self._next, None)

    def _delegates(self) -> Iterator[str]:
        asked = 0
        for node in self.members:
            if asked == MAX_DELEGATES:
                return
            if not self._gone(node):
                asked += 1
                yield node


def _turned(members: tuple[str, ...], begin: int) -> tuple[str, ...]:
    first = begin % len(members)
    return members[first:] + members[:first]
