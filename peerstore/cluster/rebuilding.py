"""Parities made of shards, and lost shards made of parities again, chunk by chunk.

Whoever calls brings the readers: ``read(start, stop)`` returns those bytes of a shard or of a parity, from wherever
they are, or raises. Memory is bounded by one chunk per member of the group, whatever the shards' sizes. No byte is
handed out that was not compared with a checksum taken when the shard was sealed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import NamedTuple

from peerstore.checksum import chunk_count, digest
from peerstore.cluster.nodes import NodeId
from peerstore.cluster.parity import ParityRecord, Segment, Stripe
from peerstore.errors import RequestError, ShardDamagedError, ShardNotFoundError
from peerstore.records import ShardRecord

Data = bytes | bytearray | memoryview
Read = Callable[[int, int], Data]

_STEP_BYTES = 16 << 10  # integers of this size are XORed fastest


def xor_into(target: bytearray | memoryview, source: Data) -> None:
    """``target ^= source``, for the length of ``source``."""
    if len(source) > len(target):
        raise RequestError(f"{len(source)} bytes do not fit {len(target)}")
    numpy = _numpy()
    if numpy is None:
        _xor_integers(target, source)
    elif source:
        view = numpy.frombuffer(target, numpy.uint8, len(source))
        numpy.bitwise_xor(view, numpy.frombuffer(source, numpy.uint8), out=view)


def parity_of(stripe: Stripe, keeper: NodeId, shards: Mapping[NodeId, Read]) -> Iterator[tuple[int, bytearray]]:
    """The chunks of ``keeper``'s parity, in order, from the other members' ``shards``.

    Each contribution is compared with its shard's checksums first: a parity of damaged bytes would be of no use on the
    day it is needed.
    """
    parity = stripe.parity(keeper)
    sources = _sources(stripe, parity.segments, shards)
    return (
        (inside, _mixed([source for source in sources if inside < len(source.chunks)], inside))
        for inside in range(chunk_count(parity.size_bytes, stripe.chunk_bytes))
    )


def rebuild_parity(record: ParityRecord, shards: Mapping[NodeId, Read]) -> Iterator[tuple[int, bytearray]]:
    """The chunks of a parity that was lost, in order, bit for bit as it was."""
    return (
        (inside, _expected(record, inside, whole)) for inside, whole in parity_of(record.stripe, record.keeper, shards)
    )


def rebuild(
    member: NodeId,
    parities: Iterable[ParityRecord],
    shards: Mapping[NodeId, Read],
    kept: Mapping[NodeId, Read],
    *,
    chunks: range | None = None,
) -> Iterator[tuple[int, bytearray]]:
    """The chunks of a lost member's shard, in order, bit for bit as it was; all, or those in ``chunks``.

    ``shards`` reads the survivors' own shards, ``kept`` their parities, which ``parities`` describe. What is missing is
    told before anything is read.
    """
    records, lost = _agreed(member, parities)
    count = chunk_count(lost.size_bytes, lost.chunk_bytes)
    wanted = range(count) if chunks is None else chunks
    if wanted.step != 1 or not 0 <= wanted.start <= max(wanted.start, wanted.stop) <= count:
        raise RequestError(f"{lost.key} has {count} chunks, not {wanted}")
    plan = []
    for segment in next(iter(records.values())).stripe.segments(member):
        part = range(max(segment.chunks.start, wanted.start), min(segment.chunks.stop, wanted.stop))
        if part:
            plan.append((part, segment.chunks.start, _mixed_with(segment, records, shards, kept)))
    return ((index, _rebuilt(lost, index, index - first, sources)) for part, first, sources in plan for index in part)


class _Source(NamedTuple):
    """A shard or a parity that something is made from."""

    name: str
    read: Read
    chunks: range
    """Which of its chunks; the first meets the first of a parity."""
    size_bytes: int
    chunk_bytes: int
    checksums: bytes

    def fetch(self, inside: int) -> Data:
        start = self.chunks[inside] * self.chunk_bytes
        stop = min(start + self.chunk_bytes, self.size_bytes)
        data = self.read(start, stop)
        if len(data) != stop - start:
            raise ShardDamagedError(f"{self.name}: bytes {start} to {stop} were asked for, {len(data)} bytes came")
        return data

    def matches(self, inside: int, data: Data) -> bool:
        return digest(data) == _checksum(self.checksums, self.chunks[inside])

    def chunk(self, inside: int) -> str:
        return f"chunk {self.chunks[inside]} of {self.name}"


def _sources(stripe: Stripe, segments: Iterable[Segment], shards: Mapping[NodeId, Read]) -> list[_Source]:
    found = []
    for segment in segments:
        shard = stripe.shard(segment.member)
        if shard is None or segment.member not in shards:
            raise ShardNotFoundError(f"the shard of node {segment.member} is needed too, and cannot be read")
        name = f"{shard.key} on {segment.member}"
        read = shards[segment.member]
        found.append(_Source(name, read, segment.chunks, shard.size_bytes, shard.chunk_bytes, shard.checksums))
    return found


def _mixed_with(
    segment: Segment,
    records: Mapping[NodeId, ParityRecord],
    shards: Mapping[NodeId, Read],
    kept: Mapping[NodeId, Read],
) -> list[_Source]:
    """What a lost segment is made from: its parity first, then what else is in it."""
    record, read = records.get(segment.keeper), kept.get(segment.keeper)
    if record is None or read is None:
        raise ShardNotFoundError(f"the parity on node {segment.keeper} is needed, and is not there with its record")
    size, chunk_bytes = record.size_bytes, record.stripe.chunk_bytes
    whole = range(chunk_count(size, chunk_bytes))
    others = (other for other in record.stripe.parity(record.keeper).segments if other.member != segment.member)
    return [
        _Source(str(record), read, whole, size, chunk_bytes, record.checksums),
        *_sources(record.stripe, others, shards),
    ]


def _mixed(sources: list[_Source], inside: int) -> bytearray:
    whole = bytearray()
    for source in sources:
        data = source.fetch(inside)
        if not source.matches(inside, data):
            raise ShardDamagedError(f"{source.chunk(inside)} is not what was sealed; no parity was made of it")
        xor_into(whole, memoryview(data)[: len(whole)])
        whole += memoryview(data)[len(whole) :]
    return whole


def _expected(record: ParityRecord, inside: int, whole: bytearray) -> bytearray:
    if digest(whole) != _checksum(record.checksums, inside):
        raise ShardDamagedError(f"{record}: chunk {inside} is not what the shards in it give, though each is intact")
    return whole


def _rebuilt(lost: ShardRecord, index: int, inside: int, sources: list[_Source]) -> bytearray:
    inputs = [(source, source.fetch(inside)) for source in sources if inside < len(source.chunks)]
    size = min(lost.chunk_bytes, lost.size_bytes - index * lost.chunk_bytes)
    whole = bytearray(memoryview(inputs[0][1])[:size])
    for _, data in inputs[1:]:
        xor_into(whole, memoryview(data)[:size])
    if digest(whole) == _checksum(lost.checksums, index):
        return whole
    bad = [source.chunk(inside) for source, data in inputs if not source.matches(inside, data)]
    raise ShardDamagedError(
        f"chunk {index} of {lost.key} cannot be rebuilt from "
        f"{', '.join(source.chunk(inside) for source, _ in inputs)}: "
        + (f"damaged is {', '.join(bad)}" if bad else "each is what its record says, but they do not belong together")
    )


def _agreed(member: NodeId, parities: Iterable[ParityRecord]) -> tuple[dict[NodeId, ParityRecord], ShardRecord]:
    """The records by keeper that know ``member``'s shard, and that shard's, on which all of them must agree."""
    told = [(record, record.stripe.shard(member)) for record in parities]
    records = {record.keeper: record for record, shard in told if shard is not None}
    found = {shard for _, shard in told if shard is not None}
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


@functools.cache
def _numpy() -> ModuleType | None:
    """Tens of times faster, but not required by torch, and nothing an agent without parities should load."""
    try:
        import numpy as np
    except ImportError:
        return None
    return np


def _xor_integers(target: bytearray | memoryview, source: Data) -> None:
    with memoryview(target) as into, memoryview(source) as other:
        for start in range(0, len(other), _STEP_BYTES):
            piece = other[start : start + _STEP_BYTES]
            stop = start + len(piece)
            mixed = int.from_bytes(into[start:stop], "little") ^ int.from_bytes(piece, "little")
            into[start:stop] = mixed.to_bytes(len(piece), "little")
