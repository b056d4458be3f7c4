"""AWS's error names, and the mapping from this project's errors.

::

    TieredCheckpointError
    └── SageMakerTieredStorageError
        ├── SageMakerTieredStorageConfigError   also UsageError
        ├── SageMakerInMemoryTierError          the memory tier failed
        │   ├── MemoryTierUnreachableError          also TierUnavailableError: unknown, not absent
        │   └── MemorySaveFailedError               also SaveFailedError
        ├── SageMakerS3TierError                the durable tier failed
        │   ├── S3TierUnreachableError              also TierUnavailableError
        │   └── S3RefusedError                      also DurableRefusedError
        ├── NoCheckpointError                   also CheckpointNotFoundError: all tiers responded, none has it
        │   └── TornCheckpointError                 also CheckpointTornError: begun, never complete
        ├── DamagedCheckpointError              also CheckpointDamagedError
        ├── LostCheckpointError                 also CheckpointLostError: it was complete once
        ├── UnprovenRestoreError                also RestoreProofError: do not train on the loaded state
        └── MismatchedStateError                also MismatchError

``except SageMakerTieredStorageError`` catches the same errors as with AWS's library. ``except CheckpointNotFoundError``
identifies a new job, which may begin without a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from peerstore.errors import (
    ArenaFullError,
    FencedError,
    PeerStoreError,
    RequestError,
    ShardDamagedError,
    UnavailableError,
    UnsupportedFormatError,
)
from tieredckpt.errors import (
    CheckpointDamagedError,
    CheckpointDeletedError,
    CheckpointLostError,
    CheckpointNotFoundError,
    CheckpointTornError,
    DurableRefusedError,
    MismatchError,
    RestoreProofError,
    SaveFailedError,
    TieredCheckpointError,
    TierUnavailableError,
    UsageError,
)


class SageMakerTieredStorageError(TieredCheckpointError):
    """Root of the errors of this package."""


class SageMakerTieredStorageConfigError(SageMakerTieredStorageError, UsageError):
    """The configuration is invalid."""


class SageMakerInMemoryTierError(SageMakerTieredStorageError):
    """The memory tier failed."""


class SageMakerS3TierError(SageMakerTieredStorageError):
    """The durable tier failed."""


class MemoryTierUnreachableError(SageMakerInMemoryTierError, TierUnavailableError):
    """The memory tier did not respond."""


class MemorySaveFailedError(SageMakerInMemoryTierError, SaveFailedError):
    """The step was not saved to memory."""


class S3TierUnreachableError(SageMakerS3TierError, TierUnavailableError):
    """The durable tier did not respond."""


class S3RefusedError(SageMakerS3TierError, DurableRefusedError):
    """The object store refused the request."""


class NoCheckpointError(SageMakerTieredStorageError, CheckpointNotFoundError):
    """No complete step matches the request, and all tiers responded."""


class TornCheckpointError(NoCheckpointError, CheckpointTornError):
    """A step began but never became complete, so no complete step is lost."""


class DamagedCheckpointError(SageMakerTieredStorageError, CheckpointDamagedError):
    """Stored bytes differ from the saved ones, and no other copy remains."""


class LostCheckpointError(SageMakerTieredStorageError, CheckpointLostError):
    """A step was complete once, and no responding tier has some of its parts."""


class UnprovenRestoreError(SageMakerTieredStorageError, RestoreProofError):
    """The loaded state differs from the saved one."""


class MismatchedStateError(SageMakerTieredStorageError, MismatchError):
    """The state and the checkpoint differ in shapes, types or names."""


_BY_CAUSE: tuple[tuple[type[Exception], type[SageMakerTieredStorageError]], ...] = (
    (CheckpointTornError, TornCheckpointError),
    (CheckpointNotFoundError, NoCheckpointError),
    (CheckpointDamagedError, DamagedCheckpointError),
    (CheckpointLostError, LostCheckpointError),
    (RestoreProofError, UnprovenRestoreError),
    (MismatchError, MismatchedStateError),
    (UsageError, SageMakerTieredStorageConfigError),
    (DurableRefusedError, S3RefusedError),
    (SaveFailedError, MemorySaveFailedError),
    (CheckpointDeletedError, S3TierUnreachableError),
    (TierUnavailableError, MemoryTierUnreachableError),
    (ShardDamagedError, DamagedCheckpointError),
    (RequestError, SageMakerTieredStorageConfigError),
    (UnsupportedFormatError, SageMakerTieredStorageConfigError),
    (UnavailableError, MemoryTierUnreachableError),
    (ArenaFullError, MemorySaveFailedError),
    (FencedError, MemorySaveFailedError),
    (PeerStoreError, SageMakerInMemoryTierError),
)
"""The first matching entry applies. A shard absent from one node may exist on others."""


def to_sagemaker_error(error: Exception) -> SageMakerTieredStorageError:
    """Return ``error`` as the corresponding error of AWS's library."""
    if isinstance(error, SageMakerTieredStorageError):
        return error
    kind = next((kind for cause, kind in _BY_CAUSE if isinstance(error, cause)), SageMakerTieredStorageError)
    return kind(str(error))


@contextmanager
def sagemaker_errors() -> Iterator[None]:
    """Convert errors raised in the block into AWS's errors."""
    try:
        yield
    except (TieredCheckpointError, PeerStoreError) as error:
        found = to_sagemaker_error(error)
        if found is error:
            raise
        raise found from error
