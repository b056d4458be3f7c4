"""Jobs of this node: owner incarnation, committed versions, and client processes. Persisted."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from peerstore.commit_protocol import MAX_RETAINED_VERSIONS, JobVersions, TooManyRetainedError, committed_versions
from peerstore.daemon_process import ProcessIdentity
from peerstore.errors import (
    ArenaFullError,
    RequestError,
    UnavailableError,
    UnsupportedFormatError,
)
from peerstore.shard_records import (
    MAX_NUMBER,
    JobStatus,
    RetentionMark,
    ShardKey,
    VersionId,
    validate_job_name,
)
from peerstore.store.incarnations import Incarnations
from peerstore.store.job_clients import JobClients
from peerstore.store.slot_metadata import (
    JOB_METADATA,
    JobMetadata,
    JobOwnerMetadata,
    VersionParts,
)
from peerstore.store.slot_table import SlotTable

log = logging.getLogger(__name__)


@dataclass
class JobEntry(JobVersions):
    """The versions of one job, and its client processes on this node."""

    unannounced_resume: VersionId | None = None
    """The version that local clients resumed from without a quorum; announced once they may write."""
    clients: Counter[ProcessIdentity] = field(default_factory=Counter)
    last_seen_at: float = 0.0


class JobTable:
    """All jobs that this node knows: versions, incarnations and clients. The slot table's lock guards it."""

    def __init__(self, table: SlotTable, ttl_s: float) -> None:
        self._table = table
        self.entries: dict[str, JobEntry] = {}
        self.incarnations = Incarnations(table, self)
        self.clients = JobClients(table, self, ttl_s)

    def get_or_create(self, job: str) -> JobEntry:
        """Return the job's entry; create it if the job is unknown."""
        known = self.entries.get(job)
        if known is None:
            known = self.entries[validate_job_name(job)] = JobEntry(last_seen_at=self._table.clock())
        return known

    def save(self, job: str) -> None:
        """Write the job's metadata."""
        known = self.entries[job]
        marks = tuple(VersionParts(group, parts) for group, parts in sorted(known.committed.items()))
        torn = tuple(VersionParts(group, tuple(sorted(parts))) for group, parts in sorted(known.aborted.items()))
        note = JobMetadata(
            known.epoch,
            known.incarnation,
            marks,
            tuple(sorted(known.damaged)),
            known.requires_replication,
            known.replicated,
            known.resume_point,
            tuple(sorted(known.retention.values(), key=lambda one: one.version_id)),
            torn,
        )
        self._table.metadata.put(JOB_METADATA, job, note)

    def names(self) -> list[str]:
        """Return the jobs that this node knows."""
        with self._table.lock:
            return sorted(self.entries)

    def versions(self, job: str) -> JobVersions:
        """Return a copy of the node's view of the job's versions."""
        with self._table.lock:
            return self._known(job).copy()

    def restore(self, job: str) -> None:
        """Restore a job from the metadata that a killed agent left."""
        try:
            note = self._table.metadata.get(JOB_METADATA, validate_job_name(job), JobMetadata)
        except UnsupportedFormatError as error:
            self._restore_owner(job, error)
            return
        if note is not None:
            marks = {mark.version_id: mark.parts for mark in note.committed}
            self.entries[job] = JobEntry(
                note.epoch,
                note.incarnation,
                marks,
                set(note.damaged),
                requires_replication=note.requires_replication,
                replicated=note.replicated,
                resume_point=note.resume_point,
                retention={one.version_id: one for one in note.retention},
                aborted={one.version_id: set(one.parts) for one in note.aborted},
                last_seen_at=self._table.clock(),
            )

    def _restore_owner(self, job: str, error: UnsupportedFormatError) -> None:
        """Restore only the job's owner from another release's metadata, so that older writers stay fenced."""
        self._table.unrecognized.mark(JOB_METADATA + job, 0, str(error))
        try:
            owner = self._table.metadata.get(JOB_METADATA, job, JobOwnerMetadata)
        except UnsupportedFormatError:
            return
        if owner is not None and 0 <= owner.epoch < MAX_NUMBER:
            self.entries[job] = JobEntry(owner.epoch, owner.incarnation, last_seen_at=self._table.clock())

    def mark_committed(self, job: str, group: VersionId) -> bool:
        """Record that every part of this version was sealed; return whether this is new.

        The caller has counted the parts, or loaded the version.
        """
        known = self.get_or_create(job)
        if not known.mark_committed(group, self._table.slots.parts_here(job, group)):
            return False
        known.prune(lambda old: self._table.slots.parts_here(job, old))
        self._save_and_notify(job)
        return True

    def abort_part(self, job: str, group: VersionId, part: int) -> bool:
        """Record that a writer of this node aborted its part of a version; return whether this is new."""
        news = self.get_or_create(job).abort_part(group, part, self._table.slots.parts_here(job, group))
        if news:
            self._save_and_notify(job)
        return news

    def mark_aborted(self, job: str, groups: Iterable[VersionId]) -> list[VersionId]:
        """Record that these versions can never be complete, as other nodes report; return the new ones."""
        news = self.get_or_create(job).mark_aborted(groups)
        if news:
            self._save_and_notify(job)
        return news

    def is_aborted(self, job: str, group: VersionId) -> bool:
        known = self.entries.get(job)
        return known is not None and group in known.aborted

    def _save_and_notify(self, job: str) -> None:
        self.save(job)
        self._table.lock.notify_all()

    def drop_versions(self, job: str, groups: Collection[VersionId] | None) -> None:
        """Forget these versions (``None``: all), also committed ones."""
        known = self.entries.get(job)
        if known is not None and known.drop(groups, time.time_ns()):
            self.save(job)

    def record_lost_part(self, job: str, group: VersionId, part: int) -> None:
        """Record that a part of this version is damaged on this node."""
        self.get_or_create(job).lose_part(group, part)
        try:
            self.save(job)
        except (ArenaFullError, UnavailableError) as error:
            log.warning("cannot record that version %s of job %s is damaged: %s", group, job, error)

    def record_repaired_part(self, job: str, group: VersionId, part: int) -> None:
        """Record that a part that was damaged here was fetched from another node."""
        if self.get_or_create(job).repair_part(group, part):
            self._save_and_notify(job)

    def apply_retention(self, job: str, said: Collection[RetentionMark]) -> bool:
        """Apply marks that retain versions, or no longer do; return whether any mark is new."""
        try:
            news = self.get_or_create(job).apply_retention(said, lambda: self.committed([job])[job])
        except TooManyRetainedError as error:
            raise RequestError(
                f"job {job} already has {MAX_RETAINED_VERSIONS} pinned steps, which is the limit: "
                f"{', '.join(map(str, error.versions[:8]))}... Unpin some of them (tieredckpt unpin)"
            ) from None
        if news:
            self._save_and_notify(job)
        return news

    def retained(self, whole: Mapping[str, Collection[VersionId]]) -> dict[str, Collection[VersionId]]:
        """Return the versions of each job that newer versions must not evict."""
        return {job: known.retained(found) for job, found in whole.items() if (known := self._known(job)).retention}

    def committed(self, jobs: Iterable[str] | None = None) -> dict[str, set[VersionId]]:
        """Return the complete versions of ``jobs`` (``None``: all jobs), by the shards verified here."""
        return {
            job: self._committed(job)
            for job in (self._table.slots.jobs_with_shards() | self.entries.keys() if jobs is None else jobs)
        }

    def _committed(self, job: str) -> set[VersionId]:
        found = {group: shards for group, shards in self._table.slots.versions(job).items() if shards.available_parts}
        return committed_versions(
            {group: shards.available_parts for group, shards in found.items()},
            {group: shards.total_parts for group, shards in found.items()},
            self._known(job).committed,
        )

    def _known(self, job: str) -> JobVersions:
        return self.entries.get(job) or _NO_VERSIONS

    def rollback_targets(
        self, whole: Mapping[str, Collection[VersionId]], mending: ShardKey | None = None
    ) -> dict[str, VersionId]:
        """Return the version that each job can always resume from; older versions may be evicted.

        ``mending`` is the key of a replica that is being received.
        """
        found = {}
        for job in whole:
            repaired = mending.version_id if mending is not None and mending.job == job else None
            target = self._known(job).rollback_target(whole[job], repaired)
            if target is not None:
                found[job] = target
        return found

    def needed(self, whole: Mapping[str, Collection[VersionId]]) -> dict[str, Collection[VersionId]]:
        """Return the versions that lack of memory does not evict.

        These are the complete versions, except those of branches that the job left.
        """
        return {job: self._known(job).needed(found) for job, found in whole.items()}

    def mark_replicated(self, job: str, group: VersionId) -> None:
        """Record that every part of this version has its replicas; this implies that it is committed."""
        known = self.get_or_create(job)
        if known.mark_replicated(group):
            known.mark_committed(group, self._table.slots.parts_here(job, group))
            known.prune(lambda old: self._table.slots.parts_here(job, old))
            self._save_and_notify(job)

    def remove_if_empty(self, job: str) -> None:
        """Forget the job if it has no slots and no clients on this node."""
        known = self.entries.get(job)
        if known is None or known.clients or self._table.slots.of_job(job):
            return
        self._table.metadata.remove(JOB_METADATA, job)
        self.entries.pop(job)

    def status(self) -> tuple[JobStatus, ...]:
        whole = self.committed()
        return tuple(self._status(job, whole.get(job, set())) for job in sorted(self.entries))

    def _status(self, job: str, whole: set[VersionId]) -> JobStatus:
        known = self.entries[job]
        newest = max(whole, default=None)
        return JobStatus(
            job=job,
            epoch=known.epoch,
            clients=len(known.clients),
            versions=len({record.key.version_id for _, record in self._table.slots.available_shards(job)}),
            newest_committed=newest.version if newest else None,
            expires_in_s=self.clients.expires_in_s(job),
            newest_replicated=known.replicated.version if known.requires_replication and known.replicated else None,
        )


_NO_VERSIONS = JobVersions()
