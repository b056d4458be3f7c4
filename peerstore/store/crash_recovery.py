"""Recovery of slots and metadata that a killed agent left on tmpfs, verified before reuse."""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import threading
from collections.abc import Callable, Iterator

import msgspec

from peerstore import deadlines
from peerstore.daemon_process import ProcessIdentity
from peerstore.errors import (
    RequestError,
    ShardDamagedError,
    ShardUnreadableError,
    UnavailableError,
    UnsupportedFormatError,
)
from peerstore.failpoints import failpoint
from peerstore.shard_records import ShardKey, ShardRecord
from peerstore.store.job_table import JobTable
from peerstore.store.leases import LeaseManager
from peerstore.store.record_validation import validate_record, validate_shard_key
from peerstore.store.slot_metadata import (
    JOB_METADATA,
    LEASE_METADATA,
    SEAL_METADATA,
    LeaseMetadata,
    SealMetadata,
)
from peerstore.store.slot_table import SlotTable
from peerstore.store.slots import SLOT_PREFIX, UNVERIFIED_STATES, ArenaSlot, SlotState

log = logging.getLogger(__name__)

_WAIT_S = 600.0
_READER_WAIT_S = 30.0
"""Seconds that readers wait for shards that cannot be read.

Many processes that restart at once can use up all file descriptors for a moment.
"""
_TRIES = 3
_RETRY_S = 0.5
_MAX_RETRY_S = 60.0
_TRANSIENT_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN)


