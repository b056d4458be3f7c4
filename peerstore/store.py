"""One node's store: slots, leases, sealed shards. The shell around :mod:`peerstore.ledger`.

::

    lease ──> write (through a mapping of the slot) ──> seal ──> read (pinned) ──> given up for a newer version
      │                                                  │
      └─ abandoned, expired, fenced: the slot is free    └─ note with checksums beside the slot: survives this process
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec

from peerstore import checksum
from peerstore.arena import Arena
from peerstore.errors import (
    ArenaBusyError,
    ArenaFullError,
    FencedError,
    LeaseLostError,
    PeerStoreError,
    RequestError,
    ShardDamagedError,
    ShardNotFoundError,
    UnavailableError,
)
from peerstore.ledger import (
    Busy,
    CreateSlot,
    Full,
    Limits,
    SlotView,
    UseSlot,
    choose_slot,
    make_room,
    whole_groups,
)
from peerstore.names import incarnation_name, job_name
from peerstore.owners import Owner, myself
from peerstore.pages import Mapping, populate_file
from peerstore.records import (
    CHUNK_BYTES,
    ArenaStatus,
    Damage,
    Group,
    JobStatus,
    Lease,
    Pin,
    ShardFact,
    ShardKey,
    ShardRecord,
    SlotInfo,
    SlotState,
    StoreStatus,
)
from peerstore.settings import StoreSettings, budget_bytes

log = logging.getLogger(__name__)

MAX_META_BYTES = 16 << 20
MAX_BLOB_BYTES = 48 << 20
_ADOPTION_WAIT_S = 600.0
_MAX_PARTS = 1 << 20


class SealListener:
    """Told what happens to shards. Calls come from the thread that caused them and must return quickly."""

    def sealed(self, record: ShardRecord) -> None:
        """A shard was sealed (or adopted from a killed agent's arena)."""

    def damaged(self, key: ShardKey, record: ShardRecord, reason: str) -> None:
        """A sealed shard was found to be damaged and was dropped: after a restart, or when it was looked at again."""

    def marked(self, job: str, group: Group) -> None:
        """Somebody who can see more than this node says that a version is whole."""

    def claimed(self, job: str, epoch: int) -> None:
        """A new incarnation owns the job."""


class _LeaseNote(msgspec.Struct, frozen=True):
    lease: Lease
    owner: tuple[int, int]


class _SealNote(msgspec.Struct, frozen=True):
    lease_id: str
    record: ShardRecord


class _ClaimNote(msgspec.Struct, frozen=True):
    epoch: int
    incarnation: str
    marked: tuple[Group, ...] = ()


@dataclass
class _Slot:
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
    sealed_under: str = ""
    """Id of the lease it was sealed under: repeating the call gives the same answer."""
    adopting: bool = False
    users: set[str] = field(default_factory=set)
    """Pins of readers and holds of uploads."""

    @property
    def state(self) -> SlotState:
        if self.lease is not None:
            return SlotState.LEASED
        return SlotState.SEALED if self.record is not None else SlotState.FREE

    @property
    def view(self) -> SlotView:
        record = self.record
        return SlotView(
            self.name,
            self.state,
            self.size_bytes,
            self.job,
            self.part,
            record.key.group if record else None,
            bool(self.users) or self.adopting,
        )


@dataclass
class _Job:
    epoch: int = 0
    incarnation: str = ""
    marked: set[Group] = field(default_factory=set)
    clients: Counter[Owner] = field(default_factory=Counter)
    seen: float = 0.0


@dataclass(frozen=True)
class _PinOf:
    slot: str
    owner: Owner


class NodeStore:
    """Sealed shards in this machine's memory. Every method may be called from any thread."""

    def __init__(
        self,
        arena: Arena,
        settings: StoreSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        threads: int = 0,
    ) -> None:
        settings = settings or StoreSettings()
        self._arena = arena
        self._settings = settings
        self._limits = Limits(budget_bytes(settings.budget), settings.slots_per_part, settings.burst_slots)
        self._clock = clock
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._slots: dict[str, _Slot] = {}
        self._jobs: dict[str, _Job] = defaultdict(_Job)
        self._pins: dict[str, _PinOf] = {}
        self._gone: dict[Owner, float] = {}
        self._damages: deque[Damage] = deque(maxlen=1000)
        self._dropped: deque[tuple[ShardRecord, str]] = deque(maxlen=1000)
        """Damaged shards and why, for listeners that come later."""
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._listeners: list[SealListener] = []
        self._populating: deque[str] = deque()
        self._started = clock()
        self._closed = False
        self._pool = ThreadPoolExecutor(threads or _hash_threads(), thread_name_prefix="peerstore-hash")
        self.arena_id = self._arena_identity()
        self._adopt_notes()
        self._background = [
            threading.Thread(target=self._verify_adopted, name="peerstore-adopt", daemon=True),
            threading.Thread(target=self._populate_loop, name="peerstore-populate", daemon=True),
        ]
        for thread in self._background:
            thread.start()

    # -- who owns a job ---------------------------------------------------------------------------------------

    def epoch(self, job: str) -> int:
        """The newest incarnation of ``job`` this node has heard of; 0 when there was none."""
        with self._lock:
            known = self._jobs.get(job_name(job))
            return known.epoch if known else 0

    def claim(self, job: str, incarnation: str, *, at_least: int = 0) -> int:
        """Make ``incarnation`` the owner of ``job`` and return its epoch; claiming again changes nothing."""
        incarnation_name(incarnation)
        with self._lock:
            state = self._jobs[job_name(job)]
            if state.incarnation != incarnation:
                self._adopt_claim(job, max(state.epoch, at_least) + 1, incarnation)
            return state.epoch

    def _adopt_claim(self, job: str, epoch: int, incarnation: str) -> None:
        state = self._jobs[job]
        state.epoch, state.incarnation, state.seen = epoch, incarnation, self._clock()
        self._save_claim(job)
        for slot in list(self._slots.values()):
            if slot.job == job and slot.lease is not None and slot.lease.key.epoch < epoch:
                self._end_lease(slot, "fenced by a newer incarnation")
        self._changed.notify_all()
        for listener in self._listeners:
            listener.claimed(job, epoch)

    def _save_claim(self, job: str) -> None:
        state = self._jobs[job]
        note = _ClaimNote(state.epoch, state.incarnation, tuple(sorted(state.marked)))
        self._arena.put_note(f"claim.{job}", msgspec.msgpack.encode(note))

    def _check_fence(self, key: ShardKey) -> None:
        state = self._jobs[key.job]
        if key.epoch > state.epoch:
            self._adopt_claim(key.job, key.epoch, key.incarnation)
        elif (key.epoch, key.incarnation) != (state.epoch, state.incarnation):
            raise FencedError(
                f"{key} is of a past incarnation: job {key.job} is now owned by epoch {state.epoch} "
                f"({state.incarnation}). This process must stop writing"
            )

    # -- writing ----------------------------------------------------------------------------------------------

    def lease(
        self, key: ShardKey, size_bytes: int, parts: int, *, wait_s: float = 0.0, owner: Owner | None = None
    ) -> Lease:
        """A slot of exactly ``size_bytes`` to write ``key`` into; waits up to ``wait_s`` for one to come free."""
        _check_key(key, size_bytes, parts)
        owner = owner or myself()
        deadline = self._clock() + wait_s
        with self._lock:
            while True:
                self._check_open()
                self._check_fence(key)
                slot = self._slot_for_again(key, owner)
                if slot is not None:
                    return self._give_lease(slot, key, size_bytes, parts, owner)
                decision = choose_slot(
                    [slot.view for slot in self._slots.values()],
                    job=key.job,
                    part=key.part,
                    size_bytes=size_bytes,
                    limits=self._limits,
                    whole=self._whole(),
                )
                if isinstance(decision, UseSlot | CreateSlot):
                    return self._give_lease(self._take(decision, key, size_bytes), key, size_bytes, parts, owner)
                self._refuse(decision, deadline)

    def _slot_for_again(self, key: ShardKey, owner: Owner) -> _Slot | None:
        """The slot ``key`` already has, when its owner asks again (its answer was lost, or staging failed)."""
        for slot in self._slots.values():
            if slot.record is not None and slot.record.key == key:
                raise RequestError(f"{key} is sealed already; a new attempt needs a new number")
            if slot.lease is not None and slot.lease.key == key:
                if slot.owner != owner and slot.owner is not None and slot.owner.alive:
                    raise RequestError(f"{key} is being written by process {slot.owner.pid}")
                if slot.sealing:
                    raise RequestError(f"{key} is being sealed")
                return slot
        return None

    def _take(self, decision: UseSlot | CreateSlot, key: ShardKey, size_bytes: int) -> _Slot:
        for name in decision.drop:
            self._drop_slot(self._slots[name])
        if isinstance(decision, UseSlot):
            slot = self._slots[decision.name]
            if slot.record is not None:
                self._forget_record(slot)
                self._counters["evicted"] += 1
            return slot
        return self._new_slot(key.job, key.part, size_bytes)

    def _new_slot(self, job: str, part: int, size_bytes: int) -> _Slot:
        generation = secrets.randbits(62)
        name = f"slot.{job}.{part}.{generation:016x}"
        self._arena.create(name, size_bytes, promised=self._cold_bytes())
        slot = self._slots[name] = _Slot(name, generation, size_bytes, 0, job, part)
        return slot

    def _cold_bytes(self) -> int:
        return sum(slot.size_bytes - slot.warm_bytes for slot in self._slots.values())

    def _give_lease(self, slot: _Slot, key: ShardKey, size_bytes: int, parts: int, owner: Owner) -> Lease:
        if slot.size_bytes != size_bytes:
            self._arena.resize(slot.name, size_bytes, promised=self._cold_bytes())
            slot.warm_bytes = min(slot.warm_bytes, size_bytes)
            slot.size_bytes = size_bytes
        lease = Lease(
            id=secrets.token_hex(8),
            key=key,
            parts=parts,
            path=self._arena.path(slot.name),
            size_bytes=size_bytes,
            slot=slot.name,
            generation=slot.generation,
            warm_bytes=slot.warm_bytes,
        )
        slot.lease, slot.owner, slot.job, slot.part = lease, owner, key.job, key.part
        self._save_lease(slot)
        self._counters["leases"] += 1
        return lease

    def _save_lease(self, slot: _Slot) -> None:
        if slot.lease is not None and slot.owner is not None:
            note = _LeaseNote(slot.lease, (slot.owner.pid, slot.owner.started))
            self._arena.put_note(f"lease.{slot.name}", msgspec.msgpack.encode(note))

    def _slot_of(self, key: ShardKey) -> _Slot | None:
        """The slot that holds or will hold ``key``."""
        for slot in self._slots.values():
            if key in (slot.record and slot.record.key, slot.lease and slot.lease.key):
                return slot
        return None

    def grow(self, lease_id: str, size_bytes: int, *, wait_s: float = 0.0) -> Lease:
        """The leased slot with room for ``size_bytes``; what was written so far stays. It never shrinks.

        The same file, so that a mapping of it stays good for the bytes it covers. Repeating the call is harmless.
        """
        deadline = self._clock() + wait_s
        with self._lock:
            while True:
                self._check_open()
                slot, done = self._leased(lease_id)
                lease = slot.lease
                if done is not None or lease is None or slot.sealing:
                    raise RequestError(f"lease {lease_id} is sealed already")
                self._check_fence(lease.key)
                if size_bytes <= lease.size_bytes:
                    return lease
                decision = make_room(
                    [slot.view for slot in self._slots.values()],
                    growing=slot.name,
                    size_bytes=size_bytes,
                    limits=self._limits,
                    whole=self._whole(),
                )
                if not isinstance(decision, Busy | Full):
                    return self._grown(slot, lease, decision.drop, size_bytes)
                self._refuse(decision, deadline)

    def _grown(self, slot: _Slot, lease: Lease, drop: tuple[str, ...], size_bytes: int) -> Lease:
        for name in drop:
            self._counters["evicted"] += self._slots[name].record is not None
            self._drop_slot(self._slots[name])
        self._arena.resize(slot.name, size_bytes, promised=self._cold_bytes())
        slot.size_bytes = size_bytes
        slot.lease = msgspec.structs.replace(lease, size_bytes=size_bytes)
        self._save_lease(slot)
        self._counters["grown"] += 1
        return slot.lease

    def _refuse(self, decision: Busy | Full, deadline: float) -> None:
        """Wait a while when that may help, or say that it does not."""
        if isinstance(decision, Full):
            self._counters["lease_full"] += 1
            raise ArenaFullError(decision.reason)
        left = deadline - self._clock()
        if not left > 0:
            self._counters["lease_busy"] += 1
            raise ArenaBusyError(decision.reason)
        self._changed.wait(min(left, 1.0))

    def relabel(self, lease_id: str, key: ShardKey) -> Lease:
        """Write the leased slot under another key of the same writer: for bytes that were placed before their version
        was known.
        """
        with self._lock:
            self._check_open()
            self._check_fence(key)
            slot, done = self._leased(lease_id)
            lease = slot.lease
            if done is not None or lease is None or slot.sealing:
                raise RequestError(f"lease {lease_id} is sealed already")
            if (key.job, key.part) != (lease.key.job, lease.key.part):
                raise RequestError(f"{lease.key} cannot become {key}: another writer")
            if key != lease.key and self._slot_of(key) is not None:
                raise RequestError(f"{key} exists already")
            slot.lease = msgspec.structs.replace(lease, key=key)
            self._save_lease(slot)
            return slot.lease

    def seal(self, lease_id: str, size_bytes: int, meta: bytes = b"") -> ShardRecord:
        """Checksum what was written, keep the note beside it, and make it immutable. Idempotent by lease."""
        if len(meta) > MAX_META_BYTES:
            raise RequestError(f"meta has {len(meta)} bytes, at most {MAX_META_BYTES} are kept")
        with self._lock:
            self._check_open()
            slot, done = self._leased(lease_id)
            while slot.sealing and done is None:  # the same call, repeated while the first still works
                self._changed.wait(1.0)
                slot, done = self._leased(lease_id)
            if done is not None:
                return done
            lease = slot.lease
            assert lease is not None  # noqa: S101 - for the type checker; _leased raises otherwise
            self._check_fence(lease.key)
            if not 0 <= size_bytes <= lease.size_bytes:
                raise RequestError(f"seal of {size_bytes} bytes in a slot of {lease.size_bytes}")
            slot.sealing = True
        started = time.monotonic()
        try:
            record = self._checksummed(lease, size_bytes, meta)
            with self._lock:
                if slot.lease is not lease:
                    raise LeaseLostError(f"the lease of {lease.key} was taken back while it was being sealed")
                self._keep(slot, record)
        finally:
            with self._lock:
                slot.sealing = False
                self._changed.notify_all()
        self._counters["sealed"] += 1
        self._counters["sealed_bytes"] += size_bytes
        self._counters["seal_seconds"] += time.monotonic() - started
        for listener in self._listeners:
            listener.sealed(record)
        return record

    def _checksummed(self, lease: Lease, size_bytes: int, meta: bytes) -> ShardRecord:
        try:
            with Mapping(lease.path, size_bytes) as mapping:
                mapping.prefault()
                with mapping.view as view:
                    sums = checksum.checksums(view, pool=self._pool)
        except (OSError, ValueError) as error:
            raise ShardDamagedError(f"{lease.key} cannot be sealed: {error}") from error
        return ShardRecord(lease.key, lease.parts, size_bytes, CHUNK_BYTES, sums, meta, time.time_ns())

    def _keep(self, slot: _Slot, record: ShardRecord) -> None:
        lease = slot.lease
        assert lease is not None  # noqa: S101 - checked by the caller
        if slot.size_bytes != record.size_bytes:
            self._arena.resize(slot.name, record.size_bytes)
            slot.size_bytes = record.size_bytes
        self._arena.put_note(f"seal.{slot.name}", msgspec.msgpack.encode(_SealNote(lease.id, record)))
        self._arena.remove_note(f"lease.{slot.name}")
        slot.record, slot.sealed_under = record, lease.id
        slot.lease = slot.owner = None
        slot.warm_bytes = record.size_bytes

    def _leased(self, lease_id: str) -> tuple[_Slot, ShardRecord | None]:
        for slot in self._slots.values():
            if slot.lease is not None and slot.lease.id == lease_id:
                return slot, None
            if slot.record is not None and slot.sealed_under == lease_id:
                return slot, slot.record
        raise LeaseLostError(f"lease {lease_id} is not known: it expired, was fenced, or its slot was given to another")

    def abandon(self, lease_id: str) -> None:
        """Give the slot back unsealed. Unknown leases are fine: there is nothing to give back."""
        with self._lock:
            for slot in self._slots.values():
                if slot.lease is not None and slot.lease.id == lease_id and not slot.sealing:
                    slot.lease = slot.owner = None
                    self._arena.remove_note(f"lease.{slot.name}")
                    self._changed.notify_all()
                    return

    def reserve(self, job: str, part: int, size_bytes: int, *, slots: int = 0) -> list[SlotInfo]:
        """Have free slots of this size ready, with pages behind them, for a writer's next saves.

        Returns the slots this writer could be given next, also those that still hold a version; fewer than asked for
        where the budget ends. Pages come in the background.
        """
        job = job_name(job)
        with self._lock:
            self._check_open()
            mine = [slot for slot in self._slots.values() if (slot.job, slot.part) == (job, part)]
            allocated = sum(slot.size_bytes for slot in self._slots.values())
            want = min(slots or self._limits.slots, self._limits.slots)
            while len(mine) < want and allocated + size_bytes <= self._limits.budget_bytes:
                try:
                    mine.append(self._new_slot(job, part, size_bytes))
                except ArenaFullError as error:
                    log.warning("reserve for part %d of job %s: %s", part, job, error)
                    break
                allocated += size_bytes
            free = [slot for slot in mine if slot.state is SlotState.FREE]
            self._populating.extend(slot.name for slot in free if slot.warm_bytes < slot.size_bytes)
            self._changed.notify_all()
            ready = [slot for slot in mine if slot.state is not SlotState.LEASED]
            return [SlotInfo(s.name, self._arena.path(s.name), s.size_bytes, s.generation) for s in ready]

    # -- reading ----------------------------------------------------------------------------------------------

    def inventory(self, job: str | None = None) -> list[ShardFact]:
        """Every sealed shard (of ``job``) whose bytes this agent has checksummed itself."""
        with self._lock:
            self._await_adoption(job)
            return [
                ShardFact(
                    record.key,
                    record.parts,
                    record.size_bytes,
                    record.meta,
                    record.sealed_ns,
                    record.key.group in self._jobs[record.key.job].marked,
                )
                for record in (slot.record for slot in self._slots.values())
                if record is not None and (job is None or record.key.job == job)
            ]

    def pin(self, key: ShardKey, *, owner: Owner | None = None) -> Pin:
        """Keep a sealed shard where it is while somebody reads it."""
        with self._lock:
            self._await_adoption(key.job)
            slot = self._sealed(key)
            pin = f"pin-{secrets.token_hex(8)}"
            self._pins[pin] = _PinOf(slot.name, owner or myself())
            slot.users.add(pin)
            assert slot.record is not None  # noqa: S101 - _sealed promises it
            return Pin(pin, self._arena.path(slot.name), slot.record)

    def unpin(self, pin_id: str) -> bool:
        """The reader is done. False when the pin did not hold until now: what was read has to be verified again."""
        with self._lock:
            pin = self._pins.pop(pin_id, None)
            slot = self._slots.get(pin.slot) if pin is not None else None
            if slot is None or pin_id not in slot.users:
                return False
            slot.users.discard(pin_id)
            self._changed.notify_all()
            return True

    def verify(self, key: ShardKey, chunks: tuple[int, int] | None = None) -> tuple[int, ...]:
        """Hash a sealed shard's bytes again (or chunks ``[start, stop)`` of it); returns the damaged chunks.

        A damaged shard is dropped and recorded: it is offered to nobody again.
        """
        pin = self.pin(key)
        try:
            bad = self._damaged_chunks(pin.record, pin.path, range(*chunks) if chunks else None)
        finally:
            self.unpin(pin.id)
        if bad:
            self.report(key, f"{len(bad)} of its chunks changed after it was sealed, first: {bad[0]}")
        return bad

    def _damaged_chunks(self, record: ShardRecord, path: str, chunks: range | None) -> tuple[int, ...]:
        count = checksum.chunk_count(record.size_bytes, record.chunk_bytes)
        if chunks is not None and not 0 <= chunks.start <= chunks.stop <= count:
            raise RequestError(f"chunks {chunks.start}..{chunks.stop} of a shard with {count}")
        try:
            with Mapping(path, record.size_bytes) as mapping:
                if chunks is None:
                    mapping.prefault()
                with mapping.view as view:
                    return checksum.mismatches(
                        view, record.checksums, chunks=chunks, chunk_bytes=record.chunk_bytes, pool=self._pool
                    )
        except (OSError, ValueError):
            return tuple(chunks) if chunks is not None else tuple(range(max(count, 1)))

    def report(self, key: ShardKey, reason: str) -> None:
        """This copy is not what was sealed: record it and drop it."""
        with self._lock:
            slot = next((slot for slot in self._slots.values() if slot.record and slot.record.key == key), None)
            if slot is None or slot.record is None:
                return
            record = slot.record
            self._record_damage(key.job, str(key), reason)
            # Readers may still look at these bytes: only a slot nobody looks at is used again.
            self._drop_slot(slot) if slot.users else self._forget_record(slot)
            self._dropped.append((record, reason))
            listeners = list(self._listeners)
            self._changed.notify_all()
        for listener in listeners:
            listener.damaged(key, record, reason)

    # -- keeping and giving up --------------------------------------------------------------------------------

    def mark_whole(self, job: str, group: Group) -> None:
        """Somebody who can see the whole job says this version is whole."""
        with self._lock:
            state = self._jobs[job_name(job)]
            if group in state.marked:
                return
            state.marked = {old for old in state.marked if old > group or self._has(job, old)} | {group}
            self._save_claim(job)
            self._changed.notify_all()
        for listener in self._listeners:
            listener.marked(job, group)

    def forget(self, job: str, groups: list[Group] | None = None) -> int:
        """Drop versions (all when ``groups`` is None) because their owner said so; pinned shards stay."""
        with self._lock:
            dropped = 0
            for slot in list(self._slots.values()):
                record = slot.record
                if record is None or record.key.job != job or slot.users:
                    continue
                if groups is None or record.key.group in groups:
                    self._forget_record(slot)
                    if groups is None:
                        self._drop_slot(slot)
                    dropped += 1
            if groups is None:
                self._drop_job(job)
            self._changed.notify_all()
            return dropped

    def hold(self, key: ShardKey, name: str) -> ShardRecord:
        """Like a pin, but named and without an owner: for work this process does itself."""
        with self._lock:
            slot = self._sealed(key)
            slot.users.add(f"hold-{name}")
            assert slot.record is not None  # noqa: S101 - _sealed promises it
            return slot.record

    def unhold(self, key: ShardKey, name: str) -> None:
        with self._lock:
            for slot in self._slots.values():
                if slot.record is not None and slot.record.key == key:
                    slot.users.discard(f"hold-{name}")
            self._changed.notify_all()

    def records(self, job: str, group: Group) -> list[ShardRecord]:
        """The sealed parts of one version, with their checksums."""
        with self._lock:
            self._await_adoption(job)
            records = [slot.record for slot in self._slots.values() if slot.record is not None]
            return [record for record in records if record.key.job == job and record.key.group == group]

    def path_of(self, key: ShardKey) -> str:
        """Where a held shard's bytes are."""
        with self._lock:
            return self._arena.path(self._sealed(key).name)

    # -- blobs ------------------------------------------------------------------------------------------------

    def put_blob(self, job: str, name: str, data: bytes) -> None:
        """Keep small bytes beside a job's shards (layouts, settings). Overwrites."""
        if len(data) > MAX_BLOB_BYTES:
            raise RequestError(f"blob {name} has {len(data)} bytes, at most {MAX_BLOB_BYTES} are kept")
        self._arena.put_note(_blob_note(job, name), data)

    def get_blob(self, job: str, name: str) -> bytes:
        data = self._arena.get_note(_blob_note(job, name))
        if data is None:
            raise ShardNotFoundError(f"job {job} has no blob {name}")
        return data

    def blobs(self, job: str) -> list[str]:
        prefix = _blob_note(job, "x")[:-1]
        return [note[len(prefix) :] for note in self._arena.notes(prefix)]

    def remove_blob(self, job: str, name: str) -> None:
        self._arena.remove_note(_blob_note(job, name))

    # -- who is there -----------------------------------------------------------------------------------------

    def arrived(self, owner: Owner, job: str) -> None:
        """A process opened a connection for ``job``."""
        with self._lock:
            self._gone.pop(owner, None)
            state = self._jobs[job_name(job)]
            state.clients[owner] += 1
            state.seen = self._clock()

    def departed(self, owner: Owner, job: str) -> None:
        """One of its connections closed."""
        with self._lock:
            state = self._jobs.get(job)
            if state is None:
                return
            state.clients[owner] -= 1
            if state.clients[owner] <= 0:
                del state.clients[owner]
            state.seen = self._clock()
            if not any(owner in other.clients for other in self._jobs.values()):
                self._gone[owner] = self._clock()
        self.sweep()

    def sweep(self) -> None:
        """Take back what belonged to processes and jobs that went away. Call now and then."""
        with self._lock:
            now = self._clock()
            for slot in list(self._slots.values()):
                if slot.lease is not None and slot.owner is not None and not slot.sealing:
                    self._sweep_lease(slot, slot.owner, now)
            for pin_id, pin in list(self._pins.items()):
                gone = self._gone.get(pin.owner)
                if not pin.owner.alive or (gone is not None and now - gone > self._settings.lease_grace_s):
                    self.unpin(pin_id)
            for job, state in list(self._jobs.items()):
                idle = not state.clients and now - state.seen > self._settings.job_ttl_s
                if idle and not any(slot.users for slot in self._slots.values() if slot.job == job):
                    log.info(
                        "job %s: its last process left over %.0f s ago, dropping its shards", job, now - state.seen
                    )
                    self.forget(job)
            self._gone = {owner: since for owner, since in self._gone.items() if owner.alive}

    def _sweep_lease(self, slot: _Slot, owner: Owner, now: float) -> None:
        if not owner.alive:
            self._end_lease(slot, "its writer died")
        elif owner in self._gone and now - self._gone[owner] > self._settings.lease_grace_s:
            self._end_lease(slot, "its writer went away")

    def idle_s(self) -> float:
        """How long nobody has been connected; 0 while somebody is or while jobs still own shards."""
        with self._lock:
            if any(state.clients for state in self._jobs.values()) or any(s.record for s in self._slots.values()):
                return 0.0
            return self._clock() - max((state.seen for state in self._jobs.values()), default=self._started)

    def subscribe(self, listener: SealListener) -> None:
        """From now on, tell ``listener``; it is told of everything that is here already first."""
        with self._lock:
            records = [slot.record for slot in self._slots.values() if slot.record is not None and not slot.adopting]
            dropped = list(self._dropped)
            self._listeners.append(listener)
        for record, reason in dropped:
            listener.damaged(record.key, record, reason)
        for record in records:
            listener.sealed(record)

    def status(self) -> StoreStatus:
        with self._lock:
            slots = list(self._slots.values())
            arena = ArenaStatus(
                budget_bytes=self._limits.budget_bytes,
                allocated_bytes=sum(slot.size_bytes for slot in slots),
                sealed_bytes=sum(slot.record.size_bytes for slot in slots if slot.record),
                slots=len(slots),
                free_slots=sum(slot.state is SlotState.FREE for slot in slots),
                leases=sum(slot.state is SlotState.LEASED for slot in slots),
                pins=len(self._pins),
            )
            return StoreStatus(
                arena,
                tuple(self._job_status(job) for job in sorted(self._jobs)),
                tuple(self._damages),
                dict(self._counters),
                sum(slot.adopting for slot in slots),
            )

    def _job_status(self, job: str) -> JobStatus:
        state = self._jobs[job]
        whole = max(self._whole().get(job, ()), default=None)
        groups = {slot.record.key.group for slot in self._slots.values() if slot.record and slot.record.key.job == job}
        left = None if state.clients else self._settings.job_ttl_s - (self._clock() - state.seen)
        return JobStatus(
            job=job,
            epoch=state.epoch,
            clients=len(state.clients),
            versions=len(groups),
            newest_whole=whole.version if whole else None,
            expires_in_s=left,
        )

    def close(self) -> None:
        """Stop the threads. What is sealed stays in the arena for the next agent."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        for thread in self._background:
            thread.join()
        self._pool.shutdown()

    # -- inside -----------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise UnavailableError("this store is shutting down")

    def _has(self, job: str, group: Group) -> bool:
        return any(s.record and s.record.key.job == job and s.record.key.group == group for s in self._slots.values())

    def _whole(self) -> dict[str, set[Group]]:
        here: dict[str, dict[Group, set[int]]] = defaultdict(lambda: defaultdict(set))
        parts: dict[Group, int] = {}
        for slot in self._slots.values():
            if slot.record is not None and not slot.adopting:
                here[slot.record.key.job][slot.record.key.group].add(slot.record.key.part)
                parts[slot.record.key.group] = slot.record.parts
        whole = {job: whole_groups(groups, parts) for job, groups in here.items()}
        for job, state in self._jobs.items():
            if state.marked:
                whole[job] = whole.get(job, set()) | state.marked
        return whole

    def _sealed(self, key: ShardKey) -> _Slot:
        for slot in self._slots.values():
            if slot.record is not None and slot.record.key == key:
                return slot
        raise ShardNotFoundError(f"{key} is not on this node")

    def _end_lease(self, slot: _Slot, why: str) -> None:
        """Take a lease back. While its writer may still hold a mapping, the file is not given to anybody else."""
        assert slot.lease is not None  # noqa: S101 - checked by the caller
        log.info("%s: lease taken back, %s", slot.lease.key, why)
        self._counters["leases_lost"] += 1
        safe = slot.owner is None or not slot.owner.alive
        slot.lease = slot.owner = None
        self._arena.remove_note(f"lease.{slot.name}")
        if not safe:
            self._drop_slot(slot)
        self._changed.notify_all()

    def _forget_record(self, slot: _Slot) -> None:
        self._arena.remove_note(f"seal.{slot.name}")
        slot.record, slot.sealed_under, slot.adopting = None, "", False
        slot.users.clear()

    def _drop_slot(self, slot: _Slot) -> None:
        for note in ("lease", "seal"):
            self._arena.remove_note(f"{note}.{slot.name}")
        self._arena.remove(slot.name)
        self._slots.pop(slot.name, None)

    def _drop_job(self, job: str) -> None:
        for slot in list(self._slots.values()):
            if slot.job == job and slot.state is SlotState.FREE:
                self._drop_slot(slot)
        for blob in self.blobs(job):
            self.remove_blob(job, blob)
        self._arena.remove_note(f"claim.{job}")
        if not any(slot.job == job for slot in self._slots.values()):
            self._jobs.pop(job, None)

    def _record_damage(self, job: str, what: str, reason: str) -> None:
        log.error("damaged: %s: %s", what, reason)
        self._counters["damaged"] += 1
        self._damages.append(Damage(job, what, reason, time.time_ns()))

    def _arena_identity(self) -> str:
        """A name that stays with the arena's contents: a client that sees another one starts afresh."""
        try:
            known = self._arena.get_note("arena")
        except ShardDamagedError:
            known = None
        if known is None:
            known = secrets.token_hex(8).encode()
            self._arena.put_note("arena", known)
        return known.decode()

    # -- after a killed agent ---------------------------------------------------------------------------------

    def _adopt_notes(self) -> None:
        for note in self._arena.notes("claim."):
            with self._damage_recorded(note, drop=(note,)):
                claim = msgspec.msgpack.decode(self._arena.get_note(note) or b"", type=_ClaimNote)
                self._jobs[note.removeprefix("claim.")] = _Job(
                    claim.epoch, claim.incarnation, set(claim.marked), seen=self._clock()
                )
        for name in self._arena.slots():
            with self._damage_recorded(name, drop=(f"seal.{name}", f"lease.{name}")):
                self._adopt_slot(name)
            if name not in self._slots:
                self._arena.remove(name)
        for kind in ("seal.", "lease."):
            for note in self._arena.notes(kind):
                if note.removeprefix(kind) not in self._slots:
                    self._arena.remove_note(note)

    def _adopt_slot(self, name: str) -> None:
        size = self._arena.size(name)
        sealed = self._arena.get_note(f"seal.{name}")
        if sealed is not None:
            note = msgspec.msgpack.decode(sealed, type=_SealNote)
            record = note.record
            if size < record.size_bytes:
                self._dropped.append((record, f"{size} bytes of {record.size_bytes} are left"))
                raise ShardDamagedError(f"{record.key}: {size} bytes of {record.size_bytes} are left")
            self._arena.remove_note(f"lease.{name}")
            slot = _Slot(name, secrets.randbits(62), size, record.size_bytes, record.key.job, record.key.part)
            slot.record, slot.sealed_under, slot.adopting = record, note.lease_id, True
            self._slots[name] = slot
            self._jobs[record.key.job].seen = self._clock()
            return
        leased = self._arena.get_note(f"lease.{name}")
        if leased is not None:
            held = msgspec.msgpack.decode(leased, type=_LeaseNote)
            slot = _Slot(name, held.lease.generation, size, 0, held.lease.key.job, held.lease.key.part)
            slot.lease, slot.owner = held.lease, Owner(*held.owner)
            self._slots[name] = slot
            self._gone[slot.owner] = self._clock()
            self._jobs[held.lease.key.job].seen = self._clock()

    @contextlib.contextmanager
    def _damage_recorded(self, what: str, drop: tuple[str, ...]) -> Iterator[None]:
        try:
            yield
        except (PeerStoreError, msgspec.DecodeError, OSError) as error:
            self._record_damage("", what, str(error))
            for note in drop:
                self._arena.remove_note(note)

    def _verify_adopted(self) -> None:
        """Re-hash what a killed agent left behind; until then nobody is offered it."""
        with self._lock:
            names = [slot.name for slot in self._slots.values() if slot.adopting]
        for name in names:
            slot = self._slots[name]
            record = slot.record
            if self._closed:
                return
            if record is None:
                continue
            bad = self._damaged_chunks(record, self._arena.path(name), None)
            if bad:
                self.report(record.key, f"{len(bad)} chunks differ after a restart, first: {bad[0]}")
                continue
            with self._lock:
                slot.adopting = False
                self._counters["adopted"] += 1
                self._changed.notify_all()
                listeners = list(self._listeners)
            for listener in listeners:
                listener.sealed(record)

    def _await_adoption(self, job: str | None) -> None:
        deadline = self._clock() + _ADOPTION_WAIT_S
        while any(s.adopting and (job is None or s.job == job) for s in self._slots.values()):
            self._check_open()
            if self._clock() > deadline:
                raise UnavailableError("still verifying what the last agent left behind")
            self._changed.wait(1.0)

    # -- pages in the background ------------------------------------------------------------------------------

    def _populate_loop(self) -> None:
        while True:
            with self._lock:
                while not self._populating and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                slot = self._slots.get(self._populating.popleft())
                if slot is None or slot.state is not SlotState.FREE:
                    continue
                path, size, warm = self._arena.path(slot.name), slot.size_bytes, slot.warm_bytes
            try:
                reached = populate_file(path, size, lambda: self._closed, start=warm)
            except (ArenaFullError, OSError) as error:
                log.warning("populating %s stopped: %s", slot.name, error)
                continue
            with self._lock:
                slot.warm_bytes = max(slot.warm_bytes, min(reached, slot.size_bytes))


def _check_key(key: ShardKey, size_bytes: int, parts: int) -> None:
    job_name(key.job)
    incarnation_name(key.incarnation)
    if min(key.version, key.epoch, key.attempt, key.part) < 0 or max(key.version, key.epoch) >= 1 << 62:
        raise RequestError(f"{key}: version, epoch, attempt and part are counted from 0")
    if not 1 <= parts <= _MAX_PARTS:
        raise RequestError(f"{key}: a version has 1 to {_MAX_PARTS} parts, not {parts}")
    if size_bytes < 0:
        raise RequestError(f"{key}: {size_bytes} bytes")


def _blob_note(job: str, name: str) -> str:
    return f"blob.{job_name(job)}@{name}"


def _hash_threads() -> int:
    return max(1, min(8, os.cpu_count() or 1))
