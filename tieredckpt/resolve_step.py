"""Choice of the step to load and its tiers. Pure.

Absent, incomplete, lost, unreachable and damaged are five distinct results. The result names each tier that did not
answer; "nothing found" means that all tiers answered.
"""

from __future__ import annotations

import bisect
import enum
import itertools
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from peerstore.shard_records import ExpiredJob, VersionId
from tieredckpt.format.manifest import UNKNOWN_PART_COUNT

_MAX_LISTED = 8


class Tier(str, enum.Enum):
    """Tiers of sealed shards, nearest first."""

    MEMORY = "memory"
    PEER = "peer"
    DURABLE = "durable"


@dataclass(frozen=True)
class Candidate:
    """One attempt to write one step, as seen in the tiers that answered."""

    version_id: VersionId
    parts: int
    """Number of parts of the complete version."""
    found: Mapping[int, tuple[Tier, ...]]
    """Tiers of each part that was found."""
    base_step: int | None = None
    """Step that its incarnation restored, if recorded."""
    covered: bool = False
    """Whether the parts that were found hold the whole state, although some parts are missing."""
    damaged: Mapping[int, str] = field(default_factory=dict)
    """Reason for each part that was dropped because its copies are damaged."""
    saved_ns: int = 0

    @property
    def is_complete(self) -> bool:
        return self.covered or len(self.found) >= self.parts

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Tiers that a load would read: the nearest one of each part."""
        return tuple(tier for tier in Tier if any(where[:1] == (tier,) for where in self.found.values()))


class StepVerdict(str, enum.Enum):
    CHOSEN = "chosen"
    OLDER = "older than the chosen one"
    TORN = "not complete"
    LOST = "was complete once"
    UNKNOWN = "not complete in the tiers that answered"
    DAMAGED = "damaged"
    QUARANTINED = "quarantined"
    AVOIDED = "loads of it ended their process on this node"
    SUPERSEDED = "of a past that the job has left"
    OTHER_STEP = "not the requested step"


@dataclass(frozen=True)
class Resolution:
    """The chosen step (or none), and the verdict on every other step."""

    chosen: Candidate | None
    verdicts: Mapping[VersionId, StepVerdict]
    unreachable: tuple[Tier, ...] = ()
    """Tiers that did not answer."""
    alternatives: tuple[Candidate, ...] = field(default=())
    """Complete steps to fall back to, best first."""
    incomplete: Mapping[VersionId, Candidate] = field(default_factory=dict)
    """Incomplete steps of which parts exist."""
    newest_known_complete: VersionId | None = None
    """Newest version that is known to have been complete, whether or not parts of it remain."""
    newest_complete: VersionId | None = None
    """Newest version that is or was complete, regardless of the requested step."""
    forgotten: ExpiredJob | None = None
    """When and why this node deleted the job's memory."""
    reasons: Mapping[Tier, str] = field(default_factory=dict)
    """Reason for each tier that did not answer, if known."""
    names_epoch: bool = False
    """Whether the caller requested the step of one epoch."""

    @property
    def damaged(self) -> bool:
        """Whether a step is damaged or quarantined."""
        return any(verdict in (StepVerdict.DAMAGED, StepVerdict.QUARANTINED) for verdict in self.verdicts.values())

    @property
    def lost(self) -> tuple[VersionId, ...]:
        """Versions that were complete and have lost parts, oldest first.

        While a tier does not answer, only versions with the verdict ``LOST`` are listed.
        """
        gone = (
            {self.newest_known_complete}
            if self.newest_known_complete is not None and self.newest_known_complete not in self.verdicts
            else set()
        )
        if self.unreachable:
            gone = set()
        return tuple(sorted(gone | {group for group, verdict in self.verdicts.items() if verdict is StepVerdict.LOST}))

    @property
    def torn(self) -> tuple[VersionId, ...]:
        """Never complete versions that are newer than every version that was complete, oldest first."""
        torn = (group for group, verdict in self.verdicts.items() if verdict is StepVerdict.TORN)
        return tuple(sorted(group for group in torn if self.newest_complete is None or group > self.newest_complete))

    @property
    def other_steps(self) -> list[str]:
        """Steps that exist instead of the requested one, oldest first. With epochs if the request names one."""
        groups = sorted((one for one, why in self.verdicts.items() if why is StepVerdict.OTHER_STEP), key=_order)
        return list(
            dict.fromkeys(f"{one.version}@{one.epoch}" if self.names_epoch else f"{one.version}" for one in groups)
        )

    def explain(self) -> str:
        """Return the verdicts, newest step first, and the tiers that did not answer."""
        verdicts = {**(dict.fromkeys(self.lost, StepVerdict.LOST) if self.chosen is None else {}), **self.verdicts}
        lines = [
            f"step {group.version} (epoch {group.epoch}): {verdict.value}{self._missing(group)}"
            for group, verdict in sorted(verdicts.items(), key=lambda item: _order(item[0]), reverse=True)
            if verdict is not StepVerdict.OTHER_STEP
        ]
        if self.other_steps:
            known = self.other_steps
            older = len(known) - _MAX_LISTED
            more = f" and {older} older step{'s' * (older > 1)}" if older > 0 else ""
            noun = "is step" if len(known) == 1 else "are steps"
            lines.append(f"there {noun} {', '.join(known[-_MAX_LISTED:])}{more}")
        for tier in self.unreachable:
            why = f": {self.reasons[tier]}" if tier in self.reasons else ""
            lines.append(f"{tier.value} tier: unavailable{why}")
        lines += [describe_forgotten(self.forgotten)] if self.forgotten is not None else []
        return "; ".join(lines) or "nothing is saved in any tier"

    def describe(self, group: VersionId) -> str:
        """Return a description of a lost step: its missing parts and the time it was saved."""
        return f"it {StepVerdict.LOST.value}{self._missing(group)}"

    def _missing(self, group: VersionId) -> str:
        torn = self.incomplete.get(group)
        if torn is None and self.verdicts.get(group) is StepVerdict.TORN:
            return ", a rank aborted its part, and the other parts were discarded"
        if torn is None:
            return ", missing all parts" if group in self.lost else ""
        saved = f", saved {time.strftime('%Y-%m-%d %H:%M:%SZ', time.gmtime(torn.saved_ns / 1e9))}" * bool(torn.saved_ns)
        if torn.parts >= UNKNOWN_PART_COUNT:
            return saved
        count = torn.parts - len(torn.found)
        first = itertools.islice((part for part in range(torn.parts) if part not in torn.found), _MAX_LISTED)
        more = f" and {count - _MAX_LISTED} more" if count > _MAX_LISTED else ""
        missing = "not found so far:" if self.verdicts.get(group) is StepVerdict.UNKNOWN else "missing"
        return f"{saved}, {missing} part{'s' * (count > 1)} {', '.join(map(str, first))}{more} of {torn.parts}"


