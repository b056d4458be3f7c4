"""Jobs of this node: owner incarnation, committed versions, and client processes. Persisted."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from peerstore.commit_protocol import MAX_RETAINED_VERSIONS, JobVersions, TooManyRetainedError
from peerstore.daemon_process import ProcessIdentity
from peerstore.errors import (
    ArenaFullError,
    FencedError,
    NoQuorumError,
    RequestError,
    ShardDamagedError,
    UnavailableError,
    UnsupportedFormatError,
)
from peerstore.failpoints import failpoint
from peerstore.shard_records import (
    MAX_NUMBER,
    ExpiredJob,
    JobStatus,
    ResumePoint,
    RetentionMark,
    ShardKey,
    VersionId,
    validate_incarnation,
    validate_job_name,
)
from peerstore.store.slot_metadata import (
    EXPIRED_JOB_METADATA,
    JOB_METADATA,
    JobMetadata,
    JobOwnerMetadata,
    VersionParts,
)
from peerstore.store.slot_table import SlotTable
from peerstore.store.slots import LEASE_STATES, SHARD_STATES

log = logging.getLogger(__name__)

_FORGOTTEN_REMEMBERED = 1000
_SPARED_S = 3600.0
"""So long after its last process a job gives way to no other: who was interrupted begins again."""


@dataclass
class JobEntry(JobVersions):
    """What is known of its versions, and of the processes of this node that take part in it."""

    unannounced_resume: VersionId | None = None
    """What processes of this node went on from where there was no quorum: said once they may write."""
    clients: Counter[ProcessIdentity] = field(default_factory=Counter)
    last_seen_at: float = 0.0


class JobTable:
    """Every job this node has heard of. The slot table's lock guards it."""

    def __init__(self, table: SlotTable, ttl_s: float) -> None:
        self._table = table
        self._ttl_s = ttl_s
        self._jobs: dict[str, JobEntry] = {}
        self._started = table.clock()
        self._start_checks: dict[str, Callable[[], None]] = {}
        self._warned: set[str] = set()
        self.disconnected_since: dict[ProcessIdentity, float] = {}
        """Processes without a connection, and since when."""
        self.managed: set[str] = set()
        """Jobs whose shards are given up by name only: their slots are bounded by the budget, and by nothing else."""

    def get_or_create(self, job: str) -> JobEntry:
        """The job, from now on known."""
        known = self._jobs.get(job)
        if known is None:
            known = self._jobs[validate_job_name(job)] = JobEntry(last_seen_at=self._table.clock())
        return known

    def get(self, job: str) -> JobEntry | None:
        return self._jobs.get(job)

    def has_clients(self, job: str) -> bool:
        """Whether a process of this node takes part in it."""
        known = self._jobs.get(job)
        return known is not None and bool(known.clients)

    def expected_parts_here(self, job: str, parts: int) -> int:
        """How many parts of the job's versions this node is expected to hold: those of its own processes, and as many
        copies where some are kept.
        """
        known = self._jobs.get(job)
        here = len(known.clients) * (2 if known.requires_replication else 1) if known is not None else 0
        return min(parts, max(1, here))

    def observe_epoch(self, key: ShardKey) -> None:
        """A killed agent had let this incarnation write, also where its note of that was lost."""
        known = self.get_or_create(key.job)
        known.last_seen_at = self._table.clock()
        if key.epoch > known.epoch and key.job not in self.managed:
            known.epoch, known.incarnation = key.epoch, key.incarnation

    # -- incarnations -----------------------------------------------------------------------------------------

    def epoch(self, job: str) -> int:
        known = self._jobs.get(validate_job_name(job))
        return known.epoch if known else 0

    def claim(self, job: str, incarnation: str, at_least: int) -> int:
        validate_incarnation(incarnation)
        if not 0 <= at_least < MAX_NUMBER:
            raise RequestError(f"job {job}: epoch {at_least} is not a number from 0 to 2^62")
        known = self.get_or_create(job)
        if known.incarnation != incarnation:
            self._check_may_start(job)
            self._start_incarnation(job, max(known.epoch, at_least) + 1, incarnation)
        return known.epoch

    def check_fence(self, key: ShardKey) -> None:
        """Let the newest incarnation write, and one that is newer still; refuse those of the past."""
        known = self.get_or_create(key.job)
        if key.epoch > known.epoch:
            self._check_may_start(key.job)
            self._start_incarnation(key.job, key.epoch, key.incarnation)
        elif (key.epoch, key.incarnation) != (known.epoch, known.incarnation):
            raise FencedError(
                f"{key} is of a past incarnation: job {key.job} is now owned by epoch {known.epoch} "
                f"({known.incarnation}). This process must stop writing"
            )

    def manage(self, job: str, epoch: int, incarnation: str) -> None:
        """Make this process the only owner of the job, also where an earlier agent recorded another one."""
        self.managed.add(validate_job_name(job))
        known = self.get_or_create(job)
        known.resume_point = known.replicated = None
        if (known.epoch, known.incarnation) != (epoch, validate_incarnation(incarnation)):
            self._set_incarnation(job, epoch, incarnation)

    def fence(self, job: str, epoch: int, incarnation: str) -> None:
        """Another node says who owns the job: writers of the past are refused from here on."""
        known = self.get_or_create(job)
        if job in self.managed or not self.is_plausible_epoch(job, epoch):
            return
        if (epoch, incarnation) > (known.epoch, known.incarnation):
            self._set_incarnation(job, epoch, incarnation)

    def is_plausible_epoch(self, job: str, epoch: int) -> bool:
        """Whether the job can have come so far since this node heard of it."""
        known = self.get_or_create(job)
        if known.is_plausible_epoch(epoch):
            return True
        if job not in self._warned:
            self._warned.add(job)
            log.warning("job %s is in epoch %d: what somebody says of epoch %d is ignored", job, known.epoch, epoch)
        return False

    def _start_incarnation(self, job: str, epoch: int, incarnation: str) -> None:
        """An incarnation of which processes of this node are part begins: it says what it goes on from."""
        known = self.get_or_create(job)
        if job in self.managed:
            raise RequestError(f"job {job} is this agent's own: call yours something else")
        group = known.unannounced_resume or (
            known.resume_point.version_id if known.resume_point is not None and known.resume_point.sequence else None
        )
        if group is not None:
            self._set_resume_point(job, ResumePoint(epoch, incarnation, 0, group))
        self._set_incarnation(job, epoch, incarnation)

    def _set_incarnation(self, job: str, epoch: int, incarnation: str) -> None:
        known = self.get_or_create(job)
        known.epoch, known.incarnation, known.unannounced_resume, known.last_seen_at = (
            epoch,
            incarnation,
            None,
            self._table.clock(),
        )
        self._save(job)
        failpoint("agent.claimed")
        self.revoke_fenced_leases(job)

    def revoke_fenced_leases(self, job: str) -> None:
        known = self.get_or_create(job)
        for slot in self._table.in_state(*LEASE_STATES):
            if slot.lease is None or slot.job != job or slot.lease.key.epoch >= known.epoch:
                continue
            if not known.may_still_write(slot.lease.key.version_id):
                self._table.revoke_lease(slot, "fenced by a newer incarnation")
        self._table.notify_changed()

    def _save(self, job: str) -> None:
        known = self._jobs[job]
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

    def restore(self, job: str) -> None:
        """What a killed agent knew about the job."""
        try:
            note = self._table.metadata.get(JOB_METADATA, validate_job_name(job), JobMetadata)
        except UnsupportedFormatError as error:
            self._restore_owner(job, error)
            return
        if note is not None:
            marks = {mark.version_id: mark.parts for mark in note.committed}
            self._jobs[job] = JobEntry(
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
        """Of what another version noted about the job, who owns it: writers of the past stay refused."""
        self._table.mark_unrecognized(JOB_METADATA + job, 0, str(error))
        try:
            owner = self._table.metadata.get(JOB_METADATA, job, JobOwnerMetadata)
        except UnsupportedFormatError:
            return
        if owner is not None and 0 <= owner.epoch < MAX_NUMBER:
            self._jobs[job] = JobEntry(owner.epoch, owner.incarnation, last_seen_at=self._table.clock())

    # -- wholeness: decided in peerstore.commit_protocol, noted here ---------------------------------------------------

    def mark_committed(self, job: str, group: VersionId) -> bool:
        """Every part of this version is sealed, as somebody says who has counted or loaded them; whether it is news."""
        known = self.get_or_create(job)
        if not known.mark_committed(group, self._parts_here(job, group)):
            return False
        known.prune(lambda old: self._parts_here(job, old))
        self._save_and_notify(job)
        return True

    def abort_part(self, job: str, group: VersionId, part: int) -> bool:
        """A writer of this node will never seal its part of this version; whether it is news."""
        news = self.get_or_create(job).abort_part(group, part, self._parts_here(job, group))
        if news:
            self._save_and_notify(job)
        return news

    def mark_aborted(self, job: str, groups: Iterable[VersionId]) -> list[VersionId]:
        """These versions will never be whole, as other nodes say; those of them that are news."""
        news = self.get_or_create(job).mark_aborted(groups)
        if news:
            self._save_and_notify(job)
        return news

    def is_aborted(self, job: str, group: VersionId) -> bool:
        known = self._jobs.get(job)
        return known is not None and group in known.aborted

    def _save_and_notify(self, job: str) -> None:
        self._save(job)
        self._table.notify_changed()

    def _parts_here(self, job: str, group: VersionId) -> tuple[int, ...]:
        return self._table.parts_here(job, group)

    def drop_versions(self, job: str, groups: Collection[VersionId] | None) -> None:
        """These versions (all, when none is named) are not kept any more, whoever called them whole."""
        known = self._jobs.get(job)
        if known is not None and known.drop(groups, time.time_ns()):
            self._save(job)

    def record_lost_part(self, job: str, group: VersionId, part: int) -> None:
        """A part of this version turned out damaged."""
        self.get_or_create(job).lose_part(group, part)
        try:
            self._save(job)
        except (ArenaFullError, UnavailableError) as error:
            log.warning("that version %s of job %s is damaged could not be noted: %s", group, job, error)

    def record_repaired_part(self, job: str, group: VersionId, part: int) -> None:
        """A part that was damaged here has been fetched from another node."""
        if self.get_or_create(job).repair_part(group, part):
            self._save_and_notify(job)

    def apply_retention(self, job: str, said: Collection[RetentionMark]) -> bool:
        """These versions stay, whatever is newer, or do not have to any more; whether that is news."""
        try:
            news = self.get_or_create(job).apply_retention(said, lambda: self.committed([job])[job])
        except TooManyRetainedError as error:
            raise RequestError(
                f"job {job} keeps {MAX_RETAINED_VERSIONS} steps in memory already, which is the most: "
                f"{', '.join(map(str, error.versions[:8]))}... Let some of them go (tieredckpt unpin)"
            ) from None
        if news:
            self._save_and_notify(job)
        return news

    def retained(self, whole: Mapping[str, Collection[VersionId]]) -> dict[str, Collection[VersionId]]:
        """Which versions of each job are not given up for newer ones."""
        return {job: known.retained(found) for job, found in whole.items() if (known := self._known(job)).retention}

    def committed(self, jobs: Iterable[str] | None = None) -> dict[str, set[VersionId]]:
        """Return the complete versions of ``jobs`` (``None``: all jobs), by the shards verified here."""
        return {
            job: self._committed(job)
            for job in (self._table.jobs_with_shards() | self._jobs.keys() if jobs is None else jobs)
        }

    def _committed(self, job: str) -> set[VersionId]:
        found = {group: shards for group, shards in self._table.versions(job).items() if shards.available_parts}
        return self._known(job).committed_here(
            {group: shards.available_parts for group, shards in found.items()},
            {group: shards.total_parts for group, shards in found.items()},
        )

    def _known(self, job: str) -> JobVersions:
        return self._jobs.get(job) or _NOTHING_KNOWN

    def rollback_targets(
        self, whole: Mapping[str, Collection[VersionId]], mending: ShardKey | None = None
    ) -> dict[str, VersionId]:
        """The version each job can always go back to: what is older may be given up."""
        found = {}
        for job in whole:
            back = mending.version_id if mending is not None and mending.job == job else None
            safe = self._known(job).rollback_target(whole[job], back)
            if safe is not None:
                found[job] = safe
        return found

    def _check_may_start(self, job: str) -> None:
        permit = self._start_checks.get(job)
        if permit is not None:
            permit()

    def set_replication_guard(self, job: str, *, guarded: bool, permit: Callable[[], None] | None) -> None:
        """``permit`` raises when this node must not let a new incarnation of the job begin."""
        if permit is None:
            self._start_checks.pop(job, None)
        else:
            self._start_checks[job] = permit
        known = self.get_or_create(job)
        if known.requires_replication != guarded:
            known.requires_replication = guarded
            self._save(job)

    def oldest_active_epoch(self, job: str) -> int:
        """What incarnations before this one left unfinished is given up when room is short."""
        return self.get_or_create(job).oldest_active_epoch()

    def needed(self, whole: Mapping[str, Collection[VersionId]]) -> dict[str, Collection[VersionId]]:
        """What is not given up for lack of room: whole versions, and of the past only what can be gone back to."""
        return {job: self._known(job).needed(found) for job, found in whole.items()}

    def mark_replicated(self, job: str, group: VersionId) -> None:
        """Every part of this version has the copies it was to have: it is whole, then."""
        known = self.get_or_create(job)
        if known.mark_replicated(group):
            known.mark_committed(group, self._parts_here(job, group))
            known.prune(lambda old: self._parts_here(job, old))
            self._save_and_notify(job)

    def resume_from(self, job: str, group: VersionId) -> None:
        """The job goes on from this version: what was called whole or settled after it is of a past that it left.

        Else those versions, of which it found too little to go on from, would keep their slots for good, and make the
        one it did go on from superfluous.

        A side of a partition that must not let a new incarnation begin does not say it either: by the time both sides
        hear of each other, the other one may have settled versions that nobody has left.
        """
        known = self.get_or_create(job)
        try:
            self._check_may_start(job)
        except NoQuorumError as error:
            log.info("that job %s goes on from version %s is not told yet: %s", job, group.version, error)
            known.unannounced_resume = group
            return
        known.unannounced_resume = None
        owner, base = (known.epoch, known.incarnation), known.resume_point
        said = base is not None and (base.epoch, base.incarnation) == owner
        if base is None or not said or not base.sequence or base.version_id != group:
            self._set_resume_point(
                job, ResumePoint(*owner, base.sequence + 1 if base is not None and said else 1, group)
            )
            self._save(job)

    def learn_resume_point(self, job: str, base: ResumePoint) -> None:
        """Another node says what the job went on from."""
        known = self.get_or_create(job)
        if job in self.managed or not self.is_plausible_epoch(job, max(base.epoch, base.version_id.epoch)):
            return
        if known.resume_point is None or base.order > known.resume_point.order:
            self._set_resume_point(job, base)
            self._save(job)
        self.fence(job, base.epoch, base.incarnation)

    def _set_resume_point(self, job: str, base: ResumePoint) -> None:
        self.get_or_create(job).resume_from(base, self._parts_here(job, base.version_id))
        self._table.notify_changed()

    # -- processes --------------------------------------------------------------------------------------------

    def client_connected(self, owner: ProcessIdentity, job: str) -> None:
        known = self.get_or_create(job)
        self.disconnected_since.pop(owner, None)
        known.clients[owner] += 1
        known.last_seen_at = self._table.clock()

    def client_disconnected(self, owner: ProcessIdentity, job: str) -> bool:
        """A connection was closed; whether it was the process's last one for the job."""
        known = self._jobs.get(job)
        if known is None:
            return True
        known.clients[owner] -= 1
        if known.clients[owner] <= 0:
            del known.clients[owner]
        known.last_seen_at = self._table.clock()
        if not any(owner in other.clients for other in self._jobs.values()):
            self.disconnected_since[owner] = self._table.clock()
        return owner not in known.clients

    def disconnected_s(self, owner: ProcessIdentity) -> float:
        """How long the process has had no connection; endless when it died."""
        if not owner.is_alive:
            return float("inf")
        since = self.disconnected_since.get(owner)
        return 0.0 if since is None else self._table.clock() - since

    def expired(self) -> list[str]:
        """Jobs whose last process left too long ago and whose shards nobody uses."""
        used = {slot.job for slot in self._table.slots() if slot.users}
        now = self._table.clock()
        return [
            job
            for job, known in self._jobs.items()
            if not known.clients and now - known.last_seen_at > self._ttl_s and job not in used | self.managed
        ]

    def unused_jobs(self) -> list[str]:
        """Jobs that no process takes part in and nobody reads, for longer than an interruption: the one that nobody
        has used for the longest time first.
        """
        used = {slot.job for slot in self._table.slots() if slot.users or slot.lease is not None}
        idle = {
            job: known.last_seen_at
            for job, known in self._jobs.items()
            if not known.clients and self._table.clock() - known.last_seen_at > min(_SPARED_S, self._ttl_s)
            if not any(one.retained for one in known.retention.values())
        }
        return sorted(idle.keys() - used - self.managed, key=lambda job: (idle[job], job))

    def unused_s(self, job: str) -> float:
        return self._table.clock() - self.get_or_create(job).last_seen_at

    def record_expiry(self, job: str, reason: str) -> None:
        """Keep in mind what the job had that nobody has told this node to forget."""
        once = self.get_or_create(job).last_committed()
        newest = max({*self.committed([job])[job], *([once] if once is not None else [])}, default=None)
        if newest is None:
            return
        try:
            self._table.metadata.put(EXPIRED_JOB_METADATA, job, ExpiredJob(job, newest, time.time_ns(), reason))
        except (ArenaFullError, UnavailableError) as error:
            log.warning("that job %s is forgotten could not be noted: %s", job, error)
        others = [
            found
            for name in self._table.metadata.list_names(EXPIRED_JOB_METADATA)
            if (found := self.expired_job(name)) is not None
        ]
        for old in sorted(others, key=lambda one: one.at_ns)[:-_FORGOTTEN_REMEMBERED]:
            self._table.metadata.remove(EXPIRED_JOB_METADATA, old.job)

    def expired_job(self, job: str) -> ExpiredJob | None:
        """When and why what was kept for the job was given back, where nobody had said so."""
        try:
            return self._table.metadata.get(EXPIRED_JOB_METADATA, job, ExpiredJob)
        except (UnsupportedFormatError, ShardDamagedError) as error:
            log.warning("what is noted of the end of job %s cannot be read: %s", job, error)
            return None

    def remove_if_empty(self, job: str) -> None:
        """Nothing of the job is here any more: forget that there was one, unless somebody still takes part."""
        known = self._jobs.get(job)
        if known is None or known.clients or self._table.slots_of_job(job):
            return
        self._table.metadata.remove(JOB_METADATA, job)
        self._jobs.pop(job)

    def idle_s(self) -> float:
        """How long nobody has been connected; 0 while somebody is or while jobs still own shards."""
        if any(known.clients for known in self._jobs.values()) or self._table.in_state(*SHARD_STATES):
            return 0.0
        return self._table.clock() - max((known.last_seen_at for known in self._jobs.values()), default=self._started)

    def status(self) -> tuple[JobStatus, ...]:
        whole = self.committed()
        return tuple(self._status(job, whole.get(job, set())) for job in sorted(self._jobs))

    def _status(self, job: str, whole: set[VersionId]) -> JobStatus:
        known = self._jobs[job]
        newest = max(whole, default=None)
        left = None if known.clients else self._ttl_s - (self._table.clock() - known.last_seen_at)
        return JobStatus(
            job=job,
            epoch=known.epoch,
            clients=len(known.clients),
            versions=len({record.key.version_id for _, record in self._table.available_shards(job)}),
            newest_committed=newest.version if newest else None,
            expires_in_s=left,
            newest_replicated=known.replicated.version if known.requires_replication and known.replicated else None,
        )


_NOTHING_KNOWN = JobVersions()
