"""Namespaces as the memory of all nodes shows them. Pure: facts in, views out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from peerstore.decode import from_msgpack
from peerstore.records import ShardFact, ShardKey
from tieredckpt.agent.memory_service.names import EPOCH, INCARNATION, JOB, PARTS
from tieredckpt.agent.memory_service.registry import Registry

_PLAN = b"torch.distributed.checkpoint.metadata"
_PICKLE = 0x80
SNIFFED_BYTES = 128
"""How much of a shard has to be seen to know whether it is a plan."""


class Note(msgspec.Struct, frozen=True, array_like=True):
    """What is kept beside a shard."""

    namespace: str
    generation: int
    header: bytes | None
    """``Shard-Meta`` as it came."""
    is_plan: bool = False


@dataclass(frozen=True)
class Shard:
    """One rank's bytes of one step, as they were put last."""

    key: ShardKey
    size_bytes: int
    note: Note
    nodes: tuple[str, ...] = ()
    """Who has it."""


Steps = dict[int, dict[int, Shard]]
"""By step and rank."""


@dataclass
class View:
    """All namespaces."""

    steps: dict[str, Steps] = field(default_factory=dict)
    outdated: list[ShardKey] = field(default_factory=list)
    """Shards that were put again since, deleted, or put into a namespace that is gone."""

    def of(self, namespace: str) -> Steps:
        return self.steps.get(namespace, {})


def key_of(rank: int, step: int, stamp: int) -> ShardKey:
    """Every shard is a version of its own: its stamp tells it from what was put for the same rank and step before."""
    return ShardKey(JOB, step, EPOCH, INCARNATION, stamp, rank)


def is_plan(head: bytes) -> bool:
    """Whether a shard that begins so is what DCP's coordinator writes last: a pickle of its ``Metadata``."""
    return head[:1] == bytes([_PICKLE]) and _PLAN in head[:SNIFFED_BYTES]


def encode_note(note: Note) -> bytes:
    return msgspec.msgpack.encode(note)


def decode_note(data: bytes) -> Note | None:
    try:
        return from_msgpack(data, Note)
    except (msgspec.DecodeError, ValueError):
        return None


def view_of(held: Mapping[str, Iterable[ShardFact]], registry: Registry) -> View:
    """What the nodes in ``held`` have, by what ``registry`` says of namespaces."""
    found: dict[ShardKey, tuple[ShardFact, list[str]]] = {}
    for node, facts in held.items():
        for fact in facts:
            if (fact.key.job, fact.key.epoch, fact.key.incarnation, fact.parts) == (JOB, EPOCH, INCARNATION, PARTS):
                found.setdefault(fact.key, (fact, []))[1].append(node)
    view, removed = View(), registry.removals()
    steps: dict[str, Steps] = defaultdict(lambda: defaultdict(dict))
    for key in sorted(found):
        fact, nodes = found[key]
        note = decode_note(fact.meta)
        if note is None:
            continue
        removed_until = removed.get((note.namespace, note.generation, key.part, key.version), -1)
        known = registry.namespaces.get(note.namespace)
        if known is None or known.generation < note.generation:
            continue  # this node has not heard of it yet
        if known.is_past(note.generation) or key.attempt <= removed_until:
            view.outdated.append(key)
            continue
        ranks = steps[note.namespace][key.version]
        before = ranks.get(key.part)
        if before is not None:  # keys are sorted: this one was put later
            view.outdated.append(before.key)
        ranks[key.part] = Shard(key, fact.size_bytes, note, tuple(nodes))
    view.steps = {name: dict(of) for name, of in steps.items()}
    return view


def whole_steps(steps: Steps, num_ranks: int) -> list[int]:
    """Steps that nothing is missing of, the newest first."""
    return sorted((step for step, ranks in steps.items() if is_whole(ranks, num_ranks)), reverse=True)


def is_whole(ranks: Mapping[int, Shard], num_ranks: int) -> bool:
    """Whether all ranks' shards are there.

    How many there are to be was said when the namespace was made. A job that comes back to it with another number of
    ranks says it by its plan, which is one rank's behind the last of them.
    """
    if all(rank in ranks for rank in range(num_ranks)):
        return True
    plans = [rank for rank, shard in ranks.items() if shard.note.is_plan]
    return any(plan + 1 != num_ranks and all(rank in ranks for rank in range(plan)) for plan in plans)
