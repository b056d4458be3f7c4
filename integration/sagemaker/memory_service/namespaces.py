"""Namespaces as all nodes know them, their shards, and retention. Pure.

A namespace that is deleted and made again is another one: its *generation* is higher, and what was put into an earlier
one does not count any more, also on a node that was away meanwhile. Nothing has to be agreed on for that: of two
things that were said, each node takes the same one.

A rank retains its newest ``steps_retained`` steps, the namespace's newest complete step, and the step that it stored
last. So failed saves replace each other and never a step that can be loaded.
``docs/decisions/0015-memory-service-retention.md`` has the reasons.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from integration.sagemaker.memory_service.shard_requests import NAMESPACE_PARTS
from peerstore.message_codec import from_msgpack
from peerstore.shard_records import ShardInfo, ShardKey
from tieredckpt.memory_service_options import MEMORY_SERVICE_EPOCH, MEMORY_SERVICE_INCARNATION, MEMORY_SERVICE_JOB

MAX_REMOVED_SHARDS = 10_000
REMOVED_SHARD_TTL_NS = 3600 * 10**9
"""How long it is remembered that one shard was deleted: a node that was away longer may bring it back."""


class Namespace(msgspec.Struct, frozen=True):
    """One generation of a namespace."""

    generation: int
    num_ranks: int
    steps_retained: int
    changed_ns: int
    deleted: bool = False

    @property
    def order(self) -> tuple[int, bool, int, int, int]:
        return self.generation, self.deleted, self.changed_ns, self.num_ranks, self.steps_retained

    def is_superseded(self, generation: int) -> bool:
        """Whether nothing of that generation counts any more."""
        return self.generation > generation or (self.generation == generation and self.deleted)


class RemovedShard(msgspec.Struct, frozen=True, array_like=True):
    """A shard that somebody deleted, whatever was put for it until then."""

    namespace: str
    generation: int
    rank: int
    step: int
    until: int
    """Stamps up to this one."""


ShardPlace = tuple[str, int, int, int]
"""Namespace, generation, rank and step."""


class Registry(msgspec.Struct, frozen=True):
    """Everything that was said, as far as one node has heard."""

    namespaces: dict[str, Namespace] = {}
    removed: tuple[RemovedShard, ...] = ()

    def get(self, name: str) -> Namespace | None:
        found = self.namespaces.get(name)
        return None if found is None or found.deleted else found

    @property
    def live_namespaces(self) -> dict[str, Namespace]:
        return {name: one for name, one in self.namespaces.items() if not one.deleted}

    def removals(self) -> dict[ShardPlace, int]:
        return {_place(one): one.until for one in self.removed}


def with_namespace(registry: Registry, name: str, *, num_ranks: int, steps_retained: int, now_ns: int) -> Registry:
    """With a new generation of ``name``, which is not there."""
    before = registry.namespaces.get(name)
    generation = before.generation + 1 if before is not None else 1
    fresh = Namespace(generation, num_ranks, steps_retained, now_ns)
    return Registry({**registry.namespaces, name: fresh}, registry.removed)


def with_deleted_namespaces(registry: Registry, *names: str, now_ns: int) -> Registry:
    """Without ``names``: that they were there is remembered."""
    gone = {
        name: msgspec.structs.replace(one, deleted=True, changed_ns=now_ns)
        for name in names
        if (one := registry.get(name)) is not None
    }
    return _tidied(Registry({**registry.namespaces, **gone}, registry.removed), now_ns)


def with_removed_shard(registry: Registry, removed: RemovedShard, *, now_ns: int) -> Registry:
    """Without one shard."""
    return merge_registries(registry, Registry({}, (removed,)), now_ns=now_ns)


def merge_registries(one: Registry, other: Registry, *, now_ns: int) -> Registry:
    """What both were told. The order in which nodes hear of things does not matter."""
    namespaces = dict(one.namespaces)
    for name, said in other.namespaces.items():
        known = namespaces.get(name)
        if known is None or said.order > known.order:
            namespaces[name] = said
    until = one.removals()
    for place, stamp in other.removals().items():
        until[place] = max(stamp, until.get(place, 0))
    removed = tuple(RemovedShard(*place, stamp) for place, stamp in sorted(until.items()))
    return _tidied(Registry(namespaces, removed), now_ns)


def _tidied(registry: Registry, now_ns: int) -> Registry:
    """Without what is of generations that are gone, and of too long ago."""
    kept = [
        one
        for one in registry.removed
        if one.until > now_ns - REMOVED_SHARD_TTL_NS
        if one.namespace not in registry.namespaces
        or not registry.namespaces[one.namespace].is_superseded(one.generation)
    ]
    latest = sorted(kept, key=lambda one: one.until)[-MAX_REMOVED_SHARDS:]
    return Registry(registry.namespaces, tuple(sorted(latest, key=_place)))


def _place(removed: RemovedShard) -> ShardPlace:
    return removed.namespace, removed.generation, removed.rank, removed.step


def encode_registry(registry: Registry) -> bytes:
    return msgspec.msgpack.encode(registry)


def decode_registry(data: bytes) -> Registry:
    return from_msgpack(data, Registry)


_PLAN = b"torch.distributed.checkpoint.metadata"
_PICKLE = 0x80
SNIFFED_BYTES = 128
"""How much of a shard has to be seen to know whether it is a plan."""


class ShardNote(msgspec.Struct, frozen=True, array_like=True):
    """What is kept beside a shard."""

    namespace: str
    generation: int
    header: bytes | None
    """``Shard-Meta`` as it came."""
    is_plan: bool = False


@dataclass(frozen=True)
class NamespaceShard:
    """One rank's bytes of one step, as they were put last."""

    key: ShardKey
    size_bytes: int
    note: ShardNote
    nodes: tuple[str, ...] = ()
    """Who has it."""


