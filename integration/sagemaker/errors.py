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
        ├── NoCheckpointError                   also CheckpointNotFoundError: every tier was asked, there is none
        │   └── TornCheckpointError                 also CheckpointTornError: begun, and never whole
        ├── DamagedCheckpointError              also CheckpointDamagedError
        ├── LostCheckpointError                 also CheckpointLostError: it was whole once
        ├── UnprovenRestoreError                also RestoreProofError: do not train on what was loaded
        └── MismatchedStateError                also MismatchError

``except SageMakerTieredStorageError`` catches what it caught before; ``except CheckpointNotFoundError`` tells a job
that begins from one that must not.
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
    """Root of what the classes of this package raise."""


class SageMakerTieredStorageConfigError(SageMakerTieredStorageError, UsageError):
    """The configuration is wrong."""


class SageMakerInMemoryTierError(SageMakerTieredStorageError):
    """The memory tier failed."""


class SageMakerS3TierError(SageMakerTieredStorageError):
    """The durable tier failed."""


class MemoryTierUnreachableError(SageMakerInMemoryTierError, TierUnavailableError):
    """The memory tier could not be asked."""


class MemorySaveFailedError(SageMakerInMemoryTierError, SaveFailedError):
    """This step is not in memory."""


class S3TierUnreachableError(SageMakerS3TierError, TierUnavailableError):
    """The durable tier could not be asked."""


class S3RefusedError(SageMakerS3TierError, DurableRefusedError):
    """The object store answered, and the answer is no."""


class NoCheckpointError(SageMakerTieredStorageError, CheckpointNotFoundError):
    """There is no whole step as asked for, and every tier could be asked."""


class TornCheckpointError(NoCheckpointError, CheckpointTornError):
    """A step was begun and never came to be whole: nothing that was whole is lost."""


class DamagedCheckpointError(SageMakerTieredStorageError, CheckpointDamagedError):
    """Bytes are not what was saved, and no other copy of them is left."""


class LostCheckpointError(SageMakerTieredStorageError, CheckpointLostError):
    """A step was whole once, and parts of it are nowhere that answers."""


class UnprovenRestoreError(SageMakerTieredStorageError, RestoreProofError):
    """What was loaded is not what was saved."""


class MismatchedStateError(SageMakerTieredStorageError, MismatchError):
    """The state and the checkpoint differ in shape, type or names."""


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
"""The first one that an error is. A shard that is absent from one node is not a checkpoint that is nowhere."""


def to_sagemaker_error(error: Exception) -> SageMakerTieredStorageError:
    """``error`` under the name that AWS's library has for it."""
    if isinstance(error, SageMakerTieredStorageError):
        return error
    kind = next((kind for cause, kind in _BY_CAUSE if isinstance(error, cause)), SageMakerTieredStorageError)
    return kind(str(error))


@contextmanager
def sagemaker_errors() -> Iterator[None]:
    """What this project raises inside the block comes out under AWS's names."""
    try:
        yield
    except (TieredCheckpointError, PeerStoreError) as error:
        found = to_sagemaker_error(error)
        if found is error:
            raise
        raise found from error
