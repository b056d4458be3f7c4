"""Shards that this node stores for other nodes: replicas, parities, their holders, and the leader's decisions."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from peerstore.commit_protocol import CommitDecision
from peerstore.daemon_process import ProcessIdentity
from peerstore.errors import FencedError, LeaseLostError, RequestError, ShardDamagedError, ShardPendingError
from peerstore.failpoints import failpoint
from peerstore.shard_records import (
    CHUNK_BYTES,
    Lease,
    ResumePoint,
    RetentionMark,
    ShardInfo,
    ShardKey,
    ShardRecord,
    VersionId,
)
from peerstore.store.job_table import JobTable
from peerstore.store.leases import LeaseManager, validate_shard_key
from peerstore.store.shards import ShardRemoval
from peerstore.store.slots import LEASE_METADATA, SEAL_METADATA, ArenaSlot, SealMetadata, ShardState, SlotTable

log = logging.getLogger(__name__)

MAX_REPLICA_CHUNK_BYTES = 64 << 20
MAX_REPLICA_META_BYTES = 16 << 20


class ReplicaStore:
    """What the store does for other nodes. The shelf's lock is taken here."""

    def __init__(
        self,
        shelf: SlotTable,
        jobs: JobTable,
        leasing: LeaseManager,
        keeping: ShardRemoval,
        *,
        torn: Callable[[str, VersionId], None] = lambda _job, _group: None,
    ) -> None:
        self._shelf = shelf
        self._jobs = jobs
        self._leasing = leasing
        self._keeping = keeping
        self._torn = torn
        """Told of versions that other nodes say are torn; not with the lock held."""

    def begin(self, record: ShardRecord, *, whole: bool, owner: ProcessIdentity) -> Lease | None:
        """A slot for a copy of ``record``, or ``None`` when it is here already.

        Of an incarnation before the running one only versions are taken that are ``whole``: its writers are fenced.
        """
        validate_received_record(record)
        key = record.key
        if key.kind:
            raise RequestError(f"{key} is no shard: every node makes its own parities")
        with self._shelf.lock:
            self._shelf.check_open()
            if self._here(record):
                return None
            return self._room(key, record.size_bytes, record.parts, whole=whole, owner=owner)

    def begin_parity(
        self, key: ShardKey, size_bytes: int, parts: int, *, whole: bool, owner: ProcessIdentity
    ) -> Lease | None:
        """A slot for a parity that this node is about to make, or ``None`` when it is here already."""
        if not key.kind:
            raise RequestError(f"{key} is a shard, not a parity")
        with self._shelf.lock:
            self._shelf.check_open()
            slot = self._shelf.slot_of(key)
            if slot is not None and slot.offered is not None:
                return None
            return self._room(key, size_bytes, parts, whole=whole, owner=owner)

    def _room(self, key: ShardKey, size_bytes: int, parts: int, *, whole: bool, owner: ProcessIdentity) -> Lease:
        self._check_fence(key, whole=whole)
        if self._shelf.slot_of(key) is not None:
            raise ShardPendingError(f"{key} is on its way already, or not verified yet")
        return self._leasing.lease(key, size_bytes, parts, wait_s=0.0, owner=owner, copy=True)

    def _here(self, record: ShardRecord) -> bool:
        slot = self._shelf.slot_of(record.key)
        if slot is None or slot.record is None:
            return False
        if slot.standing in (ShardState.ADOPTING, ShardState.UNREADABLE):
            raise ShardPendingError(f"{record.key} is here and not verified yet")
        if slot.record.checksums != record.checksums:
            raise ShardDamagedError(f"{record.key} is here with other checksums")
        return True

    def _check_fence(self, key: ShardKey, *, whole: bool) -> None:
        known = self._jobs.of(key.job)
        if known.settled is not None and key.group < known.settled and not self._kept(key):
            raise FencedError(f"{key} is older than version {known.settled.version}, which has all its copies")
        if key.group in known.torn:
            raise FencedError(f"{key}: a part of its version was left out, so that it is given up")
        base = known.base
        back = base is not None and key.epoch < base.before and key.group not in (base.group, known.settled)
        if base is not None and back and not self._kept(key):
            raise FencedError(f"{key}: job {key.job} went on from version {base.group.version}, and does not need this")
        if not self._jobs.is_near(key.job, key.epoch):
            raise RequestError(f"{key}: job {key.job} cannot have come so far, it is in epoch {known.epoch}")
        if (key.epoch, key.incarnation) > (known.epoch, known.incarnation):
            self._jobs.fence(key.job, key.epoch, key.incarnation)
        elif (key.epoch, key.incarnation) != (known.epoch, known.incarnation) and not (
            whole or known.vouched(key.group) or self._kept(key)
        ):
            raise FencedError(
                f"{key} is of a past incarnation and not whole: job {key.job} is now owned by epoch {known.epoch} "
                f"({known.incarnation})"
            )

    def _kept(self, key: ShardKey) -> bool:
        said = self._jobs.of(key.job).kept.get(key.group)
        return said is not None and said.kept

    def seal(self, lease_id: str, record: ShardRecord, holders: tuple[str, ...]) -> None:
        """Every chunk has been compared with ``record``: from here on the copy counts."""
        with self._shelf.lock:
            slot, _ = self._shelf.leased(lease_id)
            if slot.lease is None or slot.lease.key != record.key:
                raise LeaseLostError(f"the lease of {record.key} was taken back while it was being copied")
            self._shelf.notes.put(SEAL_METADATA, slot.name, SealMetadata(lease_id, record, holders))
            failpoint("peer.copying")
            slot.record, slot.sealed_under, slot.holders = record, lease_id, holders
            slot.lease = slot.owner = None
            self._shelf.drop_note(LEASE_METADATA, slot.name)
            slot.warm_bytes = max(slot.warm_bytes, record.size_bytes)
            if record.key.kind:
                self._shelf.counters["parities_made"] += 1
            else:
                self._jobs.mended(record.key.job, record.key.group, record.key.part)
                self._shelf.counters["copies_taken"] += 1
                self._shelf.counters["copied_in_bytes"] += record.size_bytes
            failpoint("peer.copied")
            if self._jobs.is_torn(record.key.job, record.key.group):  # while it was on its way
                self._keeping.forget(record.key.job, [record.key.group])

    def relist(self, key: ShardKey, holders: tuple[str, ...]) -> bool:
        """Who holds the shard has changed; no holders: it is this node's own from now on. Whether it is here."""
        with self._shelf.lock:
            slot = self._shelf.slot_of(key)
            if slot is None or slot.offered is None:
                return False
            if slot.holders != holders:
                self._shelf.notes.put(SEAL_METADATA, slot.name, SealMetadata(slot.sealed_under, slot.offered, holders))
                slot.holders = holders
            return True

    def offered(self, key: ShardKey, holders: tuple[str, ...], *, me: str) -> None:
        """Another node that has the shard too says who holds it, itself first or not.

        Two that both answer for it, each since it took the other for dead, may say so at the same moment: if each gave
        way, nobody would answer for it any more. The first by name does not.
        """
        with self._shelf.lock:
            slot = self._shelf.slot_of(key)
            if slot is not None and holders and (slot.holders or me > holders[0]):
                self.relist(key, holders_to_store(me, holders))

    def facts(self, job: str | None) -> list[ShardInfo]:
        """What is here and verified, now: what is still being verified is not waited for."""
        with self._shelf.lock:
            return [self._fact(slot, record) for slot, record in self._shelf.offered(job)]

    def parities(self, job: str) -> list[ShardRecord]:
        """The verified parities that this node keeps for its group."""
        with self._shelf.lock:
            return [record for _, record in self._shelf.offered(job, parities=True)]

    def drop_parity(self, key: ShardKey) -> None:
        """A parity that another one has made superfluous."""
        with self._shelf.lock:
            slot = self._shelf.slot_of(key) if key.kind else None
            if slot is not None and slot.record is not None:
                self._shelf.give_up(slot)

    def _fact(self, slot: ArenaSlot, record: ShardRecord) -> ShardInfo:
        marked = record.key.group in self._jobs.of(record.key.job).marks
        return ShardInfo(
            record.key, record.parts, record.size_bytes, record.meta, record.sealed_ns, marked, slot.holders
        )

    def like(self, key: ShardKey) -> tuple[ShardRecord, int] | None:
        """The newest other version of the same part that is here, and its file: what did not change needs not travel.

        The file is the caller's, and not pinned: what is taken from it has to be compared.
        """
        with self._shelf.lock:
            older = [
                (slot, record)
                for slot, record in self._shelf.offered(key.job)
                if record.key.part == key.part and record.key != key
            ]
            if not older:
                return None
            slot, record = max(older, key=lambda found: found[1].key.group)
            try:
                return record, self._shelf.arena.open(slot.name)
            except OSError:
                return None

    def kept(self, job: str) -> tuple[RetentionMark, ...]:
        """What is known of versions that are to be kept, or were."""
        with self._shelf.lock:
            known = self._jobs.if_known(job)
            return tuple(known.kept.values()) if known is not None else ()

    def keep(self, job: str, said: tuple[RetentionMark, ...]) -> None:
        """Another node says what is to be kept."""
        with self._shelf.lock:
            try:
                self._jobs.keep(job, said)
            except RequestError as error:  # each node refuses at its own users' calls
                log.warning("what other nodes keep of job %s is not kept here: %s", job, error)

    # -- what is decided of versions ------------------------------------------------------------------------------

    def decide(self, job: str, decided: CommitDecision) -> None:
        """What the node that counts has come to, wherever it was heard."""
        with self._shelf.lock:
            if decided.whole is not None and self._jobs.of(job).is_newer(decided.whole):
                self._jobs.call_whole(job, decided.whole)
            if decided.settled is not None:
                self._jobs.settle(job, decided.settled)
            news = self._jobs.tear(job, decided.torn)
            if news:
                log.info("job %s: versions %s are torn, given up", job, [group.version for group in news])
                self._keeping.forget(job, news)
        for group in news:
            self._torn(job, group)

    def decided(self, job: str) -> CommitDecision:
        """All of it that this node has heard."""
        with self._shelf.lock:
            known = self._jobs.if_known(job)
            if known is None:
                return CommitDecision()
            return CommitDecision(max(known.marks, default=None), known.settled, tuple(sorted(known.torn)))

    def left_out(self, job: str) -> dict[VersionId, tuple[int, ...]]:
        """The parts that writers of this node have left out, by version."""
        with self._shelf.lock:
            known = self._jobs.if_known(job)
            return {group: tuple(parts) for group, parts in known.torn.items() if parts} if known is not None else {}

    def go_back(self, job: str, group: VersionId) -> None:
        """The job goes on from this version: it stays, and so does what is newer, until a newer one is settled."""
        with self._shelf.lock:
            self._jobs.go_back(job, group)

    def guard(self, job: str, *, guarded: bool, permit: Callable[[], None] | None = None) -> None:
        """Whether only settled versions make older ones superfluous, and who may forbid a new incarnation."""
        with self._shelf.lock:
            self._jobs.guard(job, guarded=guarded, permit=permit)

    def fence(self, job: str, epoch: int, incarnation: str) -> None:
        with self._shelf.lock:
            self._jobs.fence(job, epoch, incarnation)

    def learn(self, job: str, base: ResumePoint) -> None:
        """Another node says what the job went on from."""
        with self._shelf.lock:
            self._jobs.learn(job, base)

    def base(self, job: str) -> ResumePoint | None:
        """What the job went on from, as far as this node has heard."""
        with self._shelf.lock:
            known = self._jobs.if_known(job)
            return known.base if known is not None else None

    def owner_of(self, job: str) -> tuple[int, str]:
        """The newest incarnation this node has heard of."""
        with self._shelf.lock:
            known = self._jobs.if_known(job)
            return (known.epoch, known.incarnation) if known is not None else (0, "")

    def settled(self, job: str) -> VersionId | None:
        with self._shelf.lock:
            known = self._jobs.if_known(job)
            return known.settled if known is not None else None

    def active(self, job: str) -> bool:
        """Whether a process of this node takes part in the job."""
        with self._shelf.lock:
            return self._jobs.active(job)

    def wanted(self, job: str, group: VersionId) -> bool:
        """Whether somebody may still need this version."""
        with self._shelf.lock:
            known = self._jobs.if_known(job)
            return known is None or known.wanted(group)

    def vouched(self, job: str, group: VersionId) -> bool:
        """Whether somebody has said that this version is whole."""
        with self._shelf.lock:
            known = self._jobs.if_known(job)
            return known is not None and known.vouched(group)

    def once_whole(self, job: str) -> VersionId | None:
        """The newest version of the job that is known to have been whole, whether it is still there or not."""
        with self._shelf.lock:
            known = self._jobs.if_known(job)
            return known.once_whole() if known is not None else None

    def touch(self, job: str) -> None:
        """Other nodes still take part in the job: what is kept for it here is not forgotten."""
        with self._shelf.lock:
            self._jobs.of(job).seen = self._shelf.clock()


