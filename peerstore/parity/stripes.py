"""Which parities a node computes and which lost shards it rebuilds, with read-ahead of their sources.

Every member numbers its shards of a version in the order of their seals. The first shards of all members form one
stripe, the second ones another. A node knows a shard's number before it knows the other nodes' shards, and the members
need no other agreement.

Two windows of each source are in memory at a time: the current one, and the next one, which is being read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import msgspec

from peerstore import checksums, message_codec
from peerstore.checksums import chunk_checksum
from peerstore.errors import PeerStoreError, PeerUnreachableError, RequestError, ShardDamagedError
from peerstore.membership.topology import NodeId
from peerstore.parity.parity_codec import ParityRecord, ReadBytes, Stripe, decode_shard, encode_parity
from peerstore.peers.peer_messages import NodeInventory, ParityInfo
from peerstore.peers.range_reader import RangeReader, ReadRequest, ReadTarget
from peerstore.rate_limiter import RateLimiter
from peerstore.shard_records import Lease, ShardInfo, ShardKey, ShardRecord, VersionId
from peerstore.store.arena import FileMapping, closing_fd, prefault_file
from peerstore.store.node_store import NodeStore
from peerstore.store.record_validation import validate_meta

StripeParts = Mapping[int, int]
"""A member's parts of a version by stripe number."""


class ParityContents(msgspec.Struct, frozen=True):
    """The sources of a parity, stored as the meta of its record."""

    stripe: Stripe
    keeper: NodeId


@dataclass(frozen=True)
class StoredParity:
    """A sealed parity on this node."""

    key: ShardKey
    parity: ParityRecord

    @property
    def members(self) -> tuple[NodeId, ...]:
        return self.parity.stripe.members

    @property
    def shards(self) -> dict[NodeId, ShardRecord]:
        """The parity's shards by member, without the keeper's own shard."""
        stripe = self.parity.stripe
        return {
            member: shard
            for member, shard in zip(stripe.members, stripe.shards, strict=True)
            if shard is not None and member != self.parity.keeper
        }

    @property
    def info(self) -> ParityInfo:
        parts = {str(member): shard.key.part for member, shard in self.shards.items()}
        return ParityInfo(self.key.version_id, self.parity.stripe.number, self.members, self.parity.keeper, parts)


# -- stored parities --------------------------------------------------------------------------------------------------


def parity_key(stripe: Stripe, keeper: NodeId) -> ShardKey:
    """Return the key of a parity; equal contents have the same key, so that a parity is made once."""
    first = next(shard for shard in stripe.shards if shard is not None)
    made_of = [(shard.key.part, chunk_checksum(shard.checksums)) if shard else None for shard in stripe.shards]
    name = hashlib.blake2b(msgspec.msgpack.encode((keeper, stripe.members, made_of)), digest_size=8).hexdigest()
    return msgspec.structs.replace(first.key, part=stripe.number, kind=f"parity.{name}")


def parity_shard_record(stripe: Stripe, keeper: NodeId, checksums: bytes, sealed_ns: int) -> ShardRecord:
    """Return the record that a parity is stored under."""
    parity = ParityRecord(stripe, keeper, checksums)
    parts = next(shard.parts for shard in stripe.shards if shard is not None)
    meta = message_codec.encode_raw_message(ParityContents(stripe, keeper))
    key = parity_key(stripe, keeper)
    return ShardRecord(key, parts, parity.size_bytes, stripe.chunk_bytes, checksums, bytes(meta), sealed_ns)


def parse_stored_parity(record: ShardRecord) -> StoredParity:
    """Decode a parity's record; raise :class:`RequestError` if it is invalid."""
    contents = message_codec.decode_message(record.meta, ParityContents)
    parity = ParityRecord(contents.stripe, contents.keeper, record.checksums)
    if parity_key(contents.stripe, contents.keeper) != record.key or parity.size_bytes != record.size_bytes:
        raise RequestError(f"{record.key} is not the parity that it says it is")
    return StoredParity(record.key, parity)


# -- new parities -----------------------------------------------------------------------------------------------------


def assign_stripe_numbers(facts: Iterable[ShardInfo], known: Mapping[ShardKey, int]) -> dict[ShardKey, int]:
    """Return a number for every shard: its ``known`` number or the next free one of its version."""
    found = {}
    taken: dict[VersionId, set[int]] = defaultdict(set)
    for key, number in known.items():
        taken[key.version_id].add(number)
    for fact in sorted(facts, key=lambda fact: (fact.sealed_ns, fact.key)):
        used = taken[fact.key.version_id]
        number = known.get(fact.key, -1)
        if number < 0:
            number = next(free for free in range(len(used) + 1) if free not in used)
            used.add(number)
        found[fact.key] = number
    return found


