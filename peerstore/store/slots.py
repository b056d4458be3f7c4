"""The on-disk metadata beside each slot, and the table of all slots behind one lock.

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
import dataclasses
import enum
import logging
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from peerstore.daemon_process import ProcessIdentity
from peerstore.errors import (
    LeaseLostError,
    PeerStoreError,
    ShardDamagedError,
    ShardNotFoundError,
    UnavailableError,
    UnsupportedFormatError,
)
from peerstore.failpoints import failpoint
from peerstore.message_codec import from_msgpack
from peerstore.shard_records import (
    ArenaStatus,
    DamageReport,
    Lease,
    ResumePoint,
    RetentionMark,
    ShardKey,
    ShardRecord,
    SlotState,
    UnrecognizedSlot,
    VersionId,
    validate_blob_name,
    validate_job_name,
)
from peerstore.sizes_and_durations import show_size
from peerstore.store.arena import Arena
from peerstore.store.slot_eviction import SlotLimits, SlotView

log = logging.getLogger(__name__)


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

    # -- blobs ------------------------------------------------------------------------------------------------

    def put_blob(self, job: str, name: str, data: bytes) -> None:
        self._arena.put_metadata(_blob(job, name), data)

    def get_blob(self, job: str, name: str) -> bytes | None:
        return self._arena.get_metadata(_blob(job, name))

    def list_blobs(self, job: str) -> list[str]:
        prefix = f"blob.{validate_job_name(job)}/"
        return [note.removeprefix(prefix) for note in self._arena.list_metadata(prefix)]

    def remove_blob(self, job: str, name: str) -> None:
        self._arena.remove_metadata(_blob(job, name))


def _blob(job: str, name: str) -> str:
    return f"blob.{validate_job_name(job)}/{validate_blob_name(name)}"


SLOT_PREFIX = "slot."
_DAMAGES = 1000
_REASON_CHARS = 500


class ShardState(enum.Enum):
    """What a sealed shard is to others."""

    AVAILABLE = "offered"
    VERIFYING = "adopting"
    """A killed agent left it, and its checksums were not looked at yet."""
    UNREADABLE = "unreadable"
    """As above, and it could not be read for a while: nobody waits for it any more. It is tried again, and may be given
    up for newer versions as others are."""
    RETIRED = "given up"
    """Its owner forgot it; those who read it may finish."""


@dataclass
class ArenaSlot:
    """One file of the arena."""

    name: str
    generation: int
    size_bytes: int
    prefaulted_bytes: int
    job: str
    part: int
    lease: Lease | None = None
    owner: ProcessIdentity | None = None
    sealing: bool = False
    record: ShardRecord | None = None
    holders: tuple[str, ...] = ()
    """For a copy of another node's shard: who was to hold it, the writer's node first."""
    sealed_lease_id: str = ""
    """Id of the lease it was sealed under: repeating the call gives the same answer."""
    shard_state: ShardState = ShardState.AVAILABLE
    users: set[str] = field(default_factory=set)
    """Pins of readers and holds of uploads."""
    reusable: bool = True
    """Whether the file may be written again. Not where somebody may still read it of whom this agent does not know: a
    reader that a killed agent had let in, or one whose pin was taken back while it was alive."""
    reserved: bool = False
    """Its writer maps it for later saves, also while a shard is sealed in it."""
    filling: bool = False
    """What a lease has written so far is being copied into it."""

    @property
    def state(self) -> SlotState:
        if self.lease is not None or self.filling:
            return SlotState.LEASED
        return SlotState.SEALED if self.record is not None else SlotState.FREE

    @property
    def available_shard(self) -> ShardRecord | None:
        """The shard in it, when it is one that others may count on."""
        return self.record if self.shard_state is ShardState.AVAILABLE else None

    @property
    def view(self) -> SlotView:
        record = self.record if self.shard_state is not ShardState.RETIRED else None
        return SlotView(
            self.name,
            self.state,
            self.size_bytes,
            self.job,
            self.part,
            record.key.version_id if record else None,
            bool(self.users) or self.sealing or self.shard_state in (ShardState.VERIFYING, ShardState.RETIRED),
            self.reusable,
        )


class SlotTable:
    """All slots. Whoever looks or changes holds ``lock``; ``changed`` tells those who wait for a slot."""

    def __init__(self, arena: Arena, limits: SlotLimits, clock: Callable[[], float]) -> None:
        self.arena = arena
        self.metadata = MetadataStore(arena)
        self._limits = limits
        self.clock = clock
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.slots: dict[str, ArenaSlot] = {}
        self.unrecognized: dict[str, UnrecognizedSlot] = {}
        """Slots that this version of the agent does not understand: they stay as they are, and nobody is given them."""
        self.damages: deque[DamageReport] = deque(maxlen=_DAMAGES)
        self.counters: defaultdict[str, float] = defaultdict(float)
        self.closed = False

    def check_open(self) -> None:
        if self.closed:
            raise UnavailableError("this store is shutting down")

    @property
    def unrecognized_bytes(self) -> int:
        return sum(one.size_bytes for one in self.unrecognized.values())

    @property
    def unrecognized_hint(self) -> str:
        """For whoever finds no room."""
        if not self.unrecognized_bytes:
            return ""
        return (
            f"; {show_size(self.unrecognized_bytes)} more is in slots that another version of the agent left: run that "
            "version again, or drop them (tieredckpt gc JOB --unrecognized-slots)"
        )

    @property
    def limits(self) -> SlotLimits:
        """What is set aside takes its part of the budget."""
        return dataclasses.replace(
            self._limits, budget_bytes=max(0, self._limits.budget_bytes - self.unrecognized_bytes)
        )

    def set_budget(self, budget_bytes: int) -> None:
        """Free slots beyond it go at once, what may be given up with the next lease; what has to stay, stays."""
        self._limits = dataclasses.replace(self._limits, budget_bytes=budget_bytes)
        over = sum(view.size_bytes for view in self.slot_views()) - self.limits.budget_bytes
        for slot in sorted(self.slots.values(), key=lambda slot: -slot.size_bytes):
            if over > 0 and slot.state is SlotState.FREE:
                self.drop(slot)
                over -= slot.size_bytes
        self.changed.notify_all()

    # -- looking ----------------------------------------------------------------------------------------------

    def slot_views(self) -> list[SlotView]:
        """All slots, and those that were removed and still take memory, since some process has them mapped."""
        removed = self.arena.removed_in_use().items()
        return [slot.view for slot in self.slots.values()] + [
            SlotView(name, SlotState.LEASED, size_bytes, "", -1) for name, size_bytes in removed
        ]

    def available_shards(
        self, job: str | None = None, *, parities: bool = False
    ) -> Iterator[tuple[ArenaSlot, ShardRecord]]:
        """Sealed shards (of ``job``) that are whole as far as this agent has checked itself; or its ``parities``."""
        for slot in self.slots.values():
            record = slot.available_shard
            if record is not None and job in (None, record.key.job) and bool(record.key.kind) is parities:
                yield slot, record

    def find_shard(self, key: ShardKey) -> tuple[ArenaSlot, ShardRecord]:
        for slot, record in self.available_shards(key.job, parities=bool(key.kind)):
            if record.key == key:
                return slot, record
        raise ShardNotFoundError(f"{key} is not on this node")

    def slot_for_key(self, key: ShardKey) -> ArenaSlot | None:
        """The slot that holds or will hold ``key``."""
        for slot in self.slots.values():
            record = slot.record if slot.shard_state is not ShardState.RETIRED else None
            if key in (record and record.key, slot.lease and slot.lease.key):
                return slot
        return None

    def slot_for_lease(self, lease_id: str) -> tuple[ArenaSlot, ShardRecord | None]:
        """The slot of a lease, and the shard when it is sealed already."""
        for slot in self.slots.values():
            if slot.lease is not None and slot.lease.id == lease_id:
                return slot, None
            if slot.available_shard is not None and slot.sealed_lease_id == lease_id:
                return slot, slot.available_shard
        raise LeaseLostError(f"lease {lease_id} is not known: it expired, was fenced, or its slot was given to another")

    def status(self, pins: int) -> ArenaStatus:
        slots = self.slots.values()
        return ArenaStatus(
            budget_bytes=self._limits.budget_bytes,
            allocated_bytes=sum(slot.size_bytes for slot in slots) + sum(self.arena.removed_in_use().values()),
            sealed_bytes=sum(slot.record.size_bytes for slot in slots if slot.record),
            slots=len(slots),
            free_slots=sum(slot.state is SlotState.FREE for slot in slots),
            leases=sum(slot.state is SlotState.LEASED for slot in slots),
            pins=pins,
            unrecognized_bytes=self.unrecognized_bytes,
        )

    # -- changing ---------------------------------------------------------------------------------------------

    def create(self, job: str, part: int, size_bytes: int) -> ArenaSlot:
        generation = secrets.randbits(62)
        name = f"{SLOT_PREFIX}{job}.{part}.{generation:016x}"
        self.arena.create(name, size_bytes)
        failpoint("agent.created")
        slot = self.slots[name] = ArenaSlot(name, generation, size_bytes, 0, job, part)
        return slot

    def is_intact(self, slot: ArenaSlot) -> bool:
        """Whether the slot's file is still there, with its size: else somebody has removed or truncated it."""
        try:
            return self.arena.size(slot.name) == slot.size_bytes
        except FileNotFoundError:
            return False

    def open(self, slot: ArenaSlot, *, writable: bool = False) -> int:
        """The slot's file, for whoever asked."""
        try:
            return self.arena.open(slot.name, writable=writable)
        except OSError as error:  # too many open files, most likely
            raise UnavailableError(f"{slot.name} cannot be opened: {error}") from error

    def drop_lost(self, slot: ArenaSlot) -> None:
        """Drop a slot whose file is not intact."""
        log.error("%s was removed or truncated by somebody else: a new one takes its place", slot.name)
        self.counters["slots_lost"] += 1
        self.drop(slot)

    def assign(self, slot: ArenaSlot, lease: Lease, owner: ProcessIdentity) -> Lease:
        """The slot belongs to ``lease`` from here on."""
        self.metadata.put(LEASE_METADATA, slot.name, LeaseMetadata(lease, (owner.pid, owner.start_time)))
        slot.lease, slot.owner, slot.job, slot.part = lease, owner, lease.key.job, lease.key.slot_part
        failpoint("agent.leased")
        return lease

    def release_lease(self, slot: ArenaSlot) -> None:
        """The slot is free again; its owner has said that it does not write any more, or is dead."""
        slot.lease = slot.owner = None
        self.metadata.remove(LEASE_METADATA, slot.name)
        self.changed.notify_all()

    def revoke_lease(self, slot: ArenaSlot, why: str) -> None:
        """Take a lease back unasked. While its writer may still write, the file is not given to anybody else."""
        log.info("%s: lease taken back, %s", slot.lease and slot.lease.key, why)
        self.counters["leases_lost"] += 1
        safe = not slot.sealing and slot.owner is not None and not slot.owner.is_alive
        self.release_lease(slot)
        if not safe:
            self.drop(slot)

    def drop_metadata(self, kind: str, name: str) -> None:
        """A note that another one has taken the place of: where it cannot be removed now, it does no harm."""
        try:
            self.metadata.remove(kind, name)
        except OSError as error:
            log.warning("note %s%s was not removed: %s", kind, name, error)

    def free(self, slot: ArenaSlot) -> None:
        """What was sealed in the slot is gone, the slot is free. One that cannot be read is not written to again."""
        if slot.shard_state is ShardState.UNREADABLE:
            self.drop(slot)
            return
        self.metadata.remove(SEAL_METADATA, slot.name)
        failpoint("agent.deleted")
        slot.record, slot.sealed_lease_id, slot.holders, slot.shard_state = None, "", (), ShardState.AVAILABLE
        slot.users.clear()
        if not slot.reusable:
            self.drop(slot)
        self.changed.notify_all()

    def drop(self, slot: ArenaSlot) -> None:
        """The slot itself is gone. Those who mapped it keep what they see."""
        for note in (LEASE_METADATA, SEAL_METADATA):
            self.metadata.remove(note, slot.name)
        failpoint("agent.dropped")
        self.arena.remove(slot.name)
        self.slots.pop(slot.name, None)
        self.changed.notify_all()

    def mark_unrecognized(self, name: str, size_bytes: int, reason: str) -> None:
        reason = reason[:_REASON_CHARS]
        log.error("%s (%d bytes) is set aside: %s", name, size_bytes, reason)
        written, key, job = None, None, ""
        if name.startswith(SLOT_PREFIX):
            written, key = self.metadata.stated(SEAL_METADATA, name)
            job = key.job if key is not None else name.removeprefix(SLOT_PREFIX).rsplit(".", 2)[0]
        self.unrecognized[name] = UnrecognizedSlot(name, size_bytes, reason, job, key, written, METADATA_FORMAT)

    def drop_unrecognized(self, names: Collection[str] | None) -> int:
        """Somebody says that what was set aside (of these names) is of no use; how many bytes it had."""
        gone = [one for one in self.unrecognized.values() if names is None or one.name in names]
        for one in gone:
            if one.name.startswith(SLOT_PREFIX):
                for note in (LEASE_METADATA, SEAL_METADATA):
                    self.metadata.remove(note, one.name)
                self.arena.remove(one.name)
            del self.unrecognized[one.name]
            log.warning("%s, which was set aside, is dropped on request", one.name)
        self.changed.notify_all()
        return sum(one.size_bytes for one in gone)

    def evict(self, names: tuple[str, ...]) -> None:
        """Drop the slots that a decision gave up."""
        for name in names:
            slot = self.slots[name]
            self.counters["evicted"] += slot.record is not None
            self.drop(slot)

    def retire(self, slot: ArenaSlot) -> None:
        """Nobody is offered this shard again; it goes when the last reader is done."""
        if not slot.users:
            self.free(slot)
            return
        self.metadata.remove(SEAL_METADATA, slot.name)
        slot.shard_state = ShardState.RETIRED

    def release_reader(self, slot: ArenaSlot, user: str) -> None:
        """One who used the shard is done."""
        slot.users.discard(user)
        if slot.shard_state is ShardState.RETIRED and not slot.users:
            self.free(slot)
        self.changed.notify_all()

    def record_damage(self, job: str, what: str, reason: str) -> None:
        reason = reason[:_REASON_CHARS]
        log.error("damaged: %s: %s", what, reason)
        self.counters["damaged"] += 1
        self.damages.append(DamageReport(job, what, reason, time.time_ns()))
