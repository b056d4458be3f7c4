"""HyperPod's member list: ``peer.discovery: hyperpod`` reads the addresses of a job's pods."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

import msgspec

from peerstore.errors import RequestError, UnavailableError
from peerstore.membership.discovery import read_member_json
from peerstore.membership.topology import DEFAULT_PEER_PORT, MemberList, member_list, node_from_ip

HYPERPOD_FILE = "/opt/ml/input/config/pod_resourceconfig.json"
_MAX_RANKS = 100_001
"""Ranks that HyperPod's agent supports."""
_MAX_DIGITS = 20
_NANOSECOND_DIGITS = re.compile(r"(\.[0-9]{6})[0-9]+")
"""Digits after the microseconds, which Go writes and Python cannot parse."""


class _PodResources(msgspec.Struct):
    ips: list[str | None]
    ips_timestamp: str | int


class PodResourceConfig:
    """Addresses of a job's pods by rank, from the file that HyperPod's agent writes.

    Each call reads the file again. It has no names and no labels, so a node's address is its name. Pods on one node
    count as one node. The member list is unknown until the operator has sent the address of every rank.
    """

    def __init__(self, path: str | Path = HYPERPOD_FILE, *, port: int = DEFAULT_PEER_PORT) -> None:
        self._path = Path(path)
        self._port = port

    def member_list(self) -> MemberList:
        resources = read_member_json(self._path, _PodResources)
        if len(resources.ips) > _MAX_RANKS:
            raise RequestError(f"{self._path} has {len(resources.ips)} ranks, more than any job of HyperPod's")
        unknown = [str(rank) for rank, address in enumerate(resources.ips) if not address]
        if unknown or not resources.ips:
            which = f"of rank {', '.join(unknown[:8])}" if unknown else "of any rank"
            raise UnavailableError(f"{self._path} does not have the address {which} yet ({len(resources.ips)} ranks)")
        try:
            nodes = {
                node.id: node for node in (node_from_ip(address, self._port) for address in resources.ips if address)
            }
            return member_list(_version_of(resources.ips_timestamp), nodes.values())
        except RequestError as error:
            raise RequestError(f"{self._path}: {error}") from error


def _version_of(stamp: str | int) -> int:
    """Return a count unchanged, and a time in milliseconds since 1970."""
    if isinstance(stamp, int) or (stamp.isascii() and stamp.isdigit() and len(stamp) < _MAX_DIGITS):
        return int(stamp)
    try:
        moment = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", _NANOSECOND_DIGITS.sub(r"\1", stamp)))
    except ValueError:
        raise RequestError(
            f"ips_timestamp {stamp[:80]!r} is neither a number nor a time like 2026-01-31T12:00:00Z"
        ) from None
    since = (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)) - datetime(
        1970, 1, 1, tzinfo=timezone.utc
    )
    return since // timedelta(milliseconds=1)


def open_pod_resource_config(path: str) -> PodResourceConfig:
    """Return the member list of ``hyperpod:/path``, or of ``hyperpod`` at the file's default location."""
    return PodResourceConfig(path or HYPERPOD_FILE)
