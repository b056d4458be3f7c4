"""Commit protocol: a node's view of a job's versions, and the leader's count of their parts.

The module has no threads and does no I/O.

::

    a writer         sealed its part ─┐
                     or aborted it ───┤ reports only to its own agent
    its agent        ─────────────────┴─> reports the parts that it owns to the commit leader
    commit leader    every part sealed ───────> COMMITTED   ┐
                     every part replicated ───> REPLICATED  ├─ broadcast, stored beside the slots, never revoked
                     one part aborted ────────> ABORTED     ┘

Only the reports on its parts decide that a version is committed, never one writer's assumptions about the others.
Without replication every committed version counts as replicated. An agent with all parts of a version counts by itself,
and so does an agent that knows no other nodes.

:class:`JobVersions` is one node's knowledge of one job, and answers two questions: is a version committed, and may it
be evicted. :class:`CommitReports` holds the reports of a node on its parts and, on the commit leader, the reports of
all nodes. It stores nothing that is not reported again: when the leader dies, the nodes report to the next one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Annotated, Protocol

import msgspec

from peerstore.shard_records import MAX_EPOCH_LEAD, ResumePoint, RetentionMark, VersionId

MAX_REMEMBERED_VERSIONS = 256
MAX_ABORTED_VERSIONS = 64
"""Number of aborted versions to remember, the newest; every ping contains them."""
MAX_RETAINED_VERSIONS = 64
"""Largest number of a job's versions retained on request; every ping contains their attempts."""
MAX_RETAINED_ATTEMPTS = MAX_RETAINED_VERSIONS + MAX_RETAINED_VERSIONS // 2
"""Largest number of attempts at them: of each version the newest complete one, and later ones."""
BROADCAST_FANOUT = 128
"""Number of nodes that the leader sends a decision to directly."""


# -- one node's view --------------------------------------------------------------------------------------------------