def resolve_step(
    candidates: Sequence[Candidate],
    *,
    step: int | None = None,
    epoch: int | None = None,
    quarantined: Collection[VersionId] = (),
    reluctant: Collection[VersionId] = (),
    unreachable: Collection[Tier] | Mapping[Tier, str] = (),
    once_complete: VersionId | None = None,
    torn: Collection[VersionId] = (),
    forgotten: ExpiredJob | None = None,
) -> Resolution:
    """Choose the newest complete step, or the newest attempt at ``step``, optionally of ``epoch``.

    ``unreachable`` names the tiers that did not answer, optionally with reasons. While there are any, an incomplete
    version is ``UNKNOWN`` instead of ``TORN`` or ``LOST``. ``once_complete`` is the newest version known to have been
    complete; if it is incomplete now, it is lost. ``torn`` versions were aborted because a rank did not seal its part.
    ``forgotten`` records when and why this node deleted the job's memory. ``reluctant`` versions are chosen only if no
    other remains.

    Newest means the highest step; among attempts at one step, the later incarnation. A step above the point
    where a later incarnation branched off belongs to another branch and is not chosen.
    """
    known = {one.version_id for one in candidates if one.is_complete} | (
        {once_complete} if once_complete is not None else set()
    )
    if once_complete is not None and not _matches(once_complete, step, epoch):
        once_complete = None
    if step is not None and forgotten is not None and forgotten.newest_committed.version < step:
        forgotten = None
    verdicts: dict[VersionId, StepVerdict] = {}
    left = []
    quarantined = frozenset(quarantined)
    branches = IncarnationBranches(candidates if step is None else (), quarantined)
    for candidate in candidates:
        verdict = _rejection(candidate, branches, step, epoch, quarantined)
        if verdict is StepVerdict.TORN and once_complete is not None and candidate.version_id == once_complete:
            verdict = StepVerdict.LOST
        if verdict in (StepVerdict.TORN, StepVerdict.LOST) and unreachable and candidate.version_id not in torn:
            verdict = StepVerdict.UNKNOWN  # a tier that did not answer may have the missing parts
        if verdict is None:
            left.append(candidate)
        else:
            verdicts[candidate.version_id] = verdict
    verdicts |= {
        one: StepVerdict.TORN
        for one in sorted(torn)[-_MAX_LISTED:]
        if one not in verdicts and _matches(one, step, epoch)
    }
    left.sort(key=lambda candidate: (candidate.version_id not in reluctant, _order(candidate.version_id)), reverse=True)
    for number, candidate in enumerate(left):
        other = StepVerdict.AVOIDED if candidate.version_id in reluctant else StepVerdict.OLDER
        verdicts[candidate.version_id] = other if number else StepVerdict.CHOSEN
    cut = (StepVerdict.TORN, StepVerdict.LOST, StepVerdict.UNKNOWN)
    incomplete = {one.version_id: one for one in candidates if verdicts[one.version_id] in cut}
    return Resolution(
        left[0] if left else None,
        verdicts,
        tuple(tier for tier in Tier if tier in unreachable),
        tuple(left[1:]),
        incomplete,
        once_complete,
        max(known, default=None),
        forgotten,
        dict(unreachable) if isinstance(unreachable, Mapping) else {},
        names_epoch=epoch is not None,
    )


