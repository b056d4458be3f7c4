"""The step that is loaded from AWS's checkpoints: complete, newest first.

Absent, unknown and damaged steps are distinct.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from integration.sagemaker.checkpoint_stores import CompleteCheckpoints, newest_checkpoint
from tests.support.aws_checkpoints import FakeCheckpointStore, encode_checkpoint
from tieredckpt.errors import CheckpointDamagedError, CheckpointNotFoundError, TierUnavailableError

RANKS = 3


def put(place, step):
    """Store a step in which each of three ranks has one row."""
    rows = [[("w", (rank, 0), torch.full((1, 2), float(step)))] for rank in range(RANKS)]
    place.put(step, *encode_checkpoint(rows, {"w": (RANKS, 2)}))


SPOILS = ["no metadata", "a shard is lost", "a shard is short", "a shard is long", "a shard is empty", "bad metadata"]


def spoil(place, step, how, rank=1):
    if how == "no metadata":
        del place.metadata[step]
    elif how == "bad metadata":
        place.metadata[step] = b"\x80\x04N."
    elif how == "a shard is lost":
        del place.blobs[step, rank]
    else:
        blob = place.blobs[step, rank]
        place.blobs[step, rank] = {"a shard is short": blob[:-1], "a shard is long": blob + b"x"}.get(how, b"")


@pytest.mark.parametrize("how", SPOILS)
def test_incomplete_step_falls_back_to_an_older_one(how):
    place = FakeCheckpointStore()
    put(place, 10)
    put(place, 20)
    spoil(place, 20, how)
    chosen = newest_checkpoint([place])
    assert chosen.step == 10
    assert "step 20" in chosen.skipped[0]


@pytest.mark.parametrize("how", SPOILS)
def test_no_complete_step_is_damage(how):
    place = FakeCheckpointStore()
    put(place, 10)
    spoil(place, 10, how)
    with pytest.raises(CheckpointDamagedError, match="step 10"):
        newest_checkpoint([place])


@given(st.dictionaries(st.integers(0, 40), st.sampled_from([None, *SPOILS]), max_size=5), st.integers(0, RANKS - 1))
def test_newest_complete_step_is_chosen(steps, rank):
    place = FakeCheckpointStore()
    for step, how in steps.items():
        put(place, step)
        if how is not None:
            spoil(place, step, how, rank)
    whole = sorted((step for step, how in steps.items() if how is None), reverse=True)
    rest = CompleteCheckpoints([place])
    assert [next(rest).step for _ in whole] == whole
    with pytest.raises((CheckpointNotFoundError, CheckpointDamagedError)) as ended:
        next(rest)
    assert ended.type is (CheckpointNotFoundError if len(whole) == len(steps) else CheckpointDamagedError)


def test_step_zero_is_a_step():
    place = FakeCheckpointStore()
    put(place, 0)
    assert newest_checkpoint([place]).step == 0


def test_nothing_is_absent_and_no_answer_is_unknown():
    empty, down = FakeCheckpointStore("memory"), FakeCheckpointStore("bucket")
    with pytest.raises(CheckpointNotFoundError):
        newest_checkpoint([empty])
    down.down = TierUnavailableError("no route")
    with pytest.raises(TierUnavailableError, match="bucket"):
        newest_checkpoint([empty, down])


def test_unreachable_store_does_not_hide_the_other():
    full, down = FakeCheckpointStore("memory"), FakeCheckpointStore("bucket")
    down.down = TierUnavailableError("no route")
    put(full, 5)
    assert newest_checkpoint([down, full]).step == 5


def test_unreachable_step_is_not_reported_as_damaged():
    place = FakeCheckpointStore()
    put(place, 5)
    place.trouble[5] = TierUnavailableError("no route")
    with pytest.raises(TierUnavailableError):
        newest_checkpoint([place])


def test_shard_lost_in_memory_is_read_from_the_bucket():
    memory, bucket = FakeCheckpointStore("memory"), FakeCheckpointStore("bucket")
    put(memory, 5)
    put(bucket, 5)
    spoil(memory, 5, "a shard is lost")
    assert newest_checkpoint([memory, bucket]).store is bucket


def test_requested_step_is_the_only_choice():
    place = FakeCheckpointStore()
    put(place, 10)
    put(place, 20)
    assert newest_checkpoint([place], 10).step == 10
    with pytest.raises(CheckpointNotFoundError, match="15"):
        newest_checkpoint([place], 15)
    spoil(place, 20, "a shard is lost")
    with pytest.raises(CheckpointDamagedError):
        newest_checkpoint([place], 20)


def test_rank_without_data_is_not_missing():
    place = FakeCheckpointStore()
    place.put(3, *encode_checkpoint([[("w", (0,), torch.ones(2))], []]))
    del place.blobs[3, 1]
    assert newest_checkpoint([place]).step == 3