def parities_to_make(
    me: str,
    members: Sequence[str],
    told: Mapping[str, StripeParts],
    kept: Iterable[Mapping[str, int]],
    *,
    complete: bool,
) -> dict[int, dict[str, int]]:
    """Return the parities of one version that this node must make now: number -> member -> part.

    ``told`` has the members' reported parts, ``kept`` the parts in parities that are sealed here, by member. A stripe
    waits for all members unless ``complete`` states that no more reports are expected.
    """
    others = [member for member in members if member != me]
    done = list(kept)
    found = {}
    for number in sorted({number for member in others for number in told.get(member, {})}):
        chosen = parts_of_stripe(others, told, number)
        waits = not complete and any(number not in told.get(member, {}) for member in others)
        if chosen and not waits and not any(chosen.items() <= there.items() for there in done):
            found[number] = chosen
    return found


def parts_of_stripe(others: Sequence[str], told: Mapping[str, StripeParts], number: int) -> dict[str, int]:
    """Return one part per member; of two members with the same part, only the first is included."""
    chosen: dict[str, int] = {}
    for member in others:
        part = told.get(member, {}).get(number)
        if part is not None and part not in chosen.values():
            chosen[member] = part
    return chosen


def superseded_parities(kept: Collection[StoredParity], useful: Collection[StoredParity]) -> list[ShardKey]:
    """Return parities whose shards are all in a useful, larger parity of the same stripe."""
    found = []
    for one in kept:
        for other in useful:
            same = one.info.stripe_id == other.info.stripe_id and one.key != other.key
            if same and one.info.parts.items() < other.info.parts.items():
                found.append(one.key)
                break
    return found


# -- lost shards ------------------------------------------------------------------------------------------------------


class LostShard(NamedTuple):
    """A shard in a parity of this node without a known holder."""

    shard: ShardRecord
    member: NodeId
    """The shard's node when the parity was made."""
    rebuilders: tuple[NodeId, ...]
    """Living members of the group that could rebuild it, in the order in which they search for it."""


def lost_shards(
    kept: Iterable[StoredParity], *, living: Collection[str], held: Callable[[ShardKey], bool]
) -> list[LostShard]:
    """Return the shards in these parities that have no confirmed holder."""
    found: dict[ShardKey, LostShard] = {}
    for one in kept:
        for member, shard in one.shards.items():
            if shard.key not in found and not held(shard.key):
                rebuilders = tuple(other for other in one.members if other in living and other != member)
                found[shard.key] = LostShard(shard, member, rebuilders)
    return [found[key] for key in sorted(found, key=lambda key: (key.version_id, key.part))]


def is_first_rebuilder(lost: LostShard, me: str, nodes: Mapping[str, NodeInventory]) -> bool:
    """Return whether this node is the first, by all inventories, with a parity that includes the shard."""
    key = lost.shard.key
    keepers = [
        node
        for node in lost.rebuilders
        if node == me
        or any(
            fact.version_id == key.version_id and key.part in fact.parts.values() for fact in _parities(nodes.get(node))
        )
    ]
    return keepers[:1] == [me]


def _parities(looked: NodeInventory | None) -> tuple[ParityInfo, ...]:
    return looked.parities if looked is not None else ()


def parity_sets_for(
    key: ShardKey, parities: Iterable[ParityRecord], *, held: Callable[[ShardKey], bool]
) -> list[tuple[NodeId, tuple[ParityRecord, ...]]]:
    """Return complete sets of parities that restore a shard, one per stripe, with the shard's member.

    Of two parities on one node, the better one needs no other lost shard (``held``); then the one with more shards,
    which was made later.
    """

    def rank(parity: ParityRecord) -> tuple[bool, int]:
        others = [shard.key for shard in parity.stripe.shards if shard is not None and shard.key != key]
        return all(map(held, others)), len(others)

    rows: dict[tuple[NodeId, int, tuple[NodeId, ...]], dict[NodeId, ParityRecord]] = defaultdict(dict)
    for parity in parities:
        stripe = parity.stripe
        for member, shard in zip(stripe.members, stripe.shards, strict=True):
            if shard is not None and shard.key == key and member != parity.keeper:
                before = rows[member, stripe.number, stripe.members].get(parity.keeper)
                if before is None or rank(before) < rank(parity):
                    rows[member, stripe.number, stripe.members][parity.keeper] = parity
    found = []
    for (member, _, _), by_keeper in sorted(rows.items()):
        one = next(iter(by_keeper.values()))
        needed = {segment.keeper for segment in one.stripe.segments(member) if segment.size_bytes}
        if needed <= by_keeper.keys():
            found.append((member, tuple(by_keeper[keeper] for keeper in sorted(by_keeper))))
    return found


