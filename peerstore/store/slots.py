"""Slots, their states, and the indexes over them.

A slot is one file of the arena. It is in one state, and changes it as follows::

    new        -> free, leased, verifying
    free       -> leased, filling, removed
    leased     -> free, leased, sealing, moving, sealed, revoked, removed
    sealing    -> leased, sealed, revoked, removed
    moving     -> free, leased, revoked, removed
    filling    -> leased, removed
    revoked    -> removed
    verifying  -> free, unreadable, sealed, removed
    unreadable -> sealed, removed
    sealed     -> free, retired, removed
    retired    -> free, removed
    removed    ->

A sealed or retired slot is pinned while it has users. An eviction removes a slot, or frees it for its next writer.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Hashable, KeysView, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from peerstore.daemon_process import ProcessIdentity
from peerstore.shard_records import Lease, ShardKey, ShardRecord, VersionId
from peerstore.store.slot_eviction import SlotUse, SlotView

SLOT_PREFIX = "slot."
K = TypeVar("K", bound=Hashable)


class SlotState(enum.Enum):
    """State of a slot."""

    NEW = "new"
    """Not in the table yet."""
    FREE = "free"
    LEASED = "leased"
    SEALING = "sealing"
    """Its bytes are being hashed; the lease stays valid."""
    MOVING = "moving"
    """Its bytes are being copied into a larger slot; the lease stays valid."""
    FILLING = "filling"
    """The bytes of a smaller slot are being copied into it."""
    REVOKED = "revoked"
    """Its lease is revoked, but the writer may still write: no other writer may use the file."""
    VERIFYING = "verifying"
    """It holds a shard of a killed agent; the shard's checksums are not verified yet."""
    UNREADABLE = "unreadable"
    """Like verifying, but reads fail for now: they are retried, no call waits, and it may be evicted."""
    SEALED = "sealed"
    RETIRED = "retired"
    """Its owner dropped the shard; its readers may finish."""
    REMOVED = "removed"


_S = SlotState
TRANSITIONS: Mapping[SlotState, tuple[SlotState, ...]] = {
    _S.NEW: (_S.FREE, _S.LEASED, _S.VERIFYING),
    _S.FREE: (_S.LEASED, _S.FILLING, _S.REMOVED),
    _S.LEASED: (_S.FREE, _S.LEASED, _S.SEALING, _S.MOVING, _S.SEALED, _S.REVOKED, _S.REMOVED),
    _S.SEALING: (_S.LEASED, _S.SEALED, _S.REVOKED, _S.REMOVED),
    _S.MOVING: (_S.FREE, _S.LEASED, _S.REVOKED, _S.REMOVED),
    _S.FILLING: (_S.LEASED, _S.REMOVED),
    _S.REVOKED: (_S.REMOVED,),
    _S.VERIFYING: (_S.FREE, _S.UNREADABLE, _S.SEALED, _S.REMOVED),
    _S.UNREADABLE: (_S.SEALED, _S.REMOVED),
    _S.SEALED: (_S.FREE, _S.RETIRED, _S.REMOVED),
    _S.RETIRED: (_S.FREE, _S.REMOVED),
    _S.REMOVED: (),
}
LEASE_STATES = (_S.LEASED, _S.SEALING, _S.MOVING)
"""States with a lease and its owner."""
SHARD_STATES = (_S.VERIFYING, _S.UNREADABLE, _S.SEALED, _S.RETIRED)
"""States with a shard."""
UNVERIFIED_STATES = (_S.VERIFYING, _S.UNREADABLE)
_BUSY_STATES = (_S.SEALING, _S.MOVING, _S.VERIFYING, _S.RETIRED)


@dataclass
class ArenaSlot:
    """One file of the arena; only the table changes it."""

    name: str
    generation: int
    size_bytes: int
    prefaulted_bytes: int
    job: str
    part: int
    state: SlotState = SlotState.NEW
    lease: Lease | None = None
    owner: ProcessIdentity | None = None
    record: ShardRecord | None = None
    holders: tuple[str, ...] = ()
    """For a replica of another node's shard: its holders, the writer's node first."""
    sealed_lease_id: str = ""
    """Id of the lease that sealed it, so that a repeated seal returns the same result."""
    users: set[str] = field(default_factory=set)
    """Pins of readers and holds of uploads."""
    reusable: bool = True
    """Whether the file may be written again. False if a reader without a pin may read it.

    Such a reader began under a killed agent, or its pin was revoked.
    """
    reserved: bool = False
    """Whether its writer maps it for later saves, even while it holds a sealed shard."""

    @property
    def use(self) -> SlotUse:
        if self.state in SHARD_STATES:
            return SlotUse.SEALED
        return SlotUse.FREE if self.state is SlotState.FREE else SlotUse.LEASED

    @property
    def available_shard(self) -> ShardRecord | None:
        """The shard, if it is sealed and verified."""
        return self.record if self.state is SlotState.SEALED else None

    @property
    def view(self) -> SlotView:
        record = self.record if self.state is not SlotState.RETIRED else None
        return SlotView(
            self.name,
            self.use,
            self.size_bytes,
            self.job,
            self.part,
            record.key.version_id if record else None,
            bool(self.users) or self.state in _BUSY_STATES,
            self.reusable,
        )


