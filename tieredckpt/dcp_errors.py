"""What a save or load that failed inside DCP raises here."""

from __future__ import annotations

from torch.distributed.checkpoint.api import CheckpointException

from tieredckpt.errors import (
    CheckpointDamagedError,
    CheckpointDeletedError,
    MismatchError,
    PeersLostError,
    TieredCheckpointError,
    TierUnavailableError,
)


def own_error(failure: BaseException) -> BaseException:
    """Our own error inside DCP's: what tells the caller most, damaged before unknown before the rest."""
    if isinstance(failure, CheckpointException):
        errors = [error for error, _ in failure.failures.values() if isinstance(error, TieredCheckpointError)]
        for kind in (
            CheckpointDamagedError,
            PeersLostError,
            CheckpointDeletedError,
            TierUnavailableError,
            TieredCheckpointError,
        ):
            for error in errors:
                if isinstance(error, kind):
                    return error
    return failure


def typed_error(failure: CheckpointException) -> BaseException:
    """What a load that failed inside DCP raises."""
    own = own_error(failure)
    if own is not failure:
        return own
    first = next(iter(failure.failures.values()))[0]
    if isinstance(first, ValueError | RuntimeError):  # how DCP's planner says that names or shapes differ
        hint = " With strict=False what there is of the state is restored" if "Missing key" in str(first) else ""
        return MismatchError(f"the state and the checkpoint do not fit: {first}{hint}")
    return failure
