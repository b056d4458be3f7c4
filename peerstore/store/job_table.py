"""Jobs of this node: owner incarnation, committed versions, and client processes. Persisted."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
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
from peerstore.store.slots import (
    EXPIRED_JOB_METADATA,
    JOB_METADATA,
    JobMetadata,
    JobOwnerMetadata,
    SlotTable,
    VersionParts,
)

log = logging.getLogger(__name__)

_FORGOTTEN_REMEMBERED = 1000
_SPARED_S = 3600.0
"""So long after its last process a job gives way to no other: who was interrupted begins again."""


@dataclass
class JobEntry(JobVersions):
    """What is known of its versions, and of the processes of this node that take part in it."""

    loaded: VersionId | None = None
    """What processes of this node went on from where there was no quorum: said once they may write."""
    clients: Counter[ProcessIdentity] = field(default_factory=Counter)
    seen: float = 0.0


class JobTable:
    """Every job this node has heard of. The shelf's lock guards it."""

    def __init__(self, shelf: SlotTable, ttl_s: float) -> None:
        self._shelf = shelf
        self._ttl_s = ttl_s
        self._jobs: dict[str, JobEntry] = {}
        self._started = shelf.clock()
        self._permits: dict[str, Callable[[], None]] = {}
        self._warned: set[str] = set()
        self.gone: dict[ProcessIdentity, float] = {}
        """Processes without a connection, and since when."""
        self.managed: set[str] = set()
        """Jobs whose shards are given up by name only: their slots are bounded by the budget, and by nothing else."""

    def of(self, job: str) -> JobEntry:
        """The job, from now on known."""
        known = self._jobs.get(job)
        if known is None:
            known = self._jobs[validate_job_name(job)] = JobEntry(seen=self._shelf.clock())
        return known

    def if_known(self, job: str) -> JobEntry | None:
        return self._jobs.get(job)

    def active(self, job: str) -> bool:
        """Whether a process of this node takes part in it."""
        known = self._jobs.get(job)
        return known is not None and bool(known.clients)

    def writers(self, job: str, parts: int) -> int:
        """How many parts of the job's versions this node is expected to hold: those of its own processes, and as many
        copies where some are kept.
        """
        known = self._jobs.get(job)
        here = len(known.clients) * (2 if known.guarded else 1) if known is not None else 0
        return min(parts, max(1, here))

    def heard_of(self, key: ShardKey) -> None:
        """A killed agent had let this incarnation write, also where its note of that was lost."""
        known = self.of(key.job)
        known.seen = self._shelf.clock()
        if key.epoch > known.epoch:
            known.epoch, known.incarnation = key.epoch, key.incarnation

    # -- incarnations -----------------------------------------------------------------------------------------

    def epoch(self, job: str) -> int:
        known = self._jobs.get(validate_job_name(job))
        return known.epoch if known else 0

    def claim(self, job: str, incarnation: str, at_least: int) -> int:
        validate_incarnation(incarnation)
        if not 0 <= at_least < MAX_NUMBER:
            raise RequestError(f"job {job}: epoch {at_least} is not a number from 0 to 2^62")
        known = self.of(job)
        if known.incarnation != incarnation:
            self._check_may_begin(job)
            self._begin(job, max(known.epoch, at_least) + 1, incarnation)
        return known.epoch

    def check_fence(self, key: ShardKey) -> None:
        """Let the newest incarnation write, and one that is newer still; refuse those of the past."""
        known = self.of(key.job)
        if key.epoch > known.epoch:
            self._check_may_begin(key.job)
            self._begin(key.job, key.epoch, key.incarnation)
        elif (key.epoch, key.incarnation) != (known.epoch, known.incarnation):
            raise FencedError(
                f"{key} is of a past incarnation: job {key.job} is now owned by epoch {known.epoch} "
                f"({known.incarnation}). This process must stop writing"
            )

    def fence(self, job: str, epoch: int, incarnation: str) -> None:
        """Another node says who owns the job: writers of the past are refused from here on."""
        known = self.of(job)
        if not self.is_near(job, epoch):
            return
        if (epoch, incarnation) > (known.epoch, known.incarnation):
            self._own(job, epoch, incarnation)

    def is_near(self, job: str, epoch: int) -> bool:
        """Whether the job can have come so far since this node heard of it."""
        known = self.of(job)
        if known.is_near(epoch):
            return True
        if job not in self._warned:
            self._warned.add(job)
            log.warning("job %s is in epoch %d: what somebody says of epoch %d is ignored", job, known.epoch, epoch)
        return False

    def _begin(self, job: str, epoch: int, incarnation: str) -> None:
        """An incarnation of which processes of this node are part begins: it says what it goes on from."""
        known = self.of(job)
        if job in self.managed:
            raise RequestError(f"job {job} is this agent's own: call yours something else")
        group = known.loaded or (known.base.group if known.base is not None and known.base.turn else None)
        if group is not None:
            self._go_on_from(job, ResumePoint(epoch, incarnation, 0, group))
        self._own(job, epoch, incarnation)

    def _own(self, job: str, epoch: int, incarnation: str) -> None:
        known = self.of(job)
        known.epoch, known.incarnation, known.loaded, known.seen = epoch, incarnation, None, self._shelf.clock()
        self._save(job)
        failpoint("agent.claimed")
        self.end_past_leases(job)

    def end_past_leases(self, job: str) -> None:
        known = self.of(job)
        for slot in list(self._shelf.slots.values()):
            if slot.lease is None or slot.job != job or slot.lease.key.epoch >= known.epoch:
                continue
            if not known.may_still_write(slot.lease.key.group):
                self._shelf.end_lease(slot, "fenced by a newer incarnation")
        self._shelf.changed.notify_all()

    def _save(self, job: str) -> None:
        known = self._jobs[job]
        marks = tuple(VersionParts(group, parts) for group, parts in sorted(known.marks.items()))
        torn = tuple(VersionParts(group, tuple(sorted(parts))) for group, parts in sorted(known.torn.items()))
        note = JobMetadata(
            known.epoch,
            known.incarnation,
            marks,
            tuple(sorted(known.damaged)),
            known.guarded,
            known.settled,
            known.base,
            tuple(sorted(known.kept.values(), key=lambda one: one.group)),
            torn,
        )
        self._shelf.notes.put(JOB_METADATA, job, note)

    def adopt(self, job: str) -> None:
        """What a killed agent knew about the job."""
        try:
            note = self._shelf.notes.get(JOB_METADATA, validate_job_name(job), JobMetadata)
        except UnsupportedFormatError as error:
            self._adopt_owner(job, error)
            return
        if note is not None:
            marks = {mark.group: mark.parts for mark in note.marks}
            self._jobs[job] = JobEntry(
                note.epoch,
                note.incarnation,
                marks,
                set(note.damaged),
                guarded=note.guarded,
                settled=note.settled,
                base=note.base,
                kept={one.group: one for one in note.kept},
                torn={one.group: set(one.parts) for one in note.torn},
                seen=self._shelf.clock(),
            )

    def _adopt_owner(self, job: str, error: UnsupportedFormatError) -> None:
        """Of what another version noted about the job, who owns it: writers of the past stay refused."""
        self._shelf.set_aside(JOB_METADATA + job, 0, str(error))
        try:
            owner = self._shelf.notes.get(JOB_METADATA, job, JobOwnerMetadata)
        except UnsupportedFormatError:
            return
        if owner is not None and 0 <= owner.epoch < MAX_NUMBER:
            self._jobs[job] = JobEntry(owner.epoch, owner.incarnation, seen=self._shelf.clock())

    # -- wholeness: decided in peerstore.commit_protocol, noted here ---------------------------------------------------

    def call_whole(self, job: str, group: VersionId) -> bool:
        """Every part of this version is sealed, as somebody says who has counted or loaded them; whether it is news."""
        known = self.of(job)
        if not known.call_whole(group, self._parts_here(job, group)):
            return False
        known.tidy(lambda old: self._parts_here(job, old))
        self._noted(job)
        return True

    def leave_out(self, job: str, group: VersionId, part: int) -> bool:
        """A writer of this node will never seal its part of this version; whether it is news."""
        news = self.of(job).leave_out(group, part, self._parts_here(job, group))
        if news:
            self._noted(job)
        return news

    def tear(self, job: str, groups: Iterable[VersionId]) -> list[VersionId]:
        """These versions will never be whole, as other nodes say; those of them that are news."""
        news = self.of(job).tear(groups)
        if news:
            self._noted(job)
        return news

    def is_torn(self, job: str, group: VersionId) -> bool:
        known = self._jobs.get(job)
        return known is not None and group in known.torn

    def _noted(self, job: str) -> None:
        self._save(job)
        self._shelf.changed.notify_all()

    def _parts_here(self, job: str, group: VersionId) -> tuple[int, ...]:
        keys = [slot.record.key for slot in self._shelf.slots.values() if slot.record is not None]
        return tuple(sorted(key.part for key in keys if (key.job, key.group) == (job, group) and not key.kind))

    def forgot(self, job: str, groups: Collection[VersionId] | None) -> None:
        """These versions (all, when none is named) are not kept any more, whoever called them whole."""
        known = self._jobs.get(job)
        if known is not None and known.drop(groups, time.time_ns()):
            self._save(job)

    def lost_part(self, job: str, group: VersionId, part: int) -> None:
        """A part of this version turned out damaged."""
        self.of(job).lose(group, part)
        try:
            self._save(job)
        except (ArenaFullError, UnavailableError) as error:
            log.warning("that version %s of job %s is damaged could not be noted: %s", group, job, error)

    def mended(self, job: str, group: VersionId, part: int) -> None:
        """A part that was damaged here has been fetched from another node."""
        if self.of(job).mend(group, part):
            self._noted(job)

    def keep(self, job: str, said: Collection[RetentionMark]) -> bool:
        """These versions stay, whatever is newer, or do not have to any more; whether that is news."""
        try:
            news = self.of(job).keep(said, lambda: self.whole().get(job, ()))
        except TooManyRetainedError as error:
            raise RequestError(
                f"job {job} keeps {MAX_RETAINED_VERSIONS} steps in memory already, which is the most: "
                f"{', '.join(map(str, error.versions[:8]))}... Let some of them go (tieredckpt unpin)"
            ) from None
        if news:
            self._noted(job)
        return news

    def kept(self, whole: Mapping[str, Collection[VersionId]]) -> dict[str, Collection[VersionId]]:
        """Which versions of each job are not given up for newer ones."""
        return {job: known.stays(whole.get(job, ())) for job, known in self._jobs.items() if known.kept}

    def whole(self) -> dict[str, set[VersionId]]:
        """Each job's whole versions, by what was verified here."""
        here: dict[str, dict[VersionId, set[int]]] = defaultdict(lambda: defaultdict(set))
        parts: dict[str, dict[VersionId, int]] = defaultdict(dict)
        for _, record in self._shelf.offered():
            job, group = record.key.job, record.key.group
            here[job][group].add(record.key.part)
            parts[job][group] = max(record.parts, parts[job].get(group, 0))
        return {job: self._known(job).whole(here[job], parts[job]) for job in here.keys() | self._jobs.keys()}

    def _known(self, job: str) -> JobVersions:
        return self._jobs.get(job) or _NOTHING_KNOWN

    def settled(
        self, whole: Mapping[str, Collection[VersionId]], mending: ShardKey | None = None
    ) -> dict[str, VersionId]:
        """The version each job can always go back to: what is older may be given up."""
        found = {}
        for job in whole.keys() | self._jobs.keys():
            back = mending.group if mending is not None and mending.job == job else None
            safe = self._known(job).safe(whole.get(job, ()), back)
            if safe is not None:
                found[job] = safe
        return found

    def _check_may_begin(self, job: str) -> None:
        permit = self._permits.get(job)
        if permit is not None:
            permit()

    def guard(self, job: str, *, guarded: bool, permit: Callable[[], None] | None) -> None:
        """``permit`` raises when this node must not let a new incarnation of the job begin."""
        if permit is None:
            self._permits.pop(job, None)
        else:
            self._permits[job] = permit
        known = self.of(job)
        if known.guarded != guarded:
            known.guarded = guarded
            self._save(job)

    def horizon(self, job: str) -> int:
        """What incarnations before this one left unfinished is given up when room is short."""
        return self.of(job).horizon()

    def needed(self, whole: Mapping[str, Collection[VersionId]]) -> dict[str, Collection[VersionId]]:
        """What is not given up for lack of room: whole versions, and of the past only what can be gone back to."""
        jobs = whole.keys() | self._jobs.keys()
        return {job: self._known(job).needed(whole.get(job, ())) for job in jobs}

    def settle(self, job: str, group: VersionId) -> None:
        """Every part of this version has the copies it was to have: it is whole, then."""
        known = self.of(job)
        if known.settle(group):
            known.call_whole(group, self._parts_here(job, group))
            known.tidy(lambda old: self._parts_here(job, old))
            self._noted(job)

    def go_back(self, job: str, group: VersionId) -> None:
        """The job goes on from this version: what was called whole or settled after it is of a past that it left.

        Else those versions, of which it found too little to go on from, would keep their slots for good, and make the
        one it did go on from superfluous.

        A side of a partition that must not let a new incarnation begin does not say it either: by the time both sides
        hear of each other, the other one may have settled versions that nobody has left.
        """
        known = self.of(job)
        try:
            self._check_may_begin(job)
        except NoQuorumError as error:
            log.info("that job %s goes on from version %s is not told yet: %s", job, group.version, error)
            known.loaded = group
            return
        known.loaded = None
        owner, base = (known.epoch, known.incarnation), known.base
        said = base is not None and (base.epoch, base.incarnation) == owner
        if base is None or not said or not base.turn or base.group != group:
            self._go_on_from(job, ResumePoint(*owner, base.turn + 1 if base is not None and said else 1, group))
            self._save(job)

    def learn(self, job: str, base: ResumePoint) -> None:
        """Another node says what the job went on from."""
        known = self.of(job)
        if not self.is_near(job, max(base.epoch, base.group.epoch)):
            return
        if known.base is None or base.order > known.base.order:
            self._go_on_from(job, base)
            self._save(job)
        self.fence(job, base.epoch, base.incarnation)

    def _go_on_from(self, job: str, base: ResumePoint) -> None:
        self.of(job).go_on_from(base, self._parts_here(job, base.group))
        self._shelf.changed.notify_all()

    # -- processes --------------------------------------------------------------------------------------------

    def arrived(self, owner: ProcessIdentity, job: str) -> None:
        known = self.of(job)
        self.gone.pop(owner, None)
        known.clients[owner] += 1
        known.seen = self._shelf.clock()

    def departed(self, owner: ProcessIdentity, job: str) -> bool:
        """A connection was closed; whether it was the process's last one for the job."""
        known = self._jobs.get(job)
        if known is None:
            return True
        known.clients[owner] -= 1
        if known.clients[owner] <= 0:
            del known.clients[owner]
        known.seen = self._shelf.clock()
        if not any(owner in other.clients for other in self._jobs.values()):
            self.gone[owner] = self._shelf.clock()
        return owner not in known.clients

    def gone_for(self, owner: ProcessIdentity) -> float:
        """How long the process has had no connection; endless when it died."""
        if not owner.alive:
            return float("inf")
        since = self.gone.get(owner)
        return 0.0 if since is None else self._shelf.clock() - since

    def expired(self) -> list[str]:
        """Jobs whose last process left too long ago and whose shards nobody uses."""
        used = {slot.job for slot in self._shelf.slots.values() if slot.users}
        now = self._shelf.clock()
        return [
            job
            for job, known in self._jobs.items()
            if not known.clients and now - known.seen > self._ttl_s and job not in used | self.managed
        ]

    def unused(self) -> list[str]:
        """Jobs that no process takes part in and nobody reads, for longer than an interruption: the one that nobody
        has used for the longest time first.
        """
        used = {slot.job for slot in self._shelf.slots.values() if slot.users or slot.lease is not None}
        idle = {
            job: known.seen
            for job, known in self._jobs.items()
            if not known.clients and self._shelf.clock() - known.seen > min(_SPARED_S, self._ttl_s)
            if not any(one.kept for one in known.kept.values())
        }
        return sorted(idle.keys() - used - self.managed, key=lambda job: (idle[job], job))

    def unused_s(self, job: str) -> float:
        return self._shelf.clock() - self.of(job).seen

    def bury(self, job: str, reason: str) -> None:
        """Keep in mind what the job had that nobody has told this node to forget."""
        once = self.of(job).once_whole()
        newest = max({*self.whole().get(job, ()), *([once] if once is not None else [])}, default=None)
        if newest is None:
            return
        try:
            self._shelf.notes.put(EXPIRED_JOB_METADATA, job, ExpiredJob(job, newest, time.time_ns(), reason))
        except (ArenaFullError, UnavailableError) as error:
            log.warning("that job %s is forgotten could not be noted: %s", job, error)
        others = [
            found
            for name in self._shelf.notes.names(EXPIRED_JOB_METADATA)
            if (found := self.forgotten(name)) is not None
        ]
        for old in sorted(others, key=lambda one: one.at_ns)[:-_FORGOTTEN_REMEMBERED]:
            self._shelf.notes.remove(EXPIRED_JOB_METADATA, old.job)

    def forgotten(self, job: str) -> ExpiredJob | None:
        """When and why what was kept for the job was given back, where nobody had said so."""
        try:
            return self._shelf.notes.get(EXPIRED_JOB_METADATA, job, ExpiredJob)
        except (UnsupportedFormatError, ShardDamagedError) as error:
            log.warning("what is noted of the end of job %s cannot be read: %s", job, error)
            return None

    def drop(self, job: str) -> None:
        """Nothing of the job is here any more: forget that there was one, unless somebody still takes part."""
        known = self._jobs.get(job)
        if known is None or known.clients or any(slot.job == job for slot in self._shelf.slots.values()):
            return
        self._shelf.notes.remove(JOB_METADATA, job)
        self._jobs.pop(job)

    def idle_s(self) -> float:
        """How long nobody has been connected; 0 while somebody is or while jobs still own shards."""
        if any(known.clients for known in self._jobs.values()) or any(s.record for s in self._shelf.slots.values()):
            return 0.0
        return self._shelf.clock() - max((known.seen for known in self._jobs.values()), default=self._started)

    def status(self) -> tuple[JobStatus, ...]:
        whole = self.whole()
        return tuple(self._status(job, whole.get(job, set())) for job in sorted(self._jobs))

    def _status(self, job: str, whole: set[VersionId]) -> JobStatus:
        known = self._jobs[job]
        newest = max(whole, default=None)
        left = None if known.clients else self._ttl_s - (self._shelf.clock() - known.seen)
        return JobStatus(
            job=job,
            epoch=known.epoch,
            clients=len(known.clients),
            versions=len({record.key.group for _, record in self._shelf.offered(job)}),
            newest_whole=newest.version if newest else None,
            expires_in_s=left,
            settled=known.settled.version if known.guarded and known.settled else None,
        )


_NOTHING_KNOWN = JobVersions()
