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
    RetentionMark,
    ShardInfo,
    ShardKey,
    ShardRecord,
    VersionId,
)
from peerstore.store.job_table import JobTable
from peerstore.store.leases import LeaseManager, validate_shard_key
from peerstore.store.shards import ShardRemoval
from peerstore.store.slot_metadata import SEAL_METADATA, SealMetadata
from peerstore.store.slot_table import SlotTable
from peerstore.store.slots import UNVERIFIED_STATES, ArenaSlot

log = logging.getLogger(__name__)

MAX_REPLICA_CHUNK_BYTES = 64 << 20
MAX_REPLICA_META_BYTES = 16 << 20


class ReplicaStore:
    """Replicas and parities that the store receives from other nodes."""

    def __init__(
        self,
        table: SlotTable,
        jobs: JobTable,
        leasing: LeaseManager,
        keeping: ShardRemoval,
        *,
        torn: Callable[[str, VersionId], None] = lambda _job, _group: None,
    ) -> None:
        self._table = table
        self.jobs = jobs
        self._leasing = leasing
        self._keeping = keeping
        self._on_aborted = torn
        """Told of versions that other nodes say are torn; not with the lock held."""

    def begin_replica(self, record: ShardRecord, *, whole: bool, owner: ProcessIdentity) -> Lease | None:
        """A slot for a copy of ``record``, or ``None`` when it is here already.

        Of an incarnation before the running one only versions are taken that are ``whole``: its writers are fenced.
        """
        validate_received_record(record)
        key = record.key
        if key.kind:
            raise RequestError(f"{key} is no shard: every node makes its own parities")
        with self._table.exclusive():
            self._table.check_open()
            if self._is_stored(record):
                return None
            return self._lease(key, record.size_bytes, record.parts, whole=whole, owner=owner)

    def begin_parity(
        self, key: ShardKey, size_bytes: int, parts: int, *, whole: bool, owner: ProcessIdentity
    ) -> Lease | None:
        """A slot for a parity that this node is about to make, or ``None`` when it is here already."""
        if not key.kind:
            raise RequestError(f"{key} is a shard, not a parity")
        with self._table.exclusive():
            self._table.check_open()
            slot = self._table.slot_for_key(key)
            if slot is not None and slot.available_shard is not None:
                return None
            return self._lease(key, size_bytes, parts, whole=whole, owner=owner)

    def _lease(self, key: ShardKey, size_bytes: int, parts: int, *, whole: bool, owner: ProcessIdentity) -> Lease:
        self._check_fence(key, whole=whole)
        if self._table.slot_for_key(key) is not None:
            raise ShardPendingError(f"{key} is on its way already, or not verified yet")
        return self._leasing.lease(key, size_bytes, parts, wait_s=0.0, owner=owner, copy=True)

    def _is_stored(self, record: ShardRecord) -> bool:
        slot = self._table.slot_for_key(record.key)
        if slot is None or slot.record is None:
            return False
        if slot.state in UNVERIFIED_STATES:
            raise ShardPendingError(f"{record.key} is here and not verified yet")
        if slot.record.checksums != record.checksums:
            raise ShardDamagedError(f"{record.key} is here with other checksums")
        return True

    def _check_fence(self, key: ShardKey, *, whole: bool) -> None:
        known = self.jobs.get_or_create(key.job)
        if key.job in self.jobs.incarnations.managed and (key.epoch, key.incarnation) != (
            known.epoch,
            known.incarnation,
        ):
            raise RequestError(f"{key}: only the agents of the nodes write shards of job {key.job}")
        if known.replicated is not None and key.version_id < known.replicated and not self._kept(key):
            raise FencedError(f"{key} is older than version {known.replicated.version}, which has all its copies")
        if key.version_id in known.aborted:
            raise FencedError(f"{key}: a part of its version was left out, so that it is given up")
        base = known.resume_point
        back = (
            base is not None
            and key.epoch < base.first_current_epoch
            and key.version_id not in (base.version_id, known.replicated)
        )
        if base is not None and back and not self._kept(key):
            raise FencedError(
                f"{key}: job {key.job} went on from version {base.version_id.version}, and does not need this"
            )
        if not self.jobs.incarnations.is_plausible_epoch(key.job, key.epoch):
            raise RequestError(f"{key}: job {key.job} cannot have come so far, it is in epoch {known.epoch}")
        if (key.epoch, key.incarnation) > known.owner:
            self.jobs.incarnations.fence(key.job, key.epoch, key.incarnation)
        elif (key.epoch, key.incarnation) != known.owner and not (
            whole or known.is_committed(key.version_id) or self._kept(key)
        ):
            raise FencedError(
                f"{key} is of a past incarnation and not whole: job {key.job} is now owned by epoch {known.epoch} "
                f"({known.incarnation})"
            )

    def _kept(self, key: ShardKey) -> bool:
        said = self.jobs.get_or_create(key.job).retention.get(key.version_id)
        return said is not None and said.retained

    def seal_replica(self, lease_id: str, record: ShardRecord, holders: tuple[str, ...]) -> None:
        """Every chunk has been compared with ``record``: from here on the copy counts."""
        with self._table.exclusive():
            slot, _ = self._table.slot_for_lease(lease_id)
            if slot.lease is None or slot.lease.key != record.key:
                raise LeaseLostError(f"the lease of {record.key} was taken back while it was being copied")
            seal = SealMetadata(lease_id, record, holders)
            self._table.metadata.put(SEAL_METADATA, slot.name, seal)
            failpoint("replica.sealing")
            self._table.seal(slot, seal)
            if record.key.kind:
                self._table.count("parities_created")
            else:
                self.jobs.record_repaired_part(record.key.job, record.key.version_id, record.key.part)
                self._table.count("replicas_received")
                self._table.count("replica_bytes_received", record.size_bytes)
            failpoint("replica.sealed")
            if self.jobs.is_aborted(record.key.job, record.key.version_id):  # while it was on its way
                self._keeping.delete_versions(record.key.job, [record.key.version_id])

    def set_holders(self, key: ShardKey, holders: tuple[str, ...]) -> bool:
        """Who holds the shard has changed; no holders: it is this node's own from now on. Whether it is here."""
        with self._table.exclusive():
            slot = self._table.slot_for_key(key)
            if slot is None or slot.available_shard is None:
                return False
            if slot.holders != holders:
                self._table.metadata.put(
                    SEAL_METADATA, slot.name, SealMetadata(slot.sealed_lease_id, slot.available_shard, holders)
                )
                self._table.set_holders(slot, holders)
            return True

    def merge_holders(self, key: ShardKey, holders: tuple[str, ...], *, me: str) -> None:
        """Another node that has the shard too says who holds it, itself first or not.

        Two that both answer for it, each since it took the other for dead, may say so at the same moment: if each gave
        way, nobody would answer for it any more. The first by name does not.
        """
        with self._table.exclusive():
            slot = self._table.slot_for_key(key)
            if slot is not None and holders and (slot.holders or me > holders[0]):
                self.set_holders(key, holders_to_store(me, holders))

    def list_shards(self, job: str | None) -> list[ShardInfo]:
        """What is here and verified, now: what is still being verified is not waited for."""
        with self._table.exclusive():
            return [self._fact(slot, record) for slot, record in self._table.available_shards(job)]

    def list_parities(self, job: str) -> list[ShardRecord]:
        """The verified parities that this node keeps for its group."""
        with self._table.exclusive():
            return [record for _, record in self._table.available_shards(job, parities=True)]

    def delete_parity(self, key: ShardKey) -> None:
        """A parity that another one has made superfluous."""
        with self._table.exclusive():
            slot = self._table.slot_for_key(key) if key.kind else None
            if slot is not None and slot.record is not None:
                self._table.retire(slot)

    def _fact(self, slot: ArenaSlot, record: ShardRecord) -> ShardInfo:
        marked = record.key.version_id in self.jobs.get_or_create(record.key.job).committed
        return ShardInfo(
            record.key, record.parts, record.size_bytes, record.meta, record.sealed_ns, marked, slot.holders
        )

    def previous_version(self, key: ShardKey) -> tuple[ShardRecord, int] | None:
        """The newest other version of the same part that is here, and its file: what did not change needs not travel.

        The file is the caller's, and not pinned: what is taken from it has to be compared.
        """
        with self._table.exclusive():
            older = [
                (slot, record)
                for slot, record in self._table.available_shards(key.job)
                if record.key.part == key.part and record.key != key
            ]
            if not older:
                return None
            slot, record = max(older, key=lambda found: found[1].key.version_id)
            try:
                return record, self._table.arena.open(slot.name)
            except OSError:
                return None

    def apply_retention(self, job: str, said: tuple[RetentionMark, ...]) -> None:
        """Another node says what is to be kept."""
        with self._table.exclusive():
            try:
                self.jobs.apply_retention(job, said)
            except RequestError as error:  # each node refuses at its own users' calls
                log.warning("what other nodes keep of job %s is not kept here: %s", job, error)

    # -- what is decided of versions ------------------------------------------------------------------------------

    def apply_decision(self, job: str, decided: CommitDecision) -> None:
        """What the node that counts has come to, wherever it was heard."""
        with self._table.exclusive():
            if job in self.jobs.incarnations.managed:  # its shards are removed by name only
                return
            if decided.committed is not None and self.jobs.get_or_create(job).would_be_newest(decided.committed):
                self.jobs.mark_committed(job, decided.committed)
            if decided.replicated is not None:
                self.jobs.mark_replicated(job, decided.replicated)
            news = self.jobs.mark_aborted(job, decided.aborted)
            if news:
                log.info("job %s: versions %s are torn, given up", job, [group.version for group in news])
                self._keeping.delete_versions(job, news)
        for group in news:
            self._on_aborted(job, group)


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
