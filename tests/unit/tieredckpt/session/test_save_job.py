"""Failed saves of ``dcp.save`` and of a ``Checkpointer`` follow the same rules."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.support.bits import assert_same_bits
from tests.support.oldest_torch import without_collectives
from tieredckpt import Checkpointer, TieredWriter, load
from tieredckpt.checkpointer.save_handle import SaveState
from tieredckpt.dcp.rank_group import unwrap_save_error
from tieredckpt.errors import SaveFailedError
from tieredckpt.tensors.slot_copy import MappedSlot
from tieredckpt.testing import memory_node

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

JOB = "job"
STAGES = {"copy": (MappedSlot, "copy_in"), "seal": (MappedSlot, "write")}


@pytest.fixture
def node():
    with memory_node() as one:
        yield one


def state_of(step: int) -> dict[str, object]:
    return {"weight": torch.arange(12.0) + step, "step": step}


def fail(monkeypatch, stage: str, error: Exception) -> None:
    def failing(*_):
        raise error

    monkeypatch.setattr(*STAGES[stage], failing)


def save_with_dcp(step: int, **how: object) -> TieredWriter:
    writer = TieredWriter(JOB, step)
    dcp.save(state_of(step), storage_writer=writer, no_dist=True, **how)
    return writer


def assert_left_out(node, step: int, *, failed: int = 1) -> None:
    """Assert that no slot is leased, the agent aborted the step, and the failure was counted once."""
    assert node.store.status().arena.leases == 0
    assert [fact.key.version for fact in node.store.list_shards(JOB) if fact.key.version == step] == []
    assert node.trainers.metrics[JOB]["failed"] == failed
    assert node.trainers.metrics[JOB]["saves"] == 1


@pytest.mark.parametrize("stage", STAGES)
def test_failed_dcp_save_is_counted_once(node, monkeypatch, stage):
    save_with_dcp(1)
    fail(monkeypatch, stage, SaveFailedError("no memory for a page"))
    with pytest.raises(CheckpointException, match="no memory for a page"):
        save_with_dcp(2)
    assert_left_out(node, 2)


@pytest.mark.parametrize("stage", STAGES)
def test_failed_first_save_of_a_checkpointer_is_counted_once(node, monkeypatch, stage):
    save_with_dcp(1)
    fail(monkeypatch, stage, SaveFailedError("no memory for a page"))
    with Checkpointer(JOB) as checkpointer:
        checkpointer.restore(state_of(0))
        saved = checkpointer.save(state_of(2), 2)
        with pytest.raises(SaveFailedError, match="no memory for a page"):
            saved.wait()
        assert saved.state is SaveState.FAILED
    assert_left_out(node, 2)


@pytest.mark.parametrize("stage", STAGES)
def test_failed_planned_save_of_a_checkpointer_is_counted_once(node, monkeypatch, stage):
    with Checkpointer(JOB) as checkpointer:
        checkpointer.save(state_of(1), 1).wait()
        fail(monkeypatch, stage, SaveFailedError("no memory for a page"))
        saved = checkpointer.save(state_of(2), 2)
        with pytest.raises(SaveFailedError, match="no memory for a page"):
            saved.wait()
        assert saved.state is SaveState.FAILED
        assert "no memory for a page" in str(saved.error)
    assert_left_out(node, 2)


def test_any_error_of_a_seal_names_the_step(node, monkeypatch):
    save_with_dcp(1)
    fail(monkeypatch, "seal", OSError("no memory for a page"))
    with pytest.raises(CheckpointException) as caught:
        save_with_dcp(2)
    error = unwrap_save_error(caught.value)
    assert isinstance(error, SaveFailedError)
    assert str(error) == "step 2 of job was not sealed: OSError('no memory for a page')"
    assert_left_out(node, 2)


@without_collectives
@pytest.mark.parametrize("stage", STAGES)
def test_any_error_without_collectives_is_kept_for_the_caller(node, monkeypatch, stage):
    """Raised, it would leave the other ranks waiting at DCP's barrier."""
    save_with_dcp(1)
    fail(monkeypatch, stage, OSError("no memory for a page"))
    writer = save_with_dcp(2, use_collectives=False)
    assert isinstance(writer.error, SaveFailedError)
    assert "no memory for a page" in str(writer.error)
    assert writer.record is None
    assert_left_out(node, 2)


def test_writer_that_has_saved_can_be_sent_to_a_background_process(node):
    writer = save_with_dcp(1)
    later = pickle.loads(pickle.dumps(writer))
    assert later.record == writer.record
    dcp.save(state_of(2), storage_writer=later, checkpoint_id=f"tiered://{JOB}/step-2", no_dist=True)
    assert_same_bits(state_of(2), load(JOB))
    assert node.store.status().arena.leases == 0
