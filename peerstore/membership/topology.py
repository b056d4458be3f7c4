"""Nodes, failure domains, and the member list with its quorum, partitions and delegates.

The nodes are split into about ``sqrt(n)`` partitions of about ``sqrt(n)`` nodes. A node queries the nodes of its own
partition directly, and one member of every other partition, its delegate there, which queries that partition::

    partition 0   a  b  c  d        b asks f for e f g h, and k for i j k l; f queries e g h once for all
    partition 1   e  f  g  h        requests of the same time. So every node sends and receives about
    partition 2   i  j  k  l        2 * sqrt(n) messages.

All nodes with the same list compute the same partitions. A node that joins or leaves changes only its own partition.
Each time the job has become four times as large, every partition is split in two.
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
    """One node agent: its name, its address, and its failure domains."""

    id: NodeId
    address: str
    """``host:port`` where its agent listens for other agents; "" if it does not listen."""
    labels: tuple[tuple[str, str], ...] = ()
    """Failure domains, sorted by level: ``(("rack", "r1"), ("zone", "a"))``."""
    memory_bytes: int = 0
    """Budget of its arena in bytes; 0 if unknown, which counts as an average node."""

    def failure_domain(self, level: str) -> str:
        """Return its failure domain at ``level``; a node without a label is a domain of its own."""
        return next((name for known, name in self.labels if known == level), f"node:{self.id}")


def validate_node_id(text: str) -> NodeId:
    """Return ``text`` as a node's name; raise :class:`InvalidNameError` if it is not allowed."""
    if not isinstance(text, str) or not _NODE.fullmatch(text):
        raise InvalidNameError(
            f"node name {text!r} is not allowed: use 1 to 128 letters, digits, '.', '_' or '-', "
            "the first one a letter or a digit"
        )
    return NodeId(text)


def parse_labels(text: str) -> tuple[tuple[str, str], ...]:
    """Parse labels such as ``rack=r1,zone=a``."""
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
    """Return ``host:port`` (``[::1]:7070`` for IPv6); raise :class:`RequestError` if it is invalid."""
    host, _, port = text.rpartition(":")
    if not _HOST.fullmatch(host) or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise RequestError(
            f"address {text!r} is not allowed: write host:port, for example 10.0.0.1:{DEFAULT_PEER_PORT}"
        )
    return text


