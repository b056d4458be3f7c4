"""The store's contract, and one request type per operation."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import msgspec

from peerstore.shard_records import (
    Lease,
    NonNegativeInt,
    Pin,
    ShardInfo,
    ShardKey,
    ShardRecord,
    SlotInfo,
    StoreStatus,
    VersionId,
)

MAX_REQUEST_WAIT_S = 300.0
"""Seconds that a server waits for one request at most; a client that waits longer repeats it."""


class Store(Protocol):
    """Sealed shards in a machine's memory, in this or another process.

    Every store guarantees (tested by ``tests/contract/test_store.py``):

    - Sealed bytes are read back exactly, or an error is raised; they never change while they are pinned.
    - The newest complete version is never evicted for a newer one that is not complete.
    - A version with an aborted part is deleted and never becomes complete.
    - A writer of an older incarnation gets :class:`FencedError`, never a slot.
    - ``lease``, ``grow`` and ``seal`` may be repeated after a lost response.
    - A retained version is evicted neither for a newer version nor for lack of memory, until its owner releases it.
    - Deleted or damaged shards are not returned and do not count for any version.
    - A pin contains the shard's file, open for reading; ``open_slot`` returns a leased slot's file, open for writing.
      No file is ever shortened, and no file with possible readers is written again.
    - :class:`ShardNotFoundError` means absent; :class:`UnavailableError` means unknown. A pin of a shard whose file is
      missing or too short raises :class:`ShardDamagedError`; that copy is dropped, and absent from then on.
    """

    arena_id: str
    """Changes when the contents of the arena are lost."""
    start_id: str
    """Changes when the store's process restarts."""

    @property
    def versions(self) -> Versions: ...
    @property
    def blobs(self) -> Blobs: ...

    def epoch(self, job: str) -> int: ...
    def claim(self, job: str, incarnation: str, *, at_least: int = 0) -> int: ...
    def lease(self, key: ShardKey, size_bytes: int, parts: int, *, wait_s: float = 0.0) -> Lease: ...
    def grow(self, lease_id: str, size_bytes: int, *, wait_s: float = 0.0) -> Lease: ...
    def open_slot(self, slot: str) -> int: ...
    def relabel(self, lease_id: str, key: ShardKey) -> Lease: ...
    def seal(self, lease_id: str, size_bytes: int, meta: bytes = b"", blobs: Collection[str] = ()) -> ShardRecord: ...
    def release(self, lease_id: str) -> None: ...
    def reserve(self, job: str, part: int, size_bytes: int, *, slots: int = 0) -> list[SlotInfo]: ...
    def list_shards(self, job: str | None = None) -> list[ShardInfo]: ...
    def pin(self, key: ShardKey) -> Pin: ...
    def unpin(self, pin_id: str) -> bool: ...
    def verify(self, key: ShardKey, chunks: tuple[int, int] | None = None) -> tuple[int, ...]: ...
    def report_damage(self, key: ShardKey, reason: str) -> None: ...
    def status(self) -> StoreStatus: ...
    def close(self) -> None: ...


class Versions(Protocol):
    """Decisions on versions at their owner's request."""

    def mark_committed(self, job: str, group: VersionId) -> None: ...
    def abort_part(self, job: str, group: VersionId, part: int) -> None: ...
    def newest_committed(self, job: str) -> VersionId | None: ...
    def delete(self, job: str, groups: list[VersionId] | None = None) -> int: ...
    def retain(self, job: str, group: VersionId, *, kept: bool = True) -> None: ...
    def retained(self, job: str) -> set[VersionId]: ...


class Blobs(Protocol):
    """Small values of the jobs, such as layouts and settings."""

    def put(self, job: str, name: str, data: bytes) -> None: ...
    def get(self, job: str, name: str) -> bytes: ...
    def list_names(self, job: str) -> list[str]: ...
    def remove(self, job: str, name: str) -> None: ...


class JobRequest(msgspec.Struct, frozen=True):
    job: str


class ClaimRequest(msgspec.Struct, frozen=True):
    job: str
    incarnation: str
    at_least: int = 0


class LeaseRequest(msgspec.Struct, frozen=True):
    key: ShardKey
    size_bytes: int
    parts: int
    wait_s: float = 0.0


class GrowRequest(msgspec.Struct, frozen=True):
    lease_id: str
    size_bytes: int
    wait_s: float = 0.0


class OpenSlotRequest(msgspec.Struct, frozen=True):
    slot: str


class RelabelRequest(msgspec.Struct, frozen=True):
    lease_id: str
    key: ShardKey


class SealRequest(msgspec.Struct, frozen=True):
    lease_id: str
    size_bytes: int
    meta: bytes = b""
    blobs: tuple[str, ...] = ()
    """Names of blobs that must exist."""


class ReleaseLeaseRequest(msgspec.Struct, frozen=True):
    lease_id: str


class ReserveRequest(msgspec.Struct, frozen=True):
    job: str
    part: int
    size_bytes: int
    slots: int = 0


class ListShardsRequest(msgspec.Struct, frozen=True):
    job: str | None = None


class PinRequest(msgspec.Struct, frozen=True):
    key: ShardKey


class UnpinRequest(msgspec.Struct, frozen=True):
    pin_id: str


class VerifyRequest(msgspec.Struct, frozen=True):
    key: ShardKey
    chunks: tuple[int, int] | None = None


class ReportDamageRequest(msgspec.Struct, frozen=True):
    key: ShardKey
    reason: str


class MarkCommittedRequest(msgspec.Struct, frozen=True):
    job: str
    version_id: VersionId


class AbortPartRequest(msgspec.Struct, frozen=True):
    job: str
    version_id: VersionId
    part: NonNegativeInt


class DeleteVersionsRequest(msgspec.Struct, frozen=True):
    job: str
    versions: list[VersionId] | None = None


class RetainVersionRequest(msgspec.Struct, frozen=True):
    job: str
    version_id: VersionId
    retained: bool = True


class PutBlobRequest(msgspec.Struct, frozen=True):
    job: str
    name: str
    data: bytes


class BlobRequest(msgspec.Struct, frozen=True):
    job: str
    name: str


class DropUnrecognizedRequest(msgspec.Struct, frozen=True):
    names: list[str] | None = None


class StoreStatusRequest(msgspec.Struct, frozen=True):
    pass


def clamp_wait_s(wait_s: float) -> float:
    """Return the client's wait in seconds, limited to 0 to ``MAX_REQUEST_WAIT_S``; NaN becomes 0."""
    return min(max(0.0, wait_s), MAX_REQUEST_WAIT_S)