@dataclass
class JobVersions:
    """One job's versions, as one node knows them. Methods that change them return whether that is new."""

    epoch: int = 0
    incarnation: str = ""
    committed: dict[VersionId, tuple[int, ...]] = field(default_factory=dict)
    """Committed versions, with the parts that were on this node when that was decided."""
    damaged: set[VersionId] = field(default_factory=set)
    """Versions that lost a part here. Only the repaired part makes such a version complete again."""
    lost_parts: dict[VersionId, set[int]] = field(default_factory=dict)
    """The lost parts, as far as this node knows."""
    requires_replication: bool = False
    """Whether shards are replicated, so that only a replicated version supersedes older ones."""
    replicated: VersionId | None = None
    resume_point: ResumePoint | None = None
    """The version that the job resumed from.

    Of earlier epochs, only this version, the replicated version and retained versions are needed.
    """
    retention: dict[VersionId, RetentionMark] = field(default_factory=dict)
    """Marks of versions that newer ones must not evict, or no longer must not."""
    dropped: set[VersionId] = field(default_factory=set)
    """Versions that were deleted recently; later reports on them are ignored."""
    aborted: dict[VersionId, set[int]] = field(default_factory=dict)
    """Versions with an aborted part, and the parts that writers of this node aborted."""

    def copy(self) -> JobVersions:
        """Return a copy that later changes do not affect."""
        return JobVersions(
            self.epoch,
            self.incarnation,
            dict(self.committed),
            set(self.damaged),
            {group: set(parts) for group, parts in self.lost_parts.items()},
            self.requires_replication,
            self.replicated,
            self.resume_point,
            dict(self.retention),
            set(self.dropped),
            {group: set(parts) for group, parts in self.aborted.items()},
        )

    @property
    def owner(self) -> tuple[int, str]:
        """The newest incarnation: its epoch and its name."""
        return self.epoch, self.incarnation

    @property
    def decision(self) -> CommitDecision:
        """All decisions on the job's versions that this node knows."""
        return CommitDecision(max(self.committed, default=None), self.replicated, tuple(sorted(self.aborted)))

    @property
    def aborted_parts(self) -> dict[VersionId, tuple[int, ...]]:
        """The parts that writers of this node did not seal, by version."""
        return {group: tuple(parts) for group, parts in self.aborted.items() if parts}

    # -- changes ------------------------------------------------------------------------------------------------------

    def mark_committed(self, group: VersionId, here: Collection[int]) -> bool:
        """Record that every part is sealed on some node; ``here`` are the parts on this node."""
        if group in self.committed or group in self.damaged or group in self.aborted or group in self.dropped:
            return False
        if self.resume_point is not None and self.resume_point.abandons(group):
            return False
        self.committed[group] = tuple(sorted(here))
        return True

    def prune(self, here: Callable[[VersionId], Collection[int]]) -> None:
        """Forget committed versions without parts on this node, except the newest one."""
        newest = max(self.committed, default=None)
        self.committed = {group: parts for group, parts in self.committed.items() if group == newest or here(group)}

    def mark_replicated(self, group: VersionId) -> bool:
        """Record that every part has its replicas."""
        if (
            group in self.dropped
            or group in self.aborted
            or (self.resume_point is not None and self.resume_point.abandons(group))
        ):
            return False  # the sender does not know the version that the job resumed from
        if self.replicated is not None and group <= self.replicated:
            return False
        self.replicated = group
        return True

    def abort_part(self, group: VersionId, part: int, here: Collection[int]) -> bool:
        """Record that a writer of this node will never seal its part; the version is aborted.

        Ignored if the part is or was here: the writer has not learned that it was sealed.
        """
        if part in here or part in self.lost_parts.get(group, ()):
            return False
        before = group in self.aborted and part in self.aborted[group]
        self.mark_aborted([group])
        if before or group not in self.aborted:
            return False
        self.aborted[group].add(part)
        return True

    def mark_aborted(self, groups: Iterable[VersionId]) -> list[VersionId]:
        """Record that a part of these versions was aborted; return the versions for which this is new."""
        news = [group for group in groups if group not in self.aborted and not self.is_committed(group)]
        self.aborted |= {group: set() for group in news}
        self.aborted = {group: self.aborted[group] for group in sorted(self.aborted)[-MAX_ABORTED_VERSIONS:]}
        return [group for group in news if group in self.aborted]

    def lose_part(self, group: VersionId, part: int) -> None:
        """Record that a part is damaged or missing on this node."""
        self.committed.pop(group, None)
        self.lost_parts.setdefault(group, set()).add(part)
        self.damaged = set(sorted(self.damaged | {group})[-MAX_REMEMBERED_VERSIONS:])

    def repair_part(self, group: VersionId, part: int) -> bool:
        """Record that a lost part was fetched from another node; return whether all are repaired."""
        lost = self.lost_parts.get(group, set())
        lost.discard(part)
        if group not in self.lost_parts or lost:
            return False
        del self.lost_parts[group]
        self.damaged.discard(group)
        return True

    def drop(self, groups: Collection[VersionId] | None, now_ns: int) -> bool:
        """Forget these versions (``None``: all), also committed ones, and ignore later reports on them."""
        known = {*self.committed, *([self.replicated] if self.replicated is not None else [])}
        news = bool(known | self.retention.keys() if groups is None else (known | self.retention.keys()) & {*groups})
        gone = known if groups is None else set(groups)
        self.dropped = set(sorted(self.dropped | gone)[-MAX_REMEMBERED_VERSIONS:])
        if groups is None:
            self.retention.clear()
        for group in gone & self.retention.keys():
            if self.retention[group].retained:
                self.retention[group] = self.new_retention_mark(group, kept=False, now_ns=now_ns)
        self.committed = {group: parts for group, parts in self.committed.items() if group not in gone}
        self.replicated = None if self.replicated in gone else self.replicated
        return news

    def new_retention_mark(self, group: VersionId, *, kept: bool, now_ns: int) -> RetentionMark:
        """Return a mark that is newer than all known marks of the version, regardless of other nodes' clocks."""
        known = self.retention.get(group)
        return RetentionMark(group, kept, now_ns if known is None else max(now_ns, known.at_ns + 1))

    def apply_retention(
        self, said: Collection[RetentionMark], whole: Callable[[], Collection[VersionId]] = tuple
    ) -> bool:
        """Apply marks that retain or release versions; raise :class:`TooManyRetainedError` over the limit.

        The limit counts versions, not attempts. A complete attempt (in ``whole``) releases earlier attempts. An abort
        releases its own attempt only.
        """
        news = {one.version_id: one for one in said if one.at_ns > self.retention.get(one.version_id, one).at_ns}
        news |= {
            one.version_id: one
            for one in said
            if one.version_id not in self.retention and one.version_id not in self.dropped
        }
        if not news:
            return False
        after = self.retention | news
        wanted = {one.version_id for one in after.values() if one.retained}
        for group in wanted - retained_versions(wanted - self.aborted.keys(), whole()):
            after[group] = RetentionMark(group, False, after[group].at_ns + 1)
        stay = sorted((one for one in after.values() if one.retained), key=lambda one: one.at_ns)
        versions = dict.fromkeys(one.version_id.version for one in stay)
        if len(versions) > MAX_RETAINED_VERSIONS or len(stay) > MAX_RETAINED_ATTEMPTS:
            raise TooManyRetainedError([*versions])
        over = sorted((one for one in after.values() if not one.retained), key=lambda one: -one.at_ns)
        self.retention = {one.version_id: one for one in (*stay, *over[: 2 * MAX_RETAINED_VERSIONS - len(stay)])}
        return True

    def resume_from(self, base: ResumePoint, here: Collection[int]) -> None:
        """Record the version that the job resumed from, and drop committed versions that it abandons."""
        self.resume_point = base
        self.committed = {group: parts for group, parts in self.committed.items() if not base.abandons(group)}
        if self.replicated is not None and base.abandons(self.replicated):
            self.replicated = base.version_id
        if base.version_id not in self.damaged:
            self.committed.setdefault(base.version_id, tuple(sorted(here)))
        self.aborted.pop(base.version_id, None)  # the job loaded it, so no part is missing

    # -- is it committed ----------------------------------------------------------------------------------------------

    def is_committed(self, group: VersionId) -> bool:
        """Return whether the version is committed as far as this node knows, on any nodes."""
        return group in self.committed or group == self.replicated

    def would_be_newest(self, whole: VersionId) -> bool:
        """Return whether it would be the newest committed version that this node knows, and is not deleted."""
        return whole not in self.dropped and all(whole > known for known in self.committed)

    def last_committed(self) -> VersionId | None:
        """Return the newest version known to have been committed, even if its shards no longer exist."""
        return max({*self.committed, *([self.replicated] if self.replicated is not None else [])}, default=None)

    # -- may it be evicted --------------------------------------------------------------------------------------------

    def rollback_target(self, whole: Collection[VersionId], mending: VersionId | None = None) -> VersionId | None:
        """Return the version that the job can always resume from; older versions may be evicted.

        A version that lost a part here is not a target, except while that very part is received again (``mending``).
        Otherwise the part would get no slot, the version would stay damaged, nothing could be evicted, and the job
        could not continue.
        """
        if not self.requires_replication:
            return max(whole, default=None)
        return self.replicated if self.replicated not in self.damaged or self.replicated == mending else None

    def retained(self, whole: Collection[VersionId]) -> set[VersionId]:
        """Return the versions retained on request, which newer ones must not evict."""
        return retained_versions([one.version_id for one in self.retention.values() if one.retained], whole)

    def needed(self, whole: Collection[VersionId]) -> set[VersionId]:
        """Return the versions that lack of memory does not evict.

        These are the complete versions, except those of branches that the job left.
        """
        if not self.requires_replication or self.resume_point is None:
            return set(whole)
        resumable = {self.resume_point.version_id, self.replicated or self.resume_point.version_id}
        retained = {one.version_id for one in self.retention.values() if one.retained and one.version_id in whole}
        return {group for group in whole if group.epoch >= self.resume_point.first_current_epoch} | resumable | retained

    def oldest_active_epoch(self) -> int:
        """Return the epoch before which unfinished versions may be evicted for lack of memory."""
        return max(self.epoch, self.resume_point.first_current_epoch if self.resume_point is not None else 0)

    def is_needed(self, group: VersionId) -> bool:
        """Return whether a restore may still need the version."""
        return group not in self.aborted and is_needed(
            group, epoch=self.epoch, replicated=self.replicated, whole=self.is_committed(group), base=self.resume_point
        )

    def may_still_write(self, group: VersionId) -> bool:
        """Return whether a lease of this version stays: current, or a replica of a committed version."""
        return group.epoch >= self.epoch or self.is_committed(group)

    def is_plausible_epoch(self, epoch: int) -> bool:
        """Return whether the job can have reached this epoch since this node first knew it."""
        return epoch <= self.epoch + MAX_EPOCH_LEAD


