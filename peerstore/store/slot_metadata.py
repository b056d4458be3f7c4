"""Metadata of an arena's slots and jobs, and the jobs' blobs.

::

    arena              the arena's identity
    job.JOB            the job's owner, and its versions that are known to be complete
    lease.SLOT         the lease of the slot's writer
    seal.SLOT          the slot's shard and its checksums: the shard exists once this is written
    expired.JOB        when and why the job's shards were removed; it remains after the others
    blob.JOB/NAME      a small value of the job

Metadata of jobs, leases and seals states its ``format``. A new field that older agents may ignore leaves the format as
it is. A change that older agents must not touch raises the format, and those agents set the slot aside.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from pathlib import Path
from typing import TypeVar

import msgspec

from peerstore.errors import (
    PeerStoreError,
    RequestError,
    ShardDamagedError,
    ShardNotFoundError,
    UnsupportedFormatError,
)
from peerstore.message_codec import from_msgpack
from peerstore.shard_records import (
    MAX_BLOB_BYTES,
    Lease,
    ResumePoint,
    RetentionMark,
    ShardKey,
    ShardRecord,
    VersionId,
    validate_blob_name,
    validate_job_name,
)
from peerstore.store.arena import Arena, metadata_in_directory

SEAL_METADATA, LEASE_METADATA, JOB_METADATA, EXPIRED_JOB_METADATA = "seal.", "lease.", "job.", "expired."
METADATA_FORMAT = 2
OLDEST_METADATA_FORMAT = 2
"""Metadata of an older format has other fields: it is kept and listed as unrecognized."""
log = logging.getLogger(__name__)
T = TypeVar("T")


class _Format(msgspec.Struct, frozen=True):
    format: int = METADATA_FORMAT
    """The metadata of an expired job has no format."""


class LeaseMetadata(msgspec.Struct, frozen=True):
    lease: Lease
    owner: tuple[int, int]
    format: int = METADATA_FORMAT


class SealMetadata(msgspec.Struct, frozen=True):
    lease_id: str
    record: ShardRecord
    holders: tuple[str, ...] = ()
    """Nodes chosen to hold this replica, the writer's node first. Empty for this node's own shard."""
    format: int = METADATA_FORMAT


class _StatedKey(msgspec.Struct, frozen=True):
    key: ShardKey


class _StatedSeal(msgspec.Struct, frozen=True):
    """Fields that a seal of any format is expected to have."""

    record: _StatedKey


class VersionParts(msgspec.Struct, frozen=True):
    """A version that the job's nodes have decided, and some of its parts."""

    version_id: VersionId
    parts: tuple[int, ...]
    """In ``committed``: the parts on this node at that time. If one is lost, the version is incomplete."""


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
    """Versions that can never be complete, with the parts that this node's writers did not seal."""
    format: int = METADATA_FORMAT


class JobOwnerMetadata(msgspec.Struct, frozen=True):
    """The owner of a job, which the metadata of every release has."""

    epoch: int
    incarnation: str


class MetadataStore:
    """Typed metadata in an arena."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._pending: dict[str, bytes] = {}

    def put(self, kind: str, name: str, note: msgspec.Struct) -> None:
        """Write metadata; if that fails for a job, its metadata stays pending and already applies here."""
        data = msgspec.msgpack.encode(note)
        if kind == JOB_METADATA:
            self._pending[kind + name] = data
        self._arena.put_metadata(kind + name, data)
        self._pending.pop(kind + name, None)

    def flush_pending(self) -> None:
        """Write pending metadata; no caller may get a success before this returns."""
        for name, data in list(self._pending.items()):
            self._arena.put_metadata(name, data)
            del self._pending[name]

    def get(self, kind: str, name: str, of: type[T]) -> T | None:
        """Return the metadata, or ``None`` if it is absent.

        Raise :class:`ShardDamagedError` if its bytes have changed, and :class:`UnsupportedFormatError` if another
        release wrote it.
        """
        data = self._arena.get_metadata(kind + name)
        if data is None:
            return None
        try:
            written = from_msgpack(data, _Format).format
            if not OLDEST_METADATA_FORMAT <= written <= METADATA_FORMAT and of is not JobOwnerMetadata:
                raise UnsupportedFormatError(
                    f"metadata {kind}{name} has format {written}, this version reads {OLDEST_METADATA_FORMAT} to "
                    f"{METADATA_FORMAT}"
                )
            return from_msgpack(data, of)
        except (msgspec.DecodeError, RecursionError) as error:
            raise UnsupportedFormatError(f"metadata {kind}{name} cannot be decoded by this version: {error}") from error

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

    def remove_replaced(self, kind: str, name: str) -> None:
        """Remove metadata that other metadata has replaced; a failure is harmless."""
        try:
            self.remove(kind, name)
        except OSError as error:
            log.warning("metadata %s%s was not removed: %s", kind, name, error)

    def list_names(self, kind: str) -> list[str]:
        return [note.removeprefix(kind) for note in self._arena.list_metadata(kind)]

    def arena_id(self) -> str:
        """Return the id of the arena's contents; a client that reads a new id drops its earlier state."""
        try:
            known = self._arena.get_metadata("arena")
        except ShardDamagedError:
            known = None
        if known is None:
            known = secrets.token_hex(8).encode()
            self._arena.put_metadata("arena", known)
        return known.decode(errors="replace")


def jobs_in_directory(directory: Path) -> list[str]:
    """Return the jobs that an agent's directory records, or nothing if no shard is sealed there.

    This needs no answer of the agent, so it also works for an agent that was stopped or killed.
    """
    names = metadata_in_directory(directory)
    if not any(name.startswith(SEAL_METADATA) for name in names):
        return []
    return [name.removeprefix(JOB_METADATA) for name in names if name.startswith(JOB_METADATA)]


class BlobStore:
    """Small values of the jobs, such as layouts and settings."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def put(self, job: str, name: str, data: bytes) -> None:
        """Store a value; replace an earlier one."""
        if len(data) > MAX_BLOB_BYTES:
            raise RequestError(f"blob {name} has {len(data)} bytes, the limit is {MAX_BLOB_BYTES}")
        self._arena.put_metadata(_blob(job, name), data)

    def get(self, job: str, name: str) -> bytes:
        data = self.find(job, name)
        if data is None:
            raise ShardNotFoundError(f"job {job} has no blob {name}")
        return data

    def find(self, job: str, name: str) -> bytes | None:
        """Return a value as :meth:`get` does, or ``None`` if the job does not have it."""
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
