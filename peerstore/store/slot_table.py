"""The table of a node's slots under one lock, and every change of a slot."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import threading
from collections.abc import Callable

from peerstore.daemon_process import ProcessIdentity
from peerstore.errors import UnavailableError
from peerstore.failpoints import failpoint
from peerstore.shard_records import (
    ArenaStatus,
    Lease,
)
from peerstore.store.arena import Arena
from peerstore.store.incidents import StoreIncidents, UnrecognizedSlots
from peerstore.store.slot_eviction import SlotLimits, SlotUse, SlotView
from peerstore.store.slot_metadata import (
    LEASE_METADATA,
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
)

log = logging.getLogger(__name__)


class TableLock:
    """The reentrant lock of a table until it is closed, and the threads that wait for a change."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = False

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout_s: float | None) -> None:
        """Release the lock and wait for a change; callers hold it."""
        self._changed.wait(timeout_s)

    def wait_closed(self, timeout_s: float) -> None:
        self._changed.wait_for(lambda: self._closed, timeout_s)

    def notify_all(self) -> None:
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


class SlotTable:
    """All slots of the arena and their changes.

    Callers hold :attr:`lock` around operations that must be atomic.
    """

    def __init__(self, arena: Arena, limits: SlotLimits, clock: Callable[[], float]) -> None:
        self.arena = arena
        self.metadata = MetadataStore(arena)
        self.blobs = BlobStore(arena)
        self.clock = clock
        self.lock = TableLock()
        self.slots = SlotIndexes()
        self.incidents = StoreIncidents()
        self.unrecognized = UnrecognizedSlots(arena, self.metadata)
        self._limits = limits

    # -- budget ---------------------------------------------------------------------------------------------------

    @property
    def allocated_bytes(self) -> int:
        """Size of all slots, including removed slots that still use memory."""
        return self.slots.size_bytes + sum(self.arena.removed_in_use().values())

    @property
    def limits(self) -> SlotLimits:
        """The limits, less the budget that unrecognized slots take."""
        available = max(0, self._limits.budget_bytes - self.unrecognized.size_bytes)
        return dataclasses.replace(self._limits, budget_bytes=available)

    def set_budget(self, budget_bytes: int) -> None:
        """Drop free slots beyond the budget now; leases evict further slots later."""
        self._limits = dataclasses.replace(self._limits, budget_bytes=budget_bytes)
        over = self.allocated_bytes - self.limits.budget_bytes
        for slot in sorted(self.slots.in_state(SlotState.FREE), key=lambda slot: -slot.size_bytes):
            if over > 0:
                self.drop(slot)
                over -= slot.size_bytes
        self.lock.notify_all()

    def status(self, pins: int) -> ArenaStatus:
        slots = self.slots.all()
        return ArenaStatus(
            budget_bytes=self._limits.budget_bytes,
            allocated_bytes=self.allocated_bytes,
            sealed_bytes=sum(slot.record.size_bytes for slot in slots if slot.record),
            slots=len(slots),
            free_slots=sum(slot.use is SlotUse.FREE for slot in slots),
            leases=sum(slot.use is SlotUse.LEASED for slot in slots),
            pins=pins,
            unrecognized_bytes=self.unrecognized.size_bytes,
        )

    def slot_views(self) -> list[SlotView]:
        """Return all slots, including removed slots that a process still has mapped."""
        removed = self.arena.removed_in_use().items()
        return [slot.view for slot in self.slots.all()] + [
            SlotView(name, SlotUse.LEASED, size_bytes, "", -1) for name, size_bytes in removed
        ]

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
            self.slots.add(slot)
        elif state is SlotState.REMOVED:
            self.slots.remove(slot)
            change()
        else:
            self.slots.update(slot, change)

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

    def drop_lost(self, slot: ArenaSlot) -> None:
        """Drop a slot whose file is not intact."""
        log.error("%s was removed or truncated by another process: a new slot replaces it", slot.name)
        self.incidents.count("slots_lost")
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

    def resume_lease(self, slot: ArenaSlot, lease: Lease) -> None:
        """Return the slot to its lease after a seal or a move, unless that ended the lease."""
        if slot.lease is lease and slot.state in (SlotState.SEALING, SlotState.MOVING):
            self._change(slot, SlotState.LEASED)
        self.lock.notify_all()

    def begin_move(self, slot: ArenaSlot, larger: ArenaSlot) -> None:
        self._change(larger, SlotState.FILLING)
        self._change(slot, SlotState.MOVING)

    def move_lease(self, slot: ArenaSlot, larger: ArenaSlot, lease: Lease, owner: ProcessIdentity) -> None:
        """Move the lease to the larger slot; a kill in between leaves it on disk for both slots."""
        self.assign(larger, lease, owner)
        failpoint("agent.grown")
        self._change(slot, SlotState.FREE)
        self.drop(slot)

    def seal(self, slot: ArenaSlot, seal: SealMetadata) -> None:
        """Make the slot's bytes a shard; its metadata is on disk already."""
        self._change(slot, SlotState.SEALED, shard=seal)
        self.metadata.remove_replaced(LEASE_METADATA, slot.name)
        slot.set_prefaulted(seal.record.size_bytes)

    def make_available(self, slot: ArenaSlot) -> None:
        """Make a recovered shard available after its checksums were verified."""
        self._change(slot, SlotState.SEALED)
        self.lock.notify_all()

    def mark_unreadable(self, slot: ArenaSlot) -> None:
        self._change(slot, SlotState.UNREADABLE)
        self.lock.notify_all()

    def release_lease(self, slot: ArenaSlot) -> None:
        """Free a slot whose writer no longer writes."""
        self._change(slot, SlotState.FREE)
        self.metadata.remove(LEASE_METADATA, slot.name)
        self.lock.notify_all()

    def revoke_lease(self, slot: ArenaSlot, why: str) -> None:
        """Revoke a lease; no other writer may use the file while this writer may still write."""
        log.info("%s: lease revoked, %s", slot.lease and slot.lease.key, why)
        self.incidents.count("leases_lost")
        if slot.state is SlotState.LEASED and slot.owner is not None and not slot.owner.is_alive:
            self.release_lease(slot)
        else:
            self._change(slot, SlotState.REVOKED)
            self.drop(slot)

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
        self.lock.notify_all()

    def drop(self, slot: ArenaSlot) -> None:
        """Remove the slot and its file; processes that have mapped it can still read it."""
        for note in (LEASE_METADATA, SEAL_METADATA):
            self.metadata.remove(note, slot.name)
        failpoint("agent.dropped")
        self.arena.remove(slot.name)
        if slot.state is not SlotState.REMOVED:
            self._change(slot, SlotState.REMOVED)
        self.lock.notify_all()

    def evict(self, names: tuple[str, ...]) -> None:
        """Drop the slots that an eviction decision names."""
        for name in names:
            slot = self.slots[name]
            self.incidents.count("evicted", slot.record is not None)
            self.drop(slot)

    def retire(self, slot: ArenaSlot) -> None:
        """Drop the shard after its last reader has finished."""
        if not slot.users:
            self.free(slot)
            return
        self.metadata.remove(SEAL_METADATA, slot.name)
        if slot.state is not SlotState.RETIRED:
            self._change(slot, SlotState.RETIRED)

    def release_reader(self, slot: ArenaSlot, user: str) -> None:
        """Free a retired slot after its last reader."""
        slot.users.discard(user)
        if slot.state is SlotState.RETIRED and not slot.users:
            self.free(slot)
        self.lock.notify_all()
