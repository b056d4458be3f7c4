"""Link faults of a network as rules of the packet filter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit")
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}
_LEAST_BURST = 128 << 10
_BURSTS_PER_S = 32
"""Bursts of one bucket per second at the full rate.

The kernel refills the bucket at each tick (4 ms on many kernels), so a much smaller one yields a tenth of the rate.
"""


@dataclass
class LinkFaults:
    """Pairs are (sender, receiver), by name."""

    cut: set[tuple[str, str]] = field(default_factory=set)
    refused: set[tuple[str, str]] = field(default_factory=set)
    lost: dict[str, float] = field(default_factory=dict)
    """Share of packets lost, by host."""

    def heal(self, one: str, other: str) -> None:
        for pairs in (self.cut, self.refused):
            pairs.difference_update({(one, other), (other, one)})

    def rules(self, receiver: str, addresses: Mapping[str, str]) -> str:
        """Return all rules of ``receiver`` for ``iptables-restore``, which replaces the old ones."""
        return "\n".join(["*filter", ":INPUT ACCEPT", *self._lines(receiver, addresses), "COMMIT", ""])

    def _lines(self, receiver: str, addresses: Mapping[str, str]) -> Iterator[str]:
        for sender, address in addresses.items():
            begin = f"-A INPUT -i eth0 -s {address}"
            if (sender, receiver) in self.cut:
                yield f"{begin} -j DROP"
            if (sender, receiver) in self.refused:
                yield f"{begin} -p tcp -j REJECT --reject-with tcp-reset"
            for host in (sender, receiver):
                if share := self.lost.get(host, 0.0):
                    yield f"{begin} -m statistic --mode random --probability {share} -j DROP"


def burst_bytes(rate: str) -> int:
    """Return the bucket size that yields this rate."""
    found = _RATE.fullmatch(rate)
    if not found:
        raise ValueError(f"rate {rate!r}: write for example 100mbit or 2.5gbit")
    return max(_LEAST_BURST, int(float(found[1]) * _UNITS[found[2]] / 8 / _BURSTS_PER_S))