class TooManyRetainedError(ValueError):
    """More versions are retained on request than the limit allows."""

    def __init__(self, versions: list[int]) -> None:
        super().__init__(versions)
        self.versions = versions


def committed_versions(
    here: Mapping[VersionId, AbstractSet[int]],
    parts: Mapping[VersionId, int],
    marked: Mapping[VersionId, Collection[int]] | None = None,
) -> set[VersionId]:
    """Return versions with all parts here, and those in ``marked`` that lost no part here since then.

    ``here`` has the verified parts. ``marked`` has committed versions, with the parts that were here when that was
    decided.
    """
    complete = {group for group, found in here.items() if len(found) >= parts[group]}
    return complete | {
        group
        for group, marked_parts in (marked or {}).items()
        if group not in complete and all(part in here.get(group, ()) for part in marked_parts)
    }


def newest_committed(whole: Mapping[str, Collection[VersionId]]) -> dict[str, VersionId]:
    """Return the newest complete version of each job, the rollback target without replication."""
    return {job: max(groups) for job, groups in whole.items() if groups}


def is_needed(
    group: VersionId, *, epoch: int, replicated: VersionId | None, whole: bool, base: ResumePoint | None
) -> bool:
    """Return whether a restore may still need this version.

    It is not needed if it is older than the replicated version, or unfinished in an earlier epoch. Of epochs that the
    job has left, only the resumed and the replicated version are needed.
    """
    if replicated is not None and group <= replicated:
        return group == replicated
    if base is not None and group.epoch < base.first_current_epoch:
        return group == base.version_id
    return group.epoch >= epoch or whole


