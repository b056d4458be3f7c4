"""What this node owes the job's other nodes: which shard goes to whom next. Pure: values in, values out.

Every copy carries the list of nodes that were to hold its shard, the writer's first. As long as the first one lives and
has it, the copies are its business. When one of the list dies, or the first one starts again and may have lost what it
had, everybody left on it makes sure that the others left have the shard (asking one that has it costs a message), and
the first one left looks for new partners.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from peerstore.cluster.domains import domains, point
from peerstore.cluster.nodes import Node, NodeId
from peerstore.errors import FencedError, LeaseLostError
from peerstore.peers.messages import Settling
from peerstore.records import Group, ShardFact, ShardKey, ShardRecord

TOLD_AT_ONCE = 128
"""How many nodes the scribe tells itself what is settled."""


class Held(msgspec.Struct, frozen=True):
    """A sealed shard on this node, as far as its copies go."""

    key: ShardKey
    size_bytes: int
    listed: tuple[str, ...]
    """Who was to hold it, the writer's node first; this node is one of them."""
    confirmed: frozenset[str] = frozenset()
    """Other nodes that have said they hold it, and have not started again since."""
    refused: frozenset[str] = frozenset()
    """Nodes that have no room for it, for now."""
    wanted: bool = True
    """Somebody may still need this version: it is not older than the settled one, nor of a past that was left."""


class Duty(msgspec.Struct, frozen=True):
    """Have ``to`` hold ``key``."""

    key: ShardKey
    to: str
    holders: tuple[str, ...]
    """Who is to hold it from then on, the one who answers for it first."""


class Standing(msgspec.Struct, frozen=True):
    """How well one shard is kept."""

    key: ShardKey
    mine: bool
    """This node answers for it: the first of its living holders."""
    copies: int
    """Living nodes that are known to hold it, this one included."""
    lacking: int
    """Copies that are still to be made, and can be."""
    short: int
    """Copies that cannot be made: there is no node for them, or none with room."""


def living_holders(held: Held, living: Collection[str]) -> tuple[str, ...]:
    return tuple(node for node in held.listed if node in living)


def plan(held: Held, *, me: str, living: Collection[str], partners: Sequence[str], copies: int) -> tuple[str, ...]:
    """Who is to hold the shard, as of now: the living of its list, then this node's partners, up to ``copies``."""
    there = living_holders(held, living)
    if me not in there:
        there = (*there, me)
    if there[0] != me:
        return there
    new = [node for node in partners if node in living and node not in there and node not in held.refused]
    return (*there, *new[: max(0, copies - len(there))])


def stand_ins(
    me: NodeId, living: Collection[Node], partners: Collection[str], levels: Sequence[str]
) -> tuple[str, ...]:
    """Who else could take a copy: the nodes that are furthest away first, in an order that each node has its own of."""
    where = domains(living, levels)
    others = [node for node in where.order if node != me and node not in partners]
    if me not in where.order:
        return tuple(others)
    return tuple(sorted(others, key=lambda node: (-where.apart(me, node), point(me, node))))


def due(
    shards: Iterable[Held], *, me: str, living: Collection[str], partners: Sequence[str], copies: int
) -> list[Duty]:
    """What is to be sent, the oldest version first, so that each gets its turn to be settled."""
    found = []
    for held in shards:
        if not held.wanted:
            continue
        there = living_holders(held, living)
        whole_list = len(there) == len(held.listed)
        if there and there[0] != me and there[0] in held.confirmed and whole_list:
            continue  # its first holder has it and looks after it
        holders = plan(held, me=me, living=living, partners=partners, copies=copies)
        found += [
            Duty(held.key, node, holders)
            for node in holders
            if node != me and node not in held.confirmed and node not in held.refused
        ]
    return sorted(found, key=lambda duty: (duty.key.group, duty.key.part, duty.to))


def inherited(
    facts: Iterable[ShardFact], *, me: str, living: Collection[str], dead: Collection[str]
) -> list[ShardFact]:
    """Copies whose writer's node is dead, and of whose living holders ``me`` is the first: they are its own now."""
    return [
        fact
        for fact in facts
        if fact.holders and fact.holders[0] in dead and fact.holders[0] not in living
        if next((node for node in fact.holders if node in living), None) == me
    ]


