"""What was said of namespaces, and how what two nodes were told becomes one. Pure: values in, values out.

A namespace that is deleted and made again is another one: its *generation* is higher, and what was put into an earlier
one does not count any more, also on a node that was away meanwhile. Nothing has to be agreed on for that: of two
things that were said, each node takes the same one.
"""

from __future__ import annotations

import msgspec

from peerstore.decode import from_msgpack

MOST_REMOVED = 10_000
REMOVED_NS = 3600 * 10**9
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

    def is_past(self, generation: int) -> bool:
        """Whether nothing of that generation counts any more."""
        return self.generation > generation or (self.generation == generation and self.deleted)


class Removed(msgspec.Struct, frozen=True, array_like=True):
    """A shard that somebody deleted, whatever was put for it until then."""

    namespace: str
    generation: int
    rank: int
    step: int
    until: int
    """Stamps up to this one."""


Place = tuple[str, int, int, int]
"""Namespace, generation, rank and step."""


class Registry(msgspec.Struct, frozen=True):
    """Everything that was said, as far as one node has heard."""

    namespaces: dict[str, Namespace] = {}
    removed: tuple[Removed, ...] = ()

    def living(self, name: str) -> Namespace | None:
        found = self.namespaces.get(name)
        return None if found is None or found.deleted else found

    @property
    def all_living(self) -> dict[str, Namespace]:
        return {name: one for name, one in self.namespaces.items() if not one.deleted}

    def removals(self) -> dict[Place, int]:
        return {_place(one): one.until for one in self.removed}


def created(registry: Registry, name: str, *, num_ranks: int, steps_retained: int, now_ns: int) -> Registry:
    """With a new generation of ``name``, which is not there."""
    before = registry.namespaces.get(name)
    generation = before.generation + 1 if before is not None else 1
    fresh = Namespace(generation, num_ranks, steps_retained, now_ns)
    return Registry({**registry.namespaces, name: fresh}, registry.removed)


def deleted(registry: Registry, *names: str, now_ns: int) -> Registry:
    """Without ``names``: that they were there is remembered."""
    gone = {
        name: msgspec.structs.replace(one, deleted=True, changed_ns=now_ns)
        for name in names
        if (one := registry.living(name)) is not None
    }
    return _tidied(Registry({**registry.namespaces, **gone}, registry.removed), now_ns)


def without(registry: Registry, removed: Removed, *, now_ns: int) -> Registry:
    """Without one shard."""
    return merged(registry, Registry({}, (removed,)), now_ns=now_ns)


def merged(one: Registry, other: Registry, *, now_ns: int) -> Registry:
    """What both were told. The order in which nodes hear of things does not matter."""
    namespaces = dict(one.namespaces)
    for name, said in other.namespaces.items():
        known = namespaces.get(name)
        if known is None or said.order > known.order:
            namespaces[name] = said
    until = one.removals()
    for place, stamp in other.removals().items():
        until[place] = max(stamp, until.get(place, 0))
    removed = tuple(Removed(*place, stamp) for place, stamp in sorted(until.items()))
    return _tidied(Registry(namespaces, removed), now_ns)


def _tidied(registry: Registry, now_ns: int) -> Registry:
    """Without what is of generations that are gone, and of too long ago."""
    kept = [
        one
        for one in registry.removed
        if one.until > now_ns - REMOVED_NS
        if one.namespace not in registry.namespaces or not registry.namespaces[one.namespace].is_past(one.generation)
    ]
    latest = sorted(kept, key=lambda one: one.until)[-MOST_REMOVED:]
    return Registry(registry.namespaces, tuple(sorted(latest, key=_place)))


def _place(removed: Removed) -> Place:
    return removed.namespace, removed.generation, removed.rank, removed.step


def encode(registry: Registry) -> bytes:
    return msgspec.msgpack.encode(registry)


def decode(data: bytes) -> Registry:
    return from_msgpack(data, Registry)
