"""Which parities a node makes for its group, and which lost shards it makes again. Pure: values in, values out.

Every member numbers its own shards of a version in the order in which they were sealed; the first of everybody are one
stripe, the second another. A node can tell its number before it knows what the others have, and those who keep the
parities need nothing else to agree.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from peerstore import frames
from peerstore.checksum import digest
from peerstore.cluster.nodes import NodeId
from peerstore.cluster.parity import ParityRecord, Stripe
from peerstore.errors import RequestError
from peerstore.peers.messages import Looked, ParityFact
from peerstore.records import Group, ShardFact, ShardKey, ShardRecord

Numbers = Mapping[int, int]
"""Number of a stripe -> part of the version that a member has in it."""


class Contents(msgspec.Struct, frozen=True):
    """What a parity is made of, kept as the meta of its own record."""

    stripe: Stripe
    keeper: NodeId


@dataclass(frozen=True)
class Kept:
    """A sealed parity on this node."""

    key: ShardKey
    parity: ParityRecord

    @property
    def members(self) -> tuple[NodeId, ...]:
        return self.parity.stripe.members

    @property
    def shards(self) -> dict[NodeId, ShardRecord]:
        """What is in it, by member; the keeper's own shard never is."""
        stripe = self.parity.stripe
        return {
            member: shard
            for member, shard in zip(stripe.members, stripe.shards, strict=True)
            if shard is not None and member != self.parity.keeper
        }

    @property
    def fact(self) -> ParityFact:
        parts = {str(member): shard.key.part for member, shard in self.shards.items()}
        return ParityFact(self.key.group, self.parity.stripe.number, self.members, self.parity.keeper, parts)


# -- a parity as it is kept -------------------------------------------------------------------------------------------


def parity_key(stripe: Stripe, keeper: NodeId) -> ShardKey:
    """Where a parity is kept: the same contents have the same key, so that it is made once."""
    first = next(shard for shard in stripe.shards if shard is not None)
    made_of = [(shard.key.part, digest(shard.checksums)) if shard else None for shard in stripe.shards]
    name = hashlib.blake2b(msgspec.msgpack.encode((keeper, stripe.members, made_of)), digest_size=8).hexdigest()
    return msgspec.structs.replace(first.key, part=stripe.number, kind=f"parity.{name}")


def sealed_parity(stripe: Stripe, keeper: NodeId, checksums: bytes, sealed_ns: int) -> ShardRecord:
    """The record a parity is kept under."""
    parity = ParityRecord(stripe, keeper, checksums)
    parts = next(shard.parts for shard in stripe.shards if shard is not None)
    meta = frames.encode_raw(Contents(stripe, keeper))
    key = parity_key(stripe, keeper)
    return ShardRecord(key, parts, parity.size_bytes, stripe.chunk_bytes, checksums, bytes(meta), sealed_ns)


def kept_parity(record: ShardRecord) -> Kept:
    """A parity's record, read; or a :class:`RequestError` that says what is wrong with it."""
    contents = frames.decode(record.meta, Contents)
    parity = ParityRecord(contents.stripe, contents.keeper, record.checksums)
    if parity_key(contents.stripe, contents.keeper) != record.key or parity.size_bytes != record.size_bytes:
        raise RequestError(f"{record.key} is not the parity that it says it is")
    return Kept(record.key, parity)


# -- making them ------------------------------------------------------------------------------------------------------


def numbered(facts: Iterable[ShardFact], known: Mapping[ShardKey, int]) -> dict[ShardKey, int]:
    """A number for every shard, the one it is ``known`` by or the next free one of its version."""
    found = {}
    taken: dict[Group, set[int]] = defaultdict(set)
    for key, number in known.items():
        taken[key.group].add(number)
    for fact in sorted(facts, key=lambda fact: (fact.sealed_ns, fact.key)):
        used = taken[fact.key.group]
        number = known.get(fact.key, -1)
        if number < 0:
            number = next(free for free in range(len(used) + 1) if free not in used)
            used.add(number)
        found[fact.key] = number
    return found


def stripes_due(
    me: str,
    members: Sequence[str],
    told: Mapping[str, Numbers],
    kept: Iterable[Mapping[str, int]],
    *,
    complete: bool,
) -> dict[int, dict[str, int]]:
    """The parities of one version that this node is to make now: number -> member -> part.

    ``told`` is what the members said they have, ``kept`` what is in the parities that are sealed here, by member. A
    stripe waits for all members, unless ``complete`` says that nobody is going to tell more.
    """
    others = [member for member in members if member != me]
    done = list(kept)
    found = {}
    for number in sorted({number for member in others for number in told.get(member, {})}):
        chosen = chosen_parts(others, told, number)
        waits = not complete and any(number not in told.get(member, {}) for member in others)
        if chosen and not waits and not any(chosen.items() <= there.items() for there in done):
            found[number] = chosen
    return found


