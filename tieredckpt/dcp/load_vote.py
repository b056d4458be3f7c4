"""The ranks' vote on the step to load, and their common error without such a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from peerstore.shard_records import VersionId
from tieredckpt.errors import (
    CheckpointDamagedError,
    CheckpointLostError,
    CheckpointTornError,
    FormatVersionError,
    TieredCheckpointError,
    TierUnavailableError,
)
from tieredckpt.rank_error import RankError
from tieredckpt.resolve_step import elect_step


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


def elect(votes: Sequence[LoadVote], where: object) -> VersionId:
    """Return the newest step that every rank can load; errors name ``where``."""
    reluctant = {group for vote in votes for group in vote.avoided}
    chosen = elect_step([vote.versions for vote in votes], reluctant=reluctant)
    if chosen is None:
        reasons = sorted({reason for vote in votes for reason in vote.refused})
        raise CheckpointDamagedError(f"{where}: no step can be loaded by all ranks: {'; '.join(reasons) or 'no votes'}")
    return chosen


class LoadOutlook(msgspec.Struct, frozen=True):
    """Outlook of one rank before a restore, as sent to the other ranks."""

    error: RankError = RankError()
    """Error of this rank; its message is empty if the rank can load a step."""
    is_late: bool = False
    """Whether its deadline has passed."""
    awaited_s: float = 0.0
    """Seconds that it would still wait for nodes that do not answer and may have a newer step."""
    proves: bool = True
    """Whether it compares the restored state with the saved one."""


def common_error(job: str, errors: Sequence[TieredCheckpointError | None]) -> TieredCheckpointError | None:
    """Return the error that all ranks raise, or ``None`` if every rank can load a step."""
    for kind in (FormatVersionError, TierUnavailableError, CheckpointDamagedError, CheckpointLostError):
        first = next((error for error in errors if isinstance(error, kind)), None)
        if first is not None:
            return first
    absent = [error for error in errors if error is not None]
    if absent and len(absent) < len(errors):
        return TierUnavailableError(
            f"{job}: {len(errors) - len(absent)} of {len(errors)} ranks reach a checkpoint, the others cannot: "
            f"{absent[0]}"
        )
    return next((error for error in absent if isinstance(error, CheckpointTornError)), next(iter(absent), None))
