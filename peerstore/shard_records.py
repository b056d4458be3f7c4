"""Validated names, and the records that the store keeps beside its slots and sends over the wire."""

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
"""Whatever is counted and comes from outside: what is larger fits no message, and nothing can follow it."""
NonNegativeIntOrMinusOne = Annotated[int, msgspec.Meta(ge=-1, lt=MAX_NUMBER)]
"""The same, with -1 before the first one."""
MAX_EPOCH_LEAD = 1 << 44
"""An epoch that somebody else tells of is at most this far beyond the newest one known here.

Epochs carry the time in milliseconds, so this is 557 years. An epoch near the largest number would be the last one, and
nobody could save any more.
"""

EPOCHS_PER_WORLD = 1 << 10
"""Epochs that a coordinator reserves for one world: each restore in it may begin another incarnation."""


def clock_ms() -> int:
    """Return the time in the unit of epochs."""
    return time.time_ns() // 1_000_000


def next_epoch(known: int, at_least: int, *, reserved: int = 1) -> int:
    """Return the epoch of a new incarnation: ``reserved`` above ``known``, the newest one, and not below ``at_least``.

    ``at_least`` is the time, or what a coordinator allocated at some time. So a later incarnation has the greater epoch
    also where the earlier ones were forgotten.
    """
    return max(known + reserved, at_least)


_JOB = re.compile(r"[A-Za-z0-9._-]{1,128}")
_BLOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,239}")
_INCARNATION = re.compile(r"[A-Za-z0-9-]{1,64}")


def validate_job_name(text: str) -> JobName:
    """``text`` as a job name, or :class:`InvalidNameError` that says what is allowed."""
    if not isinstance(text, str) or not _JOB.fullmatch(text) or set(text) == {"."}:
        raise InvalidNameError(
            f"job name {text!r} is not allowed: use 1 to 128 letters, digits, '.', '_' or '-', and not only dots"
        )
    return JobName(text)


def validate_incarnation(text: str) -> str:
    """``text`` as the name of one incarnation of a job."""
    if not isinstance(text, str) or not _INCARNATION.fullmatch(text):
        raise InvalidNameError(f"incarnation {text!r} is not allowed: use 1 to 64 letters, digits or '-'")
    return text


def validate_blob_name(text: str) -> str:
    """``text`` as the name of something small that is kept beside a job's shards."""
    if not isinstance(text, str) or not _BLOB.fullmatch(text):
        raise InvalidNameError(
            f"blob name {text!r} is not allowed: use up to 240 letters, digits, '.', '_', '@' or '-'"
        )
    return text


CHUNK_BYTES = 1 << 20
"""How much one checksum covers: small enough to verify a slice, large enough to hash at memory speed."""


class VersionId(NamedTuple):
    """All shards of one attempt to write one version; whole when every part is there."""

    epoch: NonNegativeInt
    version: NonNegativeInt
    attempt: NonNegativeInt
    incarnation: str


class ShardKey(msgspec.Struct, frozen=True, order=True, omit_defaults=True):
    """What one writer wrote for one version of one job."""

    job: str
    version: NonNegativeInt
    epoch: NonNegativeInt
    """The job's incarnation, counted: a higher one fences all lower ones."""
    incarnation: str
    """The same incarnation's own name: two that were given one number stay apart."""
    attempt: NonNegativeInt
    """Which try at this version, counted by the incarnation."""
    part: NonNegativeInt
    kind: str = ""
    """Empty for a writer's shard. What agents themselves make of shards, a parity, says here what it is made of: it is
    no part of the version, and nobody who counts parts is shown it."""

    @property
    def version_id(self) -> VersionId:
        return VersionId(self.epoch, self.version, self.attempt, self.incarnation)

    @property
    def slot_part(self) -> int:
        """Whose slots it may use: a part's are its writer's, those below 0 are for parities."""
        return -1 - self.part if self.kind else self.part

    def __str__(self) -> str:
        again = f", attempt {self.attempt}" if self.attempt else ""
        what = "parity" if self.kind else "part"
        return f"{self.job}/{self.version} {what} {self.part} (epoch {self.epoch} {self.incarnation}{again})"


