"""The plan of a restore is the one that DCP's planner makes."""

import itertools

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

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
