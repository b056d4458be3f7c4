"""The AWS exception for each of our errors: the nearest class, still caught as ours."""

import pickle

import pytest

from integration.sagemaker import errors as aws
from peerstore import errors as store
from tieredckpt import errors as ours

MEANT = {
    ours.TieredCheckpointError: aws.SageMakerTieredStorageError,
    ours.UsageError: aws.SageMakerTieredStorageConfigError,
    ours.SettingsError: aws.SageMakerTieredStorageConfigError,
    ours.MissingStepError: aws.SageMakerTieredStorageConfigError,
    ours.MismatchError: aws.MismatchedStateError,
    ours.UntrustedObjectError: aws.SageMakerTieredStorageConfigError,
    ours.FormatVersionError: aws.SageMakerTieredStorageConfigError,
    ours.PluginError: aws.SageMakerTieredStorageConfigError,
    ours.CheckpointNotFoundError: aws.NoCheckpointError,
    ours.CheckpointTornError: aws.TornCheckpointError,
    ours.EventLogNotFoundError: aws.NoCheckpointError,
    ours.TierUnavailableError: aws.MemoryTierUnreachableError,
    ours.StoreBusyError: aws.MemoryTierUnreachableError,
    ours.PeersLostError: aws.MemoryTierUnreachableError,
    ours.CheckpointDeletedError: aws.S3TierUnreachableError,
    ours.CheckpointDamagedError: aws.DamagedCheckpointError,
    ours.CheckpointLostError: aws.LostCheckpointError,
    ours.RestoreProofError: aws.UnprovenRestoreError,
    ours.DurableRefusedError: aws.S3RefusedError,
    ours.SaveFailedError: aws.MemorySaveFailedError,
    ours.JobTakenOverError: aws.MemorySaveFailedError,
    ours.NonFiniteStateError: aws.MemorySaveFailedError,
    store.PeerStoreError: aws.SageMakerInMemoryTierError,
    store.RequestError: aws.SageMakerTieredStorageConfigError,
    store.InvalidNameError: aws.SageMakerTieredStorageConfigError,
    store.MissingPackageError: aws.SageMakerTieredStorageConfigError,
    store.ProtocolError: aws.SageMakerTieredStorageConfigError,
    store.PeerRefusedError: aws.SageMakerTieredStorageConfigError,
    store.ShardNotFoundError: aws.SageMakerInMemoryTierError,
    store.ShardDamagedError: aws.DamagedCheckpointError,
    store.UnsupportedFormatError: aws.SageMakerTieredStorageConfigError,
    store.UnavailableError: aws.MemoryTierUnreachableError,
    store.AgentUnreachableError: aws.MemoryTierUnreachableError,
    store.PeerUnreachableError: aws.MemoryTierUnreachableError,
    store.JobNotJoinedError: aws.MemoryTierUnreachableError,
    store.ShardUnreadableError: aws.MemoryTierUnreachableError,
    store.NoQuorumError: aws.MemoryTierUnreachableError,
    store.ArenaBusyError: aws.MemoryTierUnreachableError,
    store.AgentBusyError: aws.MemoryTierUnreachableError,
    store.ShardPendingError: aws.MemoryTierUnreachableError,
    store.ArenaFullError: aws.MemorySaveFailedError,
    store.FencedError: aws.MemorySaveFailedError,
    store.LeaseLostError: aws.MemorySaveFailedError,
}
"""Each of our public errors. A new error must be added here and in ``_BY_CAUSE``."""

ANSWERS = (
    ours.UsageError,
    ours.MismatchError,
    ours.CheckpointNotFoundError,
    ours.CheckpointTornError,
    ours.TierUnavailableError,
    ours.CheckpointDamagedError,
    ours.CheckpointLostError,
    ours.RestoreProofError,
    ours.DurableRefusedError,
    ours.SaveFailedError,
)
"""Errors that a caller handles differently: none may become another."""


def public(module):
    return {
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__ == module.__name__
    }


def test_each_of_our_errors_has_its_place():
    assert set(MEANT) == public(ours) | public(store)
    assert {cause for cause, _ in aws._BY_CAUSE} <= set(MEANT)


@pytest.mark.parametrize("cause", MEANT, ids=lambda kind: kind.__name__)
def test_error_is_translated_to_the_nearest_aws_class(cause):
    found = aws.to_sagemaker_error(cause("why, and what to do"))
    assert type(found) is MEANT[cause]
    assert str(pickle.loads(pickle.dumps(found))) == "why, and what to do"


@pytest.mark.parametrize("cause", public(ours), ids=lambda kind: kind.__name__)
def test_errors_map_to_distinct_sagemaker_errors(cause):
    found = aws.to_sagemaker_error(cause("why"))
    assert [kind for kind in ANSWERS if isinstance(found, kind)] == [k for k in ANSWERS if issubclass(cause, k)]