class ShardRecord(msgspec.Struct, frozen=True):
    """A sealed shard: how many bytes, what they must hash to, and its owner's own notes."""

    key: ShardKey
    parts: int
    """How many parts a whole version has."""
    size_bytes: int
    chunk_bytes: int
    checksums: bytes
    """One little-endian xxh3-64 per chunk, in order."""
    meta: bytes
    """Opaque to this package."""
    sealed_ns: int


class ResumePoint(msgspec.Struct, frozen=True, array_like=True):
    """The version a job went on from. Of two that are said, the one with the later ``order`` counts.

    The processes that loaded it say so first, as a ``sequence`` number within the incarnation that was there before
    them, and the incarnation that they become says it again when it begins (number 0).
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
        """Incarnations with lower numbers are of the past that this speaks of."""
        return self.epoch + (self.sequence > 0)

    def abandons(self, group: VersionId) -> bool:
        """Whether the job has left this version behind."""
        return group.epoch < self.first_current_epoch and group > self.version_id


class Lease(msgspec.Struct, frozen=True):
    """Permission to fill one slot, until it is sealed or given back."""

    id: str
    key: ShardKey
    parts: int
    size_bytes: int
    slot: str
    generation: int
    """Changes when the slot's file is another one: a mapping of an older generation is stale."""
    prefaulted_bytes: int
    """How much of the file already has pages behind it."""
    slot_bytes: int = 0
    """How large the file is, for its whole life: what a mapping of it covers."""


class SlotInfo(msgspec.Struct, frozen=True):
    """A slot that is ready for a writer, so that it can be mapped ahead of time."""

    slot: str
    size_bytes: int
    generation: int


class PinResponse(msgspec.Struct, frozen=True):
    """A pin as it is sent; the shard's file goes with it."""

    id: str
    record: ShardRecord


class Pin:
    """A promise that a sealed shard stays as it is until it is unpinned, and the shard as a file open for reading.

    The file is the shard's whatever becomes of the store: it is never made shorter, and while somebody may have it open
    it is not written again. It is closed by :meth:`close`, at the latest when nobody has the pin any more.
    """

    def __init__(self, pin_id: str, record: ShardRecord, fd: int) -> None:
        self.id = pin_id
        self.record = record
        self.fd = fd
        self._closing = weakref.finalize(self, os.close, fd)
        self._closing.atexit = False

    def close(self) -> None:
        """Close the file. Doing it again is fine."""
        self._closing()


class ShardInfo(msgspec.Struct, frozen=True):
    """One line of the inventory: what is here, without the checksums."""

    key: ShardKey
    parts: int
    size_bytes: int
    meta: bytes
    sealed_ns: int
    marked_committed: bool
    holders: tuple[str, ...] = ()
    """Empty when it was written on this node; else the nodes that were to hold it, the writer's first."""


class DamageReport(msgspec.Struct, frozen=True):
    """A copy that could not be trusted, and how that came to light."""

    job: str
    what: str
    reason: str
    at_ns: int


class RetentionMark(msgspec.Struct, frozen=True, array_like=True):
    """Somebody said that a version is to be kept, or not any more. What was said last counts."""

    version_id: VersionId
    retained: bool
    at_ns: int


class ExpiredJob(msgspec.Struct, frozen=True):
    """What is known of a job whose shards were given back although nobody had said so."""

    job: str
    newest_committed: VersionId
    """The newest version that was whole."""
    at_ns: int
    reason: str


class UnrecognizedSlot(msgspec.Struct, frozen=True):
    """A slot that another version of the agent left, or that cannot be opened: kept, counted, given to nobody."""

    name: str
    size_bytes: int
    reason: str
    job: str = ""
    """The job of a slot; empty for metadata without one."""
    key: ShardKey | None = None
    """The sealed shard, where its metadata still states it."""
    format: int | None = None
    """Format that the metadata states; ``None`` where it states none."""
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
    """In slots that were set aside: part of the budget, and of no use to this version of the agent."""


class JobStatus(msgspec.Struct, frozen=True):
    job: str
    epoch: int
    clients: int
    versions: int
    newest_committed: int | None
    expires_in_s: float | None
    newest_replicated: int | None = None
    """The newest version with all the copies it was to have, where copies are kept on other nodes."""


class StoreStatus(msgspec.Struct, frozen=True):
    arena: ArenaStatus
    jobs: tuple[JobStatus, ...]
    damage_reports: tuple[DamageReport, ...]
    counters: dict[str, float]
    verifying: int
    unrecognized: tuple[UnrecognizedSlot, ...] = ()
