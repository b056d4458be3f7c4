"""Giving slots to writers, and taking them back."""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from peerstore import deadlines
from peerstore.crashpoints import reach
from peerstore.errors import ArenaBusyError, ArenaFullError, LeaseLostError, RequestError, UnavailableError
from peerstore.jobs import Jobs
from peerstore.ledger import (
    Busy,
    CreateSlot,
    Decision,
    Full,
    MakeRoom,
    SlotView,
    UseSlot,
    choose_slot,
    make_room,
    size_class,
)
from peerstore.names import MAX_NUMBER, incarnation_name, job_name
from peerstore.notes import LEASE
from peerstore.owners import Owner
from peerstore.pages import closing, copy_file
from peerstore.records import Lease, ShardKey, SlotState
from peerstore.shelf import Shelf, Slot

MAX_PARTS = 1 << 20
T = TypeVar("T")
_KIND = re.compile(r"(parity\.[0-9a-f]{16})?")


@dataclasses.dataclass(frozen=True)
class _Growth:
    """A lease that has grown, or is on its way to a larger slot."""

    slot: Slot
    larger: Slot | None
    lease: Lease
    grown: Lease
    owner: Owner


class Leasing:
    """``lease``, ``grow``, ``relabel``, ``abandon`` of the store. The shelf's lock is taken here."""

    def __init__(
        self, shelf: Shelf, jobs: Jobs, give_way: Callable[[str, bool], bool], expire: Callable[[str, str], None]
    ) -> None:
        self._shelf = shelf
        self._jobs = jobs
        self._give_way = give_way
        """Asked before a writer waits, and for the last time before it is refused; never with the shelf's lock held."""
        self._expire = expire
        """Drops a job that nobody uses, for this reason."""
        self.expired: list[str] = []
        """Jobs that were dropped so, and of which nobody was told yet."""

    def lease(
        self, key: ShardKey, size_bytes: int, parts: int, *, wait_s: float, owner: Owner, copy: bool = False
    ) -> Lease:
        """A slot for ``key``. Who may write a ``copy`` of another node's shard, or a parity, was decided before."""
        check_key(key, size_bytes, parts)

        def attempt() -> Lease | Busy | Full | None:
            if not copy:
                self._jobs.check_fence(key)
            slot = self._asked_before(key, owner)
            if slot is not None:
                return self._give(slot, key, min(size_bytes, slot.size_bytes), parts, owner)
            slot, refused = self._chosen(key, size_bytes, parts, copy=copy)
            return self._give(slot, key, size_bytes, parts, owner) if slot is not None else refused

        # Who takes a copy holds the lock already, and takes no slot that a drain could give up.
        deadline = self._shelf.clock() + deadlines.left(wait_s)
        lease = self._until_given(attempt, deadline, "" if copy else key.job)
        if lease.size_bytes < size_bytes:  # asked for before, in a smaller slot
            return self.grow(lease.id, size_bytes, wait_s=deadline - self._shelf.clock())
        return lease

    def _until_given(self, attempt: Callable[[], T | Busy | Full | None], deadline: float, job: str) -> T:
        while True:
            with self._shelf.lock:
                self._shelf.check_open()
                found = attempt()
                if found is not None and not isinstance(found, Busy | Full):
                    return found
                if isinstance(found, Full) or not job:
                    self._wait(found, deadline)
                    continue
            if not self._give_way(job, self._shelf.clock() >= deadline):
                with self._shelf.lock:
                    self._wait(found, deadline)

    def _asked_before(self, key: ShardKey, owner: Owner) -> Slot | None:
        """The slot ``key`` already has, when its owner asks again (its answer was lost, or staging failed)."""
        slot = self._shelf.slot_of(key)
        if slot is None:
            return None
        if slot.lease is None:
            raise RequestError(f"{key} is sealed already; a new attempt needs a new number")
        if slot.owner != owner and slot.owner is not None and slot.owner.alive:
            raise RequestError(f"{key} is being written by process {slot.owner.pid}")
        if slot.sealing:
            raise RequestError(f"{key} is being sealed")
        if not self._shelf.intact(slot):
            self._shelf.lose(slot)
            return None
        return slot

    def _chosen(
        self, key: ShardKey, size_bytes: int, parts: int, *, copy: bool
    ) -> tuple[Slot | None, Busy | Full | None]:
        limits = self._shelf.limits
        # When groups change there are several parities of one version for a while. The budget bounds those, too.
        if key.kind or key.job in self._jobs.managed:
            limits = dataclasses.replace(limits, burst=MAX_PARTS)
        slot_bytes = size_class(size_bytes)

        def decide(views: Sequence[SlotView]) -> Decision:
            whole = self._jobs.whole()
            return choose_slot(
                views,
                job=key.job,
                part=key.seat,
                epoch=max(key.epoch, self._jobs.horizon(key.job)),
                size_bytes=slot_bytes,
                limits=limits,
                whole=self._jobs.needed(whole),
                settled=self._jobs.settled(whole, key if copy else None),
                kept=self._jobs.kept(whole),
                version=key.version,
                writers=self._jobs.writers(key.job, parts),
            )

        while True:
            decision = decide(self._shelf.views())
            if isinstance(decision, CreateSlot):
                self._shelf.make_free(decision.drop)
                return self._shelf.create(key.job, key.seat, slot_bytes), None
            if isinstance(decision, UseSlot):
                slot = self._shelf.slots[decision.name]
                if self._shelf.intact(slot):
                    self._shelf.make_free(decision.drop)
                    return self._emptied(slot), None
                self._shelf.lose(slot)
            elif slot_bytes > size_bytes:
                slot_bytes = size_bytes  # there may be room for that
            elif not self._unused_give_way(key, decide):
                return None, decision

    def _unused_give_way(self, key: ShardKey, decide: Callable[[Sequence[SlotView]], object]) -> bool:
        """Drop jobs that nobody uses, where a writer of another one finds room then and not otherwise."""
        views = self._shelf.views()
        going: list[str] = []
        for job in self._jobs.unused():
            if job == key.job:
                continue
            going.append(job)
            left = [view for view in views if view.job not in going]
            if not isinstance(decide(left), Busy | Full):
                for one in going:
                    hours = self._jobs.unused_s(one) / 3600
                    self._expire(one, f"nobody had used it for {hours:.1f} hours, and job {key.job} needed the room")
                self.expired += going
                return True
        return False

    def _emptied(self, slot: Slot) -> Slot:
        if slot.record is not None:
            self._shelf.clear(slot)
            self._shelf.counters["evicted"] += 1
        return slot

    def _give(self, slot: Slot, key: ShardKey, size_bytes: int, parts: int, owner: Owner) -> Lease:
        lease = Lease(
            id=secrets.token_hex(8),
            key=key,
            parts=parts,
            size_bytes=size_bytes,
            slot=slot.name,
            generation=slot.generation,
            warm_bytes=slot.warm_bytes,
            slot_bytes=slot.size_bytes,
        )
        self._shelf.counters["leases"] += 1
        return self._shelf.give(slot, lease, owner)

    def grow(self, lease_id: str, size_bytes: int, *, wait_s: float) -> Lease:
        with self._shelf.lock:
            job = self._writable(lease_id)[1].key.job

        def attempt() -> _Growth | Busy | Full | None:
            slot, lease, owner = self._writable(lease_id)
            self._jobs.check_fence(lease.key)
            if size_bytes <= lease.size_bytes:
                return _Growth(slot, None, lease, lease, owner)
            grown = msgspec.structs.replace(lease, size_bytes=size_bytes)
            if size_bytes <= slot.size_bytes:
                return _Growth(slot, None, lease, self._shelf.give(slot, grown, owner), owner)
            larger = self._larger(slot, lease.key, size_bytes)
            if not isinstance(larger, Slot):
                return larger
            slot.sealing = larger.filling = True
            return _Growth(slot, larger, lease, grown, owner)

        growth = self._until_given(attempt, self._shelf.clock() + deadlines.left(wait_s), job)
        return growth.grown if growth.larger is None else self._moved(growth, growth.larger)

    def _moved(self, growth: _Growth, larger: Slot) -> Lease:
        """The lease in its larger slot, with what was written in the smaller one; bytes are copied without the lock."""
        slot = growth.slot
        try:
            self._copy(slot, larger)
            with self._shelf.lock:
                if slot.lease is not growth.lease:
                    raise LeaseLostError(f"the lease of {growth.lease.key} was taken back while its slot grew")
                return self._move(growth, larger)
        finally:
            with self._shelf.lock:
                slot.sealing = larger.filling = False
                if larger.lease is None:
                    self._shelf.drop(larger)
                self._shelf.changed.notify_all()

    def _copy(self, slot: Slot, larger: Slot) -> None:
        arena = self._shelf.arena
        try:
            with closing(arena.open(slot.name)) as old, closing(arena.open(larger.name, writable=True)) as new:
                copy_file(old, new)
        except OSError as error:
            raise ArenaFullError(f"{larger.name} could not take over what {slot.name} holds: {error}") from error
        larger.warm_bytes = slot.warm_bytes

    def _move(self, growth: _Growth, larger: Slot) -> Lease:
        """A kill in between leaves the lease noted for both slots: the larger one counts then."""
        slot = growth.slot
        lease = msgspec.structs.replace(
            growth.grown,
            slot=larger.name,
            generation=larger.generation,
            slot_bytes=larger.size_bytes,
            warm_bytes=larger.warm_bytes,
        )
        self._shelf.give(larger, lease, growth.owner)
        reach("agent.grown")
        slot.lease = slot.owner = None
        self._shelf.drop(slot)
        self._shelf.counters["grown"] += 1
        return lease

    def _larger(self, slot: Slot, key: ShardKey, size_bytes: int) -> Slot | Busy | Full:
        """A slot that the leased one can be copied into, or why there is none."""
        slot_bytes = size_class(size_bytes)

        def decide(views: Sequence[SlotView]) -> MakeRoom | Busy | Full:
            whole = self._jobs.whole()
            return make_room(
                views,
                growing=slot.name,
                epoch=key.epoch,
                size_bytes=slot_bytes,
                limits=self._shelf.limits,
                whole=self._jobs.needed(whole),
                settled=self._jobs.settled(whole),
                kept=self._jobs.kept(whole),
                writers=self._jobs.writers(key.job, slot.lease.parts if slot.lease is not None else 1),
            )

        while True:
            decision = decide(self._shelf.views())
            if isinstance(decision, MakeRoom):
                self._shelf.make_free(decision.drop)
                return self._shelf.create(slot.job, slot.part, slot_bytes)
            if slot_bytes > size_bytes:
                slot_bytes = size_bytes
            elif not self._unused_give_way(key, decide):
                return decision

    def open_slot(self, name: str) -> int:
        """A slot's file, open for writing, for whoever has leased it or is about to."""
        with self._shelf.lock:
            slot = self._shelf.slots.get(name)
            if slot is None or slot.state is SlotState.SEALED:
                raise LeaseLostError(f"{name} cannot be written: its lease expired or was fenced, or it is sealed")
            if not self._shelf.intact(slot):
                self._shelf.lose(slot)
                raise LeaseLostError(f"{name} was removed or truncated by somebody else, and is given up")
            return self._shelf.open(slot, writable=True)

    def _writable(self, lease_id: str) -> tuple[Slot, Lease, Owner]:
        slot, done = self._shelf.leased(lease_id)
        while slot.sealing and done is None:  # sealed, or moved to a larger slot: the call was repeated
            if deadlines.over():
                raise UnavailableError(f"what lease {lease_id} was for is still being sealed")
            self._shelf.changed.wait(deadlines.left(1.0))
            slot, done = self._shelf.leased(lease_id)
        if slot.lease is None or slot.owner is None:
            raise RequestError(f"lease {lease_id} is sealed already")
        return slot, slot.lease, slot.owner

    def _wait(self, refused: Busy | Full | None, deadline: float) -> None:
        """Wait a while when that may help, or say that it does not."""
        if isinstance(refused, Full):
            self._shelf.counters["lease_full"] += 1
            raise ArenaFullError(refused.reason + self._shelf.said_of_aside)
        left = deadline - self._shelf.clock()
        if not left > 0:
            self._shelf.counters["lease_busy"] += 1
            raise ArenaBusyError(refused.reason if refused else "no slot")
        self._shelf.counters["lease_waits"] += 1
        self._shelf.changed.wait(min(left, 1.0))

    def relabel(self, lease_id: str, key: ShardKey) -> Lease:
        with self._shelf.lock:
            self._shelf.check_open()
            slot, lease, owner = self._writable(lease_id)
            check_key(key, lease.size_bytes, lease.parts)
            if (key.job, key.part) != (lease.key.job, lease.key.part):
                raise RequestError(f"{lease.key} cannot become {key}: another writer")
            if key != lease.key and self._shelf.slot_of(key) is not None:
                raise RequestError(f"{key} exists already")
            slot.lease = msgspec.structs.replace(lease, key=key)  # a newer incarnation ends other leases, not this one
            try:
                self._jobs.check_fence(key)
            except BaseException:
                slot.lease = lease
                raise
            return self._shelf.give(slot, msgspec.structs.replace(lease, key=key), owner)

    def abandon(self, lease_id: str) -> None:
        with self._shelf.lock:
            for slot in self._shelf.slots.values():
                if slot.lease is not None and slot.lease.id == lease_id and not slot.sealing:
                    self._shelf.take_back(slot)
                    return

    def sweep(self, grace_s: float) -> None:
        """Take back what belonged to writers that went away."""
        for slot in list(self._shelf.slots.values()):
            if slot.lease is None or slot.owner is None or slot.sealing:
                continue
            gone_s = self._jobs.gone_for(slot.owner)
            if gone_s > grace_s:
                self._shelf.end_lease(slot, "its writer went away")

    def adopt(self, slot: Slot, lease: Lease, owner: Owner) -> None:
        """A killed agent had given this slot to a writer that may still be there."""
        before = next((s for s in self._shelf.slots.values() if s.lease is not None and s.lease.id == lease.id), None)
        if before is not None and before is not slot:  # it was killed while the lease moved to a larger slot
            self._shelf.drop(min(before, slot, key=lambda one: one.size_bytes))
            if slot.name not in self._shelf.slots:
                return
        slot.lease, slot.owner = lease, owner
        self._jobs.gone.setdefault(owner, self._shelf.clock())
        self._jobs.heard_of(lease.key)
        if lease.size_bytes > slot.size_bytes:
            self._shelf.note_damage(lease.key.job, str(lease.key), f"its slot has only {slot.size_bytes} bytes left")
            self._shelf.notes.remove(LEASE, slot.name)
            self._shelf.drop(slot)


def check_key(key: ShardKey, size_bytes: int, parts: int) -> None:
    job_name(key.job)
    incarnation_name(key.incarnation)
    numbers = (key.version, key.epoch, key.attempt, key.part)
    if min(numbers) < 0 or max(numbers) >= MAX_NUMBER:
        raise RequestError(f"{key}: version, epoch, attempt and part are numbers from 0 to 2^62")
    if not 1 <= parts <= MAX_PARTS:
        raise RequestError(f"{key}: a version has 1 to {MAX_PARTS} parts, not {parts}")
    if not _KIND.fullmatch(key.kind):
        raise RequestError(f"{key}: {key.kind!r} is no kind of thing that is kept")
    if key.part >= parts:
        raise RequestError(f"{key}: part {key.part} of {parts}; parts are counted from 0")
    if size_bytes < 0:
        raise RequestError(f"{key}: {size_bytes} bytes")
