"""Discovery from files that somebody else writes."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TypeVar

import msgspec

from peerstore.cluster.addresses import DEFAULT_PORT, check_address, node_at
from peerstore.cluster.nodes import Node, node_id, parse_labels
from peerstore.cluster.roster import Roster, roster_of
from peerstore.decode import from_json
from peerstore.errors import RequestError, UnavailableError

HYPERPOD_FILE = "/opt/ml/input/config/pod_resourceconfig.json"

_MOST_BYTES = 64 << 20
_MOST_RANKS = 100_001
"""HyperPod's agent knows no rank beyond 100,000."""
_MOST_DIGITS = 20
_FINER = re.compile(r"(\.[0-9]{6})[0-9]+")
"""What Go writes of a second, and Python does not read."""

T = TypeVar("T")


class _FileNode(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    address: str
    labels: dict[str, str] = {}
    memory_bytes: int = 0


class _NodesFile(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    nodes: list[_FileNode]


class NodesFile:
    """A JSON file ``{"version": 3, "nodes": [{"id", "address", "labels": {}, "memory_bytes"}]}``, read each time.

    Whoever changes it raises the version. Replace it by a rename, so that nobody reads half of it.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def roster(self) -> Roster:
        told = _read_json(self._path, _NodesFile)
        try:
            return roster_of(told.version, map(_from_file, told.nodes))
        except RequestError as error:
            raise RequestError(f"{self._path}: {error}") from error


def _from_file(told: _FileNode) -> Node:
    labels = parse_labels(",".join(f"{level}={name}" for level, name in told.labels.items()))
    return Node(node_id(told.id), check_address(told.address), labels, told.memory_bytes)


class _PodResources(msgspec.Struct):
    ips: list[str | None]
    ips_timestamp: str | int


class PodResourceConfig:
    """The file in which HyperPod's agent writes the address of every pod of the job, by rank; read each time.

    It has no names and no labels, so a node is called what its address is. Pods of one node are one node. While the
    operator has not told the address of every rank yet, the roster is not known.
    """

    def __init__(self, path: str | Path = HYPERPOD_FILE, *, port: int = DEFAULT_PORT) -> None:
        self._path = Path(path)
        self._port = port

    def roster(self) -> Roster:
        told = _read_json(self._path, _PodResources)
        if len(told.ips) > _MOST_RANKS:
            raise RequestError(f"{self._path} has {len(told.ips)} ranks, more than any job of HyperPod's")
        unknown = [str(rank) for rank, address in enumerate(told.ips) if not address]
        if unknown or not told.ips:
            which = f"of rank {', '.join(unknown[:8])}" if unknown else "of any rank"
            raise UnavailableError(f"{self._path} does not have the address {which} yet ({len(told.ips)} ranks)")
        try:
            nodes = {node.id: node for node in (node_at(address, self._port) for address in told.ips if address)}
            return roster_of(_version_of(told.ips_timestamp), nodes.values())
        except RequestError as error:
            raise RequestError(f"{self._path}: {error}") from error


def _version_of(stamp: str | int) -> int:
    """A count as it is, a time in milliseconds."""
    if isinstance(stamp, int) or (stamp.isascii() and stamp.isdigit() and len(stamp) < _MOST_DIGITS):
        return int(stamp)
    try:
        moment = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", _FINER.sub(r"\1", stamp)))
    except ValueError:
        raise RequestError(
            f"ips_timestamp {stamp[:80]!r} is neither a number nor a time like 2026-01-31T12:00:00Z"
        ) from None
    since = (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)) - datetime(
        1970, 1, 1, tzinfo=timezone.utc
    )
    return since // timedelta(milliseconds=1)


def _read_json(path: Path, kind: type[T]) -> T:
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise RequestError(f"{path} is longer than {_MOST_BYTES >> 20} MiB, so it is no list of nodes")
        return from_json(text, kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"{path} is not a list of nodes: {error}") from error
    except (OSError, ValueError) as error:
        raise UnavailableError(f"{path} could not be read: {error}") from error
