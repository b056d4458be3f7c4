"""Leases: slots granted to writers, and slots prefaulted ahead of the next save."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import msgspec

from peerstore import deadlines
from peerstore.daemon_process import ProcessIdentity
from peerstore.errors import ArenaBusyError, ArenaFullError, LeaseLostError, RequestError, UnavailableError
from peerstore.shard_records import (
    Lease,
    ShardKey,
    SlotInfo,
    VersionId,
    validate_job_name,
)
from peerstore.store.arena import closing_fd, copy_file_data, prefault_file
from peerstore.store.job_table import JobTable
from peerstore.store.record_validation import MAX_PARTS_PER_VERSION, validate_shard_key
from peerstore.store.slot_eviction import (
    BudgetExceeded,
    CreateSlot,
    EvictSlots,
    ReuseSlot,
    SlotDecision,
    SlotRequest,
    SlotsBusy,
    SlotUse,
    SlotView,
    choose_own_slot,
    choose_slot,
    evictions_to_grow,
    size_class,
    slot_fits,
)
from peerstore.store.slot_metadata import LEASE_METADATA
from peerstore.store.slot_table import SlotTable
from peerstore.store.slots import ArenaSlot, SlotState

log = logging.getLogger(__name__)


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class _Growth:
    """A lease that has grown in place, or that moves to a larger slot."""

    slot: ArenaSlot
    larger: ArenaSlot | None
    lease: Lease
    grown: Lease
    owner: ProcessIdentity


class LeaseManager:
    """Lease operations of :class:`~peerstore.store.node_store.NodeStore`."""

    def __init__(
        self,
        table: SlotTable,
        jobs: JobTable,
        give_way: Callable[[str, bool], bool],
        expire: Callable[[str, str], None],
    ) -> None:
        self._table = table
        self._jobs = jobs
        self._free_a_slot = give_way
        """Called before a writer waits or is refused; never with the table's lock held."""
        self._expire = expire
        """Drops an unused job, for the reason passed."""
        self.expired_jobs: list[str] = []
        """Jobs that were dropped for other jobs, and that listeners were not notified of."""

    def lease(
        self, key: ShardKey, size_bytes: int, parts: int, *, wait_s: float, owner: ProcessIdentity, copy: bool = False
    ) -> Lease:
        """Return a slot for ``key``, waiting up to ``wait_s`` seconds for one.

        For a ``copy`` (a replica or a parity) the caller has already checked the fence.
        """
        validate_shard_key(key, size_bytes, parts)

        def attempt() -> Lease | SlotsBusy | BudgetExceeded | None:
            if not copy:
                self._jobs.incarnations.check_fence(key)
            slot = self._existing_lease(key, owner)
            if slot is not None:
                return self._assign(slot, key, min(size_bytes, slot.size_bytes), parts, owner)
            slot, refused = self._choose(key, size_bytes, parts, copy=copy)
            return self._assign(slot, key, size_bytes, parts, owner) if slot is not None else refused

        # The caller of a copy already holds the lock, and a copy never uses a slot that a drain could release.
        deadline = self._table.clock() + deadlines.remaining_s(wait_s)
        lease = self._retry_until_granted(attempt, deadline, "" if copy else key.job)
        if lease.size_bytes < size_bytes:  # an earlier call got a smaller slot
            return self.grow(lease.id, size_bytes, wait_s=deadline - self._table.clock())
        return lease

    def _retry_until_granted(
        self, attempt: Callable[[], T | SlotsBusy | BudgetExceeded | None], deadline: float, job: str
    ) -> T:
        while True:
            with self._table.lock:
                self._table.lock.check_open()
                found = attempt()
                if found is not None and not isinstance(found, SlotsBusy | BudgetExceeded):
                    return found
                if isinstance(found, BudgetExceeded) or not job:
                    self._wait(found, deadline)
                    continue
            if not self._free_a_slot(job, self._table.clock() >= deadline):
                with self._table.lock:
                    self._wait(found, deadline)

    def _existing_lease(self, key: ShardKey, owner: ProcessIdentity) -> ArenaSlot | None:
        """Return the slot that ``key`` already has, if its owner repeats the request.

        An owner repeats it after a lost reply or a failed write.
        """
        slot = self._table.slots.for_key(key)
        if slot is None:
            return None
        if slot.lease is None:
            raise RequestError(f"{key} is sealed already; a new attempt needs a new number")
        if slot.owner != owner and slot.owner is not None and slot.owner.is_alive:
            raise RequestError(f"{key} is being written by process {slot.owner.pid}")
        if slot.state is not SlotState.LEASED:
            raise RequestError(f"{key} is being sealed")
        if not slot.is_intact(self._table.arena):
            self._table.drop_lost(slot)
            return None
        return slot

    def _choose(
        self, key: ShardKey, size_bytes: int, parts: int, *, copy: bool
    ) -> tuple[ArenaSlot | None, SlotsBusy | BudgetExceeded | None]:
        slot_bytes = size_class(size_bytes)
        mending = key if copy else None

        def decide(views: Sequence[SlotView]) -> SlotDecision:
            return choose_slot(views, self._request(key, slot_bytes, parts, self._jobs.committed(), mending))

        def decide_alone() -> SlotDecision | None:
            """Choose among the writer's slots and the free slots, without reading other shards."""
            return choose_own_slot(
                self._table.slots.views_for_writer(key.job, key.slot_part),
                self._request(key, slot_bytes, parts, self._jobs.committed([key.job]), mending),
                allocated_bytes=self._table.allocated_bytes,
            )

        while True:
            decision = decide_alone() or decide(self._table.slot_views())
            if isinstance(decision, CreateSlot):
                self._table.evict(decision.drop)
                return self._table.create(key.job, key.slot_part, slot_bytes), None
            if isinstance(decision, ReuseSlot):
                slot = self._table.slots.get(decision.name)
                if slot is not None and slot.is_intact(self._table.arena):
                    self._table.evict(decision.drop)
                    return self._free_if_sealed(slot), None
                if slot is not None:
                    self._table.drop_lost(slot)
            elif slot_bytes > size_bytes:
                slot_bytes = size_bytes  # the exact size may still fit
            elif not self._expire_unused_jobs(key, decide):
                return None, decision

    def _request(
        self,
        key: ShardKey,
        size_bytes: int,
        parts: int,
        committed: Mapping[str, Collection[VersionId]],
        mending: ShardKey | None = None,
    ) -> SlotRequest:
        limits = self._table.limits
        # While parity groups change, a version has several parities. Only the budget limits them.
        if key.kind or key.job in self._jobs.incarnations.managed:
            limits = dataclasses.replace(limits, burst=MAX_PARTS_PER_VERSION)
        return SlotRequest(
            job=key.job,
            part=key.slot_part,
            size_bytes=size_bytes,
            limits=limits,
            whole=self._jobs.needed(committed),
            rollback_targets=self._jobs.rollback_targets(committed, mending),
            kept=self._jobs.retained(committed),
            epoch=max(key.epoch, self._jobs.get_or_create(key.job).oldest_active_epoch()),
            version=key.version,
            writers=self._jobs.clients.expected_parts_here(key.job, parts),
        )

    def _expire_unused_jobs(self, key: ShardKey, decide: Callable[[Sequence[SlotView]], object]) -> bool:
        """Drop unused jobs, oldest first, if that makes room for another job; return whether it did."""
        views = self._table.slot_views()
        candidates: list[str] = []
        for job in self._jobs.clients.unused_jobs():
            if job == key.job:
                continue
            candidates.append(job)
            remaining = [view for view in views if view.job not in candidates]
            if not isinstance(decide(remaining), SlotsBusy | BudgetExceeded):
                for unused in candidates:
                    hours = self._jobs.clients.unused_s(unused) / 3600
                    self._expire(
                        unused, f"no process had used it for {hours:.1f} hours, and job {key.job} needed the memory"
                    )
                self.expired_jobs += candidates
                return True
        return False

    def _free_if_sealed(self, slot: ArenaSlot) -> ArenaSlot:
        if slot.record is not None:
            self._table.free(slot)
            self._table.incidents.count("evicted")
        return slot

    def _assign(self, slot: ArenaSlot, key: ShardKey, size_bytes: int, parts: int, owner: ProcessIdentity) -> Lease:
        lease = Lease(
            id=secrets.token_hex(8),
            key=key,
            parts=parts,
            size_bytes=size_bytes,
            slot=slot.name,
            generation=slot.generation,
            prefaulted_bytes=slot.prefaulted_bytes,
            slot_bytes=slot.size_bytes,
        )
        self._table.incidents.count("leases")
        return self._table.assign(slot, lease, owner)

    def grow(self, lease_id: str, size_bytes: int, *, wait_s: float) -> Lease:
        with self._table.lock:
            job = self._writable(lease_id)[1].key.job

        def attempt() -> _Growth | SlotsBusy | BudgetExceeded | None:
            slot, lease, owner = self._writable(lease_id)
            self._jobs.incarnations.check_fence(lease.key)
            if size_bytes <= lease.size_bytes:
                return _Growth(slot, None, lease, lease, owner)
            grown = msgspec.structs.replace(lease, size_bytes=size_bytes)
            if size_bytes <= slot.size_bytes:
                return _Growth(slot, None, lease, self._table.assign(slot, grown, owner), owner)
            larger = self._choose_larger(slot, lease.key, size_bytes)
            if not isinstance(larger, ArenaSlot):
                return larger
            self._table.begin_move(slot, larger)
            return _Growth(slot, larger, lease, grown, owner)

        growth = self._retry_until_granted(attempt, self._table.clock() + deadlines.remaining_s(wait_s), job)
        return growth.grown if growth.larger is None else self._copy_and_move(growth, growth.larger)

    def _copy_and_move(self, growth: _Growth, larger: ArenaSlot) -> Lease:
        """Move the lease to its larger slot and return it.

        The bytes of the smaller slot are copied without the lock.
        """
        slot = growth.slot
        try:
            self._copy(slot, larger)
            with self._table.lock:
                if slot.lease is not growth.lease:
                    raise LeaseLostError(f"the lease of {growth.lease.key} was revoked while its slot grew")
                return self._move(growth, larger)
        finally:
            with self._table.lock:
                self._table.resume_lease(slot, growth.lease)
                if larger.state is SlotState.FILLING:
                    self._table.drop(larger)

    def _copy(self, slot: ArenaSlot, larger: ArenaSlot) -> None:
        arena = self._table.arena
        try:
            with closing_fd(arena.open(slot.name)) as old, closing_fd(arena.open(larger.name, writable=True)) as new:
                copy_file_data(old, new)
        except OSError as error:
            raise ArenaFullError(f"cannot copy {slot.name} to the larger slot {larger.name}: {error}") from error
        larger.set_prefaulted(slot.prefaulted_bytes)

    def _move(self, growth: _Growth, larger: ArenaSlot) -> Lease:
        lease = msgspec.structs.replace(
            growth.grown,
            slot=larger.name,
            generation=larger.generation,
            slot_bytes=larger.size_bytes,
            prefaulted_bytes=larger.prefaulted_bytes,
        )
        self._table.move_lease(growth.slot, larger, lease, growth.owner)
        self._table.incidents.count("grown")
        return lease

    def _choose_larger(self, slot: ArenaSlot, key: ShardKey, size_bytes: int) -> ArenaSlot | SlotsBusy | BudgetExceeded:
        """Return a slot that the leased one can be copied into, or the reason for a refusal."""
        slot_bytes = size_class(size_bytes)

        def decide(views: Sequence[SlotView]) -> EvictSlots | SlotsBusy | BudgetExceeded:
            parts = slot.lease.parts if slot.lease is not None else 1
            request = self._request(key, slot_bytes, parts, self._jobs.committed())
            return evictions_to_grow(views, dataclasses.replace(request, epoch=key.epoch), growing=slot.name)

        while True:
            decision = decide(self._table.slot_views())
            if isinstance(decision, EvictSlots):
                self._table.evict(decision.drop)
                return self._table.create(slot.job, slot.part, slot_bytes)
            if slot_bytes > size_bytes:
                slot_bytes = size_bytes
            elif not self._expire_unused_jobs(key, decide):
                return decision

    def open_slot(self, name: str) -> int:
        """Open the file of a leased or reserved slot for writing; the caller closes the descriptor."""
        with self._table.lock:
            slot = self._table.slots.get(name)
            if slot is None or (slot.use is SlotUse.SEALED and not slot.reserved):
                raise LeaseLostError(f"{name} cannot be written: its lease expired or was fenced, or it is sealed")
            if not slot.is_intact(self._table.arena):
                self._table.drop_lost(slot)
                raise LeaseLostError(f"{name} was removed or truncated by another process")
            try:
                return self._table.arena.open(slot.name, writable=True)
            except OSError as error:  # too many open files, most likely
                raise UnavailableError(f"{slot.name} cannot be opened: {error}") from error

    def _writable(self, lease_id: str) -> tuple[ArenaSlot, Lease, ProcessIdentity]:
        slot, done = self._table.slots.for_lease(lease_id)
        while slot.state is not SlotState.LEASED and done is None:  # sealed or moved by an earlier, equal call
            if deadlines.expired():
                raise UnavailableError(f"lease {lease_id} is still being sealed")
            self._table.lock.wait(deadlines.remaining_s(1.0))
            slot, done = self._table.slots.for_lease(lease_id)
        if slot.lease is None or slot.owner is None:
            raise RequestError(f"lease {lease_id} is sealed already")
        return slot, slot.lease, slot.owner

    def _wait(self, refused: SlotsBusy | BudgetExceeded | None, deadline: float) -> None:
        """Wait up to one second for a change, or raise if waiting cannot help or the deadline has passed."""
        if isinstance(refused, BudgetExceeded):
            self._table.incidents.count("leases_over_budget")
            raise ArenaFullError(refused.reason + self._table.unrecognized.hint)
        left = deadline - self._table.clock()
        if not left > 0:
            self._table.incidents.count("leases_busy")
            raise ArenaBusyError(refused.reason if refused else "no slot")
        self._table.incidents.count("lease_waits")
        self._table.lock.wait(min(left, 1.0))

    def relabel(self, lease_id: str, key: ShardKey) -> Lease:
        with self._table.lock:
            self._table.lock.check_open()
            slot, lease, owner = self._writable(lease_id)
            validate_shard_key(key, lease.size_bytes, lease.parts)
            if (key.job, key.part) != (lease.key.job, lease.key.part):
                raise RequestError(f"cannot relabel the lease of {lease.key} to {key}: the job or the part differs")
            if key != lease.key and self._table.slots.for_key(key) is not None:
                raise RequestError(f"{key} exists already")
            relabeled = msgspec.structs.replace(lease, key=key)
            self._table.replace_lease(slot, relabeled, owner)  # a newer incarnation revokes other leases, not this one
            try:
                self._jobs.incarnations.check_fence(key)
            except BaseException:
                self._table.replace_lease(slot, lease, owner)
                raise
            return self._table.assign(slot, relabeled, owner)

    def release(self, lease_id: str) -> None:
        with self._table.lock:
            slot = self._table.slots.leased(lease_id)
            if slot is not None and slot.state is SlotState.LEASED:
                self._table.release_lease(slot)

    def sweep(self, grace_s: float) -> None:
        """Revoke the leases of writers that have been disconnected for more than ``grace_s`` seconds."""
        for slot in self._table.slots.in_state(SlotState.LEASED):
            if slot.owner is not None and self._jobs.clients.disconnected_s(slot.owner) > grace_s:
                self._table.revoke_lease(slot, "its writer is disconnected")
        for slot in self._table.slots.in_state(SlotState.REVOKED):  # the file could not be removed at that time
            try:
                self._table.drop(slot)
            except OSError as error:
                log.warning("cannot remove %s, whose lease was revoked: %s", slot.name, error)

    def restore(self, name: str, size_bytes: int, lease: Lease, owner: ProcessIdentity) -> None:
        """Adopt a slot that a killed agent had leased to a writer that may still run."""
        before = self._table.slots.leased(lease.id)
        slot = self._table.adopt_lease(name, size_bytes, lease, owner)
        if before is not None:  # the agent was killed while the lease moved to a larger slot
            self._table.drop(min(before, slot, key=lambda one: one.size_bytes))
            if slot.state is SlotState.REMOVED:
                return
        self._jobs.clients.disconnected_since.setdefault(owner, self._table.clock())
        self._jobs.incarnations.observe_epoch(lease.key)
        if lease.size_bytes > slot.size_bytes:
            reason = f"its slot has only {slot.size_bytes} bytes"
            self._table.incidents.record_damage(lease.key.job, str(lease.key), reason)
            self._table.metadata.remove(LEASE_METADATA, slot.name)
            self._table.drop(slot)


