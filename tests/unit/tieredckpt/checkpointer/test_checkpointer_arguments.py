"""Wrong arguments of ``Checkpointer``, and states that do not match: one clear line each."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tieredckpt import (
    Checkpointer,
    CheckpointNotFoundError,
    JobTakenOverError,
    MismatchError,
    SettingsError,
    TieredReader,
    UsageError,
)
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


def test_durable_steps_follow_those_that_are_saved():
    with memory_node(), Checkpointer("tiered://job", every=7) as ckpt:
        assert ckpt.settings.durable.every == 7


@pytest.mark.parametrize("method", ["save", "seal", "record_boundary", "restore"])
def test_only_a_dict_is_a_state(ckpt, method):
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


def test_error_for_an_absent_step_names_the_others(ckpt):
    for step in (4, 5):
        ckpt.save({"w": torch.zeros(3)}, step).wait()
    with pytest.raises(CheckpointNotFoundError) as absent:
        ckpt.restore({"w": torch.zeros(3)}, 77)
    assert str(absent.value) == "tiered://job/step-77: no complete step found (there are steps 4, 5)"


@pytest.mark.parametrize("strict", [True, False])
def test_tensors_with_other_shapes_are_named_with_advice(ckpt, strict):
    ckpt.save({"w": torch.zeros(3, 2), "b": torch.zeros(3), "same": torch.zeros(2)}, 4).wait()
    state = {"w": torch.zeros(4, 2), "b": torch.zeros(()), "same": torch.ones(2)}
    with pytest.raises(MismatchError) as other:
        ckpt.restore(state, strict=strict)
    assert str(other.value) == (
        "Size mismatch between the state and step 4 of job: b has the shape () and was saved with (3,), w has the "
        "shape (4, 2) and was saved with (3, 2). Create the state with the saved shapes. To restore the other entries "
        "only, remove these from the state and pass strict=False"
    )
    assert state["same"].tolist() == [1, 1]
    assert ckpt.restore({"same": state["same"]}, strict=False) == 4
    assert state["same"].tolist() == [0, 0]


def test_names_of_both_sides_are_in_a_mismatch(ckpt):
    ckpt.save({"model": {"weight": torch.ones(2), "bias": torch.ones(2)}}, 3).wait()
    with pytest.raises(MismatchError) as refused:
        ckpt.restore({"modell": {"weight": torch.zeros(2)}})
    assert str(refused.value) == (
        "The state and step 3 of job do not match: the state has modell.weight, which the step does not; step 3 has "
        "model.bias, model.weight, which the state does not. Rename the entries, or restore those that both have with "
        "strict=False"
    )


def test_second_process_of_a_job_name_is_explained(ckpt):
    ckpt.save({"w": torch.zeros(2)}, 0).wait()
    ckpt.session.agent.store.claim("job", "another")
    with pytest.raises(JobTakenOverError, match="Another process with the job name 'job' has taken over"):
        ckpt.save({"w": torch.zeros(2)}, 1)
