"""Every state DCP takes, bit for bit, through unmodified ``dcp.save`` and ``dcp.load``.

One process and a real agent.
"""

import copy
import os
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import tieredckpt
from peerstore.settings import AgentPaths
from tests.support.bits import assert_same_bits, tensor_bytes, zeros_like_state
from tests.support.example_counts import examples
from tests.support.stores import load_shard as stored
from tests.support.stores import open_client
from tieredckpt import TieredReader, TieredWriter
from tieredckpt.errors import CheckpointNotFoundError, MismatchError, MissingStepError, SaveFailedError, UsageError
from tieredckpt.testing import memory_node

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable"),
]

JOB = "tiered://states"
DTYPES = [
    getattr(torch, name)
    for name in [
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex32",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    ]
    if hasattr(torch, name)
]


def random_bits(dtype, *shape):
    count = dtype.itemsize
    for size in shape:
        count *= size
    data = torch.randint(0, 256, (count,), dtype=torch.uint8)
    if dtype is torch.bool:
        data &= 1
    return data.view(dtype).view(shape)


def save(state, step=1, **kwargs):
    dcp.save(state, storage_writer=TieredWriter(JOB, step), no_dist=True, **kwargs)


def load(target, step=None, **kwargs):
    reader = TieredReader(JOB, step)
    dcp.load(target, storage_reader=reader, no_dist=True, **kwargs)
    return reader


def round_trip(state):
    save(state)
    target = zeros_like_state(copy.deepcopy(state))
    load(target)
    assert_same_bits(state, target)


def failure(info):
    """Return the error inside DCP's exception."""
    return next(iter(info.value.failures.values()))[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(agent_dir, dtype):
    round_trip({"t": random_bits(dtype, 3, 8), "one": random_bits(dtype, 1), "big": random_bits(dtype, 1 << 12)})


def test_unusual_tensors_round_trip(agent_dir):
    base = torch.randn(64, 64)
    nan = torch.tensor([float("nan"), -0.0, float("inf")])
    nan.view(torch.int32)[0] = 0x7FC12345  # a NaN with a payload
    round_trip(
        {
            "scalar": torch.tensor(1.5),
            "empty": torch.empty(0),
            "empty rows": torch.empty(0, 3),
            "empty columns": torch.empty(3, 0),
            "transposed": base.t(),
            "strided": base[::3, 5:9],
            "flipped": base.flip(0),
            "expanded": torch.arange(4.0).expand(3, 4),
            "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
            "negated": torch.randn(3, dtype=torch.complex64).conj().imag,
            "nan": nan,
            "parameter": torch.nn.Parameter(torch.randn(3)),
            "requires grad": torch.randn(2, requires_grad=True),
            "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        }
    )


def test_objects_and_nesting(agent_dir):
    round_trip(
        {
            "model": OrderedDict(a=torch.randn(2), b={"c": torch.randn(3)}),
            "list": [torch.randn(1), {"x": torch.randn(2)}],
            "plain list": [1, 2, "three"],
            "int": 7,
            "float": 0.1,
            "none": None,
            "text": "ünïcode",
            "bytes": b"\x00\xff",
            "tuple": (1, "a", None),
            "big": list(range(5000)),
            'name with.dots and @ and / and "quotes"': torch.randn(2),
            "__metadata__": torch.randn(2),
        }
    )


def test_a_view_is_saved_at_its_own_size(agent_dir):
    base = torch.randn(1 << 20)
    state = {"view": base[:10], "other": base[10:20].clone()}
    writer = TieredWriter(JOB, 1)
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert writer.record.size_bytes < 10_000
    target = zeros_like_state(state)
    load(target)
    assert_same_bits(state, target)


def test_tied_weights_keep_their_names_and_values(agent_dir):
    shared = torch.randn(5)
    state = {"embed.weight": shared, "head.weight": shared}
    save(state)
    target = zeros_like_state(state)
    load(target)
    assert_same_bits(state, target)


def test_sparse_tensors_are_saved_unsplit(agent_dir):
    state = {"s": torch.eye(4).to_sparse(), "d": torch.randn(2)}
    save(state)
    step = TieredReader(JOB).read_metadata().state_dict_metadata
    assert tuple(step["s"].size) == (4, 4)


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.text(st.characters(exclude_characters=".", exclude_categories=("Cs",)), min_size=1, max_size=8),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 7), max_size=3).map(tuple)),
        max_size=6,
    ),
    st.randoms(use_true_random=False),
)
def test_any_dictionary_of_tensors(shape_of, random):
    torch.manual_seed(random.randrange(1 << 30))
    state = {name: random_bits(dtype, *shape) for name, (dtype, shape) in shape_of.items()}
    with memory_node():
        round_trip(state)


