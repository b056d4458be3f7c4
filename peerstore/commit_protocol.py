"""Commit protocol: a node's view of a job's versions, the leader's count of sealed and replicated parts. Pure.

::

    a writer     sealed its part ─┐
                 or left it out ──┤ tells its own agent, and nobody else
    an agent     ─────────────────┴─> tells the one node that counts, which parts it answers for
    that node    every part sealed ──────────> WHOLE    ┐
                 every part has its copies ──> SETTLED  ├─ told to all, noted beside the slots, never taken back
                 one part left out ──────────> TORN     ┘

A version is whole by what its parts say, never by what one that writes believes of the others. Where nobody keeps
copies, what is whole is settled. An agent that has all parts here counts by itself; where no other nodes are known
there is nobody else to ask.

:class:`JobVersions` is what one node knows of one job, and answers both questions there are: *is it whole*, and *may it
go*. :class:`CommitReports` is what a node says of the parts it answers for; where it is the one that counts, also what
all said. It keeps nothing that is not said again: when that node dies, the next one is told anew.
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
"""Versions that are known to be torn, the newest: nodes say them with every ping."""
MAX_RETAINED_VERSIONS = 64
"""Versions of a job that may be kept on request: nodes say the attempts at them with every ping."""
MAX_RETAINED_ATTEMPTS = MAX_RETAINED_VERSIONS + MAX_RETAINED_VERSIONS // 2
"""Attempts at them: of each the newest whole one, and those after it that may become whole."""
BROADCAST_FANOUT = 128
"""How many nodes the one that counts tells itself what it has decided."""


# -- what one node knows ----------------------------------------------------------------------------------------------


@dataclass
class JobVersions:
    """One job's versions, as one node knows them. Whatever changes it says whether that is news."""

    epoch: int = 0
    incarnation: str = ""
    committed: dict[VersionId, tuple[int, ...]] = field(default_factory=dict)
    """Versions that are whole, as this node was told, with the parts that were here then."""
    damaged: set[VersionId] = field(default_factory=set)
    """Versions that lost a part here: nobody's word makes them whole again, only the part itself does."""
    lost_parts: dict[VersionId, set[int]] = field(default_factory=dict)
    """The parts they lost, as far as this node has seen it."""
    requires_replication: bool = False
    """Copies are kept on other nodes: only a settled version makes older ones superfluous."""
    replicated: VersionId | None = None
    resume_point: ResumePoint | None = None
    """The version the job went on from: of the past before it, that one and what is settled are still needed."""
    retention: dict[VersionId, RetentionMark] = field(default_factory=dict)
    """What was said of versions that are not to be given up for newer ones."""
    dropped: set[VersionId] = field(default_factory=set)
    """Versions that were given up by name lately: nobody's word brings them back."""
    aborted: dict[VersionId, set[int]] = field(default_factory=dict)
    """Versions of which a part was left out, and the parts that writers of this node have left out."""

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

    # -- what happens -------------------------------------------------------------------------------------------------

    def mark_committed(self, group: VersionId, here: Collection[int]) -> bool:
        """Every part of it is sealed somewhere; ``here`` are those on this node."""
        if group in self.committed or group in self.damaged or group in self.aborted or group in self.dropped:
            return False
        if self.resume_point is not None and self.resume_point.abandons(group):
            return False
        self.committed[group] = tuple(sorted(here))
        return True

    def prune(self, here: Callable[[VersionId], Collection[int]]) -> None:
        """Forget of what was whole and has nothing here any more, but for the newest."""
        newest = max(self.committed, default=None)
        self.committed = {group: parts for group, parts in self.committed.items() if group == newest or here(group)}

    def mark_replicated(self, group: VersionId) -> bool:
        """Every part of it has the copies it was to have."""
        if (
            group in self.dropped
            or group in self.aborted
            or (self.resume_point is not None and self.resume_point.abandons(group))
        ):
            return False  # whoever says so has not heard what the job went on from
        if self.replicated is not None and group <= self.replicated:
            return False
        self.replicated = group
        return True

    def abort_part(self, group: VersionId, part: int, here: Collection[int]) -> bool:
        """A writer of this node will never seal its part: the version is torn.

        Not where the part is here, or was: its writer has not heard that it was sealed.
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
        """A part of these was left out somewhere: they will never be whole. Those of them that are news."""
        news = [group for group in groups if group not in self.aborted and not self.is_committed(group)]
        self.aborted |= {group: set() for group in news}
        self.aborted = {group: self.aborted[group] for group in sorted(self.aborted)[-MAX_ABORTED_VERSIONS:]}
        return [group for group in news if group in self.aborted]

    def lose_part(self, group: VersionId, part: int) -> None:
        """A part of it turned out damaged here, or is gone."""
        self.committed.pop(group, None)
        self.lost_parts.setdefault(group, set()).add(part)
        self.damaged = set(sorted(self.damaged | {group})[-MAX_REMEMBERED_VERSIONS:])

    def repair_part(self, group: VersionId, part: int) -> bool:
        """A part that was lost here has been fetched from another node."""
        lost = self.lost_parts.get(group, set())
        lost.discard(part)
        if group not in self.lost_parts or lost:
            return False
        del self.lost_parts[group]
        self.damaged.discard(group)
        return True

    def drop(self, groups: Collection[VersionId] | None, now_ns: int) -> bool:
        """These versions (all, when none is named) are given up by name, whoever called them whole."""
        vouched = {*self.committed, *([self.replicated] if self.replicated is not None else [])}
        news = bool(
            vouched | self.retention.keys() if groups is None else (vouched | self.retention.keys()) & {*groups}
        )
        gone = vouched if groups is None else set(groups)
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
        """What is said of it here and now: later than all that was heard of it, whatever the clocks of others say."""
        known = self.retention.get(group)
        return RetentionMark(group, kept, now_ns if known is None else max(now_ns, known.at_ns + 1))

    def apply_retention(
        self, said: Collection[RetentionMark], whole: Callable[[], Collection[VersionId]] = tuple
    ) -> bool:
        """These stay, whatever is newer, or do not have to any more; :class:`TooManyRetainedError` if they are too
        many.

        Versions are counted, not attempts: one that is ``whole`` releases those before it, as it does to be torn.
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
        asked = {one.version_id for one in after.values() if one.retained}
        for group in asked - retained_versions(asked - self.aborted.keys(), whole()):
            after[group] = RetentionMark(group, False, after[group].at_ns + 1)
        stay = sorted((one for one in after.values() if one.retained), key=lambda one: one.at_ns)
        versions = dict.fromkeys(one.version_id.version for one in stay)
        if len(versions) > MAX_RETAINED_VERSIONS or len(stay) > MAX_RETAINED_ATTEMPTS:
            raise TooManyRetainedError([*versions])
        over = sorted((one for one in after.values() if not one.retained), key=lambda one: -one.at_ns)
        self.retention = {one.version_id: one for one in (*stay, *over[: 2 * MAX_RETAINED_VERSIONS - len(stay)])}
        return True

    def resume_from(self, base: ResumePoint, here: Collection[int]) -> None:
        """The job goes on from a version: what was called whole or settled after it is of a past that it left."""
        self.resume_point = base
        self.committed = {group: parts for group, parts in self.committed.items() if not base.abandons(group)}
        if self.replicated is not None and base.abandons(self.replicated):
            self.replicated = base.version_id
        if base.version_id not in self.damaged:
            self.committed.setdefault(base.version_id, tuple(sorted(here)))
        self.aborted.pop(base.version_id, None)  # it was loaded, so what was left out of it is in what was there

    # -- is it whole --------------------------------------------------------------------------------------------------

    def is_committed(self, group: VersionId) -> bool:
        """Whether it is whole as far as this node was told, wherever its parts are."""
        return group in self.committed or group == self.replicated

    def committed_here(
        self, here: Mapping[VersionId, AbstractSet[int]], parts: Mapping[VersionId, int]
    ) -> set[VersionId]:
        """The versions that are whole, by what was verified here."""
        return committed_versions(here, parts, self.committed)

    def would_be_newest(self, whole: VersionId) -> bool:
        """Whether it would be the newest whole version that this node knows of, and is not given up by name."""
        return whole not in self.dropped and all(whole > known for known in self.committed)

    def last_committed(self) -> VersionId | None:
        """The newest version that is known to have been whole, whether it is still there or not."""
        return max({*self.committed, *([self.replicated] if self.replicated is not None else [])}, default=None)

    # -- may it go ----------------------------------------------------------------------------------------------------

    def rollback_target(self, whole: Collection[VersionId], mending: VersionId | None = None) -> VersionId | None:
        """The version that the job can always go back to: what is older may be given up.

        Not one that lost a part here, except to take in a part of that very version again (``mending``): without a slot
        for it the version would stay damaged, nothing else would be given up either, and the job could not go on.
        """
        if not self.requires_replication:
            return max(whole, default=None)
        return self.replicated if self.replicated not in self.damaged or self.replicated == mending else None

    def retained(self, whole: Collection[VersionId]) -> set[VersionId]:
        """What is not given up for newer ones, because somebody said so."""
        return retained_versions([one.version_id for one in self.retention.values() if one.retained], whole)

    def needed(self, whole: Collection[VersionId]) -> set[VersionId]:
        """What is not given up for lack of room: whole versions, and of the past only what can be gone back to."""
        if not self.requires_replication or self.resume_point is None:
            return set(whole)
        back = {self.resume_point.version_id, self.replicated or self.resume_point.version_id}
        asked = {one.version_id for one in self.retention.values() if one.retained and one.version_id in whole}
        return {group for group in whole if group.epoch >= self.resume_point.first_current_epoch} | back | asked

    def oldest_active_epoch(self) -> int:
        """What incarnations before this one left unfinished is given up when room is short."""
        return max(self.epoch, self.resume_point.first_current_epoch if self.resume_point is not None else 0)

    def is_needed(self, group: VersionId) -> bool:
        """Whether somebody may still need it, or a part of it."""
        return group not in self.aborted and is_needed(
            group, epoch=self.epoch, replicated=self.replicated, whole=self.is_committed(group), base=self.resume_point
        )

    def may_still_write(self, group: VersionId) -> bool:
        """Whether a slot of an older incarnation is filled with what counts: a copy of what is whole, on its way."""
        return group.epoch >= self.epoch or self.is_committed(group)

    def is_plausible_epoch(self, epoch: int) -> bool:
        """Whether the job can have come so far since this node heard of it."""
        return epoch <= self.epoch + MAX_EPOCH_LEAD