class CrashRecovery:
    """Recovery of slots: metadata at once, checksums in a background thread."""

    def __init__(self, table: SlotTable, jobs: JobTable, leasing: LeaseManager) -> None:
        self._table = table
        self._jobs = jobs
        self._leasing = leasing
        self.lost: list[tuple[ShardRecord, str]] = []
        """Sealed shards whose files are missing or too short, and the reason."""

    def load_metadata(self) -> None:
        """Restore jobs, sealed shards and leases from their metadata; call once, with the table's lock held."""
        arena, notes = self._table.arena, self._table.metadata
        for job in notes.list_names(JOB_METADATA):
            with self._recording_damage(JOB_METADATA + job, (JOB_METADATA, job)):
                self._jobs.restore(job)
        for name in arena.list_slots():
            if not name.startswith(SLOT_PREFIX):
                continue
            for remaining in reversed(range(_TRIES)):
                try:
                    with self._recording_damage(name, (SEAL_METADATA, name), (LEASE_METADATA, name)):
                        self._recover_slot(name)
                    break
                except (UnsupportedFormatError, UnavailableError, OSError) as error:
                    if not remaining:
                        self._mark_unrecognized(name, error)
            if name not in self._table.slots and not self._table.unrecognized.find(name):
                arena.remove(name)
        for kind in (SEAL_METADATA, LEASE_METADATA):
            for name in notes.list_names(kind):
                if name not in self._table.slots and not self._table.unrecognized.find(name):
                    self._metadata_without_slot(kind, name)
        for job in notes.list_names(JOB_METADATA):
            self._jobs.incarnations.revoke_fenced_leases(job)

    def _recover_slot(self, name: str) -> None:
        size = self._table.arena.size(name)
        sealed = self._table.metadata.get(SEAL_METADATA, name, SealMetadata)
        if sealed is not None:
            self._recover_sealed(name, size, sealed)
            return
        held = self._table.metadata.get(LEASE_METADATA, name, LeaseMetadata)
        if held is not None:
            validate_shard_key(held.lease.key, held.lease.size_bytes, held.lease.parts)
            lease = msgspec.structs.replace(held.lease, slot=name, slot_bytes=size)
            self._leasing.restore(name, size, lease, ProcessIdentity(*held.owner))

    def _recover_sealed(self, name: str, size: int, note: SealMetadata) -> None:
        record = note.record
        validate_record(record)
        if size < record.size_bytes:
            self._record_lost(record, f"its file has only {size} of {record.size_bytes} bytes")
            return
        self._table.metadata.remove_replaced(LEASE_METADATA, name)
        self._table.adopt_shard(name, secrets.randbits(62), size, note)
        if not note.holders and not record.key.kind:  # a replica does not show the epoch of this node's writers
            self._jobs.incarnations.observe_epoch(record.key)
        failpoint("agent.recovering")

    def _metadata_without_slot(self, kind: str, name: str) -> None:
        """Record a sealed shard as lost if its file was removed, and remove its metadata."""
        try:
            note = self._table.metadata.get(SEAL_METADATA, name, SealMetadata) if kind == SEAL_METADATA else None
            if note is not None and all(note.record.key != record.key for record, _ in self.lost):
                self._record_lost(note.record, "its file is missing")
        except ShardDamagedError as error:
            log.warning("removing damaged metadata %s%s, whose slot is missing: %s", kind, name, error)
        except (UnsupportedFormatError, UnavailableError) as error:
            self._mark_unrecognized(name, error)
            return
        self._table.metadata.remove(kind, name)

    def _mark_unrecognized(self, name: str, error: Exception) -> None:
        _raise_if_transient(error)
        try:
            size = self._table.arena.size(name)
        except OSError:
            size = 0
        self._table.unrecognized.mark(name, size, str(error))

    def _record_lost(self, record: ShardRecord, reason: str) -> None:
        self._table.incidents.record_damage(record.key.job, str(record.key), reason)
        if not record.key.kind:
            self._jobs.record_lost_part(record.key.job, record.key.version_id, record.key.part)
        self.lost.append((record, reason))

    @contextlib.contextmanager
    def _recording_damage(self, what: str, *drop: tuple[str, str]) -> Iterator[None]:
        try:
            yield
        except (ShardDamagedError, RequestError) as error:
            self._table.incidents.record_damage("", what, str(error))
            for kind, name in drop:
                self._table.metadata.remove(kind, name)

    def verify_checksums(
        self,
        damaged_chunks: Callable[[ShardRecord, str, None], tuple[int, ...]],
        sealed: Callable[[ShardRecord, tuple[str, ...]], None],
        damaged: Callable[[ShardKey, str], None],
    ) -> None:
        """Verify the checksums of recovered shards until all are verified or the store closes.

        A shard is not available before that. Shards that cannot be read are retried, at most every ``_MAX_RETRY_S``
        seconds.
        """
        patient_until = self._table.clock() + _READER_WAIT_S
        pause_s = _RETRY_S
        while (slots := self._unverified()) and not self._table.lock.closed:
            for slot in slots:
                record = slot.record
                if self._table.lock.closed or record is None or slot.state not in UNVERIFIED_STATES:
                    continue
                try:
                    damaged_indexes = damaged_chunks(record, self._table.arena.path(slot.name), None)
                except ShardUnreadableError as error:
                    self._retry_later(slot, error, patient=self._table.clock() < patient_until)
                    continue
                if damaged_indexes:
                    damaged(
                        record.key, f"{len(damaged_indexes)} chunks differ after a restart, first: {damaged_indexes[0]}"
                    )
                elif self._make_available(slot, record):
                    sealed(record, slot.holders)
            with self._table.lock:
                if self._unverified():
                    self._table.lock.wait_closed(pause_s)
            pause_s = min(2 * pause_s, _MAX_RETRY_S)

    def _unverified(self) -> list[ArenaSlot]:
        with self._table.lock:
            return self._table.slots.in_state(*UNVERIFIED_STATES)

    def _retry_later(self, slot: ArenaSlot, error: ShardUnreadableError, *, patient: bool) -> None:
        with self._table.lock:
            self._table.incidents.count("unreadable_reads")
            if patient or slot.state is not SlotState.VERIFYING:
                log.warning("recovery: %s", error)
                return
            log.error("recovery: %s; the shard counts as unreadable until a retry succeeds", error)
            self._table.mark_unreadable(slot)

    def _make_available(self, slot: ArenaSlot, record: ShardRecord) -> bool:
        with self._table.lock:
            if slot.record is not record or slot.state not in UNVERIFIED_STATES:
                return False  # its owner dropped it meanwhile
            self._table.make_available(slot)
            self._table.incidents.count("recovered")
            failpoint("agent.recovered")
            return True

    def wait_verified(self, job: str | None) -> None:
        """Wait until all recovered shards (of ``job``) are verified or marked unreadable.

        Call it with the lock held.
        """
        deadline = self._table.clock() + deadlines.remaining_s(_WAIT_S)
        while self.unverified_count(job):
            self._table.lock.check_open()
            if self._table.clock() > deadline:
                raise UnavailableError("still verifying the shards of the previous agent")
            self._table.lock.wait(deadlines.remaining_s(1.0))

    def unverified_count(self, job: str | None = None) -> int:
        return sum(job in (None, slot.job) for slot in self._table.slots.in_state(SlotState.VERIFYING))


def _raise_if_transient(error: Exception) -> None:
    """Raise the error again if it is transient: too few descriptors or too little memory.

    The agent then fails to start and starts again, instead of running without its shards.
    """
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(cause, OSError) and cause.errno in _TRANSIENT_ERRNOS:
        raise error


def start_daemon_thread(work: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread
