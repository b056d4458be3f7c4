"""Parity beside mirrors: who keeps what, so that a group of nodes survives the loss of any one. Pure.

A group has g + 1 nodes. Each cuts its shard into g segments, one for each of the others, and keeps the XOR of the
segments it is sent: 1/g of a shard more memory, where a mirror takes a whole one. With g = 3::

               n0        n1        n2        n3
    shard    a0 a1 a2  b0 b1 b2  c0 c1 c2  d0 d1 d2
    parity   b2^c1^d0  a0^c2^d1  a1^b0^d2  a2^b1^c0

No segment of a lost shard is mixed with another one of the same shard, nor kept on the node that was lost with it: each
is its parity XOR what the survivors have of that parity. With g = 1 a parity is a copy of the other's shard.

Segments are whole chunks and start at the beginning of their parity; a shorter one counts as followed by zeros. Where
a shard's segments go follows from its own size and the members alone, so that a node can send them before it knows what
the others saved. Nothing about segments is written down or sent: it is worked out from the records, and cannot
contradict them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from fractions import Fraction
from math import comb
from typing import NamedTuple

import msgspec

from peerstore import frames
from peerstore.adoption import check_record
from peerstore.checksum import chunk_count
from peerstore.cluster.nodes import NodeId, node_id
from peerstore.errors import RequestError
from peerstore.records import CHUNK_BYTES, ShardRecord

MAX_MEMBERS = 64
"""A rebuild reads all survivors of a group, so that large groups are slow to rebuild and likely to lose two."""


class Segment(NamedTuple):
    """One run of whole chunks of a member's shard, mixed into one parity."""

    member: NodeId
    keeper: NodeId
    """Whose parity it is mixed into."""
    chunks: range
    """Which of the shard's chunks; the first is mixed into the parity's first."""
    start: int
    stop: int
    """Which of the shard's bytes."""

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


class Parity(NamedTuple):
    """What one node keeps for the others of its group."""

    keeper: NodeId
    segments: tuple[Segment, ...]
    """The ones that are not empty, by member."""
    size_bytes: int
    """As much as the longest segment."""


class Stripe(msgspec.Struct, frozen=True):
    """One shard of each member of a group, protected together. What is not a stripe cannot be made or decoded."""

    number: int
    """Counts the stripes of one version in one group."""
    members: tuple[NodeId, ...]
    """All nodes of the group, sorted."""
    shards: tuple[ShardRecord | None, ...]
    """By member; ``None`` for one that has fewer shards than others, or whose record is not needed."""

    def __post_init__(self) -> None:
        _check_stripe(self)

    @property
    def chunk_bytes(self) -> int:
        return next(shard.chunk_bytes for shard in self.shards if shard is not None)

    def shard(self, member: NodeId) -> ShardRecord | None:
        return self.shards[self.place(member)]

    def place(self, member: NodeId) -> int:
        if member not in self.members:
            raise RequestError(f"node {member} is not in the parity group {', '.join(self.members)}")
        return self.members.index(member)

    def segments(self, member: NodeId) -> tuple[Segment, ...]:
        """Where a member's shard is protected, in the order of its bytes; empty ones included."""
        shard = self.shard(member)
        return split(member, self.members, shard.size_bytes if shard else 0, chunk_bytes=self.chunk_bytes)

    def parity(self, keeper: NodeId) -> Parity:
        """What ``keeper`` keeps. Its own shard has no part in it."""
        place = self.place(keeper)
        sent = [
            self.segments(member)[(place - other - 1) % len(self.members)]
            for other, member in enumerate(self.members)
            if other != place
        ]
        return Parity(keeper, tuple(s for s in sent if s.size_bytes), max(s.size_bytes for s in sent))


class ParityRecord(msgspec.Struct, frozen=True):
    """A parity that is kept: what it was made of, and what it must hash to.

    It has the records of all shards in it, so that any survivor knows what a lost node had, and what the rebuilt bytes
    must hash to.
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


class Rebuild(NamedTuple):
    """A lost shard that the survivors can rebuild."""

    stripe: Stripe
    member: NodeId
    """Whose shard it is."""
    shards: tuple[NodeId, ...]
    """Whose own shards are read for it."""
    parities: tuple[NodeId, ...]
    """Whose parities are read for it. One that is asked for the record only, where the shard has no bytes."""


class Recovery(NamedTuple):
    rebuilds: tuple[Rebuild, ...]
    gone: tuple[tuple[Stripe, NodeId], ...]
    """Lost shards that parity does not bring back."""


class Redundancy(NamedTuple):
    """A group of nodes that shares its fate with no other: a parity group, a mirror pair, a ring of three."""

    nodes: int
    tolerates: int
    """How many of them may be lost, whichever they are: 1 with parity, all but one with mirrors of every shard."""


def split(
    member: NodeId, members: tuple[NodeId, ...], size_bytes: int, *, chunk_bytes: int = CHUNK_BYTES
) -> tuple[Segment, ...]:
    """A shard of ``size_bytes`` as segments, one for each of the other ``members``, beginning with the next one."""
    place, others = members.index(member), len(members) - 1
    count = chunk_count(size_bytes, chunk_bytes)
    cuts = [count * number // others for number in range(others + 1)]
    return tuple(
        Segment(
            member,
            members[(place + 1 + number) % len(members)],
            range(first, end),
            min(first * chunk_bytes, size_bytes),
            min(end * chunk_bytes, size_bytes),
        )
        for number, (first, end) in enumerate(itertools.pairwise(cuts))
    )


def stripes(shards: Mapping[NodeId, Iterable[ShardRecord]]) -> tuple[Stripe, ...]:
    """One version's shards in one group, member by member: everybody's first part together, everybody's second, ..."""
    members = tuple(sorted(shards))
    ordered = [sorted(shards[member], key=lambda shard: shard.key) for member in members]
    return tuple(
        Stripe(number, members, tuple(own[number] if number < len(own) else None for own in ordered))
        for number in range(max(map(len, ordered), default=0))
    )