class TooManyRetainedError(ValueError):
    """More versions than may be kept on request."""

    def __init__(self, versions: list[int]) -> None:
        super().__init__(versions)
        self.versions = versions


def committed_versions(
    here: Mapping[VersionId, AbstractSet[int]],
    parts: Mapping[VersionId, int],
    marked: Mapping[VersionId, Collection[int]] | None = None,
) -> set[VersionId]:
    """The versions all of whose parts are here, and those somebody called whole that lost no part here since.

    ``here`` are the parts that were verified; ``marked`` has the parts that were here when the word was given.
    """
    complete = {group for group, found in here.items() if len(found) >= parts[group]}
    return complete | {
        group
        for group, then in (marked or {}).items()
        if group not in complete and all(part in here.get(group, ()) for part in then)
    }


def newest_committed(whole: Mapping[str, Collection[VersionId]]) -> dict[str, VersionId]:
    """What each job goes on from when nobody else keeps copies for it."""
    return {job: max(groups) for job, groups in whole.items() if groups}


def is_needed(
    group: VersionId, *, epoch: int, replicated: VersionId | None, whole: bool, base: ResumePoint | None
) -> bool:
    """Whether somebody may still need this version: it is not older than the settled one, nor of a past that was left
    unfinished. Of a past that the job has left only what it went on from is needed, and what is settled.
    """
    if replicated is not None and group <= replicated:
        return group == replicated
    if base is not None and group.epoch < base.first_current_epoch:
        return group == base.version_id
    return group.epoch >= epoch or whole


