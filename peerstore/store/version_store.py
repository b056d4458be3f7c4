"""Decisions on versions at their owner's request: committed, aborted, retained, deleted."""

from __future__ import annotations

import logging
import time

from peerstore.shard_records import VersionId, validate_job_name
from peerstore.store.job_table import JobTable
from peerstore.store.shards import ShardReader, ShardRemoval
from peerstore.store.slot_metadata import EXPIRED_JOB_METADATA
from peerstore.store.slot_table import SlotTable
from peerstore.store.store_listener import StoreListeners

log = logging.getLogger(__name__)


class VersionStore:
    """The versions of all jobs on this node."""

    def __init__(
        self,
        table: SlotTable,
        jobs: JobTable,
        *,
        reader: ShardReader,
        removal: ShardRemoval,
        listeners: StoreListeners,
    ) -> None:
        self._table, self._jobs = table, jobs
        self._reader, self._removal, self._listeners = reader, removal, listeners

    def mark_committed(self, job: str, group: VersionId) -> None:
        """Record that every part of this version was sealed, as the caller knows from another source.

        The version was loaded, or is durable, or all ranks of a job without connected agents have agreed on it. It
        counts as complete while none of its parts is lost here.
        """
        with self._table.lock:
            self._table.metadata.flush_pending()
            news = self._jobs.mark_committed(validate_job_name(job), group)
        if news:
            self._listeners.on_version_decided(job, group, torn=False)

    def abort_part(self, job: str, group: VersionId, part: int) -> None:
        """Record that the writer will never seal this part: every node deletes its shards of the version."""
        with self._table.lock:
            self._table.metadata.flush_pending()
            news = self._jobs.abort_part(validate_job_name(job), group, part)
        if news:
            log.info("job %s: part %d of version %s was aborted; deleting the version", job, part, group.version)
            self.drop_aborted(job, group)

    def drop_aborted(self, job: str, group: VersionId) -> None:
        """Delete the shards of an aborted version, and report it."""
        self._removal.delete_versions(job, [group])
        self._listeners.on_version_decided(job, group, torn=True)

    def newest_committed(self, job: str) -> VersionId | None:
        """Return the newest committed version that lost no part on this node."""
        with self._table.lock:
            return max(self._jobs.committed([job])[job], default=None)

    def delete(self, job: str, groups: list[VersionId] | None = None) -> int:
        """Delete versions (``None``: all) on request of their owner and return the number of shards.

        Readers of the shards may finish. With ``None`` the record of an earlier expiry of the job is deleted as well.
        """
        if groups is None:
            with self._table.lock:
                self._table.metadata.remove(EXPIRED_JOB_METADATA, validate_job_name(job))
        found = self._removal.delete_versions(job, groups)
        self._removal.drop_unused()
        if groups is not None:
            self._listeners.on_versions_deleted(job, groups)
        return found

    def superseded_replicas(self, job: str, version: int) -> set[VersionId]:
        """Return the versions up to ``version`` that are not retained, or none if this node wrote any shard."""
        shards = self._reader.list_shards(job)
        if any(not shard.holders for shard in shards):
            return set()
        return {shard.key.version_id for shard in shards if shard.key.version <= version} - self.retained(job)

    def retain(self, job: str, group: VersionId, *, kept: bool = True) -> None:
        """Retain the version in memory even if newer ones are complete, or end that. The mark is persistent."""
        with self._table.lock:
            self._table.metadata.flush_pending()
            mark = self._jobs.get_or_create(validate_job_name(job)).new_retention_mark(
                group, kept=kept, now_ns=time.time_ns()
            )
            self._jobs.apply_retention(job, [mark])

    def retained(self, job: str) -> set[VersionId]:
        """Return the job's versions that are retained on request of this or another node."""
        return {one.version_id for one in self._jobs.versions(job).retention.values() if one.retained}
