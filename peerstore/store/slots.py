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
from collections.abc import Callable, Hashable, Iterator, KeysView, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from peerstore.daemon_process import ProcessIdentity
from peerstore.errors import LeaseLostError, ShardNotFoundError
from peerstore.shard_records import Lease, ShardKey, ShardRecord, VersionId
from peerstore.store.arena import Arena
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

    def is_intact(self, arena: Arena) -> bool:
        """Return whether the slot's file in ``arena`` exists with the slot's size."""
        try:
            return arena.size(self.name) == self.size_bytes
        except FileNotFoundError:
            return False

    def add_user(self, user: str) -> None:
        """Pin the shard for a reader or an upload."""
        self.users.add(user)

    def set_holders(self, holders: tuple[str, ...]) -> None:
        self.holders = holders

    def mark_reserved(self) -> None:
        self.reserved = True

    def forbid_reuse(self) -> None:
        self.reusable = False

    def set_prefaulted(self, size_bytes: int) -> None:
        """Record that the first ``size_bytes`` have pages."""
        self.prefaulted_bytes = max(self.prefaulted_bytes, min(size_bytes, self.size_bytes))

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
    """The table's slots, found by name, state, key, lease, job, writer or version."""

    def __init__(self) -> None:
        self.size_bytes = 0
        """Size of all slots."""
        self._names: dict[str, ArenaSlot] = {}
        self._states: _Index[SlotState] = _Index()
        self._keys: _Index[ShardKey] = _Index()
        """Slots that hold or will hold a shard, without retired slots."""
        self._shards: _Index[ShardKey] = _Index()
        """Slots that hold a shard, including retired slots."""
        self._leases: _Index[str] = _Index()
        self._jobs: _Index[str] = _Index()
        self._writers: _Index[tuple[str, int]] = _Index()
        self._versions: dict[str, dict[VersionId, VersionShards]] = {}

    # -- lookups --------------------------------------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> ArenaSlot:
        return self._names[name]

    def get(self, name: str) -> ArenaSlot | None:
        return self._names.get(name)

    def all(self) -> list[ArenaSlot]:
        return list(self._names.values())

    def in_state(self, *states: SlotState) -> list[ArenaSlot]:
        return [slot for state in states for slot in self._states.all(state)]

    def of_job(self, job: str) -> list[ArenaSlot]:
        return self._jobs.all(job)

    def of_writer(self, job: str, part: int) -> list[ArenaSlot]:
        return self._writers.all((job, part))

    def views_for_writer(self, job: str, part: int) -> list[SlotView]:
        """Return the writer's own slots, and all free slots."""
        mine = self._writers.get((job, part), {})
        free = self._states.get(SlotState.FREE, {})
        return [slot.view for slot in (mine | free).values()]

    def available_shards(
        self, job: str | None = None, *, parities: bool = False
    ) -> Iterator[tuple[ArenaSlot, ShardRecord]]:
        """Yield the verified shards (of ``job``), or only the parities."""
        for slot in self.all() if job is None else self.of_job(job):
            record = slot.available_shard
            if record is not None and bool(record.key.kind) is parities:
                yield slot, record

    def versions(self, job: str) -> Mapping[VersionId, VersionShards]:
        """Return the job's versions with shards on this node."""
        return self._versions.get(job, {})

    def jobs_with_shards(self) -> KeysView[str]:
        return self._versions.keys()

    def parts_here(self, job: str, version_id: VersionId) -> tuple[int, ...]:
        """Return the version's parts with a shard on this node, verified or not."""
        found = self.versions(job).get(version_id)
        return tuple(sorted(found.parts)) if found is not None else ()

    def find_shard(self, key: ShardKey) -> tuple[ArenaSlot, ShardRecord]:
        for slot in self._keys.all(key):
            record = slot.available_shard
            if record is not None:
                return slot, record
        raise ShardNotFoundError(f"{key} is not on this node")

    def with_shard(self, key: ShardKey) -> list[ArenaSlot]:
        """Return the slots with this shard, including retired slots."""
        return self._shards.all(key)

    def for_key(self, key: ShardKey) -> ArenaSlot | None:
        """Return the slot that holds or will hold ``key``."""
        return self._keys.first(key)

    def for_lease(self, lease_id: str) -> tuple[ArenaSlot, ShardRecord | None]:
        """Return the slot of a lease, and the shard if it is already sealed."""
        slot = self._leases.first(lease_id)
        if slot is None:
            raise LeaseLostError(
                f"lease {lease_id} is not known: it expired, was fenced, or its slot has another lease"
            )
        return slot, slot.available_shard

    def leased(self, lease_id: str) -> ArenaSlot | None:
        """Return the slot of a lease that is not sealed yet."""
        return next((slot for slot in self._leases.all(lease_id) if slot.lease is not None), None)

    # -- changes --------------------------------------------------------------------------------------------------

    def add(self, slot: ArenaSlot) -> None:
        self._names[slot.name] = slot
        self.size_bytes += slot.size_bytes
        for index, key in self._entries(slot):
            index.put(key, slot)
        self._count_shard(slot, 1)

    def remove(self, slot: ArenaSlot) -> None:
        del self._names[slot.name]
        self.size_bytes -= slot.size_bytes
        for index, key in self._entries(slot):
            index.remove(key, slot)
        self._count_shard(slot, -1)

    def update(self, slot: ArenaSlot, change: Callable[[], None]) -> None:
        """Apply the change and index the slot by its new fields; its position in :meth:`all` stays."""
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
            (self._states, slot.state),
            (self._jobs, slot.job),
            (self._writers, (slot.job, slot.part)),
        ]
        if slot.lease is not None:
            found += [(self._keys, slot.lease.key), (self._leases, slot.lease.id)]
        if slot.record is not None:
            found.append((self._shards, slot.record.key))
            if slot.state is not SlotState.RETIRED:
                found.append((self._keys, slot.record.key))
        if slot.state is SlotState.SEALED:
            found.append((self._leases, slot.sealed_lease_id))
        return found  # type: ignore[return-value]

    def _count_shard(self, slot: ArenaSlot, by: int) -> None:
        record = slot.record
        if record is None or record.key.kind:
            return
        job, version_id = record.key.job, record.key.version_id
        versions = self._versions.setdefault(job, {})
        shards = versions.setdefault(version_id, VersionShards())
        shards.add(record, by, available=slot.state is SlotState.SEALED)
        if not shards.parts:
            del versions[version_id]
        if not versions:
            del self._versions[job]
