"""Recovery of the slots and metadata that a killed agent left on tmpfs, verified by checksum before reuse."""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import threading
from collections.abc import Callable, Iterator

import msgspec

from peerstore import deadlines
from peerstore.checksums import chunk_count
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
from peerstore.store.leases import LeaseManager, validate_shard_key
from peerstore.store.slots import (
    JOB_METADATA,
    LEASE_METADATA,
    SEAL_METADATA,
    SLOT_PREFIX,
    ArenaSlot,
    LeaseMetadata,
    SealMetadata,
    ShardState,
    SlotTable,
)

log = logging.getLogger(__name__)

_WAIT_S = 600.0
_PATIENCE_S = 30.0
"""How long whoever asks waits for shards that cannot be read: a storm of restarts uses up descriptors for a moment."""
_TRIES = 3
_AGAIN_S = 0.5
_SELDOM_S = 60.0
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN)
_UNVERIFIED = (ShardState.ADOPTING, ShardState.UNREADABLE)
_LARGEST_CHUNK = 1 << 30


class CrashRecovery:
    """Reads the notes at once, and hashes the bytes in a thread of its own."""

    def __init__(self, shelf: SlotTable, jobs: JobTable, leasing: LeaseManager) -> None:
        self._shelf = shelf
        self._jobs = jobs
        self._leasing = leasing
        self.lost: list[tuple[ShardRecord, str]] = []
        """Sealed shards whose files were found to be too short already."""

    def read_notes(self) -> None:
        arena, notes = self._shelf.arena, self._shelf.notes
        for job in notes.names(JOB_METADATA):
            with self._noting_damage(JOB_METADATA + job, (JOB_METADATA, job)):
                self._jobs.adopt(job)
        for name in arena.slots():
            if not name.startswith(SLOT_PREFIX):
                continue
            for left in reversed(range(_TRIES)):
                try:
                    with self._noting_damage(name, (SEAL_METADATA, name), (LEASE_METADATA, name)):
                        self._adopt_slot(name)
                    break
                except (UnsupportedFormatError, UnavailableError, OSError) as error:
                    if not left:
                        self._set_aside(name, error)
            if name not in self._shelf.slots and name not in self._shelf.aside:
                arena.remove(name)
        for kind in (SEAL_METADATA, LEASE_METADATA):
            for name in notes.names(kind):
                if name not in self._shelf.slots and name not in self._shelf.aside:
                    self._missing(kind, name)
        for job in notes.names(JOB_METADATA):
            self._jobs.end_past_leases(job)

    def _adopt_slot(self, name: str) -> None:
        size = self._shelf.arena.size(name)
        sealed = self._shelf.notes.get(SEAL_METADATA, name, SealMetadata)
        if sealed is not None:
            self._adopt_sealed(name, size, sealed)
            return
        held = self._shelf.notes.get(LEASE_METADATA, name, LeaseMetadata)
        if held is not None:
            validate_shard_key(held.lease.key, held.lease.size_bytes, held.lease.parts)
            lease = msgspec.structs.replace(held.lease, slot=name, slot_bytes=size)
            slot = ArenaSlot(name, lease.generation, size, 0, lease.key.job, lease.key.seat)
            self._shelf.slots[name] = slot
            self._leasing.adopt(slot, lease, ProcessIdentity(*held.owner))

    def _adopt_sealed(self, name: str, size: int, note: SealMetadata) -> None:
        record = note.record
        validate_stored_record(record)
        if size < record.size_bytes:
            self._lose(record, f"{size} bytes of {record.size_bytes} are left")
            return
        self._shelf.drop_note(LEASE_METADATA, name)
        slot = ArenaSlot(name, secrets.randbits(62), size, record.size_bytes, record.key.job, record.key.seat)
        slot.reusable = False  # whoever the killed agent had let read it may not be done
        slot.record, slot.sealed_under, slot.standing = record, note.lease_id, ShardState.ADOPTING
        slot.holders = note.holders
        self._shelf.slots[name] = slot
        if not note.holders and not record.key.kind:  # what others wrote says nothing about who writes here
            self._jobs.heard_of(record.key)
        failpoint("agent.adopting")

    def _missing(self, kind: str, name: str) -> None:
        """A note without its slot: the file of a sealed shard was removed."""
        try:
            note = self._shelf.notes.get(SEAL_METADATA, name, SealMetadata) if kind == SEAL_METADATA else None
            if note is not None and all(note.record.key != record.key for record, _ in self.lost):
                self._lose(note.record, "its slot is gone")
        except ShardDamagedError as error:
            log.warning("a note without its slot: %s", error)
        except (UnsupportedFormatError, UnavailableError) as error:
            self._set_aside(name, error)
            return
        self._shelf.notes.remove(kind, name)

    def _set_aside(self, name: str, error: Exception) -> None:
        _raise_if_passing(error)
        try:
            size = self._shelf.arena.size(name)
        except OSError:
            size = 0
        self._shelf.set_aside(name, size, str(error))

    def _lose(self, record: ShardRecord, reason: str) -> None:
        self._shelf.note_damage(record.key.job, str(record.key), reason)
        if not record.key.kind:
            self._jobs.lost_part(record.key.job, record.key.group, record.key.part)
        self.lost.append((record, reason))

    @contextlib.contextmanager
    def _noting_damage(self, what: str, *drop: tuple[str, str]) -> Iterator[None]:
        try:
            yield
        except (ShardDamagedError, RequestError) as error:
            self._shelf.note_damage("", what, str(error))
            for kind, name in drop:
                self._shelf.notes.remove(kind, name)

    # -- the bytes --------------------------------------------------------------------------------------------

    def verify(
        self,
        damaged_chunks: Callable[[ShardRecord, str, None], tuple[int, ...]],
        sealed: Callable[[ShardRecord, tuple[str, ...]], None],
        damaged: Callable[[ShardKey, str], None],
    ) -> None:
        """Hash what a killed agent left behind; until then nobody is offered it. What cannot be read is tried again."""
        patient_until = self._shelf.clock() + _PATIENCE_S
        pause_s = _AGAIN_S
        while (slots := self._unverified()) and not self._shelf.closed:
            for slot in slots:
                record = slot.record
                if self._shelf.closed or record is None or slot.standing not in _UNVERIFIED:
                    continue
                try:
                    bad = damaged_chunks(record, self._shelf.arena.path(slot.name), None)
                except ShardUnreadableError as error:
                    self._put_off(slot, error, patient=self._shelf.clock() < patient_until)
                    continue
                if bad:
                    damaged(record.key, f"{len(bad)} chunks differ after a restart, first: {bad[0]}")
                elif self._offer(slot, record):
                    sealed(record, slot.holders)
            with self._shelf.lock:
                if self._unverified():
                    self._shelf.changed.wait_for(lambda: self._shelf.closed, pause_s)
            pause_s = min(2 * pause_s, _SELDOM_S)

    def _unverified(self) -> list[ArenaSlot]:
        with self._shelf.lock:
            return [slot for slot in self._shelf.slots.values() if slot.standing in _UNVERIFIED]

    def _put_off(self, slot: ArenaSlot, error: ShardUnreadableError, *, patient: bool) -> None:
        with self._shelf.lock:
            self._shelf.counters["unreadable"] += 1
            if patient or slot.standing is not ShardState.ADOPTING:
                log.warning("adoption: %s", error)
                return
            log.error("adoption: %s; it is not waited for any more, and tried again now and then", error)
            slot.standing = ShardState.UNREADABLE
            self._shelf.changed.notify_all()

    def _offer(self, slot: ArenaSlot, record: ShardRecord) -> bool:
        with self._shelf.lock:
            if slot.record is not record or slot.standing not in _UNVERIFIED:
                return False  # its owner forgot it meanwhile
            slot.standing = ShardState.OFFERED
            self._shelf.counters["adopted"] += 1
            self._shelf.changed.notify_all()
            failpoint("agent.adopted")
            return True

    def wait(self, job: str | None) -> None:
        """Until everything (of ``job``) is verified. Called with the lock held."""
        deadline = self._shelf.clock() + deadlines.remaining_s(_WAIT_S)
        while self.left(job):
            self._shelf.check_open()
            if self._shelf.clock() > deadline:
                raise UnavailableError("still verifying what the last agent left behind")
            self._shelf.changed.wait(deadlines.remaining_s(1.0))

    def left(self, job: str | None = None) -> int:
        slots = self._shelf.slots.values()
        return sum(slot.standing is ShardState.ADOPTING and (job is None or slot.job == job) for slot in slots)


def _raise_if_passing(error: Exception) -> None:
    """Being out of descriptors or memory is over soon: better no agent until then than one without its shards."""
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(cause, OSError) and cause.errno in _PASSING:
        raise error


def validate_stored_record(record: ShardRecord) -> None:
    """A note may be intact and still not be one that this package wrote."""
    validate_shard_key(record.key, record.size_bytes, record.parts)
    if not 1 <= record.chunk_bytes <= _LARGEST_CHUNK:
        raise ShardDamagedError(f"{record.key}: chunks of {record.chunk_bytes} bytes")
    count = chunk_count(record.size_bytes, record.chunk_bytes)
    if len(record.checksums) != 8 * count:
        raise ShardDamagedError(f"{record.key}: {len(record.checksums)} bytes of checksums for {count} chunks")


def start_daemon_thread(work: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread
