"""Validated names, and records that the store writes next to its slots and sends."""

from __future__ import annotations

import os
import re
import time
import weakref
from typing import Annotated, NamedTuple, NewType

import msgspec

from peerstore.errors import InvalidNameError

JobName = NewType("JobName", str)

MAX_NUMBER = 1 << 62
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0, lt=MAX_NUMBER)]
"""A count from another process; a larger one fits no message and has no successor."""
NonNegativeIntOrMinusOne = Annotated[int, msgspec.Meta(ge=-1, lt=MAX_NUMBER)]
"""A count that is -1 before the first item."""
MAX_BLOB_BYTES = 48 << 20
MAX_EPOCH_LEAD = 1 << 44
"""Largest accepted distance of a reported epoch above the newest known one.

Epochs contain the time in milliseconds, so this is 557 years. An epoch near the largest number would have no successor,
and no process could save again.
"""

EPOCHS_PER_WORLD = 1 << 10
"""Epochs that a coordinator reserves for one world: each restore in it may begin another incarnation."""


def clock_ms() -> int:
    """Return the time in the unit of epochs."""
    return time.time_ns() // 1_000_000


def next_epoch(known: int, at_least: int, *, reserved: int = 1) -> int:
    """Return the epoch of a new incarnation.

    It is ``reserved`` above ``known``, the newest epoch, and not below ``at_least``. ``at_least`` is the current time,
    or an epoch that a coordinator allocated. So a later incarnation has the greater epoch even if earlier ones were
    forgotten.
    """
    return max(known + reserved, at_least)


_JOB = re.compile(r"[A-Za-z0-9._-]{1,128}")
_BLOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,239}")
_INCARNATION = re.compile(r"[A-Za-z0-9-]{1,64}")


def validate_job_name(text: str) -> JobName:
    """Return ``text`` as a job name; raise :class:`InvalidNameError` if it is not allowed."""
    if not isinstance(text, str) or not _JOB.fullmatch(text) or set(text) == {"."}:
        raise InvalidNameError(
            f"job name {text!r} is not allowed: use 1 to 128 letters, digits, '.', '_' or '-', and not only dots"
        )
    return JobName(text)


def validate_incarnation(text: str) -> str:
    """Return ``text`` as the name of an incarnation; raise :class:`InvalidNameError` if it is not allowed."""
    if not isinstance(text, str) or not _INCARNATION.fullmatch(text):
        raise InvalidNameError(f"incarnation {text!r} is not allowed: use 1 to 64 letters, digits or '-'")
    return text


def validate_blob_name(text: str) -> str:
    """Return ``text`` as the name of a blob; raise :class:`InvalidNameError` if it is not allowed."""
    if not isinstance(text, str) or not _BLOB.fullmatch(text):
        raise InvalidNameError(
            f"blob name {text!r} is not allowed: use up to 240 letters, digits, '.', '_', '@' or '-'"
        )
    return text


CHUNK_BYTES = 1 << 20
"""Bytes per checksum: small enough to verify a slice, large enough to hash at memory speed."""


class VersionId(NamedTuple):
    """One attempt to write a version; it is complete when every part exists."""

    epoch: NonNegativeInt
    version: NonNegativeInt
    attempt: NonNegativeInt
    incarnation: str


class ShardKey(msgspec.Struct, frozen=True, order=True, omit_defaults=True):
    """Identity of one writer's bytes for one version of one job."""

    job: str
    version: NonNegativeInt
    epoch: NonNegativeInt
    """Number of the job's incarnation: a higher one fences all lower ones."""
    incarnation: str
    """Random name of the incarnation, which distinguishes two with the same epoch."""
    attempt: NonNegativeInt
    """Number of the attempt at this version within the incarnation."""
    part: NonNegativeInt
    kind: str = ""
    """Empty for a writer's shard; for a parity, a hash of its sources.

    A parity is not part of the version and is not counted as a part.
    """

    @property
    def version_id(self) -> VersionId:
        return VersionId(self.epoch, self.version, self.attempt, self.incarnation)

    @property
    def slot_part(self) -> int:
        """The writer whose slots it may use: its part, or a negative number for parities."""
        return -1 - self.part if self.kind else self.part

    def __str__(self) -> str:
        attempt = f", attempt {self.attempt}" if self.attempt else ""
        kind = "parity" if self.kind else "part"
        return f"{self.job}/{self.version} {kind} {self.part} (epoch {self.epoch} {self.incarnation}{attempt})"


class ShardRecord(msgspec.Struct, frozen=True):
    """A sealed shard: its size, checksums and metadata."""

    key: ShardKey
    parts: int
    """Number of parts of a complete version."""
    size_bytes: int
    chunk_bytes: int
    checksums: bytes
    """One little-endian xxh3-64 per chunk, in order."""
    meta: bytes
    """Opaque to this package."""
    sealed_ns: int


class ResumePoint(msgspec.Struct, frozen=True, array_like=True):
    """The version that a job resumed from. Of two resume points the one with the greater ``order`` counts.

    The processes that loaded the version announce it first, with a ``sequence`` number within the previous incarnation.
    The new incarnation announces it again at its start, with sequence 0.
    """

    epoch: NonNegativeInt
    incarnation: str
    sequence: NonNegativeInt
    version_id: VersionId

    @property
    def order(self) -> tuple[int, str, int]:
        return self.epoch, self.incarnation, self.sequence

    @property
    def first_current_epoch(self) -> int:
        """Versions of lower epochs belong to branches that the job may have left."""
        return self.epoch + (self.sequence > 0)

    def abandons(self, group: VersionId) -> bool:
        """Return whether the job has left this version's branch."""
        return group.epoch < self.first_current_epoch and group > self.version_id


class Lease(msgspec.Struct, frozen=True):
    """Permission to write one slot, until it is sealed or released."""

    id: str
    key: ShardKey
    parts: int
    size_bytes: int
    slot: str
    generation: int
    """Changes with the slot's file: a mapping of an older generation is stale."""
    prefaulted_bytes: int
    """Bytes of the file that already have pages."""
    slot_bytes: int = 0
    """Size of the file in bytes, which never changes; a mapping covers all of it."""


class SlotInfo(msgspec.Struct, frozen=True):
    """A slot that a writer can map in advance."""

    slot: str
    size_bytes: int
    generation: int


class PinResponse(msgspec.Struct, frozen=True):
    """A pin as it is sent, together with the shard's file."""

    id: str
    record: ShardRecord


class Pin:
    """Guarantee that a sealed shard does not change until it is unpinned.

    The shard's file is open for reading. It stays valid even if the store ends: it is never shortened, and not written
    again while a process may have it open. :meth:`close` closes it, or the garbage collection of the pin.
    """

    def __init__(self, pin_id: str, record: ShardRecord, fd: int) -> None:
        self.id = pin_id
        self.record = record
        self.fd = fd
        self._closing = weakref.finalize(self, os.close, fd)
        self._closing.atexit = False

    def close(self) -> None:
        """Close the file; idempotent."""
        self._closing()


class ShardInfo(msgspec.Struct, frozen=True):
    """An inventory entry: a shard without its checksums."""

    key: ShardKey
    parts: int
    size_bytes: int
    meta: bytes
    sealed_ns: int
    marked_committed: bool
    holders: tuple[str, ...] = ()
    """Empty if this node wrote it; else the nodes chosen to hold it, the writer's node first."""


class DamageReport(msgspec.Struct, frozen=True):
    """A damaged copy, and how it was detected."""

    job: str
    what: str
    reason: str
    at_ns: int


class RetentionMark(msgspec.Struct, frozen=True, array_like=True):
    """A request to retain a version, or to end that. The latest mark of a version counts."""

    version_id: VersionId
    retained: bool
    at_ns: int


class ExpiredJob(msgspec.Struct, frozen=True):
    """A job whose shards were dropped without a request of its owner."""

    job: str
    newest_committed: VersionId
    """The newest committed version."""
    at_ns: int
    reason: str


class UnrecognizedSlot(msgspec.Struct, frozen=True):
    """A slot of another release, or a slot that cannot be opened: it stays, and no writer uses it."""

    name: str
    size_bytes: int
    reason: str
    job: str = ""
    """The job of a slot; empty for metadata without one."""
    key: ShardKey | None = None
    """The sealed shard, if its metadata states it."""
    format: int | None = None
    """Format that the metadata states; ``None`` if it states none."""
    readable_format: int = 0
    """Newest format that this agent reads."""


class ArenaStatus(msgspec.Struct, frozen=True):
    budget_bytes: int
    allocated_bytes: int
    sealed_bytes: int
    slots: int
    free_slots: int
    leases: int
    pins: int
    unrecognized_bytes: int = 0
    """Bytes in unrecognized slots: part of the budget, unusable for this release of the agent."""


class JobStatus(msgspec.Struct, frozen=True):
    job: str
    epoch: int
    clients: int
    versions: int
    newest_committed: int | None
    expires_in_s: float | None
    newest_replicated: int | None = None
    """The newest replicated version, if the job's shards are replicated."""


class StoreStatus(msgspec.Struct, frozen=True):
    arena: ArenaStatus
    jobs: tuple[JobStatus, ...]
    damage_reports: tuple[DamageReport, ...]
    counters: dict[str, float]
    verifying: int
    unrecognized: tuple[UnrecognizedSlot, ...] = ()


def is_chunk_aligned(start: int, stop: int, *, size_bytes: int, chunk_bytes: int) -> bool:
    """Return whether a range consists of complete chunks.

    The reader can verify such a range with the seal's checksums.
    """
    return start % chunk_bytes == 0 and (stop % chunk_bytes == 0 or stop == size_bytes)
