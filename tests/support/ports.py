"""Ports for somebody who is told to listen on one.

The kernel gives away the ports of its own range to everybody who connects: one that was free a moment ago is taken by a
neighbour's connection before a server has started there. These lie below that range, and each process has some of its
own.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LEAST = 10_000
_EACH = 250
_SHARES = 64
"""At least, also where the kernel's own range begins low and they lie within it."""


def free_port() -> int:
    (port,) = free_ports(1)
    return port


def free_ports(count: int) -> list[int]:
    """So many different ones that nobody listens on, and that this process was not given lately."""
    free = (port for port in _own.numbers() if _is_free(port))
    return list(itertools.islice(free, count))


class _PortRange:
    """The numbers of this process, each as late again as can be."""

    def __init__(self) -> None:
        self._pid = 0
        self._numbers: Iterator[int] = iter(())

    def numbers(self) -> Iterator[int]:
        if self._pid != os.getpid():  # a forked process has its own
            self._pid = os.getpid()
            shares = max(_SHARES, (_first_given_away() - _LEAST) // _EACH)
            first = _LEAST + self._pid % shares * _EACH
            self._numbers = itertools.cycle(range(first, first + _EACH))
        return itertools.islice(self._numbers, _EACH)


_own = _PortRange()


def _first_given_away() -> int:
    return int(_RANGE.read_text().split()[0])


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
