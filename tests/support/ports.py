"""Free ports for servers that need a fixed one.

The kernel gives ports of its ephemeral range to connecting clients, even between a check and a server's start. These
ports lie below that range, and each process has its own share. An abstract socket claims it. Such a socket belongs to
a network namespace, as ports do, and ends with its process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LEAST = 10_000
_EACH = 250
_SHARES = 64
"""Minimum number of shares, even if they then reach into the ephemeral range."""


def free_port() -> int:
    (port,) = free_ports(1)
    return port


def free_ports(count: int) -> list[int]:
    """Return ``count`` different ports without a listener, least recently used first."""
    free = (port for port in _own.numbers() if _is_free(port))
    return list(itertools.islice(free, count))


class _PortRange:
    """Share of this process, cycled so that a port is reused as late as possible."""

    def __init__(self) -> None:
        self._pid = 0
        self._numbers: Iterator[int] = iter(())
        self._claim: socket.socket | None = None

    def numbers(self) -> Iterator[int]:
        if self._pid != os.getpid():  # a forked process has its own share
            self._pid = os.getpid()
            share, self._claim = _claim_share(max(_SHARES, (_first_given_away() - _LEAST) // _EACH), self._pid)
            first = _LEAST + share * _EACH
            self._numbers = itertools.cycle(range(first, first + _EACH))
        return itertools.islice(self._numbers, _EACH)


def _claim_share(shares: int, first: int) -> tuple[int, socket.socket]:
    """Return a share and the socket that claims it; a claimed share if no other is left."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    for number in range(first, first + shares):
        with contextlib.suppress(OSError):
            claim.bind(f"\0tieredckpt-test-ports-{number % shares}")
            return number % shares, claim
    return first % shares, claim


_own = _PortRange()


def _first_given_away() -> int:
    return int(_RANGE.read_text().split()[0])


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
