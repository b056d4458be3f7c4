"""All versions of a job that a node sees, and the choice of the one that a load takes. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from peerstore.shard_records import ExpiredJob, UnrecognizedSlot, VersionId
from tieredckpt.errors import (
    CheckpointDamagedError,
    CheckpointLostError,
    CheckpointNotFoundError,
    CheckpointTornError,
    FormatVersionError,
    TieredCheckpointError,
    TierUnavailableError,
)
from tieredckpt.location import Location
from tieredckpt.resolve_step import Candidate, IncarnationBranches, Resolution, Tier, resolve_step
from tieredckpt.settings import DurableSettings

DOCTOR_HINT = "`tieredckpt doctor` checks the store from this node"
_MAX_LISTED = 8
START_FRESH_HINT = "To start from nothing on purpose: restore(..., on_lost='start_fresh'), or another job name"


class StepStatus(msgspec.Struct, frozen=True):
    """One version (an attempt at a step) as this node sees it."""

    version_id: VersionId
    parts: int
    found: dict[int, tuple[Tier, ...]]
    base: int | None = None
    covered: bool = False
    durable: bool = False
    """Whether its manifest is in the durable tier."""
    quarantined: str = ""
    """Reason not to load it; "" if it is not quarantined."""
    size_bytes: int = 0
    saved_ns: int = 0
    kept: bool = False
    """Whether a user marked it to be retained."""
    crashed_loads: int = 0
    """Number of recent loads that crashed a process of this node."""
    damaged: dict[int, str] = {}
    """Reason by part for parts that this node dropped as damaged, listed until a newer step is complete."""

    @property
    def candidate(self) -> Candidate:
        return Candidate(
            self.version_id,
            self.parts,
            self.found,
            self.base,
            covered=self.covered or self.durable,
            damaged=self.damaged,
            saved_ns=self.saved_ns,
        )


@dataclass(frozen=True)
class LoadChoice:
    """The step that a load takes, or the reasons against every step."""

    resolution: Resolution
    newest_plain: int | None = None
    """Newest plain DCP checkpoint, written while this package was disabled."""
    avoided: Mapping[VersionId, int] = dataclasses.field(default_factory=dict)
    """Versions that are taken only if no other remains, with their number of crashed loads on this node."""
    unreadable: TieredCheckpointError | None = None
    """Error for newer steps in this node's memory that this release cannot read."""

    @property
    def plain(self) -> int | None:
        """Step of the plain checkpoint, if the load takes one: it is newer than every other step."""
        chosen = self.resolution.chosen
        newest = self.newest_plain
        return newest if newest is not None and (chosen is None or chosen.version_id.version < newest) else None

    @property
    def version_id(self) -> VersionId | None:
        """The chosen version; ``None`` for a plain checkpoint or no step."""
        chosen = self.resolution.chosen
        return None if chosen is None or self.plain is not None else chosen.version_id

    @property
    def step(self) -> int:
        """The chosen step; -1 for none."""
        if self.plain is not None:
            return self.plain
        return -1 if self.version_id is None else self.version_id.version

    @property
    def repeated_s(self) -> float:
        """Seconds between the chosen step and the newest one that was ever complete; infinite if unknown."""
        known = self.resolution.newest_known_complete
        if self.version_id is not None and (known is None or self.version_id >= known):
            return 0.0
        lost = self.resolution.incomplete.get(known) if known is not None else None
        chosen = self.resolution.chosen if self.plain is None else None
        if lost is None or chosen is None or not 0 < chosen.saved_ns <= lost.saved_ns:  # their clocks may differ
            return math.inf
        return (lost.saved_ns - chosen.saved_ns) / 1e9

    @property
    def newest_step(self) -> int:
        """The newest step that a load could take, now or once it is no longer avoided; -1 for none."""
        return max([self.step, *(one.version_id.version for one in self.loadable)])

    @property
    def loadable(self) -> tuple[Candidate, ...]:
        """All versions that a load could take, best first."""
        chosen = self.resolution.chosen
        return (*(() if chosen is None else (chosen,)), *self.resolution.alternatives)

    def error(
        self, location: Location, *, failed: Collection[str] = (), advice: str = START_FRESH_HINT
    ) -> TieredCheckpointError:
        """Return the error for no step to load, with a type for each reason.

        ``failed`` has the reasons of the steps that this load has tried.
        """
        resolution, why = self.resolution, self.resolution.explain()
        away = [tier.value for tier in resolution.unreachable if tier is not Tier.MEMORY]
        if self.unreadable is not None:
            return self.unreadable
        if away:
            return TierUnavailableError(
                f"{location}: the tiers that answered have no step to load, and the {', '.join(away)} tier is "
                f"unavailable. Whether a checkpoint exists is unknown ({why}). {DOCTOR_HINT}"
            )
        advice = f". {advice}" if advice else ""
        if failed:
            return CheckpointDamagedError(f"no step of {location} can be used: {'; '.join(failed)}{advice}")
        listed = f". To list the steps: tieredckpt ls {location.job}"
        if resolution.damaged:
            return CheckpointDamagedError(
                f"{location}: checkpoints exist, but none of them can be used ({why}){listed}{advice}"
            )
        if resolution.lost:
            return CheckpointLostError(
                f"{location}: steps were complete, but the nodes that answer lack parts of each ({why}). Restart the "
                f"missing nodes{listed}{advice}"
            )
        if resolution.forgotten is not None:
            return CheckpointLostError(
                f"{location}: {why}. A durable tier (durable=, durable.url) keeps steps beyond that{advice}"
            )
        if resolution.torn:
            return CheckpointTornError(
                f"{location}: step {resolution.torn[-1].version} was started and never completed, as far as the tiers "
                f"know ({why}). The missing parts were not sealed before their ranks ended, or are on nodes that have "
                f"left the job{listed}"
            )
        return CheckpointNotFoundError(f"{location}: no complete step found ({why})")


