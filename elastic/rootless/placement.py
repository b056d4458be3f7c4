"""Which members of a world hold a key, and which nodes of a large world are members. Pure; knows no torch.

All ranks compute the same from the same list of addresses, and nobody is asked. Nothing ever moves: every world begins
with no keys, and its members stay the same until it ends. So this need not be a ring: a key's holders are drawn evenly
among all, and what a dead member held falls to all others in equal parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

ROOTLESS = "rootless"
"""Where a store's address is asked for: one on every node."""

COPIES = 2
MEMBERS_MOST = 1024
"""So many nodes of a world keep its keys at the most: a rank may have to know, and to call, each of them."""

T = TypeVar("T")


@lru_cache(maxsize=1 << 16)
def holders_of(key: str, members: int, copies: int = COPIES) -> tuple[int, ...]:
    """The members that hold ``key``, by their place in the world's list; the first one decides."""
    if members < 1 or copies < 1:
        raise ValueError(f"members={members}, copies={copies}: a key is held by at least one of at least one")
    number = _digest(key)
    drawn: list[int] = []
    for _ in range(min(copies, members)):
        number, place = divmod(number, members - len(drawn))
        drawn.append(_among_the_others(place, drawn))
    return tuple(drawn)


def members_of(epoch: int, nodes: Sequence[T], most: int = MEMBERS_MOST) -> tuple[T, ...]:
    """The nodes that keep the keys of a world: all, or so many of a large one, others in every epoch."""
    if len(nodes) <= most:
        return tuple(nodes)
    drawn = sorted(range(len(nodes)), key=lambda place: _digest(f"{epoch}/{place}"))[:most]
    return tuple(nodes[place] for place in sorted(drawn))


def _among_the_others(place: int, drawn: Sequence[int]) -> int:
    """The ``place``-th of those that were not drawn."""
    for taken in sorted(drawn):
        place += place >= taken
    return place


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).digest(), "big")
