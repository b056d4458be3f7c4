"""What is wrong on the wires of a network, and the packet filter's rules that make it so."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit")
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}
_LEAST_BURST = 128 << 10
_BURSTS_PER_S = 32
"""The bucket is filled by the clock's tick (4 ms on many kernels); much smaller ones give a tenth of the rate."""


@dataclass
class LinkFaults:
    """Pairs are (sender, receiver), by name."""

    cut: set[tuple[str, str]] = field(default_factory=set)
    refused: set[tuple[str, str]] = field(default_factory=set)
    lost: dict[str, float] = field(default_factory=dict)
    """Share of packets, by host."""

    def heal(self, one: str, other: str) -> None:
        for pairs in (self.cut, self.refused):
            pairs.difference_update({(one, other), (other, one)})

    def rules(self, receiver: str, addresses: Mapping[str, str]) -> str:
        """Everything ``receiver`` does to what arrives, for ``iptables-restore``, which replaces what there was."""
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
    """How much may go at once so that the rate comes out right."""
    found = _RATE.fullmatch(rate)
    if not found:
        raise ValueError(f"rate {rate!r}: write for example 100mbit or 2.5gbit")
    return max(_LEAST_BURST, int(float(found[1]) * _UNITS[found[2]] / 8 / _BURSTS_PER_S))