class _Index(dict[K, dict[str, ArenaSlot]]):
    """Slots by a key, oldest entry first; a key without slots is absent."""

    def put(self, key: K, slot: ArenaSlot) -> None:
        self.setdefault(key, {})[slot.name] = slot

    def remove(self, key: K, slot: ArenaSlot) -> None:
        found = self[key]
        del found[slot.name]
        if not found:
            del self[key]

    def first(self, key: K) -> ArenaSlot | None:
        return next(iter(self.get(key, {}).values()), None)

    def all(self, key: K) -> list[ArenaSlot]:
        return list(self.get(key, {}).values())


class VersionShards:
    """The shards of one version that are in the table, without parities."""

    def __init__(self) -> None:
        self.parts: Counter[int] = Counter()
        """Number of slots of each part, in any state."""
        self._available: Counter[int] = Counter()
        self._totals: Counter[int] = Counter()

    @property
    def available_parts(self) -> KeysView[int]:
        """Parts with a verified shard on this node."""
        return self._available.keys()

    @property
    def total_parts(self) -> int:
        """Number of the version's parts on all nodes, as its verified shards state it."""
        return max(self._totals, default=0)

    def add(self, record: ShardRecord, by: int, *, available: bool) -> None:
        counted = [(self.parts, record.key.part)]
        if available:
            counted += [(self._available, record.key.part), (self._totals, record.parts)]
        for counter, number in counted:
            counter[number] += by
            if not counter[number]:
                del counter[number]


class SlotIndexes:
    """The table's slots by name, state, key, lease, job, writer and version."""

    def __init__(self) -> None:
        self.names: dict[str, ArenaSlot] = {}
        self.states: _Index[SlotState] = _Index()
        self.keys: _Index[ShardKey] = _Index()
        """Slots that hold or will hold a shard, without retired slots."""
        self.shards: _Index[ShardKey] = _Index()
        """Slots that hold a shard, including retired slots."""
        self.leases: _Index[str] = _Index()
        self.jobs: _Index[str] = _Index()
        self.writers: _Index[tuple[str, int]] = _Index()
        self.versions: dict[str, dict[VersionId, VersionShards]] = {}
        self.size_bytes = 0

    def add(self, slot: ArenaSlot) -> None:
        self.names[slot.name] = slot
        self.size_bytes += slot.size_bytes
        for index, key in self._entries(slot):
            index.put(key, slot)
        self._count_shard(slot, 1)

    def remove(self, slot: ArenaSlot) -> None:
        del self.names[slot.name]
        self.size_bytes -= slot.size_bytes
        for index, key in self._entries(slot):
            index.remove(key, slot)
        self._count_shard(slot, -1)

    def update(self, slot: ArenaSlot, change: Callable[[], None]) -> None:
        """Apply the change and index the slot by its new fields; its position in ``names`` stays."""
        for index, key in self._entries(slot):
            index.remove(key, slot)
        self._count_shard(slot, -1)
        try:
            change()
        finally:
            for index, key in self._entries(slot):
                index.put(key, slot)
            self._count_shard(slot, 1)

    def _entries(self, slot: ArenaSlot) -> list[tuple[_Index[object], object]]:
        found: list[tuple[object, object]] = [
            (self.states, slot.state),
            (self.jobs, slot.job),
            (self.writers, (slot.job, slot.part)),
        ]
        if slot.lease is not None:
            found += [(self.keys, slot.lease.key), (self.leases, slot.lease.id)]
        if slot.record is not None:
            found.append((self.shards, slot.record.key))
            if slot.state is not SlotState.RETIRED:
                found.append((self.keys, slot.record.key))
        if slot.state is SlotState.SEALED:
            found.append((self.leases, slot.sealed_lease_id))
        return found  # type: ignore[return-value]

    def _count_shard(self, slot: ArenaSlot, by: int) -> None:
        record = slot.record
        if record is None or record.key.kind:
            return
        job, version_id = record.key.job, record.key.version_id
        versions = self.versions.setdefault(job, {})
        shards = versions.setdefault(version_id, VersionShards())
        shards.add(record, by, available=slot.state is SlotState.SEALED)
        if not shards.parts:
            del versions[version_id]
        if not versions:
            del self.versions[job]