def retained_versions(kept: Collection[VersionId], whole: Collection[VersionId]) -> set[VersionId]:
    """Return the versions to retain: a complete attempt at a version supersedes earlier attempts."""
    newest: dict[int, VersionId] = {}
    for group in kept:
        if group in whole:
            newest[group.version] = max(group, newest.get(group.version, group))
    return {group for group in kept if group >= newest.get(group.version, group)}


def is_superseded(group: VersionId, safe: VersionId | None, kept: Collection[VersionId] = ()) -> bool:
    """Return whether the job can resume from a newer version, so that this one may be evicted."""
    return safe is not None and group < safe and group not in kept


def is_abandoned(group: VersionId, epoch: int, whole: Collection[VersionId], safe: VersionId | None) -> bool:
    """Return whether an incarnation before ``epoch`` left the version unfinished.

    Such a version may be evicted if memory is short. The ``safe`` version counts as complete, even if this node does
    not have all parts and received no decision.
    """
    return group.epoch < epoch and group not in whole and group != safe


# -- counting ---------------------------------------------------------------------------------------------------------


class PartsReport(msgspec.Struct, frozen=True):
    """A node's report on one version to the commit leader; it replaces the node's previous report."""

    version_id: VersionId
    total_parts: int
    """Number of the version's parts; 0 if the node does not know."""
    replicated_parts: tuple[int, ...]
    """Parts that the node owns and that have all their replicas, or all that they can get."""
    node: str = ""
    """The node that owns these parts, and no other part of this version."""
    generation: int = 0
    """The node's generation: a report of an earlier generation may be outdated."""
    sealed_parts: tuple[int, ...] = ()
    """Parts that the node owns and that still lack replicas."""
    aborted_parts: tuple[int, ...] = ()
    """Parts that their writers on this node will never seal."""


