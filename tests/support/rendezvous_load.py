"""Load of rendezvous servers, computed from the keys that torch sets.

Counts the responses and connections of a server, and the connections of a rank. The sockets of gloo's own mesh, one
from every rank to every other, are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from elastic.rendezvous.store_servers import KEY_COPIES, MAX_STORE_NODES, key_holders, store_nodes

_READ = 2
"""Requests to read a key of another rank: a wait and a get."""
_NCCL_RANKS_PER_ROOT = 128


@dataclass(frozen=True)
class StoreLoad:
    """Load of one rendezvous of ``ranks`` ranks."""

    ranks: int
    members: int
    keys: int
    most: int
    """Requests that the busiest server answers."""
    mean: float
    """Requests per server."""
    connections: int
    """Connections of the busiest server."""
    per_rank: int
    """Connections of a rank."""

    @property
    def ratio(self) -> float:
        """Load of the busiest server relative to the mean."""
        return self.most / self.mean


def gloo_keys(ranks: int, epoch: int = 0) -> list[str]:
    """Return gloo's keys: each rank publishes its address and reads all others."""
    return [f"elastic/{epoch}/default_pg/0//cpu//0/{rank}" for rank in range(ranks)]


def nccl_keys(ranks: int, epoch: int = 0, per_root: int = _NCCL_RANKS_PER_ROOT) -> list[str]:
    """Return NCCL's keys: root ranks publish identifiers, and each rank reads all of them."""
    return [f"elastic/{epoch}/default_pg/0//cuda//UniqueNCCLID:0:{root}" for root in range(-(-ranks // per_root))]


def load_of_one_store(ranks: int, keys: Iterable[str]) -> StoreLoad:
    """Compute the load of a single server with all keys."""
    count = len(list(keys))
    requests = count + _READ * count * ranks
    return StoreLoad(ranks, 1, count, requests, requests, ranks, 1)


def spread_load(
    ranks: int,
    nodes: int,
    keys: Iterable[str],
    *,
    epoch: int = 0,
    most: int = MAX_STORE_NODES,
    copies: int = KEY_COPIES,
) -> StoreLoad:
    """Compute the load with the keys spread over nodes; all ranks read every key."""
    members = len(store_nodes(epoch, range(nodes), most))
    reads, writes, count = Counter[int](), Counter[int](), 0
    for key in keys:
        held = key_holders(key, members, copies)
        reads[held[0]] += _READ * ranks
        for holder in held:
            writes[holder] += 1
        count += 1
    served = [reads[member] + writes[member] for member in range(members)]
    asked = len(reads)
    return StoreLoad(ranks, members, count, max(served), sum(served) / members, ranks, min(members, asked + copies))
