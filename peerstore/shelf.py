"""The slots of one arena and what is in them: the state that the store's rooms share, behind one lock."""

from __future__ import annotations

import dataclasses
import enum
import logging
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from peerstore.arena import Arena
from peerstore.crashpoints import reach
from peerstore.errors import LeaseLostError, ShardNotFoundError, UnavailableError
from peerstore.ledger import Limits, SlotView
from peerstore.notes import LEASE, SEAL, LeaseNote, Notes
from peerstore.owners import Owner
from peerstore.records import ArenaStatus, Damage, Lease, SetAside, ShardKey, ShardRecord, SlotState

log = logging.getLogger(__name__)

SLOT = "slot."
_DAMAGES = 1000
_REASON_CHARS = 500


class Standing(enum.Enum):
    """What a sealed shard is to others."""

    OFFERED = "offered"
    ADOPTING = "adopting"
    """A killed agent left it, and its checksums were not looked at yet."""
    UNREADABLE = "unreadable"
    """As above, and it could not be read for a while: nobody waits for it any more. It is tried again, and may be given
    up for newer versions as others are."""
    GIVEN_UP = "given up"
    """Its owner forgot it; those who read it may finish."""


@dataclass
class Slot:
    """One file of the arena."""

    name: str
    generation: int
    size_bytes: int
    warm_bytes: int
    job: str
    part: int
    lease: Lease | None = None
    owner: Owner | None = None
    sealing: bool = False
    record: ShardRecord | None = None
    holders: tuple[str, ...] = ()
    """For a copy of another node's shard: who was to hold it, the writer's node first."""
    sealed_under: str = ""
    """Id of the lease it was sealed under: repeating the call gives the same answer."""
    standing: Standing = Standing.OFFERED
    users: set[str] = field(default_factory=set)
    """Pins of readers and holds of uploads."""
    reusable: bool = True
    """Whether the file may be written again. Not where somebody may still read it of whom this agent does not know: a
    reader that a killed agent had let in, or one whose pin was taken back while it was alive."""
    filling: bool = False
    """What a lease has written so far is being copied into it."""

    @property
    def state(self) -> SlotState:
        if self.lease is not None or self.filling:
            return SlotState.LEASED
        return SlotState.SEALED if self.record is not None else SlotState.FREE

    @property
    def offered(self) -> ShardRecord | None:
        """The shard in it, when it is one that others may count on."""
        return self.record if self.standing is Standing.OFFERED else None

    @property
    def view(self) -> SlotView:
        record = self.record if self.standing is not Standing.GIVEN_UP else None
        return SlotView(
            self.name,
            self.state,
            self.size_bytes,
            self.job,
            self.part,
            record.key.group if record else None,
            bool(self.users) or self.sealing or self.standing in (Standing.ADOPTING, Standing.GIVEN_UP),
            self.reusable,
        )