def retained_versions(kept: Collection[VersionId], whole: Collection[VersionId]) -> set[VersionId]:
    """Of the attempts at one version that somebody wants kept, a whole one makes those before it superfluous."""
    newest: dict[int, VersionId] = {}
    for group in kept:
        if group in whole:
            newest[group.version] = max(group, newest.get(group.version, group))
    return {group for group in kept if group >= newest.get(group.version, group)}


def is_superseded(group: VersionId, safe: VersionId | None, kept: Collection[VersionId] = ()) -> bool:
    """Whether a newer version can be gone back to, so that this one may go. Without one nothing may."""
    return safe is not None and group < safe and group not in kept


def is_abandoned(group: VersionId, epoch: int, whole: Collection[VersionId], safe: VersionId | None) -> bool:
    """Whether an incarnation before ``epoch`` ended without it: it may go when room is short.

    What is safe is whole, also where this node has not all of it and nobody has told it so.
    """
    return group.epoch < epoch and group not in whole and group != safe


# -- counting ---------------------------------------------------------------------------------------------------------


class PartsReport(msgspec.Struct, frozen=True):
    """What a node says of one version to the one that counts; what it said before does not count any more."""

    version_id: VersionId
    total_parts: int
    """0: the node does not know."""
    replicated_parts: tuple[int, ...]
    """Parts it answers for that have all the copies they were to have, or all they can get."""
    node: str = ""
    """The node that answers for these parts, and for no others of this version any more."""
    generation: int = 0
    """Which of its lives: what it said in an earlier one may not be so any more."""
    sealed_parts: tuple[int, ...] = ()
    """Parts it answers for that still lack copies."""
    aborted_parts: tuple[int, ...] = ()
    """Parts that their writers on this node will never seal."""