def versions_being_rebuilt(
    parts: Mapping[VersionId, Collection[int]], in_all: Mapping[VersionId, int], facts: Iterable[ParityInfo]
) -> dict[VersionId, set[int]]:
    """Return the versions that rebuilds will complete, and their rebuilt parts.

    Only versions newer than the newest complete version are included.
    """
    coming = rebuildable_parts(facts, parts)
    found = {}
    for group in sorted(parts, reverse=True):
        missing = set(range(in_all[group])) - set(parts[group])
        if not missing:
            break
        if missing <= coming.get(group, set()):
            found[group] = missing
    return found


def rebuildable_parts(
    facts: Iterable[ParityInfo], parts: Mapping[VersionId, Collection[int]]
) -> dict[VersionId, set[int]]:
    """Return parts without a holder that the existing parities restore, by version.

    ``parts`` are the parts with a holder: a parity restores a shard only together with all its other shards.
    """
    keepers: dict[tuple[VersionId, int, tuple[str, ...], str, int], set[str]] = defaultdict(set)
    for fact in facts:
        there = set(parts.get(fact.version_id, ()))
        for member, part in fact.parts.items():
            others = {part for other, part in fact.parts.items() if other != member}
            if part not in there and others <= there:
                row = (*fact.stripe_id, member, part)
                keepers[row].add(fact.keeper)
    found: dict[VersionId, set[int]] = defaultdict(set)
    for (group, _, members, member, part), names in keepers.items():
        if set(members) - {member} <= names:
            found[group].add(part)
    return dict(found)


def pending_recovery(nodes: Mapping[str, NodeInventory], silent: Collection[str], living: Collection[str]) -> str:
    """Return what may still complete a newer version, as text; empty if nothing can."""
    parts: dict[VersionId, set[int]] = defaultdict(set)
    in_all: dict[VersionId, int] = {}
    for looked in nodes.values():
        for fact in looked.shards:
            parts[fact.key.version_id].add(fact.key.part)
            in_all[fact.key.version_id] = fact.parts
    newest = max(parts, default=None)
    if newest is not None and len(parts[newest]) >= in_all[newest]:
        return ""
    silent_alive = [node for node in silent if node in living]
    if silent_alive:
        return f"nothing was heard of {', '.join(sorted(silent_alive))}"
    pending = versions_being_rebuilt(parts, in_all, [fact for looked in nodes.values() for fact in looked.parities])
    if not pending:
        return ""
    newest = max(pending)
    return f"parts {sorted(pending[newest])} of version {newest.version}, lost with their node, are being rebuilt"


FetchBytes: TypeAlias = Callable[[int, int], memoryview]
READ_AHEAD_BYTES = 2 << 20