class StepInventory(msgspec.Struct, frozen=True):
    """All versions that this node sees, and the tiers that did not answer."""

    views: tuple[StepStatus, ...]
    unreachable: dict[Tier, str] = {}
    plain: tuple[int, ...] = ()
    """Steps of plain DCP checkpoints, written while this package was disabled."""
    durable: DurableSettings | None = None
    """The job's durable tier, or ``None`` if the agent knows none."""
    once_complete: VersionId | None = None
    """Newest version that any responding node knows was once complete; parts of it may be lost since."""
    forgotten: ExpiredJob | None = None
    """When and why this node expired the job's shards, unless a complete step was saved since."""
    torn: tuple[VersionId, ...] = ()
    """Aborted versions: a rank did not seal its part, so the other parts were dropped."""
    unrecognized: tuple[UnrecognizedSlot, ...] = ()
    """Slots of the job in this node's memory that this release cannot read."""
    plain_incomplete: tuple[int, ...] = ()
    """Steps of plain DCP checkpoints without ``.metadata``. No load takes them."""

    @property
    def newest_complete(self) -> VersionId | None:
        """The newest complete version that is not quarantined, or ``None``."""
        complete = (view.version_id for view in self.views if view.candidate.is_complete and not view.quarantined)
        return max(complete, default=None)

    @property
    def is_partial(self) -> bool:
        """Whether other nodes or the durable tier did not answer, so more steps may exist."""
        return not self.unreachable.keys().isdisjoint((Tier.PEER, Tier.DURABLE))

    def choose(
        self,
        step: int | None = None,
        epoch: int | None = None,
        *,
        avoid_after: int,
        failed: Collection[VersionId | int] = (),
        allow_quarantined: bool = False,
    ) -> LoadChoice:
        """Choose the step that a load takes: the newest one, or ``step``, optionally of ``epoch``.

        A version with ``avoid_after`` crashed loads on this node is taken only if no other remains; 0: no limit. A
        named step is taken regardless. Versions in ``failed`` are not taken; a plain checkpoint has only a number.
        """
        unusable = {
            view.version_id
            for view in self.views
            if (view.quarantined and not allow_quarantined) or view.version_id in failed
        }
        avoided = {
            view.version_id: view.crashed_loads
            for view in self.views
            if step is None and avoid_after and view.crashed_loads >= avoid_after
        }
        candidates = [view.candidate for view in self.views]
        resolution = resolve_step(
            candidates,
            step=step,
            epoch=epoch,
            quarantined=unusable,
            reluctant=avoided,
            unreachable=self.unreachable,
            once_complete=self.once_complete,
            torn=self.torn,
            forgotten=self.forgotten,
        )
        plain = (one for one in self.plain if step in (None, one) and epoch is None and one not in failed)
        choice = LoadChoice(resolution, max(plain, default=None), avoided)
        if not self.unrecognized:
            return choice
        branches = IncarnationBranches(candidates if step is None else (), unusable)
        complete = {one.version_id for one in candidates if one.is_complete}
        newer = []
        for slot in self.unrecognized:
            if slot.key is None:
                newer += [slot] if choice.step < 0 else []
                continue
            version_id = slot.key.version_id
            is_wanted = step in (None, version_id.version) and epoch in (None, version_id.epoch)
            is_newer = version_id.version > choice.step and version_id not in complete
            if is_wanted and is_newer and not branches.supersede(version_id):
                newer.append(slot)
        return dataclasses.replace(choice, unreadable=_unreadable_error(newer) if newer else None)

    def plain_at(self, location: Location, *, incomplete: bool = False) -> list[int]:
        """Return the steps of the complete, or the incomplete, plain checkpoints at ``location``.

        They belong to no epoch.
        """
        steps = self.plain_incomplete if incomplete else self.plain
        return [step for step in steps if location.step in (None, step) and location.epoch is None]

    def merge(self, other: StepInventory) -> StepInventory:
        """Return the union of two inventories of one job."""
        views = {view.version_id: view for view in self.views}
        for theirs in other.views:
            view = views.get(theirs.version_id)
            views[theirs.version_id] = (
                theirs
                if view is None
                else msgspec.structs.replace(
                    view,
                    durable=view.durable or theirs.durable,
                    quarantined=view.quarantined or theirs.quarantined,
                    kept=view.kept or theirs.kept,
                )
            )
        plain = {*self.plain, *other.plain}
        known = (one.once_complete for one in (self, other) if one.once_complete is not None)
        return StepInventory(
            tuple(views[group] for group in sorted(views)),
            {**self.unreachable, **other.unreachable},
            tuple(sorted(plain)),
            other.durable or self.durable,
            max(known, default=None),
            self.forgotten or other.forgotten,
            tuple(sorted({*self.torn, *other.torn})),
            (*self.unrecognized, *(slot for slot in other.unrecognized if slot not in self.unrecognized)),
            tuple(sorted({*self.plain_incomplete, *other.plain_incomplete} - plain)),
        )


def _unreadable_error(found: Sequence[UnrecognizedSlot]) -> TieredCheckpointError:
    """Return the error for slots that a load cannot ignore."""
    steps = sorted({one.key.version for one in found if one.key is not None})
    what = f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps[-_MAX_LISTED:]))}" if steps else "steps"
    where = f"{what} of job {found[0].job!r} in this node's memory"
    formats = sorted({one.format for one in found if one.format is not None})
    if not formats:
        return TierUnavailableError(f"Cannot read {where}: {found[0].reason}")
    newest = found[0].readable_format
    remedy = "Install a newer release of tieredckpt" if formats[-1] > newest else "Run the release that wrote it"
    return FormatVersionError(
        f"Cannot read {where}: its metadata has format {', '.join(map(str, formats))}, and the newest format that this "
        f"release reads is {newest}. {remedy}"
    )
