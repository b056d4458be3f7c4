"""Distributed states between real gloo ranks: round trips and resharding both ways, bit for bit."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.bits import assert_same_bits, zeros_like_state
from tests.support.models import build_model, full_state, get_state, set_state, train_steps
from tests.support.oldest_torch import replicas_on_gloo, without_collectives, without_first_rank
from tieredckpt import TieredReader, TieredWriter

JOB = "tiered://distributed"


def save_trained(kind, steps, **how):
    model, optimizer = build_model(kind, dist.get_world_size(), seed=1)
    train_steps(model, optimizer, steps)
    state = get_state(model, optimizer)
    dcp.save(state, storage_writer=TieredWriter(JOB, steps), **how)
    return full_state(state)


def load_into_fresh(kind, **how):
    model, optimizer = build_model(kind, dist.get_world_size(), seed=2)
    train_steps(model, optimizer, 1)
    state = get_state(model, optimizer)
    reader = TieredReader(JOB)
    dcp.load(state, storage_reader=reader, **how)
    set_state(model, optimizer, state)
    return full_state(get_state(model, optimizer)), reader.report.bytes_by_tier


@pytest.mark.parametrize(
    "kind",
    [
        "ddp",
        pytest.param("hsdp", marks=replicas_on_gloo),
        "2d",
        *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("fsdp", "tp")),
    ],
)
def test_round_trip(agent_dir, ranks, kind):
    saved = ranks.run(4, save_trained, kind, 3)
    loaded = ranks.run(4, load_into_fresh, kind)
    for before, (after, tiers) in zip(saved, loaded, strict=True):
        assert_same_bits(before, after)
        assert set(tiers) == {"memory"}


@pytest.mark.parametrize(
    ("kind", "before", "other", "after"),
    [
        pytest.param("fsdp", 4, "fsdp", 2, marks=pytest.mark.nightly),
        ("fsdp", 2, "fsdp", 3),
        pytest.param("fsdp", 3, "fsdp", 4, marks=pytest.mark.nightly),
        pytest.param("fsdp", 1, "fsdp", 4, marks=pytest.mark.nightly),
        ("fsdp", 4, "fsdp", 1),
        pytest.param("hsdp", 4, "fsdp", 3, marks=[replicas_on_gloo, pytest.mark.nightly]),
        ("tp", 2, "fsdp", 4),
        pytest.param("fsdp", 4, "tp", 2, marks=pytest.mark.nightly),
        pytest.param("2d", 4, "fsdp", 3, marks=pytest.mark.nightly),
        ("fsdp", 3, "2d", 4),
        pytest.param("tp", 4, "tp", 3, marks=pytest.mark.nightly),
    ],
)
def test_resharding(agent_dir, ranks, kind, before, other, after):
    saved = ranks.run(before, save_trained, kind, 2)
    loaded = ranks.run(after, load_into_fresh, other)
    for found, _ in loaded:
        assert_same_bits(saved[0], found)


def save_rows(placements):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full_tensor = torch.arange(1 << 18, dtype=torch.float32).view(512, 512)
    dcp.save({"w": distribute_tensor(full_tensor, mesh, placements)}, storage_writer=TieredWriter(JOB, 1))


def load_rows(placements):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    target = {"w": distribute_tensor(torch.zeros(512, 512), mesh, placements)}
    reader = TieredReader(JOB)
    dcp.load(target, storage_reader=reader)
    whole = target["w"].full_tensor()
    assert torch.equal(whole, torch.arange(1 << 18, dtype=torch.float32).view(512, 512))
    return sum(reader.report.bytes_by_tier.values()), target["w"].to_local().nbytes


ROWS, COLUMNS = [Shard(0)], [Shard(1)]
WORLDS = [(2, 3), (4, 3), (1, 4), (4, 2)]
DIRECTIONS = [(ROWS, ROWS), (ROWS, COLUMNS), (COLUMNS, ROWS)]
IN_A_PUSH = [(2, 3, *DIRECTIONS[0]), (4, 3, *DIRECTIONS[1]), (1, 4, *DIRECTIONS[2]), (4, 2, *DIRECTIONS[0])]
"""Each pair of worlds and each direction at least once; the full matrix is nightly."""
ALL = [(*worlds, *directions) for worlds in WORLDS for directions in DIRECTIONS]


@pytest.mark.parametrize(
    ("before", "after", "rows", "columns"),
    [pytest.param(*each, marks=() if each in IN_A_PUSH else pytest.mark.nightly) for each in ALL],
)
def test_resharding_reads_exactly_the_needed_bytes(agent_dir, ranks, before, after, rows, columns):
    ranks.run(before, save_rows, rows)
    for moved, needed in ranks.run(after, load_rows, columns):
        assert moved == needed


def save_many(kind, how):
    model, optimizer = build_model(kind, dist.get_world_size(), seed=1)
    states = []
    for step in range(4):
        train_steps(model, optimizer, 1)
        state = get_state(model, optimizer)
        planner = DefaultSavePlanner(enable_plan_caching=True) if how == "cached" else None
        options = {"use_collectives": False} if how == "no collectives" else {}
        dcp.save(state, storage_writer=TieredWriter(JOB, step), planner=planner, **options)
        states.append(full_state(state))
    return states[-1]


@pytest.mark.parametrize("how", ["cached", pytest.param("no collectives", marks=without_collectives)])
@pytest.mark.parametrize("kind", ["fsdp", pytest.param("ddp", marks=pytest.mark.nightly)])
def test_saves_with_cached_plans_or_without_collectives_round_trip(agent_dir, ranks, kind, how):
    saved = ranks.run(2, save_many, kind, how)
    for found, _ in ranks.run(2, load_into_fresh, kind):
        assert_same_bits(saved[0], found)
    for found, _ in ranks.run(3, load_into_fresh, "fsdp"):
        assert_same_bits(saved[0], found)


def save_async(kind, way):
    model, optimizer = build_model(kind, dist.get_world_size(), seed=1)
    writer = TieredWriter(JOB, 0)
    for step in range(3):
        train_steps(model, optimizer, 1)
        state = get_state(model, optimizer)
        before = full_state(state)
        future = dcp.async_save(
            state,
            checkpoint_id=f"{JOB}/step-{step}",
            storage_writer=writer,
            async_checkpointer_type=AsyncCheckpointerType[way],
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-3)  # training continues during the save
        future.result()
        set_state(model, optimizer, _distributed_like(state, before))
    writer.close()
    return before


def _distributed_like(state, values):
    if isinstance(state, DTensor):
        return distribute_tensor(values, state.device_mesh, state.placements)
    if isinstance(state, dict):
        return {key: _distributed_like(state[key], values[key]) for key in state}
    return values


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        ("THREAD", "fsdp"),
        pytest.param("THREAD", "ddp", marks=pytest.mark.nightly),
        ("PROCESS", "fsdp"),
        pytest.param("PROCESS", "ddp", marks=pytest.mark.nightly),
    ],
)
def test_async_save(agent_dir, ranks, kind, way):
    saved = ranks.run(2, save_async, kind, way)
    for found, _ in ranks.run(2, load_into_fresh, kind):
        assert_same_bits(saved[0], found)
    assert not list((agent_dir / "notes").glob("lease.*"))


def save_in_subgroup():
    group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        state = {"w": torch.arange(6.0) + 1, f"own{dist.get_rank()}": torch.full((3,), float(dist.get_rank()))}
        dcp.save(state, storage_writer=TieredWriter(JOB, 1), process_group=group)
        target = zeros_like_state(copy.deepcopy(state))
        dcp.load(target, storage_reader=TieredReader(JOB), process_group=group)
        assert_same_bits(state, target)
    dist.barrier()


@without_first_rank
def test_process_group_of_some_ranks(agent_dir, ranks):
    ranks.run(4, save_in_subgroup)


def load_alone():
    """Load on rank 1 only, which needs no other rank."""
    found = {"model": {"norm.weight": torch.zeros(24)}}
    if dist.get_rank() == 1:
        dcp.load(found, storage_reader=TieredReader(JOB), no_dist=True)
    return found["model"]["norm.weight"]


def test_single_rank_loads_alone(agent_dir, ranks):
    saved = ranks.run(2, save_trained, "ddp", 1)
    _, loaded = ranks.run(2, load_alone)
    assert torch.equal(loaded, saved[0]["model"]["norm.weight"])


def save_failing_on(rank):
    me = dist.get_rank()
    state = {"w": torch.ones(4), f"object{me}": (lambda: None) if me == rank else 1}  # a lambda cannot be pickled
    try:
        dcp.save(state, storage_writer=TieredWriter(JOB, 9))
    except BaseException as error:
        return type(error).__name__
    return "saved"


def test_a_rank_that_cannot_save_leaves_no_step_and_no_lease(agent_dir, ranks):
    ranks.run(2, save_trained, "ddp", 1)
    assert ranks.run(2, save_failing_on, 0) == ["CheckpointException"] * 2
    for _, tiers in ranks.run(2, load_into_fresh, "ddp"):
        assert tiers
    assert not list((agent_dir / "notes").glob("lease.*"))
