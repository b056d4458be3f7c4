"""What changed since the message before, on one connection between a supervisor and the coordinator. Pure.

Both sides speak of whole messages, :class:`NodeSays` and :class:`NodeHears`; what goes over the wire is what is new in
them. The first report of a connection is whole, and what a node hears begins from :data:`NOTHING_HEARD`. A world, which
names all nodes, goes over a connection once in each direction at the most: a supervisor names one that it was told of
on the same connection by the number of the message that brought it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from elastic.control.messages import Formed, NodeHears, NodeSays
from peerstore.errors import ProtocolError
from peerstore.frames import decode
from peerstore.names import Number

_encode = msgspec.msgpack.Encoder().encode
NOTHING_HEARD = NodeHears("", 0)


class Told(msgspec.Struct, frozen=True, tag="told"):
    """The world that the coordinator told in so many-th place on this connection, counted from 1."""

    number: Number


class _World(Formed, frozen=True, tag="world"):
    """A world that the coordinator did not tell on this connection."""


def _partial(name: str, whole: type[msgspec.Struct], tag: str, **others: Any) -> type[msgspec.Struct]:
    """``whole`` with every field left out where it has not changed."""
    fields = [
        (field.name, others.get(field.name, field.type) | msgspec.UnsetType, msgspec.UNSET)
        for field in msgspec.structs.fields(whole)
    ]
    return msgspec.defstruct(name, fields, frozen=True, tag=tag, forbid_unknown_fields=True, kw_only=True)


SaysChanges = _partial("SaysChanges", NodeSays, "changed", formed=_World | Told | None)
HearsChanges = _partial("HearsChanges", NodeHears, "hears")


class NodeEnd:
    """A supervisor's end of one connection. One thread encodes and one decodes."""

    def __init__(self) -> None:
        self._said: NodeSays | None = None
        self._heard = NOTHING_HEARD
        self._told: tuple[int, Formed | None] = (0, None)
        """The world that the coordinator told last, and its number."""

    def encode(self, says: NodeSays) -> bytes:
        before, self._said = self._said, says
        if before is None:
            return _encode(says)
        changes = _changes(before, says)
        formed = changes.get("formed")
        if formed is not None:
            number, told = self._told
            changes["formed"] = Told(number) if formed is told else _World(*msgspec.structs.astuple(formed))
        return _encode(SaysChanges(**changes))

    def decode(self, body: bytes) -> NodeHears:
        changes = decode(body, HearsChanges)
        self._heard = _applied(self._heard, changes)
        if isinstance(formed := changes.formed, Formed):  # type: ignore[attr-defined]  # a field of NodeHears
            self._told = self._told[0] + 1, formed
        return self._heard


class CoordinatorEnd:
    """The coordinator's end of it. ``packed`` encodes a world, ``shared`` gives the one of two equal worlds to keep:
    the same world goes to, and comes from, all nodes.
    """

    def __init__(
        self,
        says: NodeSays,
        packed: Callable[[Formed], msgspec.Raw] = lambda formed: msgspec.Raw(_encode(formed)),
        shared: Callable[[Formed], Formed] = lambda formed: formed,
    ) -> None:
        self._packed, self._shared = packed, shared
        self._told: dict[int, Formed] = {}
        """Worlds that the node may speak of by their number."""
        self._number = 0
        self._hears = NOTHING_HEARD
        self.said = says if says.formed is None else msgspec.structs.replace(says, formed=shared(says.formed))
        """The node's newest report."""

    def encode(self, hears: NodeHears) -> bytes:
        changes = _changes(self._hears, hears)
        self._hears = hears
        formed = changes.get("formed")
        if formed is not None:
            self._number += 1
            self._told[self._number] = formed
            changes["formed"] = self._packed(formed)
        return _encode(HearsChanges(**changes))

    def decode(self, body: bytes) -> NodeSays:
        changes = decode(body, SaysChanges)
        self.said = _applied(self.said, changes, formed=self._world(changes.formed))  # type: ignore[attr-defined]
        return self.said

    def _world(self, formed: Any) -> Any:
        if isinstance(formed, _World):
            return self._shared(Formed(*msgspec.structs.astuple(formed)))
        if not isinstance(formed, Told):
            return formed
        if formed.number not in self._told:
            raise ProtocolError(f"it speaks of world number {formed.number}, which it was not told here")
        self._told = {number: told for number, told in self._told.items() if number >= formed.number}
        return self._told[formed.number]


def _changes(before: msgspec.Struct, after: msgspec.Struct) -> dict[str, Any]:
    changes = {}
    for name in after.__struct_fields__:
        old, new = getattr(before, name), getattr(after, name)
        if new is not old and new != old:
            changes[name] = new
    return changes


def _applied(before: Any, changes: msgspec.Struct, **others: Any) -> Any:
    new = {name: value for name in changes.__struct_fields__ if (value := getattr(changes, name)) is not msgspec.UNSET}
    new.update({name: value for name, value in others.items() if name in new})
    return msgspec.structs.replace(before, **new)