class CommitDecision(msgspec.Struct, frozen=True):
    """What is known of versions from here on. None of it is ever taken back."""

    committed: VersionId | None = None
    """The newest version all of whose parts are sealed, where that is news."""
    replicated: VersionId | None = None
    """The newest one all of whose parts have their copies."""
    aborted: Annotated[tuple[VersionId, ...], msgspec.Meta(max_length=MAX_REMEMBERED_VERSIONS)] = ()
    """Versions that will never be whole."""

    def __bool__(self) -> bool:
        return self.committed is not None or self.replicated is not None or bool(self.aborted)

    def __or__(self, later: CommitDecision) -> CommitDecision:
        """Both of them, for whoever has heard of neither."""
        return CommitDecision(
            _newer(self.committed, later.committed),
            _newer(self.replicated, later.replicated),
            tuple(sorted({*self.aborted, *later.aborted})[-MAX_ABORTED_VERSIONS:]),
        )


def _newer(one: VersionId | None, other: VersionId | None) -> VersionId | None:
    return max((group for group in (one, other) if group is not None), default=None)


class ReportedShard(Protocol):
    """How well one shard is kept; see :mod:`peerstore.replication.replication_policy`."""

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


class _Said:
    """What was said of one version."""

    def __init__(self) -> None:
        self.notes: dict[str, PartsReport] = {}
        self.whole = False
        """It was decided that it is."""
        self._safe = self._sealed = 0
        """How many parts were named so; some of them by several."""
        self._least = sys.maxsize
        """The fewest parts in all that anybody spoke of."""

    def add(self, note: PartsReport) -> None:
        known = self.notes.get(note.node)
        if known is None or note.generation >= known.generation:
            self.notes[note.node] = note
            self._safe += len(note.replicated_parts) - (len(known.replicated_parts) if known is not None else 0)
            self._sealed += len(note.sealed_parts) - (len(known.sealed_parts) if known is not None else 0)
            self._least = min(self._least, note.total_parts or sys.maxsize)

    @property
    def may_be_news(self) -> bool:
        """Whether it is worth counting: with each of thousands of notes that would be slow."""
        return self._safe + (0 if self.whole else self._sealed) >= self._least


