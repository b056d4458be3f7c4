"""The ranks' vote on the step to load, and the error if there is no such step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peerstore.shard_records import VersionId
from tieredckpt.errors import (
    CheckpointDamagedError,
    CheckpointLostError,
    CheckpointNotFoundError,
    CheckpointTornError,
    TieredCheckpointError,
    TierUnavailableError,
)
from tieredckpt.location import Location
from tieredckpt.resolve_step import Resolution, elect_step

DOCTOR_HINT = "`tieredckpt doctor` checks the store from this node"
START_FRESH_HINT = "To start from nothing on purpose: restore(..., on_lost='start_fresh'), or another job name"


@dataclass(frozen=True)
class LoadVote:
    """Steps that a rank can load, best first, and the reasons against the others."""

    versions: tuple[VersionId, ...]
    refused: tuple[str, ...] = ()
    avoided: tuple[VersionId, ...] = ()
    """Steps with crashed loads on this rank's node, which are chosen only if no other step remains."""
    plain: int | None = None
    """Step of a plain DCP checkpoint that is newer than every other step."""


@dataclass(frozen=True)
class LoadDecision:
    """Step that all ranks load."""

    version_id: VersionId
    ranks: int = 1
    """Number of ranks that load it together."""


def elect(votes: Sequence[LoadVote], location: Location) -> VersionId:
    """Return the newest step that every rank can load."""
    reluctant = {group for vote in votes for group in vote.avoided}
    chosen = elect_step([vote.versions for vote in votes], reluctant=reluctant)
    if chosen is None:
        reasons = sorted({reason for vote in votes for reason in vote.refused})
        raise CheckpointDamagedError(
            f"{location}: no step can be loaded by all ranks: {'; '.join(reasons) or 'no votes'}"
        )
    return chosen


def no_step_error(location: Location, resolution: Resolution) -> TieredCheckpointError:
    """Return the error for no step to load, with a type for each reason."""
    if resolution.unreachable:
        return TierUnavailableError(
            f"{location}: the tiers that answered have no step to load, and the {', '.join(resolution.unreachable)} "
            f"tier is unavailable. Whether a checkpoint exists is unknown ({resolution.explain()}). {DOCTOR_HINT}"
        )
    purpose = f"To list the steps: tieredckpt ls {location.job}. {START_FRESH_HINT}"
    if resolution.damaged:
        return CheckpointDamagedError(
            f"{location}: checkpoints exist, but none of them can be used ({resolution.explain()}). {purpose}"
        )
    if resolution.lost:
        return CheckpointLostError(
            f"{location}: steps were complete, but the nodes that answer lack parts of each "
            f"({resolution.explain()}). Restart the missing nodes. {purpose}"
        )
    if resolution.forgotten is not None:
        return CheckpointLostError(
            f"{location}: {resolution.explain()}. A durable tier (durable=, durable.url) keeps steps beyond that. "
            f"{START_FRESH_HINT}"
        )
    if resolution.torn:
        return CheckpointTornError(
            f"{location}: step {resolution.torn[-1].version} was started and never completed, as far as the tiers know "
            f"({resolution.explain()}). The missing parts were not sealed before their ranks ended, or are on nodes "
            f"that have left the job. To list the steps: tieredckpt ls {location.job}"
        )
    return CheckpointNotFoundError(f"{location}: no complete step to load ({resolution.explain()})")