class CommitDecision(msgspec.Struct, frozen=True):
    """Decisions on versions. They are never revoked."""

    committed: VersionId | None = None
    """The newest version with all parts sealed, if that is new."""
    replicated: VersionId | None = None
    """The newest version with all parts replicated."""
    aborted: Annotated[tuple[VersionId, ...], msgspec.Meta(max_length=MAX_REMEMBERED_VERSIONS)] = ()
    """Versions that can never be complete."""

    def __bool__(self) -> bool:
        return self.committed is not None or self.replicated is not None or bool(self.aborted)

    def __or__(self, later: CommitDecision) -> CommitDecision:
        """Return both decisions combined."""
        return CommitDecision(
            _newer(self.committed, later.committed),
            _newer(self.replicated, later.replicated),
            tuple(sorted({*self.aborted, *later.aborted})[-MAX_ABORTED_VERSIONS:]),
        )


def _newer(one: VersionId | None, other: VersionId | None) -> VersionId | None:
    return max((group for group in (one, other) if group is not None), default=None)


class ReportedShard(Protocol):
    """The replication state of one shard; see :mod:`peerstore.replication.replication_policy`."""

    @property
    def key(self) -> _Key: ...
    @property
    def is_owner(self) -> bool: ...
    @property
    def missing(self) -> int: ...


class _Key(Protocol):
    @property
    def version_id(self) -> VersionId: ...
    @property
    def part(self) -> int: ...


class _VersionReports:
    """The reports on one version."""

    def __init__(self) -> None:
        self.notes: dict[str, PartsReport] = {}
        self.whole = False
        """Whether the version was decided to be committed."""
        self._replicated_count = self._sealed_count = 0
        """Number of parts in all reports; a part may be counted several times."""
        self._min_total = sys.maxsize
        """The smallest total number of parts that a report states."""

    def add(self, note: PartsReport) -> None:
        known = self.notes.get(note.node)
        if known is None or note.generation >= known.generation:
            self.notes[note.node] = note
            self._replicated_count += len(note.replicated_parts) - (
                len(known.replicated_parts) if known is not None else 0
            )
            self._sealed_count += len(note.sealed_parts) - (len(known.sealed_parts) if known is not None else 0)
            self._min_total = min(self._min_total, note.total_parts or sys.maxsize)

    @property
    def may_be_news(self) -> bool:
        """Whether the version may be complete: a quick check, because an exact count per report would be slow."""
        return self._replicated_count + (0 if self.whole else self._sealed_count) >= self._min_total


class PartsTally:
    """Count of sealed and replicated parts per version, on the commit leader.

    A node's report counts while the node lives. When the node dies or restarts, another node owns its parts, or the
    node reports again. Otherwise a version could count as replicated although a part was lost with its last holder.
    Only an abort stays forever. When the leader dies, the nodes repeat their reports to the next leader.
    """

    def __init__(self) -> None:
        self._reports: dict[VersionId, _VersionReports] = {}
        self._aborted: dict[VersionId, bool] = {}
        """Aborted versions, and whether that was decided and broadcast."""

    def add(self, note: PartsReport) -> None:
        if note.aborted_parts and note.version_id not in self._aborted and not self._is_committed(note.version_id):
            self._aborted[note.version_id] = False
        if note.version_id not in self._aborted:
            self._reports.setdefault(note.version_id, _VersionReports()).add(note)

    def _is_committed(self, group: VersionId) -> bool:
        return group in self._reports and self._reports[group].whole

    def newly_aborted(self) -> tuple[VersionId, ...]:
        """Return the versions with an aborted part that were not returned before."""
        news = tuple(sorted(group for group, decided in self._aborted.items() if not decided))
        self._aborted = dict.fromkeys(sorted(self._aborted)[-MAX_REMEMBERED_VERSIONS:], True)
        for group in news:
            self._reports.pop(group, None)
        return news

    def newly_complete(self, *, me: str, living: Collection[str], life: Callable[[str], int]) -> CommitDecision:
        """Return the newest versions with all parts sealed or replicated, if that is new."""
        sealed, safe = [], []
        for group, said in self._reports.items():
            if not said.may_be_news:
                continue
            counted = [
                note
                for node, note in said.notes.items()
                if node == me or (node in living and life(node) <= note.generation)
            ]
            in_all = max((note.total_parts for note in counted), default=0)
            parts = {part for note in counted for part in note.replicated_parts if 0 <= part < in_all}
            if in_all and len(parts) == in_all:
                safe.append(group)
            elif in_all and not said.whole:
                parts |= {part for note in counted for part in note.sealed_parts if 0 <= part < in_all}
                if len(parts) == in_all:
                    said.whole = True
                    sealed.append(group)
        newest = max(safe, default=None)
        if newest is not None:  # decided once, even if the job has left that version
            del self._reports[newest]
        return CommitDecision(_newer(newest, max(sealed, default=None)), newest)

    def drop_until(self, replicated: VersionId) -> None:
        self._reports = {group: said for group, said in self._reports.items() if group > replicated}


