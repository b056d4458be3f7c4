"""Shards stored for other nodes: replicas, parities, their holders, and the leader's decisions."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from peerstore.commit_protocol import CommitDecision
from peerstore.daemon_process import ProcessIdentity, current_process
from peerstore.errors import FencedError, LeaseLostError, RequestError, ShardDamagedError, ShardPendingError
from peerstore.failpoints import failpoint
from peerstore.shard_records import (
    Lease,
    RetentionMark,
    ShardInfo,
    ShardKey,
    ShardRecord,
)
from peerstore.store.job_table import JobTable
from peerstore.store.leases import LeaseManager
from peerstore.store.record_validation import validate_record
from peerstore.store.shards import ShardRemoval
from peerstore.store.slot_metadata import SEAL_METADATA, SealMetadata
from peerstore.store.slot_table import SlotTable
from peerstore.store.slots import UNVERIFIED_STATES, ArenaSlot
from peerstore.store.store_listener import StoreListeners

log = logging.getLogger(__name__)


class ReplicaStore:
    """Replicas and parities that the store receives from other nodes."""

    def __init__(
        self,
        table: SlotTable,
        jobs: JobTable,
        leasing: LeaseManager,
        removal: ShardRemoval,
        listeners: StoreListeners,
        *,
        check_files: Callable[[str], None] = lambda _what: None,
    ) -> None:
        self._table = table
        self.jobs = jobs
        self._leasing = leasing
        self._removal = removal
        self._listeners = listeners
        self._check_files = check_files
        """Raises an error if too few file descriptors remain."""

    def begin_replica(self, record: ShardRecord, *, whole: bool, owner: ProcessIdentity | None = None) -> Lease | None:
        """Return a slot for a copy of ``record``, or ``None`` if it is stored already.

        Versions of an earlier incarnation are accepted only if they are complete (``whole``): their writers are fenced.
        """
        validate_record(record)
        key = record.key
        if key.kind:
            raise RequestError(f"{key} is not a shard: every node makes its own parities")
        self._check_files(f"a copy of {key}")
        with self._table.lock:
            self._table.lock.check_open()
            if self._is_stored(record):
                return None
            return self._lease(key, record.size_bytes, record.parts, whole=whole, owner=owner)

    def begin_parity(
        self, key: ShardKey, size_bytes: int, parts: int, *, whole: bool, owner: ProcessIdentity | None = None
    ) -> Lease | None:
        """Return a slot for a parity that this node computes, or ``None`` if it is stored already."""
        if not key.kind:
            raise RequestError(f"{key} is a shard, not a parity")
        self._check_files(f"a parity {key}")
        with self._table.lock:
            self._table.lock.check_open()
            slot = self._table.slots.for_key(key)
            if slot is not None and slot.available_shard is not None:
                return None
            return self._lease(key, size_bytes, parts, whole=whole, owner=owner)

    def _lease(
        self, key: ShardKey, size_bytes: int, parts: int, *, whole: bool, owner: ProcessIdentity | None
    ) -> Lease:
        self._check_fence(key, whole=whole)
        if self._table.slots.for_key(key) is not None:
            raise ShardPendingError(f"{key} is already being written, or not verified yet")
        return self._leasing.lease(key, size_bytes, parts, wait_s=0.0, owner=owner or current_process(), copy=True)

    def _is_stored(self, record: ShardRecord) -> bool:
        slot = self._table.slots.for_key(record.key)
        if slot is None or slot.record is None:
            return False
        if slot.state in UNVERIFIED_STATES:
            raise ShardPendingError(f"{record.key} is stored but not verified yet")
        if slot.record.checksums != record.checksums:
            raise ShardDamagedError(f"{record.key} is stored with other checksums")
        return True

    def _check_fence(self, key: ShardKey, *, whole: bool) -> None:
        known = self.jobs.get_or_create(key.job)
        if key.job in self.jobs.incarnations.managed and (key.epoch, key.incarnation) != (
            known.epoch,
            known.incarnation,
        ):
            raise RequestError(f"{key}: only the agents of the nodes write shards of job {key.job}")
        if known.replicated is not None and key.version_id < known.replicated and not self._is_retained(key):
            raise FencedError(f"{key} is older than version {known.replicated.version}, which is replicated")
        if key.version_id in known.aborted:
            raise FencedError(f"{key}: its version was aborted")
        base = known.resume_point
        abandoned = (
            base is not None
            and key.epoch < base.first_current_epoch
            and key.version_id not in (base.version_id, known.replicated)
        )
        if base is not None and abandoned and not self._is_retained(key):
            raise FencedError(
                f"{key}: job {key.job} resumed from version {base.version_id.version} and does not need this"
            )
        if not self.jobs.incarnations.is_plausible_epoch(key.job, key.epoch):
            raise RequestError(f"{key}: epoch {key.epoch} is implausible, job {key.job} is in epoch {known.epoch}")
        if (key.epoch, key.incarnation) > known.owner:
            self.jobs.incarnations.fence(key.job, key.epoch, key.incarnation)
        elif (key.epoch, key.incarnation) != known.owner and not (
            whole or known.is_committed(key.version_id) or self._is_retained(key)
        ):
            raise FencedError(
                f"{key} belongs to a past incarnation and is not complete: job {key.job} is now owned by epoch "
                f"{known.epoch} ({known.incarnation})"
            )

    def _is_retained(self, key: ShardKey) -> bool:
        mark = self.jobs.get_or_create(key.job).retention.get(key.version_id)
        return mark is not None and mark.retained

    def seal_replica(self, lease_id: str, record: ShardRecord, holders: tuple[str, ...]) -> None:
        """Seal a copy whose chunks all equal ``record``; a parity has no ``holders``."""
        with self._table.lock:
            slot, _ = self._table.slots.for_lease(lease_id)
            if slot.lease is None or slot.lease.key != record.key:
                raise LeaseLostError(f"the lease of {record.key} was revoked while it was being copied")
            seal = SealMetadata(lease_id, record, holders)
            self._table.metadata.put(SEAL_METADATA, slot.name, seal)
            failpoint("replica.sealing")
            self._table.seal(slot, seal)
            if record.key.kind:
                self._table.incidents.count("parities_created")
            else:
                self.jobs.record_repaired_part(record.key.job, record.key.version_id, record.key.part)
                self._table.incidents.count("replicas_received")
                self._table.incidents.count("replica_bytes_received", record.size_bytes)
            failpoint("replica.sealed")
            if self.jobs.is_aborted(record.key.job, record.key.version_id):  # while the copy was being received
                self._removal.delete_versions(record.key.job, [record.key.version_id])
        self._listeners.on_stored(record, holders)

    def take_ownership(self, key: ShardKey) -> None:
        """Make a shard of a dead node this node's own, so that this node drains it."""
        if self.set_holders(key, ()):
            with self._table.lock:
                _, record = self._table.slots.find_shard(key)
            self._listeners.on_shard_sealed(record)

    def set_holders(self, key: ShardKey, holders: tuple[str, ...]) -> bool:
        """Record the shard's holders, and return whether it is stored here.

        Without holders the shard belongs to this node.
        """
        with self._table.lock:
            slot = self._table.slots.for_key(key)
            if slot is None or slot.available_shard is None:
                return False
            if slot.holders != holders:
                self._table.metadata.put(
                    SEAL_METADATA, slot.name, SealMetadata(slot.sealed_lease_id, slot.available_shard, holders)
                )
                slot.set_holders(holders)
            return True

    def merge_holders(self, key: ShardKey, holders: tuple[str, ...], *, me: str) -> None:
        """Apply the holders that another holder of the shard reports.

        Two nodes that considered each other dead may both own the shard and report this at the same time. If both
        applied the other's report, the shard would have no owner. So the node whose name sorts first does not.
        """
        with self._table.lock:
            slot = self._table.slots.for_key(key)
            if slot is not None and holders and (slot.holders or me > holders[0]):
                self.set_holders(key, holders_to_store(me, holders))

    def list_shards(self, job: str | None) -> list[ShardInfo]:
        """Return the shards that are verified now, without waiting for the others."""
        with self._table.lock:
            return [self._shard_info(slot, record) for slot, record in self._table.slots.available_shards(job)]

    def list_parities(self, job: str) -> list[ShardRecord]:
        """Return the verified parities that this node stores for its group."""
        with self._table.lock:
            return [record for _, record in self._table.slots.available_shards(job, parities=True)]

    def delete_parity(self, key: ShardKey) -> None:
        """Delete a parity that another parity replaces."""
        with self._table.lock:
            slot = self._table.slots.for_key(key) if key.kind else None
            if slot is not None and slot.record is not None:
                self._table.retire(slot)

    def _shard_info(self, slot: ArenaSlot, record: ShardRecord) -> ShardInfo:
        marked = record.key.version_id in self.jobs.get_or_create(record.key.job).committed
        return ShardInfo(
            record.key, record.parts, record.size_bytes, record.meta, record.sealed_ns, marked, slot.holders
        )

    def previous_version(self, key: ShardKey) -> tuple[ShardRecord, int] | None:
        """Return the newest other version of the same part on this node, and its open file.

        The sender can skip chunks that did not change. The caller closes the descriptor. The shard is not pinned, so
        the caller compares the bytes that it copies.
        """
        with self._table.lock:
            older = [
                (slot, record)
                for slot, record in self._table.slots.available_shards(key.job)
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
        """Apply retention marks of another node."""
        with self._table.lock:
            try:
                self.jobs.apply_retention(job, said)
            except RequestError as error:  # each node checks the limit when its own users retain a version
                log.warning("job %s: cannot apply the retention marks of other nodes: %s", job, error)

    def apply_decision(self, job: str, decided: CommitDecision) -> None:
        """Apply the commit leader's decision, from any sender."""
        with self._table.lock:
            if job in self.jobs.incarnations.managed:  # the shards of a managed job are removed by name only
                return
            if decided.committed is not None and self.jobs.get_or_create(job).would_be_newest(decided.committed):
                self.jobs.mark_committed(job, decided.committed)
            if decided.replicated is not None:
                self.jobs.mark_replicated(job, decided.replicated)
            news = self.jobs.mark_aborted(job, decided.aborted)
            if news:
                log.info("job %s: versions %s were aborted; deleting them", job, [group.version for group in news])
                self._removal.delete_versions(job, news)
        for group in news:
            self._listeners.on_version_decided(job, group, torn=True)


def holders_to_store(me: str, holders: tuple[str, ...]) -> tuple[str, ...]:
    """Return the holders to record for a shard: none if this node is the first of them and owns the shard."""
    return () if holders[:1] == (me,) else holders


def is_same_shard(one: ShardRecord, other: ShardRecord) -> bool:
    """Return whether two records describe the same bytes; the time of the seal does not matter."""
    return msgspec.structs.replace(one, sealed_ns=0) == msgspec.structs.replace(other, sealed_ns=0)
