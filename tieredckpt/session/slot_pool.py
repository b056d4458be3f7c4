"""SlotPool: the agent's slots that this process leases, maps, fills and prepares for its saves."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from peerstore.daemon_process import ProcessIdentity, current_process
from peerstore.errors import ArenaBusyError, ArenaFullError, FencedError, LeaseLostError, PeerStoreError
from peerstore.failpoints import failpoint
from peerstore.shard_records import Lease, ShardKey, SlotInfo
from peerstore.sizes_and_durations import show_size
from tieredckpt.agent.agent_api import NodeAgentAPI
from tieredckpt.errors import JobTakenOverError, SaveFailedError, StoreBusyError, TierUnavailableError
from tieredckpt.format.shard_layout import Layout, round_up
from tieredckpt.session.incarnation import Incarnation, IncarnationTracker
from tieredckpt.session.save_plan import PlannedSave
from tieredckpt.tensors.device import accelerator
from tieredckpt.tensors.slot_copy import Copier, MappedSlot

log = logging.getLogger(__name__)

_SLOT_STEP = 1 << 20
"""Bytes that sizes of large leases are multiples of."""
_SMALL = 16 << 20
"""Bytes up to which leases have finer sizes and slots are not prepared."""
_PROVISIONAL = 1 << 40
"""First attempt number of slots that are leased before their step is known."""


@dataclass
class StagedShard:
    """Slot that is filled, or being filled, before its seal."""

    lease: Lease
    layout: Layout
    memory: MappedSlot
    owner: ProcessIdentity = field(default_factory=current_process)
    """Process that leased the slot. Another process of the same rank may fill and seal it."""


class SlotPool:
    """Mapped slots of one job in this process. Any thread may call it.

    ``before_lease`` runs before each lease. ``follow_restart`` registers the job again with a restarted agent.
    """

    def __init__(
        self,
        job: str,
        node: NodeAgentAPI,
        incarnation: IncarnationTracker,
        threads: int,
        *,
        before_lease: Callable[[], object],
        follow_restart: Callable[[], object],
    ) -> None:
        self._job = job
        self._agent = node
        self._incarnation = incarnation
        self._threads = threads
        self._before_lease = before_lease
        self._follow_restart = follow_restart
        self._item_bytes = 0
        """Bytes of the objects in the last shard, as an estimate for the next one."""
        self._provisional = itertools.count()
        self._memories: dict[str, MappedSlot] = {}
        self._prepared: set[tuple[int, int]] = set()
        """Part and size of slots that were prepared after a save."""
        self._preparing: list[threading.Thread] = []
        self._is_closing = False
        self._lock = threading.RLock()

    def lease(self, key: ShardKey, parts: int, layout: Layout, item_bytes: int, *, wait_s: float) -> StagedShard:
        """Lease and map a slot for ``layout`` and ``item_bytes`` bytes of objects.

        Wait up to ``wait_s`` seconds for a free slot.
        """
        self._before_lease()
        size = _lease_bytes(layout.header_bytes + layout.tensor_bytes + item_bytes)
        self._follow_restart()
        self._unmap_evicted()
        try:
            lease = self._lease(key, size, parts, wait_s)
            self._follow_restart()  # the old agent may have ended only now
            failpoint("stage.leased")
            memory = self._map_leased(lease)
            self._wait_for_preparation(lease, memory)
            return StagedShard(lease, layout, memory)
        except ArenaBusyError as error:
            raise StoreBusyError(str(error)) from error
        except FencedError as error:
            raise JobTakenOverError(
                f"Another process with the job name {self._job!r} has taken over, so this one can no longer save. Two "
                f"trainings need two job names ({error})"
            ) from error
        except ArenaFullError as error:
            raise SaveFailedError(
                f"{error}. The agent takes its budget from agent.budget (TIEREDCKPT_AGENT_BUDGET) when it starts"
            ) from error
        except (PeerStoreError, OSError, ValueError) as error:
            raise TierUnavailableError(f"no slot for {key}: {error}") from error

    def lease_before_step(self, planned: PlannedSave, *, wait_s: float) -> StagedShard | None:
        """Lease a slot for a planned save before its step is known; the seal sets the key.

        Return ``None`` if a newer incarnation has begun. This rank learns its name when the ranks of the save agree.
        """
        current = self._incarnation.current
        if current is None:
            raise SaveFailedError(f"{self._job}: a planned save without an incarnation")
        key = self._provisional_key(current, planned.part)
        try:
            return self.lease(key, planned.parts, planned.layout, self._item_bytes, wait_s=wait_s)
        except JobTakenOverError:
            return None
        except (StoreBusyError, SaveFailedError, TierUnavailableError) as error:
            description = f"what part {planned.part} of {self._job} stages (epoch {current.epoch} {current.name})"
            raise type(error)(str(error).replace(str(key), description)) from error

    def relabel(self, staged: StagedShard, key: ShardKey) -> StagedShard | None:
        """Return the slot moved to the incarnation of ``key``; the seal sets the final key.

        Return ``None`` if another rank of this node has begun that incarnation first, which ended this lease. The
        mapped memory is unchanged, and the agent does not lease it again while its owner lives.
        """
        provisional = self._provisional_key(Incarnation(key.epoch, key.incarnation), staged.lease.key.part)
        try:
            return replace(staged, lease=self._agent.store.relabel(staged.lease.id, provisional))
        except LeaseLostError:
            return None
        except PeerStoreError as error:
            raise SaveFailedError(f"{key}: its staged data was lost: {error}") from error

    def adopt(self, lease: Lease, layout: Layout, owner: ProcessIdentity) -> StagedShard:
        """Use a slot that another process of this rank has staged."""
        return StagedShard(lease, layout, self._map_leased(lease), owner)

    def finish(self, staged: StagedShard, key: ShardKey, items: Sequence[bytes | memoryview]) -> StagedShard:
        """Return the slot with its final key, header and items, grown for the items if necessary."""
        layout, lease = staged.layout, staged.lease
        sizes = tuple(len(item) for item in items)
        if staged.owner == current_process():
            self._prepare_following(staged)
        self._item_bytes = sum(sizes)
        if lease.key != key:
            lease = self._agent.store.relabel(lease.id, key)
        if (total := layout.size_bytes(sizes)) > lease.size_bytes:  # this may copy the staged bytes into another file
            lease = self._agent.store.grow(lease.id, round_up(total, _SLOT_STEP))
        if lease is not staged.lease:
            staged = replace(staged, lease=lease, memory=self._map_leased(lease))
        staged.memory.write(0, layout.header(sizes))
        for start, item in zip(layout.item_starts(sizes), items, strict=True):
            staged.memory.write(layout.header_bytes + start, item)
        return staged

    def release(self, staged: StagedShard) -> None:
        """Release the slot. Errors are only logged, because the lease expires anyway."""
        try:
            self._agent.store.release(staged.lease.id)
        except PeerStoreError as error:
            log.warning("slot of %s was not given back: %s", staged.lease.key, error)

    def prepare(self, part: int, size_bytes: int, place: torch.device | None) -> None:
        """Map, populate and register in the background the slots that the next saves of ``part`` write into."""
        with self._lock:
            if self._is_closing:
                return
            thread = threading.Thread(
                target=self._prepare, args=(part, size_bytes, place), name="tieredckpt-prepare", daemon=True
            )
            self._preparing = [*(one for one in self._preparing if one.is_alive()), thread]
            thread.start()

    def wait_until_prepared(self) -> None:
        """Wait until the slots that are being prepared are ready for saves."""
        with self._lock:
            threads = list(self._preparing)
        for thread in threads:
            thread.join()

    def populated_mapping(self, fd: int, size_bytes: int) -> MappedSlot | None:
        """Return this process's mapping of a shard's open file, if all pages of the shard are populated."""
        with self._lock:
            return next((memory for memory in self._memories.values() if memory.maps_file(fd, size_bytes)), None)

    def close(self) -> None:
        self._is_closing = True
        self.wait_until_prepared()
        for memory in self._memories.values():
            memory.close()
        self._memories.clear()

    def _provisional_key(self, incarnation: Incarnation, part: int) -> ShardKey:
        attempt = _PROVISIONAL + next(self._provisional)
        return ShardKey(self._job, 0, incarnation.epoch, incarnation.name, attempt, part)

    def _lease(self, key: ShardKey, size: int, parts: int, wait_s: float) -> Lease:
        store = self._agent.store
        try:
            return store.lease(key, size, parts, wait_s=wait_s)
        except (ArenaBusyError, ArenaFullError):
            if not self._unmap_evicted():
                raise
            return store.lease(key, size, parts, wait_s=wait_s)  # the memory of unmapped slots is free now

    def _map_leased(self, lease: Lease) -> MappedSlot:
        with self._lock:
            memory, _ = self._map(lease.slot, lease.slot_bytes, lease.generation)
            self._unmap_evicted()
            return memory

    def _map(self, slot: str, size_bytes: int, generation: int) -> tuple[MappedSlot, bool]:
        """Return the mapping of a slot, and whether it is new. The caller holds the lock."""
        known = self._memories.get(slot)
        if known is not None and known.generation == generation:
            return known, False
        fd = self._agent.store.open_slot(slot)
        if known is not None:
            known.close()
        memory = self._memories[slot] = MappedSlot(fd, size_bytes, generation)
        return memory, True

    def _unmap_evicted(self) -> bool:
        """Unmap evicted slots, whose memory counts until then; return whether any were mapped."""
        with self._lock:
            dropped = [name for name, memory in self._memories.items() if memory.is_evicted]
            for name in dropped:
                self._memories.pop(name).close()
            return bool(dropped)

    def _prepare(self, part: int, size_bytes: int, place: torch.device | None) -> None:
        try:
            # Own threads, because a save may use those of the session at the same time.
            with contextlib.closing(Copier(self._threads)) as copier:
                for slot in self._agent.store.reserve(self._job, part, _lease_bytes(size_bytes)):
                    if not self._is_closing:
                        self._prepare_slot(slot, place, copier)
        except (PeerStoreError, OSError, ValueError) as error:
            # Saves work without prepared slots.
            log.debug("slots for %s were not prepared: %s", self._job, error)

    def _prepare_slot(self, slot: SlotInfo, place: torch.device | None, copier: Copier) -> None:
        with self._lock:
            memory, is_new = self._map(slot.slot, slot.size_bytes, slot.generation)
            if not is_new:
                return
            memory.ready.clear()
        try:
            memory.prefault(copier, lambda: self._is_closing)
            if place is not None and not self._is_closing:
                memory.register(accelerator(), place)
        finally:
            memory.ready.set()

    def _prepare_following(self, staged: StagedShard) -> None:
        """Prepare the slot of the next save, once for each part and size."""
        lease = staged.lease
        with self._lock:
            is_new = (lease.key.part, lease.size_bytes) not in self._prepared
            self._prepared.add((lease.key.part, lease.size_bytes))
        if is_new and lease.size_bytes > _SMALL:
            self.prepare(lease.key.part, lease.size_bytes, staged.memory.place)

    def _wait_for_preparation(self, lease: Lease, memory: MappedSlot) -> None:
        if memory.ready.is_set():
            return
        log.info(
            "%s: step %d waits for its slot of %s, which is still being prepared. Call Checkpointer.prepare(state) "
            "earlier to avoid the wait",
            *(self._job, lease.key.version, show_size(lease.slot_bytes)),
        )
        memory.ready.wait()


def _lease_bytes(size_bytes: int) -> int:
    """Return the lease size for a shard of ``size_bytes``, rounded so that similar shards share slots."""
    return round_up(size_bytes, _SLOT_STEP if size_bytes > _SMALL else 1 << 16)
