"""What this node owes the job's other nodes: which shard goes to whom next. Pure: values in, values out.

Every copy carries the list of nodes that were to hold its shard, the writer's first. As long as the first one lives and
has it, the copies are its business. When one of the list dies, or the first one starts again and may have lost what it
had, everybody left on it makes sure that the others left have the shard (asking one that has it costs a message), and
the first one left looks for new partners.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from peerstore.cluster.domains import domains, point
from peerstore.cluster.nodes import Node, NodeId
from peerstore.errors import FencedError, LeaseLostError
from peerstore.records import Group, ShardFact, ShardKey, ShardRecord


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