class SlotPrefaulter:
    """Implementation of ``reserve``, and the thread that allocates the pages of reserved slots."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._waiting: deque[str] = deque()

    def reserve(self, job: str, part: int, size_bytes: int, slots: int) -> list[SlotInfo]:
        job = validate_job_name(job)
        if not 0 <= part < MAX_PARTS_PER_VERSION or size_bytes < 0:
            raise RequestError(f"part {part} of job {job}: {size_bytes} bytes cannot be reserved")
        table = self._table
        with table.lock:
            table.lock.check_open()
            size_bytes = size_class(size_bytes)
            mine = table.slots.of_writer(job, part)
            for slot in mine:
                fits = slot_fits(slot.view, size_bytes) and slot.is_intact(table.arena)
                if slot.state is SlotState.FREE and not fits:
                    table.drop(slot)
            mine = [slot for slot in mine if slot.name in table.slots]
            allocated = table.allocated_bytes
            want = min(slots or table.limits.slots, table.limits.slots)
            while len(mine) < want and allocated + size_bytes <= table.limits.budget_bytes:
                try:
                    mine.append(table.create(job, part, size_bytes))
                except ArenaFullError as error:
                    log.warning("reserve for part %d of job %s: %s", part, job, error)
                    break
                allocated += size_bytes
            free = [slot for slot in mine if slot.state is SlotState.FREE]
            sealed = [slot for slot in mine if slot.use is SlotUse.SEALED and slot_fits(slot.view, size_bytes)]
            sealed = [slot for slot in sealed if slot.is_intact(table.arena)]
            for slot in sealed:
                slot.mark_reserved()
            self._waiting.extend(slot.name for slot in free if slot.prefaulted_bytes < slot.size_bytes)
            table.lock.notify_all()
            return [SlotInfo(s.name, s.size_bytes, s.generation) for s in [*free, *sealed]]

    def run(self) -> None:
        """Allocate the pages of reserved slots, one slot after the other, until the store closes."""
        table = self._table
        while True:
            with table.lock:
                while not self._waiting and not table.lock.closed:
                    table.lock.wait(None)
                if table.lock.closed:
                    return
                slot = table.slots.get(self._waiting.popleft())
                if slot is None or slot.state is not SlotState.FREE:
                    continue
                size, warm = slot.size_bytes, slot.prefaulted_bytes
            try:
                with closing_fd(table.arena.open(slot.name, writable=True)) as fd:
                    reached = prefault_file(fd, size, lambda: table.lock.closed, start=warm)
            except (ArenaFullError, OSError, ValueError) as error:
                log.warning("prefaulting %s stopped: %s", slot.name, error)
                continue
            with table.lock:
                slot.set_prefaulted(reached)