ShardsByStep = dict[int, dict[int, NamespaceShard]]
"""By step and rank."""


@dataclass
class NamespaceView:
    """All namespaces."""

    steps: dict[str, ShardsByStep] = field(default_factory=dict)
    outdated: list[ShardKey] = field(default_factory=list)
    """Shards that were put again since, deleted, or put into a namespace that is gone."""

    def of(self, namespace: str) -> ShardsByStep:
        return self.steps.get(namespace, {})


def namespace_shard_key(rank: int, step: int, stamp: int) -> ShardKey:
    """Every shard is a version of its own: its stamp tells it from what was put for the same rank and step before."""
    return ShardKey(MEMORY_SERVICE_JOB, step, MEMORY_SERVICE_EPOCH, MEMORY_SERVICE_INCARNATION, stamp, rank)


def is_dcp_metadata(head: bytes) -> bool:
    """Whether a shard that begins so is what DCP's coordinator writes last: a pickle of its ``Metadata``."""
    return head[:1] == bytes([_PICKLE]) and _PLAN in head[:SNIFFED_BYTES]


def encode_note(note: ShardNote) -> bytes:
    return msgspec.msgpack.encode(note)


def decode_note(data: bytes) -> ShardNote | None:
    try:
        return from_msgpack(data, ShardNote)
    except (msgspec.DecodeError, ValueError):
        return None


def namespace_view(held: Mapping[str, Iterable[ShardInfo]], registry: Registry) -> NamespaceView:
    """What the nodes in ``held`` have, by what ``registry`` says of namespaces."""
    found: dict[ShardKey, tuple[ShardInfo, list[str]]] = {}
    for node, facts in held.items():
        for fact in facts:
            if (fact.key.job, fact.key.epoch, fact.key.incarnation, fact.parts) == (
                MEMORY_SERVICE_JOB,
                MEMORY_SERVICE_EPOCH,
                MEMORY_SERVICE_INCARNATION,
                NAMESPACE_PARTS,
            ):
                found.setdefault(fact.key, (fact, []))[1].append(node)
    view, removed = NamespaceView(), registry.removals()
    steps: dict[str, ShardsByStep] = defaultdict(lambda: defaultdict(dict))
    for key in sorted(found):
        fact, nodes = found[key]
        note = decode_note(fact.meta)
        if note is None:
            continue
        removed_until = removed.get((note.namespace, note.generation, key.part, key.version), -1)
        known = registry.namespaces.get(note.namespace)
        if known is None or known.generation < note.generation:
            continue  # this node has not heard of it yet
        if known.is_superseded(note.generation) or key.attempt <= removed_until:
            view.outdated.append(key)
            continue
        ranks = steps[note.namespace][key.version]
        before = ranks.get(key.part)
        if before is not None:  # keys are sorted: this one was put later
            view.outdated.append(before.key)
        ranks[key.part] = NamespaceShard(key, fact.size_bytes, note, tuple(nodes))
    view.steps = {name: dict(of) for name, of in steps.items()}
    return view


def complete_namespace_steps(steps: ShardsByStep, num_ranks: int) -> list[int]:
    """Steps that nothing is missing of, the newest first."""
    return sorted((step for step, ranks in steps.items() if has_all_ranks(ranks, num_ranks)), reverse=True)


def has_all_ranks(ranks: Mapping[int, NamespaceShard], num_ranks: int) -> bool:
    """Whether all ranks' shards are there.

    How many there are to be was said when the namespace was made. A job that comes back to it with another number of
    ranks says it by its plan, which is one rank's behind the last of them.
    """
    if all(rank in ranks for rank in range(num_ranks)):
        return True
    plans = [rank for rank, shard in ranks.items() if shard.note.is_plan]
    return any(plan + 1 != num_ranks and all(rank in ranks for rank in range(plan)) for plan in plans)


def surplus_steps(steps: Collection[int], *, retained: int, newest_whole: int | None, last_put: int) -> list[int]:
    """Which of one rank's steps go: as many of the lowest as there are too many."""
    others = sorted(step for step in steps if step not in (newest_whole, last_put))
    return others[: max(0, len(steps) - retained)]


def surplus_shards(view: NamespaceView, registry: Registry, *, sure: bool) -> list[ShardKey]:
    """All shards that go.

    Unless it is ``sure`` that nobody holds anything that is not in view, a step that seems to lack something may be the
    newest whole one: then only what is older than a whole one goes.
    """
    found = list(view.outdated)
    for name, namespace in registry.live_namespaces.items():
        steps = view.of(name)
        newest = next(iter(complete_namespace_steps(steps, namespace.num_ranks)), None)
        for rank, of in _by_rank(steps).items():
            last_put = max(of, key=lambda step: of[step].attempt)
            gone = surplus_steps(of, retained=namespace.steps_retained, newest_whole=newest, last_put=last_put)
            found += [steps[step][rank].key for step in gone if sure or (newest is not None and step < newest)]
    return found


def _by_rank(steps: ShardsByStep) -> Mapping[int, dict[int, ShardKey]]:
    found: dict[int, dict[int, ShardKey]] = defaultdict(dict)
    for step, ranks in steps.items():
        for rank, shard in ranks.items():
            found[rank][step] = shard.key
    return found
