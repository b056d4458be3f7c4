"""Parities made into slots of this node, and lost shards made again: chunk by chunk, each compared as it is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from peerstore import checksum
from peerstore.cluster.nodes import NodeId
from peerstore.cluster.parity import ParityRecord, Stripe
from peerstore.cluster.rebuilding import Read, parity_of, rebuild
from peerstore.copies import MAX_META_BYTES
from peerstore.errors import PeerStoreError, RequestError, ShardDamagedError
from peerstore.pages import Mapping as Mapped
from peerstore.pages import closing, populate_file
from peerstore.peers.striping import parity_key, sealed_parity
from peerstore.records import Lease, ShardRecord
from peerstore.store import NodeStore

Stopped = Callable[[], bool]


def make_parity(
    store: NodeStore, stripe: Stripe, keeper: NodeId, reads: Mapping[NodeId, Read], *, whole: bool, stopped: Stopped
) -> ShardRecord | None:
    """``keeper``'s parity of ``stripe``, sealed on this node; ``None`` when it was here already.

    Every contribution has been compared with its shard's checksums, and the parity's own are of what came of them.
    """
    size = stripe.parity(keeper).size_bytes
    parts = next(shard.parts for shard in stripe.shards if shard is not None)
    lease = store.begin_parity(parity_key(stripe, keeper), size, parts, whole=whole)
    if lease is None:
        return None
    try:
        sums = _written(store, lease, size, stripe.chunk_bytes, parity_of(stripe, keeper, reads), stopped=stopped)
        record = sealed_parity(stripe, keeper, sums, time.time_ns())
        if len(record.meta) > MAX_META_BYTES:
            raise RequestError(f"{record.key}: what it is made of takes {len(record.meta)} bytes to tell")
        store.seal_parity(lease.id, record)
    except BaseException:
        store.abandon(lease.id)
        raise
    return record


def rebuild_shard(
    store: NodeStore,
    shard: ShardRecord,
    member: NodeId,
    parities: Iterable[ParityRecord],
    *,
    shards: Mapping[NodeId, Read],
    kept: Mapping[NodeId, Read],
    holders: tuple[str, ...],
    stopped: Stopped,
) -> bool:
    """A lost shard, here again bit for bit, as a copy that ``holders`` have; False when it was here already."""
    lease = store.begin_copy(shard, whole=True)
    if lease is None:
        return False
    try:
        chunks = rebuild(member, parities, shards, kept)
        sums = _written(store, lease, shard.size_bytes, shard.chunk_bytes, chunks, stopped=stopped)
        if sums != shard.checksums:
            raise ShardDamagedError(f"{shard.key} was rebuilt, but is not what was sealed")
        store.seal_copy(lease.id, shard, holders)
    except BaseException:
        store.abandon(lease.id)
        raise
    return True


def _written(
    store: NodeStore,
    lease: Lease,
    size_bytes: int,
    chunk_bytes: int,
    chunks: Iterator[tuple[int, bytearray]],
    *,
    stopped: Stopped,
) -> bytes:
    """Write ``chunks`` into the slot; the checksums of what is there then."""
    sums = bytearray()
    with closing(store.open_slot(lease.slot)) as fd:
        populate_file(fd, size_bytes, stopped, start=lease.warm_bytes)
        mapped = Mapped(fd, size_bytes, writable=True)
    with mapped as mapping, mapping.view as view:
        for number, data in chunks:
            if stopped():
                raise PeerStoreError("this agent is stopping")
            start = number * chunk_bytes
            view[start : start + len(data)] = data
            expected = checksum.digest(data)
            if checksum.digest(view[start : start + len(data)]) != expected:
                raise ShardDamagedError(f"chunk {number} of {lease.key} changed on its way into memory")
            sums += expected.to_bytes(8, "little")
    return bytes(sums)
