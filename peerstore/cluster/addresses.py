"""Where nodes are, as text."""

from __future__ import annotations

import ipaddress
import re

from peerstore.cluster.nodes import Node, node_id
from peerstore.errors import RequestError

DEFAULT_PORT = 7070

_HOST = re.compile(r"\[[0-9A-Fa-f:.]+\]|[^\s:/\[\],=]+")


def check_address(text: str) -> str:
    """``host:port`` (``[::1]:7070`` for IPv6) as it is, or :class:`RequestError`."""
    host, _, port = text.rpartition(":")
    if not _HOST.fullmatch(host) or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise RequestError(f"address {text!r} is not allowed: write host:port, for example 10.0.0.1:{DEFAULT_PORT}")
    return text


def node_at(address: str, port: int) -> Node:
    """The node at an IP address that has no other name: ``10.0.0.1``, ``fd00-0000-…`` for IPv6."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        raise RequestError(f"{address!r} is not an IP address") from None
    if isinstance(found, ipaddress.IPv6Address):
        return Node(node_id(found.exploded.replace(":", "-")), check_address(f"[{found}]:{port}"))
    return Node(node_id(str(found)), check_address(f"{found}:{port}"))