class PartsTally:
    """Counts sealed and protected parts per version, for the whole job. One node keeps it; losing it costs a
    repetition.

    What a node said counts while it lives. When it dies or starts again, somebody else answers for its parts, or it
    says so anew: else a version could count as safe of which a part went with its last holder. Only that a part was
    left out stays so for good.
    """

    def __init__(self) -> None:
        self._said: dict[VersionId, _Said] = {}
        self._torn: dict[VersionId, bool] = {}
        """And whether that was decided, and told."""

    def add(self, note: PartsReport) -> None:
        if note.aborted_parts and note.version_id not in self._torn and not self._is_whole(note.version_id):
            self._torn[note.version_id] = False
        if note.version_id not in self._torn:
            self._said.setdefault(note.version_id, _Said()).add(note)

    def _is_whole(self, group: VersionId) -> bool:
        return group in self._said and self._said[group].whole

    def newly_aborted(self) -> tuple[VersionId, ...]:
        """Versions of which a part was left out, when that is news."""
        news = tuple(sorted(group for group, told in self._torn.items() if not told))
        self._torn = dict.fromkeys(sorted(self._torn)[-MAX_REMEMBERED_VERSIONS:], True)
        for group in news:
            self._said.pop(group, None)
        return news

    def newly_complete(self, *, me: str, living: Collection[str], life: Callable[[str], int]) -> CommitDecision:
        """The newest versions all of whose parts are sealed, or protected, when that is news."""
        sealed, safe = [], []
        for group, said in self._said.items():
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
        if newest is not None:  # it is said once: also when the job has left that version and nobody wants to know
            del self._said[newest]
        return CommitDecision(_newer(newest, max(sealed, default=None)), newest)

    def drop_until(self, replicated: VersionId) -> None:
        self._said = {group: said for group, said in self._said.items() if group > replicated}


def commit_leader(living: Mapping[str, object] | Collection[str], standby: Collection[str] = ()) -> str | None:
    """Return the first living node with a vote, or the first of all if no node with a vote lives.

    A standby node may not have been told of the world, and would count for an older member list.
    """
    return min((node for node in living if node not in standby), default=min(living, default=None))


def broadcast_targets(living: Iterable[str], me: str) -> list[str]:
    """Whom the leader tells what is decided: everybody in a small job, in a large one some of all, who pass it on.

    Pings carry it too, and reach everybody within a few of their periods; telling thousands one by one takes longer.
    """
    others = sorted(node for node in living if node != me)
    return others[:: max(1, -(-len(others) // BROADCAST_FANOUT))]


class CommitReports:
    """What a node says of the parts it answers for; and, where it is the commit leader, what all of them said."""

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
        """Who keeps the tally, and what it has not been told yet. ``parts_of``: how many parts a version has in all."""
        teller = commit_leader(living, standby) or self._me
        self._reported = {
            group: told for group, told in self._reported.items() if replicated is None or group > replicated
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
                out = tuple(sorted(torn.get(group, ())))
                count = in_all.get(group, 0)
                notes.append(
                    PartsReport(group, count, tuple(sorted(safe)), self._me, life, tuple(sorted(lacking)), out)
                )
        return teller, [note for note in notes if self._reported.get(note.version_id) != (teller, note)]

    def mark_reported(self, teller: str, note: PartsReport) -> None:
        self._reported[note.version_id] = (teller, note)

    def add(self, note: PartsReport) -> None:
        """A node says which parts it answers for, and how they are kept."""
        self._tally.add(note)

    def decide(
        self, *, living: Collection[str], life: Callable[[str], int], replicated: VersionId | None, quorum: bool
    ) -> CommitDecision:
        """What follows from all that was said, as far as it is news.

        Without a quorum nothing is whole or settled: the other side of a partition may have gone on from a version that
        this one would give up. What was told is kept until the others are back. One word is enough for what is torn.
        """
        if replicated is not None:
            self._tally.drop_until(replicated)
        torn = self._tally.newly_aborted()
        done = self._tally.newly_complete(me=self._me, living=living, life=life) if quorum else CommitDecision()
        return CommitDecision(done.committed, done.replicated, torn)
