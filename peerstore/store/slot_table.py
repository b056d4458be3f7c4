"""The table of a node's slots under one lock: lookups by index, and every change of a slot."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, KeysView, Mapping

from peerstore.daemon_process import ProcessIdentity
from peerstore.errors import LeaseLostError, ShardNotFoundError, UnavailableError
from peerstore.failpoints import failpoint
from peerstore.shard_records import (
    ArenaStatus,
    DamageReport,
    Lease,
    ShardKey,
    ShardRecord,
    UnrecognizedSlot,
    VersionId,
)
from peerstore.sizes_and_durations import show_size
from peerstore.store.arena import Arena
from peerstore.store.slot_eviction import SlotLimits, SlotUse, SlotView
from peerstore.store.slot_metadata import (
    LEASE_METADATA,
    METADATA_FORMAT,
    SEAL_METADATA,
    BlobStore,
    LeaseMetadata,
    MetadataStore,
    SealMetadata,
)
from peerstore.store.slots import (
    LEASE_STATES,
    SHARD_STATES,
    SLOT_PREFIX,
    TRANSITIONS,
    ArenaSlot,
    SlotIndexes,
    SlotState,
    VersionShards,
)

log = logging.getLogger(__name__)

_DAMAGES = 1000
_REASON_CHARS = 500


class SlotTable:
    """All slots of the arena; callers hold :meth:`exclusive` around operations that must be atomic."""

    def __init__(self, arena: Arena, limits: SlotLimits, clock: Callable[[], float]) -> None:
        self.arena = arena
        self.metadata = MetadataStore(arena)
        self.blobs = BlobStore(arena)
        self.clock = clock
        self._limits = limits
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._slots = SlotIndexes()
        self._unrecognized: dict[str, UnrecognizedSlot] = {}
        self._damages: deque[DamageReport] = deque(maxlen=_DAMAGES)
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._closed = False

    # -- lock, waiters and counters -------------------------------------------------------------------------------

    def exclusive(self) -> contextlib.AbstractContextManager[object]:
        """Hold the table's lock, which is reentrant."""
        return self._lock

    def wait_for_change(self, timeout_s: float | None) -> None:
        """Release the lock and wait for a change; call inside :meth:`exclusive`."""
        self._changed.wait(timeout_s)

    def wait_closed(self, timeout_s: float) -> None:
        self._changed.wait_for(lambda: self._closed, timeout_s)

    def notify_changed(self) -> None:
        """Wake all threads that wait for a slot, a job or a shard."""
        self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Refuse leases from now on, and wake all waiting threads."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def check_open(self) -> None:
        if self._closed:
            raise UnavailableError("this store is shutting down")

    def count(self, name: str, by: float = 1) -> None:
        with self._lock:
            self._counters[name] += by

    def counters(self) -> dict[str, float]:
        return dict(self._counters)

    # -- budget ---------------------------------------------------------------------------------------------------

    @property
    def allocated_bytes(self) -> int:
        """Size of all slots, including removed slots that still use memory."""
        return self._slots.size_bytes + sum(self.arena.removed_in_use().values())

    @property
    def unrecognized_bytes(self) -> int:
        return sum(one.size_bytes for one in self._unrecognized.values())

    @property
    def unrecognized_hint(self) -> str:
        """Text for errors of full memory if slots of another release use part of the budget."""
        if not self.unrecognized_bytes:
            return ""
        return (
            f"; {show_size(self.unrecognized_bytes)} more is in slots that another version of the agent left: run that "
            "version again, or drop them (tieredckpt gc JOB --unrecognized-slots)"
        )

    @property
    def limits(self) -> SlotLimits:
        """The limits, less the budget that unrecognized slots take."""
        return dataclasses.replace(
            self._limits, budget_bytes=max(0, self._limits.budget_bytes - self.unrecognized_bytes)
        )

    def set_budget(self, budget_bytes: int) -> None:
        """Drop free slots beyond the budget now; leases evict further slots later."""
        self._limits = dataclasses.replace(self._limits, budget_bytes=budget_bytes)
        over = self.allocated_bytes - self.limits.budget_bytes
        for slot in sorted(self.in_state(SlotState.FREE), key=lambda slot: -slot.size_bytes):
            if over > 0:
                self.drop(slot)
                over -= slot.size_bytes
        self.notify_changed()

    # -- lookups --------------------------------------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        return name in self._slots.names

    def slot(self, name: str) -> ArenaSlot | None:
        return self._slots.names.get(name)

    def slots(self) -> list[ArenaSlot]:
        return list(self._slots.names.values())

    def in_state(self, *states: SlotState) -> list[ArenaSlot]:
        return [slot for state in states for slot in self._slots.states.all(state)]

    def slots_of_job(self, job: str) -> list[ArenaSlot]:
        return self._slots.jobs.all(job)

    def slots_of_writer(self, job: str, part: int) -> list[ArenaSlot]:
        return self._slots.writers.all((job, part))

    def slot_views(self) -> list[SlotView]:
        """Return all slots, including removed slots that a process still has mapped."""
        removed = self.arena.removed_in_use().items()
        return [slot.view for slot in self._slots.names.values()] + [
            SlotView(name, SlotUse.LEASED, size_bytes, "", -1) for name, size_bytes in removed
        ]

    def views_for_writer(self, job: str, part: int) -> list[SlotView]:
        """Return the writer's own slots, and all free slots."""
        mine = self._slots.writers.get((job, part), {})
        free = self._slots.states.get(SlotState.FREE, {})
        return [slot.view for slot in (mine | free).values()]

    def available_shards(
        self, job: str | None = None, *, parities: bool = False
    ) -> Iterator[tuple[ArenaSlot, ShardRecord]]:
        """Yield the verified shards (of ``job``), or only the parities."""
        for slot in self.slots() if job is None else self.slots_of_job(job):
            record = slot.available_shard
            if record is not None and bool(record.key.kind) is parities:
                yield slot, record

    def versions(self, job: str) -> Mapping[VersionId, VersionShards]:
        """Return the job's versions with shards on this node."""
        return self._slots.versions.get(job, {})

    def jobs_with_shards(self) -> KeysView[str]:
        return self._slots.versions.keys()

    def parts_here(self, job: str, version_id: VersionId) -> tuple[int, ...]:
        """Return the version's parts with a shard on this node, verified or not."""
        found = self.versions(job).get(version_id)
        return tuple(sorted(found.parts)) if found is not None else ()

    def find_shard(self, key: ShardKey) -> tuple[ArenaSlot, ShardRecord]:
        for slot in self._slots.keys.all(key):
            record = slot.available_shard
            if record is not None:
                return slot, record
        raise ShardNotFoundError(f"{key} is not on this node")

    def slots_with_shard(self, key: ShardKey) -> list[ArenaSlot]:
        """Return the slots with this shard, including retired slots."""
        return self._slots.shards.all(key)

    def slot_for_key(self, key: ShardKey) -> ArenaSlot | None:
        """Return the slot that holds or will hold ``key``."""
        return self._slots.keys.first(key)

    def slot_for_lease(self, lease_id: str) -> tuple[ArenaSlot, ShardRecord | None]:
        """Return the slot of a lease, and the shard if it is already sealed."""
        slot = self._slots.leases.first(lease_id)
        if slot is None:
            raise LeaseLostError(
                f"lease {lease_id} is not known: it expired, was fenced, or its slot has another lease"
            )
        return slot, slot.available_shard

    def leased_slot(self, lease_id: str) -> ArenaSlot | None:
        """Return the slot of a lease that is not sealed yet."""
        return next((slot for slot in self._slots.leases.all(lease_id) if slot.lease is not None), None)

    def status(self, pins: int) -> ArenaStatus:
        slots = self.slots()
        return ArenaStatus(
            budget_bytes=self._limits.budget_bytes,
            allocated_bytes=self.allocated_bytes,
            sealed_bytes=sum(slot.record.size_bytes for slot in slots if slot.record),
            slots=len(slots),
            free_slots=sum(slot.use is SlotUse.FREE for slot in slots),
            leases=sum(slot.use is SlotUse.LEASED for slot in slots),
            pins=pins,
            unrecognized_bytes=self.unrecognized_bytes,
        )

    # -- transitions ----------------------------------------------------------------------------------------------

    def _change(
        self,
        slot: ArenaSlot,
        state: SlotState,
        *,
        lease: Lease | None = None,
        owner: ProcessIdentity | None = None,
        shard: SealMetadata | None = None,
    ) -> None:
        """Change the slot's state and its fields; refuse a change that is not in :data:`TRANSITIONS`."""
        if state not in TRANSITIONS[slot.state]:
            raise RuntimeError(f"slot {slot.name} is {slot.state.value} and cannot become {state.value}")

        def change() -> None:
            slot.state = state
            if state not in LEASE_STATES:
                slot.lease = slot.owner = None
            elif lease is not None:
                slot.lease, slot.owner, slot.job, slot.part = lease, owner, lease.key.job, lease.key.slot_part
            if state not in SHARD_STATES:
                slot.record, slot.sealed_lease_id, slot.holders = None, "", ()
                slot.users.clear()
            elif shard is not None:
                slot.record, slot.sealed_lease_id, slot.holders = shard.record, shard.lease_id, shard.holders

        if slot.state is SlotState.NEW:
            change()
            self._slots.add(slot)
        elif state is SlotState.REMOVED:
            self._slots.remove(slot)
            change()
        else:
            self._slots.update(slot, change)

    def create(self, job: str, part: int, size_bytes: int) -> ArenaSlot:
        generation = secrets.randbits(62)
        name = f"{SLOT_PREFIX}{job}.{part}.{generation:016x}"
        self.arena.create(name, size_bytes)
        failpoint("agent.created")
        slot = ArenaSlot(name, generation, size_bytes, 0, job, part)
        self._change(slot, SlotState.FREE)
        return slot

    def adopt_lease(self, name: str, size_bytes: int, lease: Lease, owner: ProcessIdentity) -> ArenaSlot:
        """Add a slot that a killed agent had leased."""
        slot = ArenaSlot(name, lease.generation, size_bytes, 0, lease.key.job, lease.key.slot_part)
        self._change(slot, SlotState.LEASED, lease=lease, owner=owner)
        return slot

    def adopt_shard(self, name: str, generation: int, size_bytes: int, seal: SealMetadata) -> None:
        """Add a slot that a killed agent had sealed; that agent's readers may still read it."""
        key, written_bytes = seal.record.key, seal.record.size_bytes
        slot = ArenaSlot(name, generation, size_bytes, written_bytes, key.job, key.slot_part, reusable=False)
        self._change(slot, SlotState.VERIFYING, shard=seal)

    def is_intact(self, slot: ArenaSlot) -> bool:
        """Return whether the slot's file exists with the slot's size."""
        try:
            return self.arena.size(slot.name) == slot.size_bytes
        except FileNotFoundError:
            return False

    def open(self, slot: ArenaSlot, *, writable: bool = False) -> int:
        """Open the slot's file; the caller closes the descriptor."""
        try:
            return self.arena.open(slot.name, writable=writable)
        except OSError as error:  # too many open files, most likely
            raise UnavailableError(f"{slot.name} cannot be opened: {error}") from error

    def drop_lost(self, slot: ArenaSlot) -> None:
        """Drop a slot whose file is not intact."""
        log.error("%s was removed or truncated by another process: a new slot replaces it", slot.name)
        self.count("slots_lost")
        self.drop(slot)

    def assign(self, slot: ArenaSlot, lease: Lease, owner: ProcessIdentity) -> Lease:
        """Assign the slot to the lease, on disk first."""
        self.metadata.put(LEASE_METADATA, slot.name, LeaseMetadata(lease, (owner.pid, owner.start_time)))
        self._change(slot, SlotState.LEASED, lease=lease, owner=owner)
        failpoint("agent.leased")
        return lease

    def replace_lease(self, slot: ArenaSlot, lease: Lease, owner: ProcessIdentity) -> None:
        """Replace the lease in memory only."""
        self._change(slot, SlotState.LEASED, lease=lease, owner=owner)

    def begin_seal(self, slot: ArenaSlot) -> None:
        self._change(slot, SlotState.SEALING)

    def end_seal(self, slot: ArenaSlot) -> None:
        """Return the slot to its lease unless it was sealed or lost meanwhile."""
        if slot.state is SlotState.SEALING:
            self._change(slot, SlotState.LEASED)
        self.notify_changed()

    def begin_move(self, slot: ArenaSlot, larger: ArenaSlot) -> None:
        self._change(larger, SlotState.FILLING)
        self._change(slot, SlotState.MOVING)

    def end_move(self, slot: ArenaSlot, larger: ArenaSlot) -> None:
        """Return the slot to its lease and drop the larger one, unless the lease has moved."""
        if slot.state is SlotState.MOVING:
            self._change(slot, SlotState.LEASED)
        if larger.state is SlotState.FILLING:
            self.drop(larger)
        self.notify_changed()

    def move_lease(self, slot: ArenaSlot, larger: ArenaSlot, lease: Lease, owner: ProcessIdentity) -> None:
        """Move the lease to the larger slot; a kill in between leaves it on disk for both slots."""
        self.assign(larger, lease, owner)
        failpoint("agent.grown")
        self._change(slot, SlotState.FREE)
        self.drop(slot)

    def seal(self, slot: ArenaSlot, seal: SealMetadata) -> None:
        """Make the slot's bytes a shard; its metadata is on disk already."""
        self._change(slot, SlotState.SEALED, shard=seal)
        self.drop_metadata(LEASE_METADATA, slot.name)
        self.set_prefaulted(slot, seal.record.size_bytes)

    def make_available(self, slot: ArenaSlot) -> None:
        """Make a recovered shard available after its checksums were verified."""
        self._change(slot, SlotState.SEALED)
        self.notify_changed()

    def mark_unreadable(self, slot: ArenaSlot) -> None:
        self._change(slot, SlotState.UNREADABLE)
        self.notify_changed()

    def release_lease(self, slot: ArenaSlot) -> None:
        """Free a slot whose writer no longer writes."""
        self._change(slot, SlotState.FREE)
        self.metadata.remove(LEASE_METADATA, slot.name)
        self.notify_changed()

    def revoke_lease(self, slot: ArenaSlot, why: str) -> None:
        """Revoke a lease; no other writer may use the file while this writer may still write."""
        log.info("%s: lease revoked, %s", slot.lease and slot.lease.key, why)
        self.count("leases_lost")
        if slot.state is SlotState.LEASED and slot.owner is not None and not slot.owner.is_alive:
            self.release_lease(slot)
        else:
            self._change(slot, SlotState.REVOKED)
            self.drop(slot)

    def drop_metadata(self, kind: str, name: str) -> None:
        """Remove metadata that other metadata has replaced; a failure is harmless."""
        try:
            self.metadata.remove(kind, name)
        except OSError as error:
            log.warning("metadata %s%s was not removed: %s", kind, name, error)

    def free(self, slot: ArenaSlot) -> None:
        """Drop the shard and free its slot; drop a slot that must not be written again."""
        if slot.state is SlotState.UNREADABLE:
            self.drop(slot)
            return
        self.metadata.remove(SEAL_METADATA, slot.name)
        failpoint("agent.deleted")
        self._change(slot, SlotState.FREE)
        if not slot.reusable:
            self.drop(slot)
        self.notify_changed()

    def drop(self, slot: ArenaSlot) -> None:
        """Remove the slot and its file; processes that have mapped it can still read it."""
        for note in (LEASE_METADATA, SEAL_METADATA):
            self.metadata.remove(note, slot.name)
        failpoint("agent.dropped")
        self.arena.remove(slot.name)
        if slot.state is not SlotState.REMOVED:
            self._change(slot, SlotState.REMOVED)
        self.notify_changed()

    def evict(self, names: tuple[str, ...]) -> None:
        """Drop the slots that an eviction decision names."""
        for name in names:
            slot = self._slots.names[name]
            self.count("evicted", slot.record is not None)
            self.drop(slot)

    def retire(self, slot: ArenaSlot) -> None:
        """Drop the shard after its last reader has finished."""
        if not slot.users:
            self.free(slot)
            return
        self.metadata.remove(SEAL_METADATA, slot.name)
        if slot.state is not SlotState.RETIRED:
            self._change(slot, SlotState.RETIRED)

    def add_reader(self, slot: ArenaSlot, user: str) -> None:
        slot.users.add(user)

    def release_reader(self, slot: ArenaSlot, user: str) -> None:
        """Free a retired slot after its last reader."""
        slot.users.discard(user)
        if slot.state is SlotState.RETIRED and not slot.users:
            self.free(slot)
        self.notify_changed()

    def set_holders(self, slot: ArenaSlot, holders: tuple[str, ...]) -> None:
        slot.holders = holders

    def set_prefaulted(self, slot: ArenaSlot, size_bytes: int) -> None:
        """Record that the slot's first ``size_bytes`` have pages."""
        slot.prefaulted_bytes = max(slot.prefaulted_bytes, min(size_bytes, slot.size_bytes))

    def mark_reserved(self, slot: ArenaSlot) -> None:
        slot.reserved = True

    def forbid_reuse(self, slot: ArenaSlot) -> None:
        slot.reusable = False

    # -- damage and unrecognized slots ----------------------------------------------------------------------------

    def record_damage(self, job: str, what: str, reason: str) -> None:
        reason = reason[:_REASON_CHARS]
        log.error("damaged: %s: %s", what, reason)
        self.count("damaged")
        self._damages.append(DamageReport(job, what, reason, time.time_ns()))

    def damage_reports(self) -> tuple[DamageReport, ...]:
        return tuple(self._damages)

    def unrecognized(self, name: str | None = None, *, job: str | None = None) -> tuple[UnrecognizedSlot, ...]:
        """Return the slots that this release cannot read; they stay unchanged, and no writer uses them."""
        with self._lock:
            found = [one for one in self._unrecognized.values() if name in (None, one.name) and job in (None, one.job)]
            return tuple(found)

    def mark_unrecognized(self, name: str, size_bytes: int, reason: str) -> None:
        reason = reason[:_REASON_CHARS]
        log.error("%s (%d bytes) is set aside: %s", name, size_bytes, reason)
        written, key, job = None, None, ""
        if name.startswith(SLOT_PREFIX):
            written, key = self.metadata.stated(SEAL_METADATA, name)
            job = key.job if key is not None else name.removeprefix(SLOT_PREFIX).rsplit(".", 2)[0]
        self._unrecognized[name] = UnrecognizedSlot(name, size_bytes, reason, job, key, written, METADATA_FORMAT)

    def drop_unrecognized(self, names: Collection[str] | None) -> int:
        """Drop unrecognized slots (of these names) and return their bytes."""
        gone = [one for one in self._unrecognized.values() if names is None or one.name in names]
        for one in gone:
            if one.name.startswith(SLOT_PREFIX):
                for note in (LEASE_METADATA, SEAL_METADATA):
                    self.metadata.remove(note, one.name)
                self.arena.remove(one.name)
            del self._unrecognized[one.name]
            log.warning("dropped unrecognized %s on request", one.name)
        self.notify_changed()
        return sum(one.size_bytes for one in gone)
