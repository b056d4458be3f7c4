"""Parity arithmetic: stripes and segments, encoding parities from shards, decoding a lost shard.

A group has g + 1 nodes. Each node cuts its shard into g segments, one for each of the others, and stores the XOR of the
segments that it receives. This takes 1/g of a shard of memory, where a replica takes a whole shard. With g = 3::

               n0        n1        n2        n3
    shard    a0 a1 a2  b0 b1 b2  c0 c1 c2  d0 d1 d2
    parity   b2^c1^d0  a0^c2^d1  a1^b0^d2  a2^b1^c0

No two segments of a shard are in one parity, and no segment is stored on its shard's node. So each segment of a lost
shard is its parity XOR the survivors' segments in that parity. With g = 1 a parity is a copy of the other node's shard.

Segments consist of complete chunks and start at the beginning of their parity. A shorter segment counts as padded with
zeros. A shard's segments depend only on its size and the members, so that a node can send them before it knows the
other nodes' shards. Segments are not stored or sent: they are computed from the records and cannot contradict them.

The caller passes the readers: ``read(start, stop)`` returns these bytes of a shard or of a parity, or raises. Memory is
bounded by one chunk per member of the group, for shards of any size. All returned bytes were compared with a checksum
taken when the shard was sealed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from peerstore.checksums import chunk_checksum, chunk_count
from peerstore.errors import RequestError, ShardDamagedError, ShardNotFoundError
from peerstore.membership.topology import NodeId, validate_node_id
from peerstore.shard_records import CHUNK_BYTES, ShardRecord
from peerstore.store.record_validation import validate_record

MAX_PARITY_MEMBERS = 64
"""Largest number of nodes in a group.

A rebuild reads all survivors, so large groups are slow to rebuild and more likely to lose two nodes.
"""


class ParitySegment(NamedTuple):
    """A run of whole chunks of a member's shard that is part of one parity."""

    member: NodeId
    keeper: NodeId
    """The node that stores the parity."""
    chunks: range
    """Indexes of the shard's chunks; the first one is in the parity's first chunk."""
    start: int
    stop: int
    """Range of the shard's bytes."""

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


class ParityLayout(NamedTuple):
    """The segments in the parity of one node."""

    keeper: NodeId
    segments: tuple[ParitySegment, ...]
    """Segments that are not empty, by member."""
    size_bytes: int
    """Size of the longest segment."""


class Stripe(msgspec.Struct, frozen=True):
    """One shard of each member of a group, protected together.

    Invalid combinations raise :class:`RequestError`.
    """

    number: int
    """Number of the stripe among those of one version in one group."""
    members: tuple[NodeId, ...]
    """All nodes of the group, sorted."""
    shards: tuple[ShardRecord | None, ...]
    """Shards by member; ``None`` if the member has fewer shards, or if the record is not needed."""

    def __post_init__(self) -> None:
        _check_stripe(self)

    @property
    def chunk_bytes(self) -> int:
        return next(shard.chunk_bytes for shard in self.shards if shard is not None)

    def shard(self, member: NodeId) -> ShardRecord | None:
        return self.shards[self.index_of(member)]

    def index_of(self, member: NodeId) -> int:
        if member not in self.members:
            raise RequestError(f"node {member} is not in the parity group {', '.join(self.members)}")
        return self.members.index(member)

    def segments(self, member: NodeId) -> tuple[ParitySegment, ...]:
        """Return the segments of a member's shard in the order of its bytes, including empty ones."""
        shard = self.shard(member)
        return split_segments(member, self.members, shard.size_bytes if shard else 0, chunk_bytes=self.chunk_bytes)

    def parity(self, keeper: NodeId) -> ParityLayout:
        """Return the layout of ``keeper``'s parity, which does not include its own shard."""
        place = self.index_of(keeper)
        sent = [
            self.segments(member)[(place - other - 1) % len(self.members)]
            for other, member in enumerate(self.members)
            if other != place
        ]
        return ParityLayout(keeper, tuple(s for s in sent if s.size_bytes), max(s.size_bytes for s in sent))


class ParityRecord(msgspec.Struct, frozen=True):
    """A stored parity: its sources and its checksums.

    It contains the records of all its shards, so that any survivor knows a lost node's shards and their checksums.
    """

    stripe: Stripe
    keeper: NodeId
    checksums: bytes
    """One little-endian xxh3-64 per chunk of the parity, in order."""

    def __post_init__(self) -> None:
        count = chunk_count(self.size_bytes, self.stripe.chunk_bytes)
        if len(self.checksums) != 8 * count:
            raise RequestError(
                f"{self}: {len(self.checksums)} bytes of checksums, {8 * count} belong to {self.size_bytes} bytes"
            )

    def __str__(self) -> str:
        key = next(shard.key for shard in self.stripe.shards if shard is not None)
        return f"parity {self.stripe.number} of {key.job}/{key.version} on {self.keeper}"

    @property
    def size_bytes(self) -> int:
        return self.stripe.parity(self.keeper).size_bytes


