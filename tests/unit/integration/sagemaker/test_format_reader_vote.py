"""The step that several ranks load from AWS's checkpoints: the newest that all of them can load."""

import pickle

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from integration.sagemaker.format_reader import SageMakerFormatReader
from tests.support.aws_checkpoints import FakeCheckpointStore, encode_checkpoint
from tieredckpt.errors import CheckpointDamagedError

RANKS = 2


def make_store(*steps, damaged=()):
    """Return a store with these steps, in which the bytes of the damaged ones are changed."""
    store = FakeCheckpointStore()
    for step in steps:
        blobs, metadata = encode_checkpoint(
            [[("w", (rank, 0), torch.full((1, 2), float(step)))] for rank in range(RANKS)], {"w": (RANKS, 2)}
        )
        if step in damaged:
            blobs = [blob[:64] + b"?" * 8 + blob[72:] for blob in blobs]
        store.put(step, blobs, metadata)
    return store


def load(*stores):
    """Load on one rank per store, as DCP does; return each rank's step and value."""
    ranks = []
    for store in stores:
        state = {"w": torch.zeros(RANKS, 2)}
        reader, planner = SageMakerFormatReader([store]), DefaultLoadPlanner()
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, is_coordinator=not ranks)
        reader.set_up_storage_reader(metadata, is_coordinator=not ranks)
        ranks.append((reader, planner, state, reader.prepare_local_plan(planner.create_local_plan())))
    plans = pickle.loads(pickle.dumps([plan for _, _, _, plan in ranks]))
    final = ranks[0][0].prepare_global_plan(plans)
    found = []
    for (reader, planner, state, _), plan in zip(ranks, final, strict=True):
        own_plan = pickle.loads(pickle.dumps(plan))
        reader.read_data(planner.finish_plan(own_plan), planner).wait()
        assert torch.equal(state["w"], torch.full((RANKS, 2), float(reader.restored_step)))
        found.append(reader.restored_step)
    return found


def test_all_ranks_load_the_newest_step():
    assert load(make_store(10, 20), make_store(10, 20)) == [20, 20]


def test_damage_on_one_rank_makes_all_load_an_older_step():
    assert load(make_store(10, 20), make_store(10, 20, damaged=[20])) == [10, 10]


def test_step_that_another_rank_lacks_is_not_elected():
    assert load(make_store(10, 20, 30, damaged=[30]), make_store(10, 30)) == [10, 10]


def test_ranks_without_a_common_step_raise_the_reasons():
    with pytest.raises(CheckpointDamagedError, match="no step can be loaded by all ranks: step 30"):
        load(make_store(20, 30, damaged=[30]), make_store(10, 30))
