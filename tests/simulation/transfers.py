"""Simulated transfers of copies, one chunk at a time, so that faults can occur between chunks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from peerstore import checksums
from peerstore.errors import LeaseLostError, PeerStoreError, ShardDamagedError, ShardNotFoundError
from peerstore.peers.peer_messages import OfferReplica, OfferReply
from peerstore.replication.replication_policy import ReplicationTask, ReplicationView, is_committed
from peerstore.shard_records import Lease, ResumePoint, ShardRecord
from peerstore.store.received_replicas import holders_to_store
from peerstore.store.slots import ArenaSlot
from tests.simulation.memory import CHUNK_BYTES

if TYPE_CHECKING:
    from tests.simulation.agent import SimulatedAgent

_IDLE_S = 3.0
_names = itertools.count()


@dataclass
class _Transfer:
    sender: str
    record: ShardRecord
    lease: Lease
    holders: tuple[str, ...]
    touched: float
    done: list[bool] = field(default_factory=list)


def is_chunk_intact(record: ShardRecord, number: int, data: bytes) -> bool:
    return checksums.chunk_checksum(data).to_bytes(8, "little") == record.checksums[8 * number : 8 * number + 8]


class IncomingTransfers:
    """Copies that other nodes send to this one."""

    def __init__(self, agent: SimulatedAgent) -> None:
        self._agent = agent
        self._transfers: dict[str, _Transfer] = {}
        self.handlers: dict[str, Callable[[str, Any], Any]] = {
            "offer_replica": self._offer,
            "replica_chunk": self._chunk,
            "commit_replica": self._commit,
            "abort_replica": self._abort,
        }

    def _offer(self, sender: str, offer: OfferReplica) -> OfferReply:
        from tests.simulation.agent import COPIER, JOB

        if offer.resume_point is not None:
            self._agent.jobs.incarnations.learn_resume_point(JOB, offer.resume_point)
        lease = self._agent.copies.begin_replica(offer.record, whole=offer.committed, owner=COPIER)
        if lease is None:
            self._agent.copies.merge_holders(offer.record.key, offer.holders, me=self._agent.name)
            return OfferReply("")
        name = f"t{next(_names)}"
        count = checksums.chunk_count(offer.record.size_bytes, CHUNK_BYTES)
        self._transfers[name] = _Transfer(
            sender, offer.record, lease, offer.holders, self._agent.world.now, [False] * count
        )
        return OfferReply(name, ((0, count),))

    def _transfer_of(self, sender: str, name: str) -> _Transfer | None:
        found = self._transfers.get(name)
        return found if found is not None and found.sender == sender else None

    def _chunk(self, sender: str, chunk: tuple[str, int, bytes]) -> None:
        name, number, data = chunk
        transfer = self._transfer_of(sender, name)
        if transfer is None or transfer.done[number]:
            return
        transfer.touched = self._agent.world.now
        slot = self._agent.machine.arena.bytes.get(transfer.lease.slot)
        if slot is None:  # the lease was revoked
            return
        slot[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES] = data
        transfer.done[number] = is_chunk_intact(transfer.record, number, data)

    def _commit(self, sender: str, name: str) -> tuple[int, ...]:
        """Return missing and damaged chunks, or seal the complete copy."""
        transfer = self._transfer_of(sender, name)
        if transfer is None:
            raise LeaseLostError(f"transfer {name} is unknown: it was aborted")
        missing = tuple(number for number, done in enumerate(transfer.done) if not done)
        if missing:
            return missing
        del self._transfers[name]
        try:
            self._agent.copies.seal_replica(
                transfer.lease.id, transfer.record, holders_to_store(self._agent.name, transfer.holders)
            )
        except PeerStoreError:
            self._agent.leasing.release(transfer.lease.id)
            raise
        self._agent.accounts.confirm_holder(transfer.record.key, sender, self._agent.members.generation_of(sender))
        self._agent.wake()
        return ()

    def _abort(self, sender: str, name: str) -> None:
        if self._transfer_of(sender, name) is not None:
            self._agent.leasing.release(self._transfers.pop(name).lease.id)

    def sweep(self) -> None:
        """Abort transfers that have been idle too long, as after a lost connection."""
        for name, transfer in list(self._transfers.items()):
            if self._agent.world.now - transfer.touched > _IDLE_S:
                self._abort(transfer.sender, name)


class OutgoingTransfer:
    """The copy this node sends right now."""

    def __init__(self, agent: SimulatedAgent) -> None:
        self._agent = agent
        self._task: ReplicationTask | None = None
        self._slot: ArenaSlot | None = None
        self._record: ShardRecord | None = None
        self._transfer = ""
        self._is_retry = False
        self._target_generation = 0
        self._base: ResumePoint | None = None

    @property
    def is_busy(self) -> bool:
        return self._task is not None

    def begin(self, task: ReplicationTask, look: ReplicationView) -> None:
        try:
            self._slot, self._record = self._agent.shelf.slots.find_shard(task.key)
        except ShardNotFoundError:
            self._agent.wake()
            return
        self._task, self._transfer, self._is_retry = task, "", False
        self._slot.add_user("push")
        self._target_generation, self._base = look.generation_of(task.target), look.resume_point
        fact = next(fact for fact in look.shards if fact.key == task.key)
        offer = OfferReplica(
            self._record, task.holders, is_committed(fact, look.newest_replicated), resume_point=look.resume_point
        )
        self._agent.call(task.target, "offer_replica", offer, self._offer_accepted, self._failed)

    def _offer_accepted(self, wanted: OfferReply) -> None:
        if not wanted.transfer:
            self._done()
            return
        self._transfer = wanted.transfer
        self._send(tuple(number for run in wanted.missing for number in range(*run)))

    def _send(self, numbers: tuple[int, ...]) -> None:
        assert self._task is not None
        assert self._slot is not None
        data = self._agent.machine.arena.bytes.get(self._slot.name, bytearray())
        for nth, number in enumerate(numbers):
            chunk = bytes(data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES])
            chunk = self._agent.world.damage_on_wire(chunk)
            work = partial(self._agent.call, self._task.target, "replica_chunk", (self._transfer, number, chunk))
            self._agent.run_later(0.001 * nth, work)
        commit = partial(
            self._agent.call, self._task.target, "commit_replica", self._transfer, self._committed, self._failed
        )
        self._agent.run_later(0.001 * len(numbers) + 0.005, commit)

    def _committed(self, missing: tuple[int, ...]) -> None:
        if not missing:
            self._done()
        elif self._is_retry:
            self._failed(ShardDamagedError(f"{len(missing)} chunks arrived damaged twice"))
        else:
            self._is_retry = True
            self._send(missing)

    def _done(self) -> None:
        assert self._task is not None
        self._agent.accounts.task_done(self._task, self._target_generation, self._base)
        self._end()

    def _failed(self, error: PeerStoreError) -> None:
        task = self._task
        assert task is not None
        self._agent.world.log(
            f"{self._agent.name} could not copy {self._agent.world.short_name(task.key)} to {task.target}: "
            f"{type(error).__name__}"
        )
        doubtful = self._agent.accounts.task_failed(task, error, self._agent.world.now)
        if self._transfer:
            self._agent.call(task.target, "abort_replica", self._transfer)
        if doubtful:
            self._agent.verify(task.key)
        self._end()

    def _end(self) -> None:
        assert self._slot is not None
        self._task = None
        with self._agent.shelf.lock:
            self._agent.shelf.release_reader(self._slot, "push")
        self._agent.wake()
