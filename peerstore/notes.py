"""What is written beside the slots, so that the next agent knows what this one knew.

::

    arena              the arena's identity
    claim.JOB          who owns the job, and which of its versions are known to be whole
    lease.SLOT         who fills the slot
    seal.SLOT          what the slot holds, with checksums: the shard exists from here on
    forgotten.JOB      when and why the job's shards were given back; outlives all of the above
    blob.JOB/NAME      small bytes of the job's own

Claims, leases and seals say in which ``format`` they are. It is not raised for a new field that may be overlooked, but
for what an agent that does not know it must not touch: such an agent sets the slot aside.
"""

from __future__ import annotations

import secrets
from typing import TypeVar

import msgspec

from peerstore.arena import Arena
from peerstore.decode import from_msgpack
from peerstore.errors import NotUnderstoodError, ShardDamagedError
from peerstore.names import blob_name, job_name
from peerstore.records import Base, Group, Kept, Lease, ShardRecord

SEAL, LEASE, CLAIM, FORGOTTEN = "seal.", "lease.", "claim.", "forgotten."
FORMAT = 1
T = TypeVar("T")


class _Format(msgspec.Struct, frozen=True):
    format: int = 1


class LeaseNote(msgspec.Struct, frozen=True):
    lease: Lease
    owner: tuple[int, int]
    format: int = FORMAT


class SealNote(msgspec.Struct, frozen=True):
    lease_id: str
    record: ShardRecord
    holders: tuple[str, ...] = ()
    """For a copy: the nodes that were to hold this shard, the one that wrote it first. Empty for this node's own."""
    format: int = FORMAT


class Mark(msgspec.Struct, frozen=True):
    """A version that somebody who sees more than this node called whole."""

    group: Group
    parts: tuple[int, ...]
    """Those of its parts that were here then: without one of them it is not whole any more."""


class ClaimNote(msgspec.Struct, frozen=True):
    epoch: int
    incarnation: str
    marks: tuple[Mark, ...] = ()
    damaged: tuple[Group, ...] = ()
    guarded: bool = False
    settled: Group | None = None
    base: Base | None = None
    kept: tuple[Kept, ...] = ()
    torn: tuple[Mark, ...] = ()
    """Versions that will never be whole, with the parts that writers of this node left out."""
    format: int = FORMAT


class OwnerNote(msgspec.Struct, frozen=True):
    """What every version says of a job: who owns it."""

    epoch: int
    incarnation: str


class Notes:
    """Typed notes in an arena."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._owed: dict[str, bytes] = {}

    def put(self, kind: str, name: str, note: msgspec.Struct) -> None:
        """A claim that cannot be put is owed: what it says counts in this process already."""
        data = msgspec.msgpack.encode(note)
        if kind == CLAIM:
            self._owed[kind + name] = data
        self._arena.put_note(kind + name, data)
        self._owed.pop(kind + name, None)

    def catch_up(self) -> None:
        """Put what is owed. Before this has worked nobody may be told that anything of it was done."""
        for name, data in list(self._owed.items()):
            self._arena.put_note(name, data)
            del self._owed[name]

    def get(self, kind: str, name: str, of: type[T]) -> T | None:
        """The note, ``None`` when there is none; :class:`ShardDamagedError` when it is not what was put, and
        :class:`NotUnderstoodError` when another version put it.
        """
        data = self._arena.get_note(kind + name)
        if data is None:
            return None
        try:
            written = from_msgpack(data, _Format).format
            if written > FORMAT and of is not OwnerNote:
                raise NotUnderstoodError(f"note {kind}{name} is of format {written}, this version knows {FORMAT}")
            return from_msgpack(data, of)
        except (msgspec.DecodeError, RecursionError) as error:
            raise NotUnderstoodError(f"note {kind}{name} is not what this version writes: {error}") from error

    def remove(self, kind: str, name: str) -> None:
        self._arena.remove_note(kind + name)
        self._owed.pop(kind + name, None)

    def names(self, kind: str) -> list[str]:
        return [note.removeprefix(kind) for note in self._arena.notes(kind)]

    def identity(self) -> str:
        """A name that stays with the arena's contents: a client that sees another one starts afresh."""
        try:
            known = self._arena.get_note("arena")
        except ShardDamagedError:
            known = None
        if known is None:
            known = secrets.token_hex(8).encode()
            self._arena.put_note("arena", known)
        return known.decode(errors="replace")

    # -- blobs ------------------------------------------------------------------------------------------------

    def put_blob(self, job: str, name: str, data: bytes) -> None:
        self._arena.put_note(_blob(job, name), data)

    def get_blob(self, job: str, name: str) -> bytes | None:
        return self._arena.get_note(_blob(job, name))

    def blobs(self, job: str) -> list[str]:
        prefix = f"blob.{job_name(job)}/"
        return [note.removeprefix(prefix) for note in self._arena.notes(prefix)]

    def remove_blob(self, job: str, name: str) -> None:
        self._arena.remove_note(_blob(job, name))


def _blob(job: str, name: str) -> str:
    return f"blob.{job_name(job)}/{blob_name(name)}"