def describe_forgotten(forgotten: ExpiredJob) -> str:
    """Return when and why the job's memory was deleted."""
    at = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(forgotten.at_ns / 1e9))
    return (
        f"the steps of {forgotten.job} in memory, up to step {forgotten.newest_committed.version}, were deleted at "
        f"{at} because {forgotten.reason}"
    )


def elect_step(votes: Sequence[Collection[VersionId]], *, reluctant: Collection[VersionId] = ()) -> VersionId | None:
    """Return the newest step that every rank can load, or ``None``.

    Each vote lists the steps that one rank can load.

    ``reluctant`` versions are chosen only if no other is common to all ranks.
    """
    common = set(votes[0]).intersection(*votes[1:]) if votes else set()
    return max(common, key=lambda group: (group not in reluctant, _order(group)), default=None)


def _rejection(
    candidate: Candidate,
    branches: IncarnationBranches,
    step: int | None,
    epoch: int | None,
    quarantined: Collection[VersionId],
) -> StepVerdict | None:
    group = candidate.version_id
    if not _matches(group, step, epoch):
        return StepVerdict.OTHER_STEP
    if not candidate.is_complete:
        return StepVerdict.DAMAGED if candidate.damaged else StepVerdict.TORN
    if group in quarantined:
        return StepVerdict.QUARANTINED
    if branches.supersede(candidate.version_id):
        return StepVerdict.SUPERSEDED
    return None


def _matches(group: VersionId, step: int | None, epoch: int | None) -> bool:
    return step in (None, group.version) and epoch in (None, group.epoch)


def incomplete_state(
    group: VersionId,
    *,
    newest_complete: VersionId | None,
    once_complete: VersionId | None,
    aborted: Collection[VersionId],
    unsure: bool,
    needed: bool,
) -> str:
    """Return the state of an incomplete version: ``torn``, ``unknown``, ``superseded`` or ``lost``.

    A newer complete version lets nodes evict the parts of older ones, so those are superseded, not lost. This excludes
    ``needed`` versions: pinned, or not uploaded so far. ``unsure``: a tier or node did not answer.
    """
    if group in aborted:
        return "torn"
    if unsure:
        return "unknown"
    if not needed and newest_complete is not None and group < newest_complete:
        return "superseded"
    return "lost" if group == once_complete else "torn"


@dataclass(frozen=True)
class LeftBehind:
    """Later incarnation whose branch does not contain a step."""

    epoch: int
    """Epoch of the incarnation that continued from an older step."""
    base_step: int
    """Step that it continued from. -1: it restored none."""

    def __str__(self) -> str:
        start = f"continued from step {self.base_step}" if self.base_step >= 0 else "began without a checkpoint"
        return f"left behind: epoch {self.epoch} {start}"


def newer_steps(candidates: Iterable[Candidate], chosen: VersionId) -> tuple[Candidate, ...]:
    """Return the complete steps newer than ``chosen``, oldest first.

    A job that restores ``chosen`` repeats them.
    """
    newer = [one for one in candidates if one.is_complete and one.version_id.version > chosen.version]
    return tuple(sorted(newer, key=lambda one: _order(one.version_id)))


class IncarnationBranches:
    """Steps from which incarnations branched off, as recorded in complete steps that are not quarantined."""

    def __init__(self, candidates: Iterable[Candidate], quarantined: Collection[VersionId] = ()) -> None:
        lowest: dict[int, int] = {}
        self._bases = lowest
        """For each epoch, the step that it continued from."""
        for one in candidates:
            if one.base_step is not None and one.is_complete and one.version_id not in quarantined:
                lowest[one.version_id.epoch] = min(one.base_step, lowest.get(one.version_id.epoch, one.base_step))
        self._epochs = sorted(lowest)
        bases = [lowest[epoch] for epoch in self._epochs]
        self._lowest = list(itertools.accumulate(reversed(bases), min))[::-1]
        """For each epoch, the lowest base step of it and all later epochs."""

    def supersede(self, group: VersionId) -> bool:
        """Return whether an incarnation of a later epoch branched off before this step."""
        later = bisect.bisect_right(self._epochs, group.epoch)
        return later < len(self._epochs) and self._lowest[later] < group.version

    def left_behind_by(self, group: VersionId) -> LeftBehind | None:
        """Return the first later incarnation that continued from before this step.

        ``None``: the step is current.
        """
        if not self.supersede(group):
            return None
        later = self._epochs[bisect.bisect_right(self._epochs, group.epoch) :]
        epoch = next(one for one in later if self._bases[one] < group.version)
        return LeftBehind(epoch, self._bases[epoch])


def _order(group: VersionId) -> tuple[int, int, int, str]:
    return group.version, group.epoch, group.attempt, group.incarnation