def split_segments(
    member: NodeId, members: tuple[NodeId, ...], size_bytes: int, *, chunk_bytes: int = CHUNK_BYTES
) -> tuple[ParitySegment, ...]:
    """Split a shard of ``size_bytes`` into one segment for each other member, beginning with the next one."""
    place, others = members.index(member), len(members) - 1
    count = chunk_count(size_bytes, chunk_bytes)
    cuts = [count * number // others for number in range(others + 1)]
    return tuple(
        ParitySegment(
            member,
            members[(place + 1 + number) % len(members)],
            range(first, end),
            min(first * chunk_bytes, size_bytes),
            min(end * chunk_bytes, size_bytes),
        )
        for number, (first, end) in enumerate(itertools.pairwise(cuts))
    )


def _check_stripe(stripe: Stripe) -> None:
    if not 2 <= len(stripe.members) <= MAX_PARITY_MEMBERS or len(stripe.shards) != len(stripe.members):
        raise RequestError(
            f"a parity group has 2 to {MAX_PARITY_MEMBERS} nodes and a place for a shard of each; "
            f"this one has {len(stripe.members)} nodes and {len(stripe.shards)} places"
        )
    members = [validate_node_id(member) for member in stripe.members]
    if members != sorted(set(members)):
        raise RequestError(f"the nodes of a parity group are sorted and named once, not {', '.join(members)}")
    shards = [shard for shard in stripe.shards if shard is not None]
    if not shards or stripe.number < 0:
        raise RequestError(f"stripe {stripe.number} of {', '.join(members)} holds {len(shards)} shards")
    for shard in shards:
        validate_record(shard)
        if shard.chunk_bytes > CHUNK_BYTES:
            raise RequestError(f"{shard.key}: chunks of {shard.chunk_bytes} bytes, parities take up to {CHUNK_BYTES}")
    if len({(shard.key.job, shard.key.version_id, shard.parts, shard.chunk_bytes) for shard in shards}) > 1:
        raise RequestError(f"not of one version, or not in chunks of one size: {_shard_names(shards)}")
    if len({shard.key.part for shard in shards}) < len(shards):
        raise RequestError(f"one shard on two nodes: {_shard_names(shards)}. A stripe cannot contain copies")


def _shard_names(shards: list[ShardRecord]) -> str:
    return ", ".join(str(shard.key) for shard in shards)


BytesLike = bytes | bytearray | memoryview
ReadBytes = Callable[[int, int], BytesLike]


def xor_into(target: bytearray | memoryview, source: BytesLike) -> None:
    """Compute ``target ^= source`` in place, for the length of ``source``."""
    if len(source) > len(target):
        raise RequestError(f"{len(source)} bytes do not fit {len(target)}")
    if source:
        import numpy as np  # an agent without parities does not load numpy

        view = np.frombuffer(target, np.uint8, len(source))
        np.bitwise_xor(view, np.frombuffer(source, np.uint8), out=view)


def encode_parity(
    stripe: Stripe, keeper: NodeId, shards: Mapping[NodeId, ReadBytes]
) -> Iterator[tuple[int, bytearray]]:
    """Return the chunks of ``keeper``'s parity, in order, from the other members' ``shards``.

    Each contribution is first compared with its shard's checksums, because a parity of damaged bytes would be useless.
    """
    parity = stripe.parity(keeper)
    sources = _sources(stripe, parity.segments, shards)
    return (
        (inside, _xor_chunks([source for source in sources if inside < len(source.chunks)], inside))
        for inside in range(chunk_count(parity.size_bytes, stripe.chunk_bytes))
    )


def decode_shard(
    member: NodeId,
    parities: Iterable[ParityRecord],
    shards: Mapping[NodeId, ReadBytes],
    kept: Mapping[NodeId, ReadBytes],
    *,
    chunks: range | None = None,
) -> Iterator[tuple[int, bytearray]]:
    """Return the chunks of a lost member's shard, in order and bit-exact: all, or those in ``chunks``.

    ``shards`` reads the survivors' shards, ``kept`` their parities, which ``parities`` describe. Raise before any read
    if a source is missing.
    """
    records, lost = _matching_records(member, parities)
    count = chunk_count(lost.size_bytes, lost.chunk_bytes)
    wanted = range(count) if chunks is None else chunks
    if wanted.step != 1 or not 0 <= wanted.start <= max(wanted.start, wanted.stop) <= count:
        raise RequestError(f"{lost.key} has {count} chunks, not {wanted}")
    plan = []
    for segment in next(iter(records.values())).stripe.segments(member):
        part = range(max(segment.chunks.start, wanted.start), min(segment.chunks.stop, wanted.stop))
        if part:
            plan.append((part, segment.chunks.start, _segment_sources(segment, records, shards, kept)))
    return (
        (index, _rebuild_chunk(lost, index, index - first, sources)) for part, first, sources in plan for index in part
    )


class _Source(NamedTuple):
    """A shard or a parity that another one is computed from."""

    name: str
    read: ReadBytes
    chunks: range
    """Indexes of its chunks; the first one corresponds to the parity's first chunk."""
    size_bytes: int
    chunk_bytes: int
    checksums: bytes

    def fetch(self, inside: int) -> BytesLike:
        start = self.chunks[inside] * self.chunk_bytes
        stop = min(start + self.chunk_bytes, self.size_bytes)
        data = self.read(start, stop)
        if len(data) != stop - start:
            raise ShardDamagedError(f"{self.name}: requested bytes {start} to {stop}, received {len(data)} bytes")
        return data

    def matches(self, inside: int, data: BytesLike) -> bool:
        return chunk_checksum(data) == _checksum(self.checksums, self.chunks[inside])

    def chunk(self, inside: int) -> str:
        return f"chunk {self.chunks[inside]} of {self.name}"


def _sources(stripe: Stripe, segments: Iterable[ParitySegment], shards: Mapping[NodeId, ReadBytes]) -> list[_Source]:
    found = []
    for segment in segments:
        shard = stripe.shard(segment.member)
        if shard is None or segment.member not in shards:
            raise ShardNotFoundError(f"the shard of node {segment.member} is needed too, and cannot be read")
        name = f"{shard.key} on {segment.member}"
        read = shards[segment.member]
        found.append(_Source(name, read, segment.chunks, shard.size_bytes, shard.chunk_bytes, shard.checksums))
    return found


def _segment_sources(
    segment: ParitySegment,
    records: Mapping[NodeId, ParityRecord],
    shards: Mapping[NodeId, ReadBytes],
    kept: Mapping[NodeId, ReadBytes],
) -> list[_Source]:
    """Return the sources of a lost segment: its parity first, then the other segments in it."""
    record, read = records.get(segment.keeper), kept.get(segment.keeper)
    if record is None or read is None:
        raise ShardNotFoundError(f"the parity on node {segment.keeper} is needed, but it or its record is missing")
    size, chunk_bytes = record.size_bytes, record.stripe.chunk_bytes
    whole = range(chunk_count(size, chunk_bytes))
    others = (other for other in record.stripe.parity(record.keeper).segments if other.member != segment.member)
    return [
        _Source(str(record), read, whole, size, chunk_bytes, record.checksums),
        *_sources(record.stripe, others, shards),
    ]


def _xor_chunks(sources: list[_Source], inside: int) -> bytearray:
    whole = bytearray()
    for source in sources:
        data = source.fetch(inside)
        if not source.matches(inside, data):
            raise ShardDamagedError(f"{source.chunk(inside)} is not what was sealed; no parity was made of it")
        xor_into(whole, memoryview(data)[: len(whole)])
        whole += memoryview(data)[len(whole) :]
    return whole


def _rebuild_chunk(lost: ShardRecord, index: int, inside: int, sources: list[_Source]) -> bytearray:
    inputs = [(source, source.fetch(inside)) for source in sources if inside < len(source.chunks)]
    size = min(lost.chunk_bytes, lost.size_bytes - index * lost.chunk_bytes)
    whole = bytearray(memoryview(inputs[0][1])[:size])
    for _, data in inputs[1:]:
        xor_into(whole, memoryview(data)[:size])
    if chunk_checksum(whole) == _checksum(lost.checksums, index):
        return whole
    damaged = [source.chunk(inside) for source, data in inputs if not source.matches(inside, data)]
    raise ShardDamagedError(
        f"chunk {index} of {lost.key} cannot be rebuilt from "
        f"{', '.join(source.chunk(inside) for source, _ in inputs)}: "
        + (
            f"damaged is {', '.join(damaged)}"
            if damaged
            else "each is what its record says, but they do not belong together"
        )
    )


def _matching_records(
    member: NodeId, parities: Iterable[ParityRecord]
) -> tuple[dict[NodeId, ParityRecord], ShardRecord]:
    """Return the records with ``member``'s shard, by keeper, and the shard; raise if they disagree."""
    described = [(record, record.stripe.shard(member)) for record in parities]
    records = {record.keeper: record for record, shard in described if shard is not None}
    found = {shard for _, shard in described if shard is not None}
    if not found:
        raise ShardNotFoundError(f"no parity that is left knows of a shard of node {member}")
    lost = found.pop()
    if found or len({(record.stripe.number, record.stripe.members) for record in records.values()}) > 1:
        raise RequestError(
            f"the parities on {', '.join(sorted(records))} tell different things about {lost.key} of node {member}: "
            "take those of one stripe of one version"
        )
    return records, lost


def _checksum(checksums: bytes, index: int) -> int:
    return int.from_bytes(checksums[8 * index : 8 * index + 8], "little")
