"""What a client may ask of a store: one message type per operation, and which method answers it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from peerstore.names import Number
from peerstore.owners import Owner
from peerstore.records import Group, Lease, Pin, Pinned, ShardFact, ShardKey, ShardRecord, SlotInfo, StoreStatus
from peerstore.store import NodeStore

MAX_WAIT_S = 300.0
"""The longest a server keeps one request waiting; a client that wants longer asks again."""


class Store(Protocol):
    """Sealed shards in a machine's memory, wherever the store itself runs.

    Promises every store makes (``tests/contract/test_store.py`` holds them to it):

    - What was sealed is read back exactly, or an error is raised; it never changes while it is pinned.
    - The newest whole version is never given up for a newer one that is not whole.
    - A version of which a part is left out is torn: it is given up, and never whole again.
    - A writer of a past incarnation gets :class:`FencedError`, never a slot.
    - ``lease``, ``grow`` and ``seal`` may be repeated after a lost answer.
    - What is kept is given up for no newer version, nor for want of room, until its owner says so.
    - What was forgotten or found damaged is offered to nobody, and counts for no version.
    - A pin brings the shard's file, open for reading; ``open_slot`` gives a leased slot's, open for writing. No file is
      ever made shorter, and none is written again that somebody may still read.
    - :class:`ShardNotFoundError` means absent; :class:`UnavailableError` means unknown. A pin whose file is gone, or
      shorter than what was sealed, is a :class:`ShardDamagedError`; that copy is dropped, and absent from then on.
    """

    arena_id: str
    """Changes when everything that was here is gone."""
    started: str
    """Changes whenever the store's process begins again."""

    def epoch(self, job: str) -> int: ...
    def claim(self, job: str, incarnation: str, *, at_least: int = 0) -> int: ...
    def lease(self, key: ShardKey, size_bytes: int, parts: int, *, wait_s: float = 0.0) -> Lease: ...
    def grow(self, lease_id: str, size_bytes: int, *, wait_s: float = 0.0) -> Lease: ...
    def open_slot(self, slot: str) -> int: ...
    def relabel(self, lease_id: str, key: ShardKey) -> Lease: ...
    def seal(self, lease_id: str, size_bytes: int, meta: bytes = b"", blobs: Collection[str] = ()) -> ShardRecord: ...
    def abandon(self, lease_id: str) -> None: ...
    def reserve(self, job: str, part: int, size_bytes: int, *, slots: int = 0) -> list[SlotInfo]: ...
    def inventory(self, job: str | None = None) -> list[ShardFact]: ...
    def pin(self, key: ShardKey) -> Pin: ...
    def unpin(self, pin_id: str) -> bool: ...
    def verify(self, key: ShardKey, chunks: tuple[int, int] | None = None) -> tuple[int, ...]: ...
    def report(self, key: ShardKey, reason: str) -> None: ...
    def call_whole(self, job: str, group: Group) -> None: ...
    def leave_out(self, job: str, group: Group, part: int) -> None: ...
    def newest_whole(self, job: str) -> Group | None: ...
    def forget(self, job: str, groups: list[Group] | None = None) -> int: ...
    def keep(self, job: str, group: Group, *, kept: bool = True) -> None: ...
    def kept(self, job: str) -> set[Group]: ...
    def put_blob(self, job: str, name: str, data: bytes) -> None: ...
    def get_blob(self, job: str, name: str) -> bytes: ...
    def blobs(self, job: str) -> list[str]: ...
    def remove_blob(self, job: str, name: str) -> None: ...
    def status(self) -> StoreStatus: ...
    def close(self) -> None: ...


class EpochOf(msgspec.Struct, frozen=True):
    job: str


class Claim(msgspec.Struct, frozen=True):
    job: str
    incarnation: str
    at_least: int = 0


class TakeLease(msgspec.Struct, frozen=True):
    key: ShardKey
    size_bytes: int
    parts: int
    wait_s: float = 0.0


class Grow(msgspec.Struct, frozen=True):
    lease_id: str
    size_bytes: int
    wait_s: float = 0.0


class OpenSlot(msgspec.Struct, frozen=True):
    slot: str


class Relabel(msgspec.Struct, frozen=True):
    lease_id: str
    key: ShardKey


class Seal(msgspec.Struct, frozen=True):
    lease_id: str
    size_bytes: int
    meta: bytes = b""
    blobs: tuple[str, ...] = ()
    """What has to be kept beside it."""


class Abandon(msgspec.Struct, frozen=True):
    lease_id: str


class Reserve(msgspec.Struct, frozen=True):
    job: str
    part: int
    size_bytes: int
    slots: int = 0


class Inventory(msgspec.Struct, frozen=True):
    job: str | None = None


class TakePin(msgspec.Struct, frozen=True):
    key: ShardKey


class Unpin(msgspec.Struct, frozen=True):
    pin_id: str


class Verify(msgspec.Struct, frozen=True):
    key: ShardKey
    chunks: tuple[int, int] | None = None