class ReadAhead:
    """A reader that reads the next window in advance. Used by one thread."""

    def __init__(self, fetch: FetchBytes, size_bytes: int, window_bytes: int, pool: ThreadPoolExecutor) -> None:
        self._fetch = fetch
        self._size = size_bytes
        self._window = window_bytes
        self._pool = pool
        self._base = 0
        self._data = memoryview(b"")
        self._next: tuple[int, Future[memoryview]] | None = None

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes ``[start, stop)``, at most a window, from the beginning of a chunk."""
        if not (self._base <= start and stop <= self._base + len(self._data)):
            self._move(start)
        return self._data[start - self._base : stop - self._base]

    def _move(self, start: int) -> None:
        coming, self._next = self._next, None
        if coming is not None and coming[0] == start:
            self._data = coming[1].result()
        else:
            self._data = self._fetch(start, min(start + self._window, self._size))
        self._base = start
        after = start + len(self._data)
        if after < self._size:
            future = self._pool.submit(self._fetch, after, min(after + self._window, self._size))
            self._next = after, future


class ShardSources:
    """Readers of the sources of one parity or rebuild; a context manager."""

    def __init__(self, store: NodeStore, puller: RangeReader, pace: RateLimiter, *, me: str, sources: int) -> None:
        self._store = store
        self._reader = puller
        self._pace = pace
        self._me = me
        self._pool = ThreadPoolExecutor(max(1, sources), thread_name_prefix="peerstore-ahead")
        self._exit = contextlib.ExitStack()
        self.bytes_read = 0

    def reader(self, record: ShardRecord, nodes: Sequence[str], *, stop: int | None = None) -> FetchBytes:
        """Return a reader of ``record`` up to ``stop``.

        It reads from this node if it is in ``nodes``, otherwise from the other nodes.
        """
        fetch = self._local_reader(record) if self._me in nodes else self._remote_reader(record, nodes)
        window = max(1, READ_AHEAD_BYTES // record.chunk_bytes) * record.chunk_bytes
        return ReadAhead(fetch, record.size_bytes if stop is None else stop, window, self._pool).read

    def _local_reader(self, record: ShardRecord) -> FetchBytes:
        fd = self._exit.enter_context(_pinned(self._store, record))

        def fetch(start: int, stop: int) -> memoryview:
            data = memoryview(bytearray(stop - start))
            read_bytes = 0
            while read_bytes < len(data):
                count = os.preadv(fd, [data[read_bytes:]], start + read_bytes)
                if not count:
                    raise ShardDamagedError(f"{record.key} ends at byte {start + read_bytes} of {record.size_bytes}")
                read_bytes += count
            return data

        return fetch

    def _remote_reader(self, record: ShardRecord, nodes: Sequence[str]) -> FetchBytes:
        if not nodes:
            raise PeerUnreachableError(f"no node that is reached holds {record.key}")

        def fetch(start: int, stop: int) -> memoryview:
            data = memoryview(bytearray(stop - start))
            self._pace.acquire(len(data))
            pulled = self._reader.read([ReadRequest(record, [ReadTarget(start, stop, data)], list(nodes))])
            if record.key in pulled.failed:
                raise pulled.failed[record.key]
            self.bytes_read += len(data)
            return data

        return fetch

    def __enter__(self) -> ShardSources:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)  # before the files that its threads read are closed
        self._exit.close()


@contextlib.contextmanager
def _pinned(store: NodeStore, record: ShardRecord) -> Iterator[int]:
    pin = store.pin(record.key)
    try:
        yield pin.fd
    finally:
        pin.close()
        store.unpin(pin.id)


StopCheck = Callable[[], bool]


def write_parity(
    store: NodeStore,
    stripe: Stripe,
    keeper: NodeId,
    reads: Mapping[NodeId, ReadBytes],
    *,
    whole: bool,
    stopped: StopCheck,
) -> ShardRecord | None:
    """Make and seal ``keeper``'s parity of ``stripe``; return ``None`` if it is stored already.

    Every contribution is compared with its shard's checksums, and the parity's checksums are computed from the result.
    """
    size = stripe.parity(keeper).size_bytes
    parts = next(shard.parts for shard in stripe.shards if shard is not None)
    lease = store.replicas.begin_parity(parity_key(stripe, keeper), size, parts, whole=whole)
    if lease is None:
        return None
    try:
        sums = _write_chunks(
            store, lease, size, stripe.chunk_bytes, encode_parity(stripe, keeper, reads), stopped=stopped
        )
        record = parity_shard_record(stripe, keeper, sums, time.time_ns())
        validate_meta(record.key, record.meta)
        store.replicas.seal_replica(lease.id, record, ())
    except BaseException:
        store.release(lease.id)
        raise
    return record


def write_rebuilt_shard(
    store: NodeStore,
    shard: ShardRecord,
    member: NodeId,
    parities: Iterable[ParityRecord],
    *,
    shards: Mapping[NodeId, ReadBytes],
    kept: Mapping[NodeId, ReadBytes],
    holders: tuple[str, ...],
    stopped: StopCheck,
) -> bool:
    """Rebuild a lost shard, bit-exact, as a copy with these ``holders``.

    Return ``False`` if the shard is stored already.
    """
    lease = store.replicas.begin_replica(shard, whole=True)
    if lease is None:
        return False
    try:
        chunks = decode_shard(member, parities, shards, kept)
        sums = _write_chunks(store, lease, shard.size_bytes, shard.chunk_bytes, chunks, stopped=stopped)
        if sums != shard.checksums:
            raise ShardDamagedError(f"{shard.key} was rebuilt, but is not what was sealed")
        store.replicas.seal_replica(lease.id, shard, holders)
    except BaseException:
        store.release(lease.id)
        raise
    return True


def _write_chunks(
    store: NodeStore,
    lease: Lease,
    size_bytes: int,
    chunk_bytes: int,
    chunks: Iterator[tuple[int, bytearray]],
    *,
    stopped: StopCheck,
) -> bytes:
    """Write ``chunks`` into the slot and return the checksums of the slot's bytes."""
    sums = bytearray()
    with closing_fd(store.open_slot(lease.slot)) as fd:
        prefault_file(fd, size_bytes, stopped, start=lease.prefaulted_bytes)
        mapped = FileMapping(fd, size_bytes, writable=True)
    with mapped as mapping, mapping.view as view:
        for number, data in chunks:
            if stopped():
                raise PeerStoreError("this agent is stopping")
            start = number * chunk_bytes
            view[start : start + len(data)] = data
            expected = checksums.chunk_checksum(data)
            if checksums.chunk_checksum(view[start : start + len(data)]) != expected:
                raise ShardDamagedError(f"chunk {number} of {lease.key} changed while it was written to memory")
            sums += expected.to_bytes(8, "little")
    return bytes(sums)
