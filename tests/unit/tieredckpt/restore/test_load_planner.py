"""The plan of a restore equals the one of DCP's planner."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from tieredckpt.restore.load_planner import RestorePlanner

STATE = {
    "weight": torch.zeros(3, 4),
    "parameter": torch.nn.Parameter(torch.zeros(5)),
    "scalar": torch.tensor(1.0),
    "empty": torch.zeros(0, 3),
    "strided": torch.zeros(6, 4).t(),
    "nested": {"moment": torch.zeros(7), "lr": 0.1},
    "object": "text",
}


def metadata_of(state, pieces=1):
    entries = {}
    for fqn, value in state.items():
        if not isinstance(value, torch.Tensor):
            entries[fqn] = BytesStorageMetadata()
            continue
        size, cuts = value.shape, pieces if value.dim() and value.numel() else 1
        rows = [size[0] * at // cuts for at in range(cuts + 1)] if value.dim() else [0, 0]
        chunks = [
            ChunkStorageMetadata(
                torch.Size([low, *[0] * (len(size) - 1)]) if size else size,
                torch.Size([high - low, *size[1:]]) if size else size,
            )
            for low, high in itertools.pairwise(rows)
        ]
        entries[fqn] = TensorStorageMetadata(TensorProperties(dtype=value.dtype), size, chunks)
    return Metadata(entries)


def plan_of(kind, state, metadata, **how):
    planner = kind(**how)
    planner.set_up_planner(state, metadata, is_coordinator=True)
    return planner.create_local_plan()


def flat(state):
    return {f"{k}.{n}": v for k, o in state.items() if isinstance(o, dict) for n, v in o.items()} | {
        k: v for k, v in state.items() if not isinstance(v, dict)
    }


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("partial", [False, True])
def test_plan_is_the_one_of_dcp(pieces, partial):
    metadata = metadata_of(flat(STATE), pieces)
    ours, theirs = (
        plan_of(kind, STATE, metadata, allow_partial_load=partial) for kind in (RestorePlanner, DefaultLoadPlanner)
    )
    assert ours == theirs
    assert [item.dest_index.index for item in ours.items] == [item.dest_index.index for item in theirs.items]


def test_partial_state_is_planned_by_dcp():
    metadata = metadata_of({"weight": torch.zeros(3, 4)})
    ours, theirs = (
        plan_of(kind, STATE, metadata, allow_partial_load=True) for kind in (RestorePlanner, DefaultLoadPlanner)
    )
    assert ours == theirs


@pytest.mark.parametrize("change", [{"weight": torch.zeros(3, 5)}, {"more": torch.zeros(1)}])
def test_mismatch_is_refused_with_the_message_of_dcp(change):
    messages = []
    for kind in (RestorePlanner, DefaultLoadPlanner):
        with pytest.raises((RuntimeError, ValueError)) as refused:
            plan_of(kind, STATE | change, metadata_of(flat(STATE)))
        messages.append(str(refused.value))
    assert messages[0] == messages[1]


@pytest.fixture
def mesh():
    """The second of four ranks; nothing is sent."""
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
@pytest.mark.parametrize("shape", [(8, 4), (5, 3), (1, 2)])  # even, uneven, and without elements on this rank
def test_sharded_plan_is_the_one_of_dcp(mesh, placement, shape):
    sizes, _ = compute_local_shape_and_global_offset(shape, mesh, [placement])
    whole = torch.zeros(shape)
    tensor = DTensor.from_local(
        torch.zeros(sizes), mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    metadata = metadata_of({"weight": whole})
    ours, theirs = (plan_of(kind, {"weight": tensor}, metadata) for kind in (RestorePlanner, DefaultLoadPlanner))
    assert ours == theirs
    assert [item.dest_index.index for item in ours.items] == [item.dest_index.index for item in theirs.items]


NESTED = {
    "optim": {"state": {0: {"step": torch.tensor(1.0)}, 1: {}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]},
    "list": [torch.zeros(2), [torch.zeros(3), 1]],
    "plain": [1, [2, 3]],
    "pair": (torch.zeros(2), 1),
    "a.b": 1,
}


def test_state_is_flattened_as_dcp_does():
    ours, theirs = RestorePlanner(), DefaultLoadPlanner()
    for planner in (ours, theirs):
        planner.set_up_planner(NESTED, Metadata({}))
    assert list(ours.state_dict) == list(theirs.state_dict)
    assert ours.state_dict == theirs.state_dict  # tensors are equal here only to themselves
    assert ours.mappings == theirs.mappings


def test_two_entries_of_one_name_are_refused_as_dcp_does():
    for kind in (RestorePlanner, DefaultLoadPlanner):
        with pytest.raises(ValueError, match=r"duplicated flatten key a\.b"):
            kind().set_up_planner({"a": {"b": 1}, "a.b": 2}, Metadata({}))
