"""``dcp.save`` of a planned state uses the earlier save's layout if the plan is the same."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from tests.support.bits import assert_same_bits
from tests.support.oldest_torch import without_collectives
from tieredckpt import TieredWriter, load
from tieredckpt.dcp.rank_group import unwrap_save_error
from tieredckpt.errors import SaveFailedError
from tieredckpt.session import save_plan
from tieredckpt.session.incarnation import decide_save
from tieredckpt.session.session import leave_worlds, open_session
from tieredckpt.settings import load_settings
from tieredckpt.testing import memory_node

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

JOB = "job"


@pytest.fixture(autouse=True)
def node():
    with memory_node() as one:
        yield one


def save(state, step, **how):
    dcp.save(state, storage_writer=TieredWriter(JOB, step), no_dist=True, **how)


def state_of(step):
    transposed = torch.arange(24.0).view(4, 6).t()
    return {"model": {"view": transposed + step, "weight": torch.arange(12.0) + step}, "at": step}


def newest_plan():
    return open_session(JOB, load_settings()).plans._plans[0]


def test_known_layout_is_not_built_again(monkeypatch):
    save(state_of(1), 1)

    def built(*_):
        raise AssertionError("the layout was built again")

    monkeypatch.setattr(save_plan, "build_layout", built)
    for step in (2, 3):
        save(state_of(step), step)
        assert_same_bits(state_of(step), load(JOB))


def test_changed_gradient_requirement_changes_the_layout():
    weight = nn.Parameter(torch.arange(12.0))
    save({"weight": weight}, 1)
    assert newest_plan().layout.tensors[0].requires_grad
    weight.requires_grad_(False)
    save({"weight": weight}, 2)
    assert not newest_plan().layout.tensors[0].requires_grad
    assert not newest_plan().table.tensors[0].requires_grad


def test_changed_nesting_is_saved_as_it_is():
    value = torch.arange(12.0)
    save({"a": {"b": value}}, 1)
    save({"a.b": value + 1}, 2)
    assert_same_bits({"a.b": value + 1}, load(JOB))


def test_tensor_moved_to_the_meta_device_is_named():
    save({"weight": torch.arange(12.0)}, 1)
    with pytest.raises(CheckpointException) as caught:
        save({"weight": torch.empty(12, device="meta")}, 2)
    error = unwrap_save_error(caught.value)
    assert isinstance(error, SaveFailedError)
    assert "weight is on the meta device and has no values to save" in str(error)


@without_collectives
def test_save_after_a_local_save_has_the_table_of_the_state():
    save(state_of(1), 1, use_collectives=False)
    assert newest_plan().table is None
    save(state_of(2), 2)
    assert [one.fqn for one in newest_plan().table.tensors] == ["model.view", "model.weight"]
    assert_same_bits(state_of(2), load(JOB))


def adopt(session, *, known_epoch):
    point = session.incarnation.capture()
    session.adopt(decide_save([session.incarnation.propose(2, point, known_epoch, None)], "newer", 0), point)


def test_plan_cache_is_empty_after_a_decision_for_a_newer_incarnation():
    save(state_of(1), 1)
    session, planned = open_session(JOB, load_settings()), newest_plan()
    current = session.incarnation.current
    adopt(session, known_epoch=current.epoch)
    assert session.incarnation.current == current
    assert session.plans.has(planned)
    adopt(session, known_epoch=current.epoch + 1)
    assert session.incarnation.current.name == "newer"
    assert not session.plans.has(planned)
    assert session.plans.layouts == []


@pytest.mark.parametrize("change", ["rewind", "left world"])
def test_plan_cache_is_empty_after_the_incarnation_ends(change):
    save(state_of(1), 1)
    session = open_session(JOB, load_settings())
    if change == "rewind":
        session.loads.rewind_to(0)
    else:
        leave_worlds()
    assert session.plans.layouts == []