class Shelf:
    """All slots. Whoever looks or changes holds ``lock``; ``changed`` tells those who wait for a slot."""

    def __init__(self, arena: Arena, limits: Limits, clock: Callable[[], float]) -> None:
        self.arena = arena
        self.notes = Notes(arena)
        self._limits = limits
        self.clock = clock
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.slots: dict[str, Slot] = {}
        self.aside: dict[str, SetAside] = {}
        """Slots that this version of the agent does not understand: they stay as they are, and nobody is given them."""
        self.damages: deque[Damage] = deque(maxlen=_DAMAGES)
        self.counters: defaultdict[str, float] = defaultdict(float)
        self.closed = False

    def check_open(self) -> None:
        if self.closed:
            raise UnavailableError("this store is shutting down")

    @property
    def aside_bytes(self) -> int:
        return sum(one.size_bytes for one in self.aside.values())

    @property
    def said_of_aside(self) -> str:
        """For whoever finds no room."""
        if not self.aside_bytes:
            return ""
        return (
            f"; {self.aside_bytes} bytes more are in slots that another version of the agent left: run that version "
            "again, or drop them (tieredckpt gc JOB --set-aside)"
        )

    @property
    def limits(self) -> Limits:
        """What is set aside takes its part of the budget."""
        return dataclasses.replace(self._limits, budget_bytes=max(0, self._limits.budget_bytes - self.aside_bytes))

    def set_budget(self, budget_bytes: int) -> None:
        """Free slots beyond it go at once, what may be given up with the next lease; what has to stay, stays."""
        self._limits = dataclasses.replace(self._limits, budget_bytes=budget_bytes)
        over = sum(view.size_bytes for view in self.views()) - self.limits.budget_bytes
        for slot in sorted(self.slots.values(), key=lambda slot: -slot.size_bytes):
            if over > 0 and slot.state is SlotState.FREE:
                self.drop(slot)
                over -= slot.size_bytes
        self.changed.notify_all()

    # -- looking ----------------------------------------------------------------------------------------------

    def views(self) -> list[SlotView]:
        """All slots, and those that were removed and still take memory, since some process has them mapped."""
        removed = self.arena.lingering().items()
        return [slot.view for slot in self.slots.values()] + [
            SlotView(name, SlotState.LEASED, size_bytes, "", -1) for name, size_bytes in removed
        ]

    def offered(self, job: str | None = None, *, parities: bool = False) -> Iterator[tuple[Slot, ShardRecord]]:
        """Sealed shards (of ``job``) that are whole as far as this agent has checked itself; or its ``parities``."""
        for slot in self.slots.values():
            record = slot.offered
            if record is not None and job in (None, record.key.job) and bool(record.key.kind) is parities:
                yield slot, record

    def sealed(self, key: ShardKey) -> tuple[Slot, ShardRecord]:
        for slot, record in self.offered(key.job, parities=bool(key.kind)):
            if record.key == key:
                return slot, record
        raise ShardNotFoundError(f"{key} is not on this node")

    def slot_of(self, key: ShardKey) -> Slot | None:
        """The slot that holds or will hold ``key``."""
        for slot in self.slots.values():
            record = slot.record if slot.standing is not Standing.GIVEN_UP else None
            if key in (record and record.key, slot.lease and slot.lease.key):
                return slot
        return None

    def leased(self, lease_id: str) -> tuple[Slot, ShardRecord | None]:
        """The slot of a lease, and the shard when it is sealed already."""
        for slot in self.slots.values():
            if slot.lease is not None and slot.lease.id == lease_id:
                return slot, None
            if slot.offered is not None and slot.sealed_under == lease_id:
                return slot, slot.offered
        raise LeaseLostError(f"lease {lease_id} is not known: it expired, was fenced, or its slot was given to another")

    def status(self, pins: int) -> ArenaStatus:
        slots = self.slots.values()
        return ArenaStatus(
            budget_bytes=self._limits.budget_bytes,
            allocated_bytes=sum(slot.size_bytes for slot in slots) + sum(self.arena.lingering().values()),
            sealed_bytes=sum(slot.record.size_bytes for slot in slots if slot.record),
            slots=len(slots),
            free_slots=sum(slot.state is SlotState.FREE for slot in slots),
            leases=sum(slot.state is SlotState.LEASED for slot in slots),
            pins=pins,
            aside_bytes=self.aside_bytes,
        )

    # -- changing ---------------------------------------------------------------------------------------------

    def create(self, job: str, part: int, size_bytes: int) -> Slot:
        generation = secrets.randbits(62)
        name = f"{SLOT}{job}.{part}.{generation:016x}"
        self.arena.create(name, size_bytes)
        reach("agent.created")
        slot = self.slots[name] = Slot(name, generation, size_bytes, 0, job, part)
        return slot

    def intact(self, slot: Slot) -> bool:
        """Whether the slot's file is still there, with its size: else somebody has removed or truncated it."""
        try:
            return self.arena.size(slot.name) == slot.size_bytes
        except FileNotFoundError:
            return False

    def open(self, slot: Slot, *, writable: bool = False) -> int:
        """The slot's file, for whoever asked."""
        try:
            return self.arena.open(slot.name, writable=writable)
        except OSError as error:  # too many open files, most likely
            raise UnavailableError(f"{slot.name} cannot be opened: {error}") from error

    def lose(self, slot: Slot) -> None:
        """Drop a slot whose file is not intact."""
        log.error("%s was removed or truncated by somebody else: a new one takes its place", slot.name)
        self.counters["slots_lost"] += 1
        self.drop(slot)

    def give(self, slot: Slot, lease: Lease, owner: Owner) -> Lease:
        """The slot belongs to ``lease`` from here on."""
        self.notes.put(LEASE, slot.name, LeaseNote(lease, (owner.pid, owner.started)))
        slot.lease, slot.owner, slot.job, slot.part = lease, owner, lease.key.job, lease.key.seat
        reach("agent.leased")
        return lease

    def take_back(self, slot: Slot) -> None:
        """The slot is free again; its owner has said that it does not write any more, or is dead."""
        slot.lease = slot.owner = None
        self.notes.remove(LEASE, slot.name)
        self.changed.notify_all()

    def end_lease(self, slot: Slot, why: str) -> None:
        """Take a lease back unasked. While its writer may still write, the file is not given to anybody else."""
        log.info("%s: lease taken back, %s", slot.lease and slot.lease.key, why)
        self.counters["leases_lost"] += 1
        safe = not slot.sealing and slot.owner is not None and not slot.owner.alive
        self.take_back(slot)
        if not safe:
            self.drop(slot)

    def drop_note(self, kind: str, name: str) -> None:
        """A note that another one has taken the place of: where it cannot be removed now, it does no harm."""
        try:
            self.notes.remove(kind, name)
        except OSError as error:
            log.warning("note %s%s was not removed: %s", kind, name, error)

    def clear(self, slot: Slot) -> None:
        """What was sealed in the slot is gone, the slot is free. One that cannot be read is not written to again."""
        if slot.standing is Standing.UNREADABLE:
            self.drop(slot)
            return
        self.notes.remove(SEAL, slot.name)
        reach("agent.forgot")
        slot.record, slot.sealed_under, slot.holders, slot.standing = None, "", (), Standing.OFFERED
        slot.users.clear()
        if not slot.reusable:
            self.drop(slot)
        self.changed.notify_all()

    def drop(self, slot: Slot) -> None:
        """The slot itself is gone. Those who mapped it keep what they see."""
        for note in (LEASE, SEAL):
            self.notes.remove(note, slot.name)
        reach("agent.dropped")
        self.arena.remove(slot.name)
        self.slots.pop(slot.name, None)
        self.changed.notify_all()

    def set_aside(self, name: str, size_bytes: int, reason: str) -> None:
        reason = reason[:_REASON_CHARS]
        log.error("%s (%d bytes) is set aside: %s", name, size_bytes, reason)
        self.aside[name] = SetAside(name, size_bytes, reason)

    def drop_aside(self, names: Collection[str] | None) -> int:
        """Somebody says that what was set aside (of these names) is of no use; how many bytes it had."""
        gone = [one for one in self.aside.values() if names is None or one.name in names]
        for one in gone:
            if one.name.startswith(SLOT):
                for note in (LEASE, SEAL):
                    self.notes.remove(note, one.name)
                self.arena.remove(one.name)
            del self.aside[one.name]
            log.warning("%s, which was set aside, is dropped on request", one.name)
        self.changed.notify_all()
        return sum(one.size_bytes for one in gone)

    def make_free(self, names: tuple[str, ...]) -> None:
        """Drop the slots that a decision gave up."""
        for name in names:
            slot = self.slots[name]
            self.counters["evicted"] += slot.record is not None
            self.drop(slot)

    def give_up(self, slot: Slot) -> None:
        """Nobody is offered this shard again; it goes when the last reader is done."""
        if not slot.users:
            self.clear(slot)
            return
        self.notes.remove(SEAL, slot.name)
        slot.standing = Standing.GIVEN_UP

    def release(self, slot: Slot, user: str) -> None:
        """One who used the shard is done."""
        slot.users.discard(user)
        if slot.standing is Standing.GIVEN_UP and not slot.users:
            self.clear(slot)
        self.changed.notify_all()

    def note_damage(self, job: str, what: str, reason: str) -> None:
        reason = reason[:_REASON_CHARS]
        log.error("damaged: %s: %s", what, reason)
        self.counters["damaged"] += 1
        self.damages.append(Damage(job, what, reason, time.time_ns()))