def decode_parity(data: bytes | bytearray) -> ParityRecord:
    """A record that came from somewhere else, or a :class:`RequestError` that says what is wrong with it."""
    if len(data) > frames.MAX_FRAME_BYTES:
        raise RequestError(f"a parity's record of {len(data)} bytes is above the limit of {frames.MAX_FRAME_BYTES}")
    return frames.decode(data, ParityRecord)


def recoverable(lost: Collection[NodeId], stripes: Iterable[Stripe]) -> Recovery:
    """What becomes of the shards of the ``lost`` nodes.

    No order of rebuilding saves more: where two lost segments meet in one parity, each needs the other.
    """
    rebuilds, gone = [], []
    for stripe in stripes:
        for member, shard in zip(stripe.members, stripe.shards, strict=True):
            if member in lost and shard is not None:
                rebuild = _rebuild(stripe, member, lost)
                if rebuild is None:
                    gone.append((stripe, member))
                else:
                    rebuilds.append(rebuild)
    return Recovery(tuple(rebuilds), tuple(gone))


def memory_overhead(stripes: Iterable[Stripe]) -> float:
    """Bytes of parity per byte of shard: 1/g for equal shards that are large against a chunk, more for unequal ones."""
    kept = own = 0
    for stripe in stripes:
        kept += sum(stripe.parity(member).size_bytes for member in stripe.members)
        own += sum(shard.size_bytes for shard in stripe.shards if shard is not None)
    return kept / own if own else 0.0


def loss_probability(groups: Iterable[Redundancy], lost: int) -> Fraction:
    """How likely ``lost`` nodes, any as likely as any other, cost some group more of its nodes than it tolerates.

    Exact. For m parity groups of n nodes it is 1 - C(m, k) n^k / C(mn, k).
    """
    total, harmless = 0, [1] + [0] * lost  # harmless[k]: ways to lose k of the nodes so far and no bytes
    for group in groups:
        total += group.nodes
        ways = [comb(group.nodes, count) for count in range(min(group.tolerates, lost) + 1)]
        harmless = [sum(ways[i] * harmless[k - i] for i in range(min(k, len(ways) - 1) + 1)) for k in range(lost + 1)]
    if not 0 <= lost <= total:
        raise RequestError(f"{lost} of {total} nodes cannot be lost")
    return 1 - Fraction(harmless[lost], comb(total, lost))


def _rebuild(stripe: Stripe, member: NodeId, lost: Collection[NodeId]) -> Rebuild | None:
    keepers = {segment.keeper for segment in stripe.segments(member) if segment.size_bytes}
    sources = {segment.member for keeper in keepers for segment in stripe.parity(keeper).segments} - {member}
    alive = [other for other in stripe.members if other not in lost]
    if not alive or not (keepers | sources).isdisjoint(lost):
        return None
    return Rebuild(stripe, member, tuple(sorted(sources)), tuple(sorted(keepers)) or (alive[0],))


def _check_stripe(stripe: Stripe) -> None:
    if not 2 <= len(stripe.members) <= MAX_MEMBERS or len(stripe.shards) != len(stripe.members):
        raise RequestError(
            f"a parity group has 2 to {MAX_MEMBERS} nodes and a place for a shard of each; "
            f"this one has {len(stripe.members)} nodes and {len(stripe.shards)} places"
        )
    members = [node_id(member) for member in stripe.members]
    if members != sorted(set(members)):
        raise RequestError(f"the nodes of a parity group are sorted and named once, not {', '.join(members)}")
    shards = [shard for shard in stripe.shards if shard is not None]
    if not shards or stripe.number < 0:
        raise RequestError(f"stripe {stripe.number} of {', '.join(members)} holds {len(shards)} shards")
    for shard in shards:
        check_record(shard)
        if shard.chunk_bytes > CHUNK_BYTES:
            raise RequestError(f"{shard.key}: chunks of {shard.chunk_bytes} bytes, parities take up to {CHUNK_BYTES}")
    if len({(shard.key.job, shard.key.group, shard.parts, shard.chunk_bytes) for shard in shards}) > 1:
        raise RequestError(f"not of one version, or not in chunks of one size: {_named(shards)}")
    if len({shard.key.part for shard in shards}) < len(shards):
        raise RequestError(f"one shard on two nodes: {_named(shards)}. Copies are no parts of a stripe")


def _named(shards: list[ShardRecord]) -> str:
    return ", ".join(str(shard.key) for shard in shards)