class Report(msgspec.Struct, frozen=True):
    key: ShardKey
    reason: str


class CallWhole(msgspec.Struct, frozen=True):
    job: str
    group: Group


class LeaveOut(msgspec.Struct, frozen=True):
    job: str
    group: Group
    part: Number


class Forget(msgspec.Struct, frozen=True):
    job: str
    groups: list[Group] | None = None


class Keep(msgspec.Struct, frozen=True):
    job: str
    group: Group
    kept: bool = True


class PutBlob(msgspec.Struct, frozen=True):
    job: str
    name: str
    data: bytes


class GetBlob(msgspec.Struct, frozen=True):
    job: str
    name: str


class DropAside(msgspec.Struct, frozen=True):
    names: list[str] | None = None


class Status(msgspec.Struct, frozen=True):
    pass


@dataclass(frozen=True)
class WithFile:
    """A result and the open file that goes with it; ``close`` when it has been sent, ``undo`` where it was not."""

    result: object
    fd: int
    close: Callable[[], object]
    undo: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Operation:
    """How one request is decoded and answered: with a ``result``, or with one in a :class:`WithFile`."""

    args: type[Any]
    result: Any
    answer: Callable[[Any, Owner], Any]


def store_operations(store: NodeStore) -> Mapping[str, Operation]:
    """Every operation of :class:`Store`, answered by ``store``."""
    none = type(None)

    def pin(key: ShardKey, who: Owner) -> WithFile:
        made = store.pin(key, owner=who)
        return WithFile(Pinned(made.id, made.record), made.fd, made.close, lambda: store.unpin(made.id))

    def open_slot(slot: str) -> WithFile:
        fd = store.open_slot(slot)
        return WithFile(None, fd, lambda: os.close(fd))

    return {
        "epoch": Operation(EpochOf, int, lambda a, _: store.epoch(a.job)),
        "claim": Operation(Claim, int, lambda a, _: store.claim(a.job, a.incarnation, at_least=a.at_least)),
        "lease": Operation(
            TakeLease,
            Lease,
            lambda a, who: store.lease(a.key, a.size_bytes, a.parts, wait_s=patience(a.wait_s), owner=who),
        ),
        "grow": Operation(Grow, Lease, lambda a, _: store.grow(a.lease_id, a.size_bytes, wait_s=patience(a.wait_s))),
        "open_slot": Operation(OpenSlot, none, lambda a, _: open_slot(a.slot)),
        "relabel": Operation(Relabel, Lease, lambda a, _: store.relabel(a.lease_id, a.key)),
        "seal": Operation(Seal, ShardRecord, lambda a, _: store.seal(a.lease_id, a.size_bytes, a.meta, a.blobs)),
        "abandon": Operation(Abandon, none, lambda a, _: store.abandon(a.lease_id)),
        "reserve": Operation(
            Reserve, list[SlotInfo], lambda a, _: store.reserve(a.job, a.part, a.size_bytes, slots=a.slots)
        ),
        "inventory": Operation(Inventory, list[ShardFact], lambda a, _: store.inventory(a.job)),
        "pin": Operation(TakePin, Pinned, lambda a, who: pin(a.key, who)),
        "unpin": Operation(Unpin, bool, lambda a, _: store.unpin(a.pin_id)),
        "verify": Operation(Verify, tuple[int, ...], lambda a, _: store.verify(a.key, a.chunks)),
        "report": Operation(Report, none, lambda a, _: store.report(a.key, a.reason)),
        "mark_whole": Operation(CallWhole, none, lambda a, _: store.call_whole(a.job, a.group)),
        "leave_out": Operation(LeaveOut, none, lambda a, _: store.leave_out(a.job, a.group, a.part)),
        "newest_whole": Operation(EpochOf, Group | None, lambda a, _: store.newest_whole(a.job)),
        "forget": Operation(Forget, int, lambda a, _: store.forget(a.job, a.groups)),
        "keep": Operation(Keep, none, lambda a, _: store.keep(a.job, a.group, kept=a.kept)),
        "kept": Operation(EpochOf, set[Group], lambda a, _: store.kept(a.job)),
        "put_blob": Operation(PutBlob, none, lambda a, _: store.put_blob(a.job, a.name, a.data)),
        "get_blob": Operation(GetBlob, bytes, lambda a, _: store.get_blob(a.job, a.name)),
        "remove_blob": Operation(GetBlob, none, lambda a, _: store.remove_blob(a.job, a.name)),
        "blobs": Operation(EpochOf, list[str], lambda a, _: store.blobs(a.job)),
        "drop_aside": Operation(DropAside, int, lambda a, _: store.drop_aside(a.names)),
        "status": Operation(Status, StoreStatus, lambda *_: store.status()),
    }


def patience(wait_s: float) -> float:
    """What a client asked for, within reason (and a number)."""
    return min(max(0.0, wait_s), MAX_WAIT_S)