def test_model_and_optimizer_through_get_state_dict(agent_dir):
    torch.manual_seed(3)
    model, again = (torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)) for _ in range(2))
    optimizer, other = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(again.parameters(), lr=9)
    for _ in range(3):
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    save({"model": weights, "optim": moments})
    target_weights, target_moments = get_state_dict(again, other)
    target = {"model": target_weights, "optim": target_moments}
    load(target)
    set_state_dict(again, other, model_state_dict=target["model"], optim_state_dict=target["optim"])
    assert_same_bits(dict(get_state_dict(model, optimizer)[0]), dict(get_state_dict(again, other)[0]))
    assert_same_bits(optimizer.state_dict(), other.state_dict())


class Counter:
    def __init__(self, value):
        self.value = torch.tensor(value)
        self.note = "n" * value

    def state_dict(self):
        return {"value": self.value, "note": self.note}

    def load_state_dict(self, state):
        self.value, self.note = state["value"], state["note"]


def test_stateful_objects(agent_dir):
    state = {"counter": Counter(7)}
    save(state)
    target = {"counter": Counter(0)}
    load(target)
    assert (int(target["counter"].value), target["counter"].note) == (7, "n" * 7)


def test_partial_load_and_strictness(agent_dir):
    save({"a": torch.ones(3), "b": torch.ones(2)})
    target = {"a": torch.zeros(3)}
    load(target)
    assert target["a"].sum() == 3
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: c"):
        load({"a": torch.zeros(3), "c": torch.zeros(1)})
    target = {"a": torch.zeros(3), "c": torch.zeros(1)}
    load(target, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert target["a"].sum() == 3


def test_shape_and_dtype_mismatch_are_errors_and_leave_the_checkpoint(agent_dir):
    save({"a": torch.ones(3)})
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load({"a": torch.zeros(4)})
    with pytest.raises(CheckpointException) as info:
        load({"a": torch.zeros(3, dtype=torch.float64)})
    assert isinstance(failure(info), MismatchError)
    assert "a was saved as float32" in str(failure(info))
    target = {"a": torch.zeros(3, dtype=torch.float64)}
    dcp.load(target, storage_reader=TieredReader(JOB, on_dtype_mismatch="cast"), no_dist=True)
    assert target["a"].sum() == 3
    target = {"a": torch.zeros(3)}
    load(target)
    assert target["a"].sum() == 3


def test_targets_of_other_strides(agent_dir):
    state = {"a": torch.randn(6, 8)}
    save(state)
    target = {"a": torch.zeros(8, 6).t()}
    load(target)
    assert torch.equal(target["a"], state["a"])


def test_step_0_is_a_step_and_the_newest_wins(agent_dir):
    save({"a": torch.tensor(0)}, 0)
    target = {"a": torch.tensor(9)}
    assert load(target).restored_step == 0
    assert int(target["a"]) == 0
    save({"a": torch.tensor(1)}, 1)
    save({"a": torch.tensor(2)}, 2)
    assert load(target).restored_step == 2
    assert load(target, step=1).restored_step == 1
    assert int(target["a"]) == 1


def test_repeated_save_of_a_step_replaces_it(agent_dir):
    save({"a": torch.tensor(1)}, 5)
    save({"a": torch.tensor(2)}, 5)
    target = {"a": torch.tensor(0)}
    assert load(target).restored_step == 5
    assert int(target["a"]) == 2


def test_checkpoint_id_may_contain_the_step(agent_dir):
    writer, reader = TieredWriter(JOB), TieredReader(JOB)
    state = {"a": torch.randn(3)}
    dcp.save(state, checkpoint_id=f"{JOB}/step-12", storage_writer=writer, no_dist=True)
    target = zeros_like_state(state)
    dcp.load(target, checkpoint_id=f"{JOB}/step-12", storage_reader=reader, no_dist=True)
    assert_same_bits(state, target)
    target = zeros_like_state(state)
    dcp.load(target, checkpoint_id=Path(f"{JOB}/step-12"), storage_reader=TieredReader("another"), no_dist=True)
    assert_same_bits(state, target)


def test_save_without_a_step_is_refused_with_advice(agent_dir):
    with pytest.raises(CheckpointException) as info:
        dcp.save({"a": torch.ones(1)}, storage_writer=TieredWriter(JOB), no_dist=True)
    assert isinstance(failure(info), MissingStepError)
    assert "step=N" in str(failure(info))


@pytest.mark.parametrize(
    "target",
    ["tiered://a/b", "tiered://", "tiered://../etc", "s3://bucket/x", "a/step-1/more", "tiered://j/step--1", ""],
)
def test_invalid_locations_are_refused_before_any_side_effect(target):
    with pytest.raises(UsageError):
        TieredWriter(target, 1)


@pytest.mark.parametrize("step", [-1, 1.5, "3", True, 1 << 62])
def test_invalid_steps_are_refused(step):
    with pytest.raises(UsageError):
        TieredWriter(JOB, step)


def test_nothing_saved_is_absent(agent_dir):
    with pytest.raises(CheckpointNotFoundError, match="nothing is saved"):
        TieredReader(JOB).read_metadata()
    with pytest.raises(CheckpointException) as info:
        load({"a": torch.zeros(1)})
    assert isinstance(failure(info), CheckpointNotFoundError)


def test_plan_caching(agent_dir):
    for step in range(4):
        state = {"a": torch.full((5,), float(step)), "n": step}
        save(state, step, planner=DefaultSavePlanner(enable_plan_caching=True))
        target = zeros_like_state(state)
        assert load(target).restored_step == step
        assert_same_bits(state, target)
    for cache in (
        "_cached_save_plan",
        "_cached_final_save_plan",
        "_cached_all_plans",
        "_cached_global_plan",
        "_cached_metadata",
    ):
        getattr(DefaultSavePlanner, cache, {}).clear()  # torch 2.7 does not cache metadata


class Halving(DefaultSavePlanner):
    def transform_object(self, write_item, object):  # noqa: A002 - DCP's name
        found = super().transform_object(write_item, object)
        return found.to(torch.bfloat16) if isinstance(found, torch.Tensor) else found


def test_a_planner_that_makes_new_tensors(agent_dir):
    state = {f"t{i}": torch.randn(1 << 16) for i in range(4)}
    save(state, planner=Halving())
    target = {name: torch.zeros(1 << 16, dtype=torch.bfloat16) for name in state}
    load(target)
    assert_same_bits({name: tensor.to(torch.bfloat16) for name, tensor in state.items()}, target)


class Forgetful(DefaultSavePlanner):
    def finish_plan(self, new_plan):
        import dataclasses

        return dataclasses.replace(super().finish_plan(new_plan), storage_data=None)


def test_planner_may_drop_storage_data_from_its_plans(agent_dir):
    save({"a": torch.ones(1)}, planner=Forgetful())
    target = {"a": torch.zeros(1)}
    load(target)
    assert_same_bits({"a": torch.ones(1)}, target)


def test_tensor_without_values_is_named(agent_dir):
    with pytest.raises(CheckpointException) as info:
        save({"layer.weight": torch.empty(3, device="meta")})
    assert isinstance(failure(info), SaveFailedError)
    assert "layer.weight is on the meta device" in str(failure(info))
    assert "staged" not in str(failure(info))


def test_unflattened_states(agent_dir):
    state = {"a": torch.randn(3), "b": {"c": 1}}
    dcp.save(
        state, storage_writer=TieredWriter(JOB, 1), planner=DefaultSavePlanner(flatten_state_dict=False), no_dist=True
    )
    target = {"a": torch.zeros(3), "b": None}
    dcp.load(
        target, storage_reader=TieredReader(JOB), planner=DefaultLoadPlanner(flatten_state_dict=False), no_dist=True
    )
    assert_same_bits(state["a"], target["a"])


def test_a_state_can_be_rebuilt_without_a_template(agent_dir):
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    state = {"m": {"w.x": torch.randn(3), "l": [torch.randn(1), torch.randn(2)]}, "n": 3}
    save(state)
    rebuilt = _load_state_dict_from_keys({"m", "n"}, storage_reader=TieredReader(JOB))  # torch 2.7 needs keys
    assert_same_bits(state["m"]["w.x"], rebuilt["m"]["w.x"])
    assert_same_bits(state["m"]["l"], rebuilt["m"]["l"])
    assert rebuilt["n"] == 3


def test_the_sealed_bytes_in_memory_open_with_safetensors(agent_dir, tmp_path):
    """Cut the slot's file at the sealed size, because safetensors accepts no trailing bytes."""
    state = {"w": torch.randn(3, 4), "b": random_bits(torch.bfloat16, 5), "lr": 0.1}
    save(state)
    shard = tmp_path / "shard.safetensors"
    with open_client(AgentPaths(agent_dir).socket) as store:
        (fact,) = store.list_shards()
        shard.write_bytes(stored(store, fact.key))
    with safe_open(shard, "pt") as file:
        assert set(file.keys()) == {"w", "b", "lr"}
        assert tensor_bytes(file.get_tensor("w")) == tensor_bytes(state["w"])
        assert tensor_bytes(file.get_tensor("b")) == tensor_bytes(state["b"])


def test_a_state_larger_than_the_budget_is_refused_and_the_last_step_kept(agent_dir, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_AGENT_BUDGET", "4MiB")
    save({"a": torch.ones(1000)}, 1)
    with pytest.raises(CheckpointException) as info:
        save({"a": torch.ones(2 << 20)}, 2)
    assert isinstance(failure(info), SaveFailedError)
    assert "budget" in str(failure(info))
    target = {"a": torch.zeros(1000)}
    assert load(target).restored_step == 1


@pytest.mark.parametrize("times", [1, 4])
def test_async_save_in_a_thread(agent_dir, times):
    writer = TieredWriter(JOB, 0)
    state = {"w": torch.randn(1000), "nested": {"b": torch.randn(10)}, "step": 0}
    for step in range(times):
        state["w"].add_(1)
        state["step"] = step
        before = copy.deepcopy(state)
        future = dcp.async_save(state, checkpoint_id=f"{JOB}/step-{step}", storage_writer=writer)
        state["w"].fill_(-1)  # training continues at once
        future.result()
        target = zeros_like_state(before)
        assert load(target).restored_step == step
        assert_same_bits(before, target)
        state["w"].copy_(before["w"])
    writer.close()
    assert not list((agent_dir / "notes").glob("lease.*"))


def test_staged_but_unwritten_state_releases_its_slot(agent_dir):
    writer = TieredWriter(JOB, 1)
    state = {"w": torch.randn(100)}
    dcp.save(state, storage_writer=writer, no_dist=True)
    staged = writer.stage(state)
    assert staged["w"].data_ptr() != state["w"].data_ptr()
    assert len(list((agent_dir / "notes").glob("lease.*"))) == 1
    writer.close()
    assert not list((agent_dir / "notes").glob("lease.*"))


def test_metadata_matches_dcp(agent_dir, tmp_path):
    state = {"m": {"w": torch.randn(3, 4).bfloat16(), "p": torch.nn.Parameter(torch.randn(2))}, "n": 1}
    save(state)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "x"), no_dist=True)
    ours = TieredReader(JOB).read_metadata()
    theirs = dcp.FileSystemReader(tmp_path / "x").read_metadata()
    assert ours.planner_data == theirs.planner_data
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    for name, expected in theirs.state_dict_metadata.items():
        found = ours.state_dict_metadata[name]
        assert type(found) is type(expected)
        if hasattr(expected, "size"):
            assert (found.size, found.chunks) == (expected.size, expected.chunks)
            assert found.properties.dtype == expected.properties.dtype
            assert found.properties.requires_grad == expected.properties.requires_grad


def test_environment_is_not_read_by_importing(agent_dir):
    assert os.environ["TIEREDCKPT_AGENT_DIRECTORY"] == str(agent_dir)
    assert not agent_dir.exists()


def test_empty_containers_keep_their_list_position(agent_dir):
    state = {"layers": [{}, {}, {}, {}, {"w": torch.ones(3)}]}
    dcp.save(state, storage_writer=TieredWriter("empty", 1), no_dist=True)
    assert_same_bits(state["layers"][4], tieredckpt.load("empty")["layers"][4])