def commit_leader(living: Mapping[str, object] | Collection[str], standby: Collection[str] = ()) -> str | None:
    """Return the first living node with a vote, or the first of all if no node with a vote lives.

    A standby node may not know the world, and would count for an older member list.
    """
    return min((node for node in living if node not in standby), default=min(living, default=None))


def broadcast_targets(living: Iterable[str], me: str) -> list[str]:
    """Return the nodes to send a decision to: all nodes of a small job, a sample of a large one.

    Pings spread the decision to all nodes within a few periods, which is faster than thousands of messages.
    """
    others = sorted(node for node in living if node != me)
    return others[:: max(1, -(-len(others) // BROADCAST_FANOUT))]


class CommitReports:
    """A node's reports on the parts that it owns and, on the commit leader, the reports of all nodes."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._tally = PartsTally()
        self._reported: dict[VersionId, tuple[str, PartsReport]] = {}

    def pending(
        self,
        standings: Iterable[ReportedShard],
        parts_of: Mapping[VersionId, int],
        *,
        living: Mapping[str, object],
        replicated: VersionId | None,
        life: int,
        left_out: Mapping[VersionId, Collection[int]] | None = None,
        standby: Collection[str] = (),
    ) -> tuple[str, list[PartsReport]]:
        """Return the commit leader, and the reports that it has not received.

        ``parts_of`` maps a version to its total number of parts.
        """
        leader = commit_leader(living, standby) or self._me
        self._reported = {
            group: reported for group, reported in self._reported.items() if replicated is None or group > replicated
        }
        mine: dict[VersionId, tuple[list[int], list[int]]] = {}
        for one in standings:
            if one.is_owner:
                mine.setdefault(one.key.version_id, ([], []))[bool(one.missing)].append(one.key.part)
        torn = {group: parts for group, parts in (left_out or {}).items() if parts}
        in_all = {**{group: note.total_parts for group, (_, note) in self._reported.items()}, **parts_of}
        notes = []
        for group in sorted(mine.keys() | self._reported.keys() | torn.keys()):
            if replicated is None or group > replicated:
                safe, lacking = mine.get(group, ([], []))
                aborted = tuple(sorted(torn.get(group, ())))
                count = in_all.get(group, 0)
                notes.append(
                    PartsReport(group, count, tuple(sorted(safe)), self._me, life, tuple(sorted(lacking)), aborted)
                )
        return leader, [note for note in notes if self._reported.get(note.version_id) != (leader, note)]

    def mark_reported(self, leader: str, note: PartsReport) -> None:
        self._reported[note.version_id] = (leader, note)

    def add(self, note: PartsReport) -> None:
        """Add a node's report."""
        self._tally.add(note)

    def decide(
        self, *, living: Collection[str], life: Callable[[str], int], replicated: VersionId | None, quorum: bool
    ) -> CommitDecision:
        """Return the new decisions that follow from all reports.

        Without a quorum no version becomes committed or replicated: the other partition side may have resumed from a
        version that this side would evict. Reports are retained until the quorum returns. An abort needs only one
        report and no quorum.
        """
        if replicated is not None:
            self._tally.drop_until(replicated)
        torn = self._tally.newly_aborted()
        done = self._tally.newly_complete(me=self._me, living=living, life=life) if quorum else CommitDecision()
        return CommitDecision(done.committed, done.replicated, torn)