def remembered(me: str, said: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Who was to hold a shard that ``me`` lost, by what the others say of it; empty when ``me`` wrote it."""
    listed = next((holders for holders in said.values() if me in holders), ())
    if listed:
        return listed if listed[0] != me else ()
    owner = next((node for node, holders in said.items() if not holders), min(said, default=me))
    return (owner, me) if owner != me else ()


def worth_mending(record: ShardRecord, error: Exception, settled: Group | None) -> bool:
    """Whether to try again to fetch a damaged shard that could not be: not what is of the past by now."""
    if isinstance(error, FencedError) and not isinstance(error, LeaseLostError):
        return False
    return settled is None or record.key.group >= settled


def standing(held: Held, *, me: str, living: Collection[str], partners: Sequence[str], copies: int) -> Standing:
    """How well the shard is kept, as this node knows."""
    holders = plan(held, me=me, living=living, partners=partners, copies=copies)
    there = 1 + sum(node in held.confirmed for node in holders if node != me)
    if not held.wanted:
        return Standing(held.key, holders[0] == me, there, 0, 0)
    lacking = sum(node not in held.confirmed and node not in held.refused for node in holders if node != me)
    short = max(0, copies - there - lacking)
    return Standing(held.key, holders[0] == me, there, lacking, short)


def protected(standings: Iterable[Standing]) -> dict[Group, tuple[int, ...]]:
    """The parts this node answers for that have all the copies they can have, by version."""
    found: dict[Group, list[int]] = {}
    for one in standings:
        if one.mine and not one.lacking:
            found.setdefault(one.key.group, []).append(one.key.part)
    return {group: tuple(sorted(parts)) for group, parts in found.items()}


class _Said:
    """What was said of one version."""

    def __init__(self) -> None:
        self.notes: dict[str, Settling] = {}
        self._named = 0
        self._least = sys.maxsize
        """The fewest parts in all that anybody spoke of."""

    def add(self, note: Settling) -> None:
        known = self.notes.get(note.by)
        if known is None or note.life >= known.life:
            self.notes[note.by] = note
            self._named += len(note.parts) - (len(known.parts) if known is not None else 0)
            self._least = min(self._least, note.parts_in_all)

    @property
    def may_be_all(self) -> bool:
        """Whether it is worth counting: with each of thousands of notes that would be slow."""
        return self._named >= self._least


class Tally:
    """Counts protected parts per version, for the whole job. One node keeps it; losing it costs a repetition.

    What a node said counts while it lives. When it dies or starts again, somebody else answers for its parts, or it
    says so anew: else a version could count as safe of which a part went with its last holder.
    """

    def __init__(self) -> None:
        self._said: dict[Group, _Said] = {}

    def add(self, note: Settling) -> None:
        self._said.setdefault(note.group, _Said()).add(note)

    def complete(self, *, me: str, living: Collection[str], life: Callable[[str], int]) -> Group | None:
        """The newest version all of whose parts are protected."""
        found = []
        for group, said in self._said.items():
            if not said.may_be_all:
                continue
            counted = [
                note for node, note in said.notes.items() if node == me or (node in living and life(node) <= note.life)
            ]
            in_all = max((note.parts_in_all for note in counted), default=0)
            parts = {part for note in counted for part in note.parts if 0 <= part < in_all}
            if in_all and len(parts) == in_all:
                found.append(group)
        newest = max(found, default=None)
        if newest is not None:  # it is said once: also when the job has left that version and nobody wants to know
            del self._said[newest]
        return newest

    def forget_until(self, settled: Group) -> None:
        self._said = {group: said for group, said in self._said.items() if group > settled}


def scribe(living: Mapping[str, object] | Collection[str]) -> str | None:
    """Who keeps the tally: the first of the living."""
    return min(living, default=None)


def told_at_once(living: Iterable[str], me: str) -> list[str]:
    """Whom the scribe tells what is settled: everybody in a small job, in a large one some of all, who pass it on.

    Pings carry it too, and reach everybody within a few of their periods; telling thousands one by one takes longer.
    """
    others = sorted(node for node in living if node != me)
    return others[:: max(1, -(-len(others) // TOLD_AT_ONCE))]


class Reports:
    """What a node says of the parts it answers for; and, where it is the scribe, what all of them said."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._tally = Tally()
        self._reported: dict[Group, tuple[str, Settling]] = {}

    def unreported(
        self,
        standings: Iterable[Standing],
        parts_of: Mapping[Group, int],
        *,
        living: Mapping[str, object],
        settled: Group | None,
        life: int,
    ) -> tuple[str, list[Settling]]:
        """Who keeps the tally, and what it has not been told yet. ``parts_of``: how many parts a version has in all."""
        teller = scribe(living) or self._me
        self._reported = {group: told for group, told in self._reported.items() if settled is None or group > settled}
        parts = protected(standings)
        in_all = {**{group: note.parts_in_all for group, (_, note) in self._reported.items()}, **parts_of}
        notes = [
            Settling(group, in_all[group], parts.get(group, ()), self._me, life)
            for group in sorted(parts.keys() | self._reported.keys())
            if settled is None or group > settled
        ]
        return teller, [note for note in notes if self._reported.get(note.group) != (teller, note)]

    def reported(self, teller: str, note: Settling) -> None:
        self._reported[note.group] = (teller, note)

    def count(self, note: Settling) -> None:
        """A node says which parts are kept as they are to be."""
        self._tally.add(note)

    def complete(
        self, *, living: Collection[str], life: Callable[[str], int], settled: Group | None, quorum: bool
    ) -> Group | None:
        """The newest version of which all parts are kept as they are to be, when that is news.

        Without a quorum there is none: the other side of a partition may have gone on from a version that this one
        would give up. What was told is kept until the others are back.
        """
        if settled is not None:
            self._tally.forget_until(settled)
        return self._tally.complete(me=self._me, living=living, life=life) if quorum else None