def chosen_parts(others: Sequence[str], told: Mapping[str, Numbers], number: int) -> dict[str, int]:
    """One part per member; where two have the same one (a copy), the first of them: the other one keeps it safe."""
    chosen: dict[str, int] = {}
    for member in others:
        part = told.get(member, {}).get(number)
        if part is not None and part not in chosen.values():
            chosen[member] = part
    return chosen


def superseded(kept: Collection[Kept], useful: Collection[Kept]) -> list[ShardKey]:
    """Parities all of whose shards are in a useful one of the same stripe: somebody was late."""
    found = []
    for one in kept:
        for other in useful:
            same = one.fact.row == other.fact.row and one.key != other.key
            if same and one.fact.parts.items() < other.fact.parts.items():
                found.append(one.key)
                break
    return found


# -- what was lost ----------------------------------------------------------------------------------------------------


class Missing(NamedTuple):
    """A shard in a parity of this node that nobody is known to hold."""

    shard: ShardRecord
    member: NodeId
    """Whose it was when the parity was made."""
    heirs: tuple[NodeId, ...]
    """Who could make it again, in the order in which they look for it: the others of that group that live."""


def missing_shards(kept: Iterable[Kept], *, living: Collection[str], held: Callable[[ShardKey], bool]) -> list[Missing]:
    """What is in these parities and was lost, or may have been: its holder is gone, or has started again since."""
    found: dict[ShardKey, Missing] = {}
    for one in kept:
        for member, shard in one.shards.items():
            if shard.key not in found and not held(shard.key):
                heirs = tuple(other for other in one.members if other in living and other != member)
                found[shard.key] = Missing(shard, member, heirs)
    return [found[key] for key in sorted(found, key=lambda key: (key.group, key.part))]


def makes_again(lost: Missing, me: str, nodes: Mapping[str, Looked]) -> bool:
    """Whether this node is the first that has a parity with the shard in it, by what all said they hold."""
    key = lost.shard.key
    keepers = [
        node
        for node in lost.heirs
        if node == me
        or any(fact.group == key.group and key.part in fact.parts.values() for fact in _parities(nodes.get(node)))
    ]
    return keepers[:1] == [me]


def _parities(looked: Looked | None) -> tuple[ParityFact, ...]:
    return looked.parities if looked is not None else ()


def rows_with(
    key: ShardKey, parities: Iterable[ParityRecord], *, held: Callable[[ShardKey], bool]
) -> list[tuple[NodeId, tuple[ParityRecord, ...]]]:
    """The parities that give a shard back, in sets of one stripe each, and whose shard it is there. Whole sets only.

    Of two that one node keeps, the one is taken that needs no other shard which nobody has (``held``), and then the one
    with more in it: that was made later.
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


def awaited(
    parts: Mapping[Group, Collection[int]], in_all: Mapping[Group, int], facts: Iterable[ParityFact]
) -> dict[Group, set[int]]:
    """Versions newer than the newest whole one that a rebuild is going to complete, and the parts it makes."""
    coming = rebuildable(facts, parts)
    found = {}
    for group in sorted(parts, reverse=True):
        missing = set(range(in_all[group])) - set(parts[group])
        if not missing:
            break
        if missing <= coming.get(group, set()):
            found[group] = missing
    return found


def rebuildable(facts: Iterable[ParityFact], parts: Mapping[Group, Collection[int]]) -> dict[Group, set[int]]:
    """Parts that nobody has and that the parities which are there give back, by version.

    ``parts`` are the ones that somebody has: a parity is worth something only together with all else in it.
    """
    keepers: dict[tuple[Group, int, tuple[str, ...], str, int], set[str]] = defaultdict(set)
    for fact in facts:
        there = set(parts.get(fact.group, ()))
        for member, part in fact.parts.items():
            others = {part for other, part in fact.parts.items() if other != member}
            if part not in there and others <= there:
                row = (*fact.row, member, part)
                keepers[row].add(fact.keeper)
    found: dict[Group, set[int]] = defaultdict(set)
    for (group, _, members, member, part), names in keepers.items():
        if set(members) - {member} <= names:
            found[group].add(part)
    return dict(found)


def still_coming(nodes: Mapping[str, Looked], silent: Collection[str], living: Collection[str]) -> str:
    """What may still make a newer version whole, in words; nothing when nothing will."""
    parts: dict[Group, set[int]] = defaultdict(set)
    in_all: dict[Group, int] = {}
    for looked in nodes.values():
        for fact in looked.facts:
            parts[fact.key.group].add(fact.key.part)
            in_all[fact.key.group] = fact.parts
    newest = max(parts, default=None)
    if newest is not None and len(parts[newest]) >= in_all[newest]:
        return ""
    unheard = [node for node in silent if node in living]
    if unheard:
        return f"nothing was heard of {', '.join(sorted(unheard))}"
    pending = awaited(parts, in_all, [fact for looked in nodes.values() for fact in looked.parities])
    if not pending:
        return ""
    newest = max(pending)
    return f"parts {sorted(pending[newest])} of version {newest.version}, lost with their node, are being rebuilt"
