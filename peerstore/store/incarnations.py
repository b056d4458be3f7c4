"""Incarnations of the jobs on this node: epochs, fencing, and the version that each job resumed from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from peerstore.errors import FencedError, NoQuorumError, RequestError
from peerstore.failpoints import failpoint
from peerstore.shard_records import (
    MAX_NUMBER,
    ResumePoint,
    ShardKey,
    VersionId,
    validate_incarnation,
    validate_job_name,
)
from peerstore.store.slot_table import SlotTable
from peerstore.store.slots import LEASE_STATES

if TYPE_CHECKING:
    from peerstore.store.job_table import JobTable

log = logging.getLogger(__name__)


class Incarnations:
    """The owner incarnation of each job, and the fencing of older ones. The slot table's lock guards it."""

    def __init__(self, table: SlotTable, jobs: JobTable) -> None:
        self._table = table
        self._jobs = jobs
        self._start_checks: dict[str, Callable[[], None]] = {}
        self._warned: set[str] = set()
        self.managed: set[str] = set()
        """Jobs whose shards are only removed by name; their slots are limited by the budget alone."""

    def epoch(self, job: str) -> int:
        known = self._jobs.entries.get(validate_job_name(job))
        return known.epoch if known else 0

    def claim(self, job: str, incarnation: str, at_least: int) -> int:
        """Make ``incarnation`` the job's owner, in an epoch above ``at_least``; return the epoch."""
        validate_incarnation(incarnation)
        if not 0 <= at_least < MAX_NUMBER:
            raise RequestError(f"job {job}: epoch {at_least} is not a number from 0 to 2^62")
        known = self._jobs.get_or_create(job)
        if known.incarnation != incarnation:
            self._check_may_start(job)
            self._start_incarnation(job, max(known.epoch, at_least) + 1, incarnation)
        return known.epoch

    def check_fence(self, key: ShardKey) -> None:
        """Accept writes of the newest or a newer incarnation; raise :class:`FencedError` for an older one."""
        known = self._jobs.get_or_create(key.job)
        if key.epoch > known.epoch:
            self._check_may_start(key.job)
            self._start_incarnation(key.job, key.epoch, key.incarnation)
        elif (key.epoch, key.incarnation) != known.owner:
            raise FencedError(
                f"{key} belongs to a past incarnation: job {key.job} is now owned by epoch {known.epoch} "
                f"({known.incarnation}). This process must stop writing"
            )

    def manage(self, job: str, epoch: int, incarnation: str) -> None:
        """Make this process the only owner of the job, even if an earlier agent recorded another owner."""
        with self._table.lock:
            self.managed.add(validate_job_name(job))
            known = self._jobs.get_or_create(job)
            known.resume_point = known.replicated = None
            if known.owner != (epoch, validate_incarnation(incarnation)):
                self._set_incarnation(job, epoch, incarnation)

    def fence(self, job: str, epoch: int, incarnation: str) -> None:
        """Record the job's owner as reported by another node: writers of older incarnations are refused."""
        with self._table.lock:
            known = self._jobs.get_or_create(job)
            if job in self.managed or not self.is_plausible_epoch(job, epoch):
                return
            if (epoch, incarnation) > known.owner:
                self._set_incarnation(job, epoch, incarnation)

    def is_plausible_epoch(self, job: str, epoch: int) -> bool:
        """Return whether the job can have reached this epoch since this node first knew it."""
        known = self._jobs.get_or_create(job)
        if known.is_plausible_epoch(epoch):
            return True
        if job not in self._warned:
            self._warned.add(job)
            log.warning("job %s is in epoch %d: reports of epoch %d are ignored", job, known.epoch, epoch)
        return False

    def observe_epoch(self, key: ShardKey) -> None:
        """Record the epoch of a recovered shard or lease, in case the job's own metadata was lost."""
        known = self._jobs.get_or_create(key.job)
        known.last_seen_at = self._table.clock()
        if key.epoch > known.epoch and key.job not in self.managed:
            known.epoch, known.incarnation = key.epoch, key.incarnation

    def _start_incarnation(self, job: str, epoch: int, incarnation: str) -> None:
        """Start an incarnation with processes of this node, and record the version that it resumed from."""
        known = self._jobs.get_or_create(job)
        if job in self.managed:
            raise RequestError(f"job {job} belongs to this agent: choose another job name")
        group = known.unannounced_resume or (
            known.resume_point.version_id if known.resume_point is not None and known.resume_point.sequence else None
        )
        if group is not None:
            self._set_resume_point(job, ResumePoint(epoch, incarnation, 0, group))
        self._set_incarnation(job, epoch, incarnation)

    def _set_incarnation(self, job: str, epoch: int, incarnation: str) -> None:
        known = self._jobs.get_or_create(job)
        known.epoch, known.incarnation = epoch, incarnation
        known.unannounced_resume, known.last_seen_at = None, self._table.clock()
        self._jobs.save(job)
        failpoint("agent.claimed")
        self.revoke_fenced_leases(job)

    def revoke_fenced_leases(self, job: str) -> None:
        known = self._jobs.get_or_create(job)
        for slot in self._table.slots.in_state(*LEASE_STATES):
            if slot.lease is None or slot.job != job or slot.lease.key.epoch >= known.epoch:
                continue
            if not known.may_still_write(slot.lease.key.version_id):
                self._table.revoke_lease(slot, "fenced by a newer incarnation")
        self._table.lock.notify_all()

    def _check_may_start(self, job: str) -> None:
        permit = self._start_checks.get(job)
        if permit is not None:
            permit()

    def set_replication_guard(self, job: str, *, guarded: bool, permit: Callable[[], None] | None = None) -> None:
        """Set whether the job's versions require replication.

        ``permit`` raises if this node must not start a new incarnation of the job.
        """
        with self._table.lock:
            if permit is None:
                self._start_checks.pop(job, None)
            else:
                self._start_checks[job] = permit
            known = self._jobs.get_or_create(job)
            if known.requires_replication != guarded:
                known.requires_replication = guarded
                self._jobs.save(job)

    def resume_from(self, job: str, group: VersionId) -> None:
        """Record that the job resumed from this version: later versions belong to a branch that it left.

        Without this record, those versions would retain their slots forever if they were committed or replicated. They
        would also supersede the version that the job resumed from.

        A partition side that must not start a new incarnation does not announce the resume. The other side may have
        replicated versions of a branch that the job never left.
        """
        with self._table.lock:
            known = self._jobs.get_or_create(job)
            try:
                self._check_may_start(job)
            except NoQuorumError as error:
                log.info("job %s: the resume from version %s is not announced yet: %s", job, group.version, error)
                known.unannounced_resume = group
                return
            known.unannounced_resume = None
            owner, base = known.owner, known.resume_point
            announced = base is not None and (base.epoch, base.incarnation) == owner
            if base is None or not announced or not base.sequence or base.version_id != group:
                self._set_resume_point(
                    job, ResumePoint(*owner, base.sequence + 1 if base is not None and announced else 1, group)
                )
                self._jobs.save(job)

    def learn_resume_point(self, job: str, base: ResumePoint) -> None:
        """Record the version that the job resumed from, as another node reports it."""
        with self._table.lock:
            known = self._jobs.get_or_create(job)
            if job in self.managed or not self.is_plausible_epoch(job, max(base.epoch, base.version_id.epoch)):
                return
            if known.resume_point is None or base.order > known.resume_point.order:
                self._set_resume_point(job, base)
                self._jobs.save(job)
            self.fence(job, base.epoch, base.incarnation)

    def _set_resume_point(self, job: str, base: ResumePoint) -> None:
        self._jobs.get_or_create(job).resume_from(base, self._table.slots.parts_here(job, base.version_id))
        self._table.lock.notify_all()