def holders_to_store(me: str, holders: tuple[str, ...]) -> tuple[str, ...]:
    """Who is to be noted as a shard's holders: nobody, where this node is the first of them and the shard its own."""
    return () if holders[:1] == (me,) else holders


def validate_received_record(record: ShardRecord) -> None:
    """A record that came from another node describes a shard that could be."""
    validate_shard_key(record.key, record.size_bytes, record.parts)
    if not 1 <= record.chunk_bytes <= MAX_REPLICA_CHUNK_BYTES:
        raise RequestError(f"{record.key}: chunks of {record.chunk_bytes} bytes, {CHUNK_BYTES} are usual")
    if len(record.checksums) != 8 * -(-record.size_bytes // record.chunk_bytes):
        raise RequestError(f"{record.key}: {len(record.checksums)} bytes of checksums for {record.size_bytes} bytes")
    if len(record.meta) > MAX_REPLICA_META_BYTES:
        raise RequestError(f"{record.key}: {len(record.meta)} bytes of meta, at most {MAX_REPLICA_META_BYTES} are kept")


def is_same_shard(one: ShardRecord, other: ShardRecord) -> bool:
    """Whether two nodes mean the same bytes; when they were sealed does not matter."""
    return msgspec.structs.replace(one, sealed_ns=0) == msgspec.structs.replace(other, sealed_ns=0)
