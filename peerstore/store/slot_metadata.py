"""The metadata beside the slots of an arena, and the blobs of a job.

::

    arena              the arena's identity
    job.JOB            who owns the job, and which of its versions are known to be whole
    lease.SLOT         who fills the slot
    seal.SLOT          what the slot holds, with checksums: the shard exists from here on
    expired.JOB        when and why the job's shards were given back; outlives all of the above
    blob.JOB/NAME      small bytes of the job's own

Claims, leases and seals say in which ``format`` they are. It is not raised for a new field that may be overlooked, but
for what an agent that does not know it must not touch: such an agent sets the slot aside.
"""

from __future__ import annotations

import contextlib
import secrets
from typing import TypeVar

import msgspec

from peerstore.errors import PeerStoreError, ShardDamagedError, UnsupportedFormatError
from peerstore.message_codec import from_msgpack
from peerstore.shard_records import (
    Lease,
    ResumePoint,
    RetentionMark,
    ShardKey,
    ShardRecord,
    VersionId,
    validate_blob_name,
    validate_job_name,
)
from peerstore.store.arena import Arena

SEAL_METADATA, LEASE_METADATA, JOB_METADATA, EXPIRED_JOB_METADATA = "seal.", "lease.", "job.", "expired."
METADATA_FORMAT = 2
OLDEST_METADATA_FORMAT = 2
"""Notes of an older format have other fields: they are kept and named as unrecognized."""
T = TypeVar("T")


class _Format(msgspec.Struct, frozen=True):
    format: int = METADATA_FORMAT
    """An expired job's note states none."""


class LeaseMetadata(msgspec.Struct, frozen=True):
    lease: Lease
    owner: tuple[int, int]
    format: int = METADATA_FORMAT


class SealMetadata(msgspec.Struct, frozen=True):
    lease_id: str
    record: ShardRecord
    holders: tuple[str, ...] = ()
    """For a copy: the nodes that were to hold this shard, the one that wrote it first. Empty for this node's own."""
    format: int = METADATA_FORMAT


class _StatedKey(msgspec.Struct, frozen=True):
    key: ShardKey


class _StatedSeal(msgspec.Struct, frozen=True):
    """What a seal of any format is expected to state."""

    record: _StatedKey


class VersionParts(msgspec.Struct, frozen=True):
    """A version that somebody who sees more than this node called whole."""

    version_id: VersionId
    parts: tuple[int, ...]
    """Those of its parts that were here then: without one of them it is not whole any more."""


class JobMetadata(msgspec.Struct, frozen=True):
    epoch: int
    incarnation: str
    committed: tuple[VersionParts, ...] = ()
    damaged: tuple[VersionId, ...] = ()
    requires_replication: bool = False
    replicated: VersionId | None = None
    resume_point: ResumePoint | None = None
    retention: tuple[RetentionMark, ...] = ()
    aborted: tuple[VersionParts, ...] = ()
    """Versions that will never be whole, with the parts that writers of this node left out."""
    format: int = METADATA_FORMAT


class JobOwnerMetadata(msgspec.Struct, frozen=True):
    """What every version says of a job: who owns it."""

    epoch: int
    incarnation: str


class MetadataStore:
    """Typed notes in an arena."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._pending: dict[str, bytes] = {}

    def put(self, kind: str, name: str, note: msgspec.Struct) -> None:
        """A claim that cannot be put is owed: what it says counts in this process already."""
        data = msgspec.msgpack.encode(note)
        if kind == JOB_METADATA:
            self._pending[kind + name] = data
        self._arena.put_metadata(kind + name, data)
        self._pending.pop(kind + name, None)

    def flush_pending(self) -> None:
        """Put what is owed. Before this has worked nobody may be told that anything of it was done."""
        for name, data in list(self._pending.items()):
            self._arena.put_metadata(name, data)
            del self._pending[name]

    def get(self, kind: str, name: str, of: type[T]) -> T | None:
        """The note, ``None`` when there is none; :class:`ShardDamagedError` when it is not what was put, and
        :class:`UnsupportedFormatError` when another version put it.
        """
        data = self._arena.get_metadata(kind + name)
        if data is None:
            return None
        try:
            written = from_msgpack(data, _Format).format
            if not OLDEST_METADATA_FORMAT <= written <= METADATA_FORMAT and of is not JobOwnerMetadata:
                raise UnsupportedFormatError(
                    f"note {kind}{name} is of format {written}, this version reads {OLDEST_METADATA_FORMAT} to "
                    f"{METADATA_FORMAT}"
                )
            return from_msgpack(data, of)
        except (msgspec.DecodeError, RecursionError) as error:
            raise UnsupportedFormatError(f"note {kind}{name} is not what this version writes: {error}") from error

    def stated(self, kind: str, name: str) -> tuple[int | None, ShardKey | None]:
        """Return the format and the shard that metadata of another release states, as far as they can be read."""
        written: int | None = None
        with contextlib.suppress(msgspec.DecodeError, RecursionError, PeerStoreError):
            data = self._arena.get_metadata(kind + name)
            if data is not None:
                written = from_msgpack(data, _Format).format
                if kind == SEAL_METADATA:
                    return written, from_msgpack(data, _StatedSeal).record.key
        return written, None

    def remove(self, kind: str, name: str) -> None:
        self._arena.remove_metadata(kind + name)
        self._pending.pop(kind + name, None)

    def list_names(self, kind: str) -> list[str]:
        return [note.removeprefix(kind) for note in self._arena.list_metadata(kind)]

    def arena_id(self) -> str:
        """A name that stays with the arena's contents: a client that sees another one starts afresh."""
        try:
            known = self._arena.get_metadata("arena")
        except ShardDamagedError:
            known = None
        if known is None:
            known = secrets.token_hex(8).encode()
            self._arena.put_metadata("arena", known)
        return known.decode(errors="replace")


class BlobStore:
    """Small bytes of a job's own: layouts, settings."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def put(self, job: str, name: str, data: bytes) -> None:
        self._arena.put_metadata(_blob(job, name), data)

    def get(self, job: str, name: str) -> bytes | None:
        return self._arena.get_metadata(_blob(job, name))

    def list_names(self, job: str) -> list[str]:
        prefix = f"blob.{validate_job_name(job)}/"
        return [note.removeprefix(prefix) for note in self._arena.list_metadata(prefix)]

    def remove(self, job: str, name: str) -> None:
        self._arena.remove_metadata(_blob(job, name))

    def remove_all(self, job: str) -> None:
        for name in self.list_names(job):
            self.remove(job, name)


def _blob(job: str, name: str) -> str:
    return f"blob.{validate_job_name(job)}/{validate_blob_name(name)}"
