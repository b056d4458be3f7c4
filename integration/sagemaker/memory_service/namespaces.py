"""Namespaces as all nodes know them, their shards, and retention. Pure.

A deleted and recreated namespace has a higher *generation*. Shards of earlier generations no longer count, even on a
node that was away meanwhile. This needs no agreement: of two versions, every node chooses the same one.

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
"""Nanoseconds for which the deletion of a shard is remembered.

A node that was away longer may bring the shard back.
"""


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
        """Return whether shards of that generation no longer count."""
        return self.generation > generation or (self.generation == generation and self.deleted)


class RemovedShard(msgspec.Struct, frozen=True, array_like=True):
    """Deletion of one shard and of all earlier shards of its rank and step."""

    namespace: str
    generation: int
    rank: int
    step: int
    until: int
    """Greatest deleted stamp."""


ShardPlace = tuple[str, int, int, int]
"""Namespace, generation, rank and step."""


class Registry(msgspec.Struct, frozen=True):
    """All namespaces and deletions known to one node."""

    namespaces: dict[str, Namespace] = {}
    removed: tuple[RemovedShard, ...] = ()

    def get(self, name: str) -> Namespace | None:
        namespace = self.namespaces.get(name)
        return None if namespace is None or namespace.deleted else namespace

    @property
    def live_namespaces(self) -> dict[str, Namespace]:
        return {name: namespace for name, namespace in self.namespaces.items() if not namespace.deleted}

    def removals(self) -> dict[ShardPlace, int]:
        return {_place_of(removal): removal.until for removal in self.removed}


def with_namespace(registry: Registry, name: str, *, num_ranks: int, steps_retained: int, now_ns: int) -> Registry:
    """Return the registry with a new generation of ``name``, which must not exist."""
    before = registry.namespaces.get(name)
    generation = before.generation + 1 if before is not None else 1
    fresh = Namespace(generation, num_ranks, steps_retained, now_ns)
    return Registry({**registry.namespaces, name: fresh}, registry.removed)


def with_deleted_namespaces(registry: Registry, *names: str, now_ns: int) -> Registry:
    """Return the registry with ``names`` marked as deleted."""
    deleted = {
        name: msgspec.structs.replace(namespace, deleted=True, changed_ns=now_ns)
        for name in names
        if (namespace := registry.get(name)) is not None
    }
    return _without_old_removals(Registry({**registry.namespaces, **deleted}, registry.removed), now_ns)


def with_removed_shard(registry: Registry, removed: RemovedShard, *, now_ns: int) -> Registry:
    """Return the registry with the deletion of one shard."""
    return merge_registries(registry, Registry({}, (removed,)), now_ns=now_ns)


def merge_registries(one: Registry, other: Registry, *, now_ns: int) -> Registry:
    """Return the union of both registries. The order of merges does not matter."""
    namespaces = dict(one.namespaces)
    for name, namespace in other.namespaces.items():
        known = namespaces.get(name)
        if known is None or namespace.order > known.order:
            namespaces[name] = namespace
    until = one.removals()
    for place, stamp in other.removals().items():
        until[place] = max(stamp, until.get(place, 0))
    removed = tuple(RemovedShard(*place, stamp) for place, stamp in sorted(until.items()))
    return _without_old_removals(Registry(namespaces, removed), now_ns)


def _without_old_removals(registry: Registry, now_ns: int) -> Registry:
    """Return the registry without deletions that are too old or of superseded generations."""
    kept = [
        removal
        for removal in registry.removed
        if removal.until > now_ns - REMOVED_SHARD_TTL_NS
        if removal.namespace not in registry.namespaces
        or not registry.namespaces[removal.namespace].is_superseded(removal.generation)
    ]
    latest = sorted(kept, key=lambda removal: removal.until)[-MAX_REMOVED_SHARDS:]
    return Registry(registry.namespaces, tuple(sorted(latest, key=_place_of)))


def _place_of(removed: RemovedShard) -> ShardPlace:
    return removed.namespace, removed.generation, removed.rank, removed.step


def encode_registry(registry: Registry) -> bytes:
    return msgspec.msgpack.encode(registry)


def decode_registry(data: bytes) -> Registry:
    return from_msgpack(data, Registry)


_DCP_MODULE = b"torch.distributed.checkpoint.metadata"
_PICKLE_MARK = 0x80
SNIFFED_BYTES = 128
"""Bytes at the start of a shard that show whether it is a plan."""


class ShardNote(msgspec.Struct, frozen=True, array_like=True):
    """Metadata stored with a shard."""

    namespace: str
    generation: int
    header: bytes | None
    """Value of ``Shard-Meta``, unchanged."""
    is_plan: bool = False


@dataclass(frozen=True)
class NamespaceShard:
    """Newest shard of one rank and step."""

    key: ShardKey
    size_bytes: int
    note: ShardNote
    nodes: tuple[str, ...] = ()
    """Nodes that hold it."""


ShardsByStep = dict[int, dict[int, NamespaceShard]]
"""Shards by step and rank."""


@dataclass
class NamespaceView:
    """Shards of all namespaces."""

    steps: dict[str, ShardsByStep] = field(default_factory=dict)
    outdated: list[ShardKey] = field(default_factory=list)
    """Shards that were replaced, deleted, or stored in a deleted namespace."""

    def of(self, namespace: str) -> ShardsByStep:
        return self.steps.get(namespace, {})


def namespace_shard_key(rank: int, step: int, stamp: int) -> ShardKey:
    """Return the key of a shard. Its stamp distinguishes it from earlier shards of the rank and step."""
    return ShardKey(MEMORY_SERVICE_JOB, step, MEMORY_SERVICE_EPOCH, MEMORY_SERVICE_INCARNATION, stamp, rank)


def is_dcp_metadata(head: bytes) -> bool:
    """Return whether a shard is a plan: a pickle of DCP's ``Metadata``.

    DCP's coordinator writes it last.
    """
    return head[:1] == bytes([_PICKLE_MARK]) and _DCP_MODULE in head[:SNIFFED_BYTES]


def encode_note(note: ShardNote) -> bytes:
    return msgspec.msgpack.encode(note)


def decode_note(data: bytes) -> ShardNote | None:
    try:
        return from_msgpack(data, ShardNote)
    except (msgspec.DecodeError, ValueError):
        return None


def namespace_view(held: Mapping[str, Iterable[ShardInfo]], registry: Registry) -> NamespaceView:
    """Return the shards of the nodes in ``held``, according to the registry."""
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
            continue  # this node does not know the namespace or its generation so far
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
    """Return the complete steps, newest first."""
    return sorted((step for step, ranks in steps.items() if has_all_ranks(ranks, num_ranks)), reverse=True)


def has_all_ranks(ranks: Mapping[int, NamespaceShard], num_ranks: int) -> bool:
    """Return whether the shards of all ranks exist.

    The namespace's settings define the number of ranks. A job that returns with another number declares it by its plan,
    stored as the shard after the last rank.
    """
    if all(rank in ranks for rank in range(num_ranks)):
        return True
    plans = [rank for rank, shard in ranks.items() if shard.note.is_plan]
    return any(plan + 1 != num_ranks and all(rank in ranks for rank in range(plan)) for plan in plans)


def surplus_steps(steps: Collection[int], *, retained: int, newest_whole: int | None, last_put: int) -> list[int]:
    """Return the steps of one rank to delete: the lowest ones beyond ``retained``."""
    others = sorted(step for step in steps if step not in (newest_whole, last_put))
    return others[: max(0, len(steps) - retained)]


def surplus_shards(view: NamespaceView, registry: Registry, *, sure: bool) -> list[ShardKey]:
    """Return all shards to delete.

    Unless ``sure`` that all shards are in view, an incomplete step may be the newest complete one. Then only steps
    older than a complete one are deleted.
    """
    found = list(view.outdated)
    for name, namespace in registry.live_namespaces.items():
        steps = view.of(name)
        newest = next(iter(complete_namespace_steps(steps, namespace.num_ranks)), None)
        for rank, of in _by_rank(steps).items():
            last_put = max(of, key=lambda step: of[step].attempt)
            surplus = surplus_steps(of, retained=namespace.steps_retained, newest_whole=newest, last_put=last_put)
            found += [steps[step][rank].key for step in surplus if sure or (newest is not None and step < newest)]
    return found


def _by_rank(steps: ShardsByStep) -> Mapping[int, dict[int, ShardKey]]:
    found: dict[int, dict[int, ShardKey]] = defaultdict(dict)
    for step, ranks in steps.items():
        for rank, shard in ranks.items():
            found[rank][step] = shard.key
    return found