def node_from_ip(address: str, port: int) -> PeerNode:
    """Return a node named by its IP address: ``10.0.0.1``, or ``fd00-0000-…`` for IPv6."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        raise RequestError(f"{address!r} is not an IP address") from None
    if isinstance(found, ipaddress.IPv6Address):
        return PeerNode(validate_node_id(found.exploded.replace(":", "-")), validate_address(f"[{found}]:{port}"))
    return PeerNode(validate_node_id(str(found)), validate_address(f"{found}:{port}"))


DomainLabels = tuple[tuple[str, str], ...]

_LAYERS = tuple(f"topology.k8s.aws/network-node-layer-{layer}" for layer in (4, 3, 2, 1))
"""AWS numbers network layers from the top; the machine is attached to the last existing one."""
_LEVELS = ("rack", "switch", "spine")
_KUBERNETES_LABELS = {
    "topology.k8s.aws/zone-id": "zone",  # for clusters without zone names
    "topology.kubernetes.io/zone": "zone",
    "topology.k8s.aws/ultraserver-id": "ultraserver",
}
_LABEL_NAMES = dict.fromkeys((*_LEVELS, *_KUBERNETES_LABELS.values()))
_FILE = "file:"
_LINE = re.compile(r'([^=\s]+)=("(?:[^"\\]|\\.)*")')


def labels_from_kubernetes(labels: Mapping[str, str]) -> DomainLabels:
    """Return the labels for ``ultraserver``, ``rack``, ``switch``, ``spine`` and ``zone`` that are set.

    The rack is the network layer that the machine is attached to. Works for plain Kubernetes and for managed clusters,
    which use the same labels. Labels with these short names override them. All other labels are ignored.
    """
    layers = filter(None, (labels.get(layer) for layer in _LAYERS))
    found = dict(zip(_LEVELS, layers, strict=False))
    found.update({ours: labels[theirs] for theirs, ours in _KUBERNETES_LABELS.items() if labels.get(theirs)})
    found.update({ours: labels[ours] for ours in _LABEL_NAMES if labels.get(ours)})
    return parse_labels(",".join(f"{level}={name}" for level, name in found.items()))


def load_node_labels(text: str) -> DomainLabels:
    """Return labels from ``rack=r1,zone=a``, or from ``file:/path`` with Kubernetes labels.

    The file has the labels of a node or pod. It is the output of ``kubectl get node NAME -o json``, the labels alone as
    JSON, or the downward API's file for ``metadata.labels``.
    """
    if not text.startswith(_FILE):
        return parse_labels(text)
    path = Path(text.removeprefix(_FILE))
    try:
        return labels_from_kubernetes(_parse_label_file(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RequestError) as error:
        raise RequestError(f"the labels in {path} cannot be used: {error}") from error


def _parse_label_file(text: str) -> Mapping[str, str]:
    if text.lstrip().startswith("{"):
        content = json.loads(text)
        metadata = content.get("metadata")
        labels = metadata.get("labels") if isinstance(metadata, dict) else content
    else:
        labels = dict(map(_parse_label_line, filter(None, map(str.strip, text.splitlines()))))
    if not isinstance(labels, dict) or not all(isinstance(name, str) for name in labels.values()):
        raise ValueError("that is neither a node with labels, nor names of labels and their values")
    return labels


def _parse_label_line(line: str) -> tuple[str, str]:
    found = _LINE.fullmatch(line)
    if found is None:
        raise ValueError(f'a line is not of the form NAME="VALUE": {line[:80]!r}')
    return found[1], json.loads(found[2])


DEFAULT_DOMAIN_LEVELS = ("zone", "rack")

_MEMORY_TOLERANCE = 1 / 8
"""Relative difference of memory that is ignored, because firmware reserves a varying amount."""


def stable_hash(*words: str) -> int:
    """Return a hash that is equal on every machine and in every process."""
    return xxhash.xxh3_64_intdigest("\x1f".join(words).encode())


@dataclass(frozen=True)
class FailureDomains:
    """The nodes of one decision, with their domains from the outermost level to the innermost."""

    order: tuple[NodeId, ...]
    """Nodes by hash, the order in which all decisions process them."""
    hashes: Mapping[NodeId, int]
    levels: tuple[Mapping[NodeId, str], ...]

    @property
    def innermost(self) -> Mapping[NodeId, str]:
        return self.levels[-1]

    def levels_apart(self, one: NodeId, other: NodeId) -> int:
        """Return the number of levels at which two nodes are in different domains."""
        return sum(names[one] != names[other] for names in self.levels)


def failure_domains(nodes: Collection[PeerNode], levels: Sequence[str]) -> FailureDomains:
    """Return the nested failure domains of the nodes: rack r1 of zone a differs from r1 of zone b.

    A node without a label at the innermost level is a domain of its own. Nodes without a label at an outer level share
    one unknown domain there, because they may fail together.
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
    """Return each node's share of all copies, by memory; 1 is the average, also used if memory is unknown."""
    known = {node.id: node.memory_bytes for node in nodes if node.memory_bytes > 0}
    if not known:
        return dict.fromkeys((node.id for node in nodes), 1.0)
    usual = sorted(known.values())[(len(known) - 1) // 2]
    weights = {
        node: usual if abs(memory - usual) <= usual * _MEMORY_TOLERANCE else memory for node, memory in known.items()
    }
    total = sum(weights.values())
    return {node.id: weights[node.id] * len(weights) / total if node.id in weights else 1.0 for node in nodes}


class MemberListVersion(NamedTuple):
    """Sort key of member lists: the greatest one is the newest.

    A higher version always wins. Of two different lists with one version, the one with more voters wins, because it
    makes a quorum harder. Then the greater digest wins, so that all nodes choose the same list.
    """

    version: int
    voters: int
    digest: str


class MemberList(msgspec.Struct, frozen=True):
    """The nodes of a job, seen or not. Create one with :func:`member_list`."""

    version: int
    nodes: tuple[PeerNode, ...]
    """Nodes sorted by id."""
    standby: tuple[NodeId, ...] = ()
    """Nodes without a rank, sorted; they have no vote, and store replicas only if necessary."""

    def __post_init__(self) -> None:
        if not 0 <= self.version < 1 << 62:
            raise RequestError(f"member list version {self.version} is not allowed: versions count up from 0")
        if not self.nodes:
            raise RequestError("a member list needs at least one node")
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
            raise RequestError("a roster needs at least one node that is not a standby node")

    @property
    def voters(self) -> int:
        """The number of nodes that count for the quorum."""
        return len(self.nodes) - len(self.standby)

    @property
    def list_version(self) -> MemberListVersion:
        digest = hashlib.blake2b(msgspec.msgpack.encode((self.nodes, self.standby)), digest_size=8).hexdigest()
        return MemberListVersion(self.version, self.voters, digest)

    def has_quorum(self, seen: Collection[NodeId]) -> bool:
        """Return whether ``seen`` is a quorum: more than half of the voters, or half including the lowest id.

        Two disjoint sets of nodes are never both a quorum. This holds for one member list only. While partition sides
        have different lists, their publisher must not remove a node before it has stopped.
        """
        voters = [node.id for node in self.nodes if node.id not in self.standby]
        count = sum(1 for node in voters if node in seen)
        return 2 * count > len(voters) or (2 * count == len(voters) and voters[0] in seen)


def member_list(version: int, nodes: Iterable[PeerNode], standby: Iterable[NodeId] = ()) -> MemberList:
    return MemberList(version, tuple(sorted(nodes)), tuple(sorted(standby)))


PARTITION_MIN_NODES = 64
"""Number of nodes below which a node queries all others directly, with one message each."""
MAX_DELEGATES = 3
"""Number of members of a partition that receive a request before its nodes are queried directly."""
_POINT_BITS = 64


class NodePartitions:
    """The nodes of a job, split into partitions."""

    def __init__(self, nodes: Collection[str], *, split_from: int = PARTITION_MIN_NODES) -> None:
        self._bits = len(nodes).bit_length() // 2 if len(nodes) >= split_from else 0
        cut: dict[int, list[tuple[int, str]]] = {}
        for node in nodes:
            cut.setdefault(self._number(stable_hash(node)), []).append((stable_hash(node), node))
        self._members = {number: tuple(node for _, node in sorted(cut[number])) for number in sorted(cut)}

    def partition_of(self, node: str) -> tuple[str, ...]:
        """Return all members of the partition that ``node`` is in, or would be in."""
        return self._members.get(self._number(stable_hash(node)), ())

    def other_partitions(self, node: str) -> list[tuple[str, ...]]:
        """Return the members of every other partition, in the order in which ``node`` asks them as delegates.

        The first member depends on the asking node, so that all members have the same load.
        """
        mine, begin = self._number(stable_hash(node)), stable_hash(node) & 0xFFFFFFFF
        return [_rotated(members, begin) for number, members in self._members.items() if number != mine]

    def _number(self, place: int) -> int:
        return place >> (_POINT_BITS - self._bits)


class DelegateCandidates:
    """The members of another partition, and the next one to ask as a delegate."""

    def __init__(self, members: Sequence[str], *, gone: Callable[[str], bool]) -> None:
        self.members = tuple(members)
        self._gone = gone
        self._next = self._delegates()

    def next_delegate(self) -> str | None:
        """Return the next delegate; ``None`` after the last one."""
        return next(self._next, None)

    def _delegates(self) -> Iterator[str]:
        asked = 0
        for node in self.members:
            if asked == MAX_DELEGATES:
                return
            if not self._gone(node):
                asked += 1
                yield node


def _rotated(members: tuple[str, ...], begin: int) -> tuple[str, ...]:
    first = begin % len(members)
    return members[first:] + members[:first]
