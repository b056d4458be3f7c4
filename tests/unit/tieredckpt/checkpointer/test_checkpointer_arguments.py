"""Wrong arguments of ``Checkpointer``, and states that do not match: one clear line each."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tieredckpt import Checkpointer, CheckpointNotFoundError, MismatchError, SettingsError, TieredReader, UsageError
from tieredckpt.testing import memory_node

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def ckpt():
    with memory_node(), Checkpointer("tiered://job") as one:
        yield one


@pytest.mark.parametrize("name", ["every", "durable_every", "keep_last"])
def test_wrong_number_is_named(name):
    with pytest.raises(SettingsError, match="two"):
        Checkpointer("tiered://job", **{name: "two"})


@pytest.mark.parametrize("method", ["save", "seal", "record_boundary", "restore"])
def test_state_that_is_no_dict_is_refused(ckpt, method):
    with pytest.raises(UsageError, match="The state is a Linear, and a dict is expected"):
        getattr(ckpt, method)(torch.nn.Linear(2, 2), 0)


def test_step_to_restore_is_a_number(ckpt):
    with pytest.raises(UsageError, match="'newest' is not a training step"):
        ckpt.restore({"w": torch.zeros(2)}, "newest")


def test_state_of_another_type_is_restored_as_the_error_says(ckpt):
    ckpt.save({"w": torch.arange(3.0)}, 4).wait()
    state = {"w": torch.zeros(3, dtype=torch.float64)}
    with pytest.raises(MismatchError, match="w was saved as float32, and the state has float64") as refused:
        ckpt.restore(state)
    assert "on_dtype_mismatch='cast'" in str(refused.value)
    dcp.load(state, storage_reader=TieredReader("tiered://job", on_dtype_mismatch="cast"))
    assert state["w"].tolist() == [0.0, 1.0, 2.0]
    assert ckpt.save(state, 5).wait().value == "sealed"


def test_step_that_is_absent_is_told_from_those_that_are_there(ckpt):
    for step in (4, 5):
        ckpt.save({"w": torch.zeros(3)}, step).wait()
    with pytest.raises(CheckpointNotFoundError) as absent:
        ckpt.restore({"w": torch.zeros(3)}, 77)
    assert str(absent.value) == "tiered://job/step-77: no whole step to load (there are steps 4, 5)"
