"""An arena in memory and tiny shards, for running the real store without threads and files."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import xxhash

from peerstore.checksums import mismatched_chunks
from peerstore.errors import ArenaFullError
from peerstore.membership.topology import NodeId, PeerNode
from peerstore.parity import parity_store, parity_strategy, stripes
from peerstore.replication import replication_policy
from peerstore.replication.replica_placement import ReplicaPlacement, parity_groups, place_replicas
from peerstore.replication.replication_policy import substitute_partners
from peerstore.shard_records import Lease, ShardKey, ShardRecord
from peerstore.store import crash_recovery, leases, slot_metadata, slot_table
from peerstore.store.shards import ShardSealer
from tests.support.chunk_sums import chunk_checksums

CHUNK_BYTES = 8
CHUNKS = 3
SHARD_BYTES = CHUNK_BYTES * CHUNKS
SEALED = slot_metadata.SEAL_METADATA
SLOTS, BURST = 2, 1


class DictArena:
    """An arena without files: slots are byte arrays, metadata is bytes."""

    def __init__(self) -> None:
        self.bytes: dict[str, bytearray] = {}
        self._metadata: dict[str, bytes] = {}
        self.full = False
        """Whether the machine has no memory left for another slot."""
        self.sealed: Callable[[str, bytes], None] = lambda _slot, _data: None
        """Callback with a slot's name and new seal metadata."""
        self.unsealed: Callable[[str], None] = lambda _slot: None
        """Callback with the name of a slot whose shard is about to be deleted."""

    def create(self, name: str, size_bytes: int) -> None:
        if self.full:
            raise ArenaFullError("no memory left")
        self.bytes[name] = bytearray(size_bytes)

    def remove(self, name: str) -> None:
        self.bytes.pop(name, None)

    def open(self, name: str, *, writable: bool = False) -> int:
        raise NotImplementedError("this arena has no files")

    def path(self, name: str) -> str:
        return name

    def size(self, name: str) -> int:
        return len(self.bytes[name])

    def list_slots(self) -> list[str]:
        return sorted(self.bytes)

    def removed_in_use(self) -> dict[str, int]:
        return {}

    def put_metadata(self, name: str, data: bytes) -> None:
        self._metadata[name] = data
        if name.startswith(SEALED):
            self.sealed(name.removeprefix(SEALED), data)

    def get_metadata(self, name: str) -> bytes | None:
        return self._metadata.get(name)

    def remove_metadata(self, name: str) -> None:
        if name in self._metadata and name.startswith(SEALED):
            self.unsealed(name.removeprefix(SEALED))
        self._metadata.pop(name, None)

    def list_metadata(self, prefix: str) -> list[str]:
        return sorted(name for name in self._metadata if name.startswith(prefix))

    def purge(self, *, keep: str = "") -> None:
        self.bytes.clear()
        self._metadata = {name: data for name, data in self._metadata.items() if keep and name.startswith(keep)}

    def close(self) -> None:
        pass


class SimulatedSealing(ShardSealer):
    """The store's sealer. It reads shards from a :class:`DictArena`."""

    now_ns = 0

    def _compute_record(self, lease: Lease, size_bytes: int, meta: bytes) -> ShardRecord:
        data = memoryview(self._table.arena.bytes[lease.slot])[:size_bytes]
        sums = chunk_checksums(data, chunk_bytes=CHUNK_BYTES)
        return ShardRecord(lease.key, lease.parts, size_bytes, CHUNK_BYTES, sums, meta, self.now_ns)


@functools.lru_cache(maxsize=10_000)
def shard_content(key: ShardKey) -> bytes:
    """Return the bytes that a trainer saves as this shard."""
    return b"".join(xxhash.xxh3_64_digest(f"{key} {number}".encode()) for number in range(CHUNKS))


def damaged_chunks(data: bytes | bytearray, record: ShardRecord) -> tuple[int, ...]:
    view = memoryview(data)[: record.size_bytes]
    return mismatched_chunks(view, record.checksums, chunk_bytes=record.chunk_bytes)


@functools.lru_cache(maxsize=10_000)
def _cached_placement(nodes: tuple[PeerNode, ...], copies: int, levels: tuple[str, ...]) -> ReplicaPlacement:
    return place_replicas(nodes, copies=copies, levels=levels)


@functools.lru_cache(maxsize=10_000)
def _cached_groups(nodes: tuple[PeerNode, ...], size: int, levels: tuple[str, ...]) -> tuple[tuple[NodeId, ...], ...]:
    return parity_groups(nodes, size, levels=levels)


@functools.lru_cache(maxsize=10_000)
def _cached_substitutes(
    me: NodeId, nodes: tuple[PeerNode, ...], partners: tuple[str, ...], levels: tuple[str, ...]
) -> Any:
    return substitute_partners(me, nodes, partners, levels)


@contextlib.contextmanager
def seeded_randomness(rng: random.Random) -> Iterator[None]:
    """Derive the store's random names from the seed while the block runs, and cache placement.

    Placement is a pure function that every node computes in every schedule, so it is computed once per set of nodes.
    """
    from tests.simulation import parity

    fake = SimpleNamespace(
        randbits=rng.getrandbits, token_hex=lambda count: f"{rng.getrandbits(8 * count):0{2 * count}x}"
    )
    instead: list[tuple[Any, str, Any]] = [(module, "secrets", fake) for module in (slot_table, leases, crash_recovery)]
    instead += [
        (stripes, "_write_chunks", parity.write_parity),
        (stripes, "time", SimpleNamespace(time_ns=lambda: 0)),
        (parity_store, "ShardSources", parity.SimulatedRanges),
        (
            parity_strategy,
            "parity_groups",
            lambda nodes, size, *, levels: _cached_groups(tuple(nodes), size, tuple(levels)),
        ),
        (
            replication_policy,
            "place_replicas",
            lambda nodes, *, copies, levels: _cached_placement(tuple(nodes), copies, tuple(levels)),
        ),
        (replication_policy, "substitute_partners", lambda me, *given: _cached_substitutes(me, *map(tuple, given))),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in instead]
    for module, name, double in instead:
        setattr(module, name, double)
    try:
        yield
    finally:
        for module, name, real in before:
            setattr(module, name, real)
