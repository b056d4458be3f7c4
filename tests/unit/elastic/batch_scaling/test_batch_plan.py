"""Batch plans: each sample is computed once, the load is even, and limits hold."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.batch_scaling.batch_plan import BatchPlan, PlannedMicrobatch, RankQuota, common_microbatch
from elastic.errors import PolicyError

SIZES = st.integers(1, 90)
LIMITS = st.none() | st.integers(1, 40)


def split(plan):
    return [[m.samples for m in plan.for_rank(rank).microbatches] for rank in range(plan.world_size)]


def test_a_batch_that_divides():
    plan = BatchPlan(128, 16, 4)
    assert (plan.accumulation_steps, plan.microbatch_size, plan.microbatch_count) == (2, 4, 32)
    assert plan.quotas == (RankQuota(16, 8),)
    assert plan.utilization == 1
    share = plan.for_rank(8)
    assert share.microbatches == (PlannedMicrobatch(16, 64, 4), PlannedMicrobatch(17, 68, 4))
    assert (share.first, share.samples, share.empty_passes, share.weight) == (64, 8, 0, 1 / 16)


def test_a_batch_that_does_not_divide():
    plan = BatchPlan(10, 4, 2)
    assert split(plan) == [[2, 1], [2, 1], [1, 1], [1, 1]]
    assert plan.quotas == (RankQuota(2, 3), RankQuota(2, 2))
    assert plan.utilization == 10 / 12
    assert not plan.is_world_independent


def test_passes_are_as_few_as_fit_and_alike():
    """Nine samples, at most four at a time, make three passes of three instead of 4, 4 and 1."""
    assert split(BatchPlan(9, 1, 4)) == [[3, 3, 3]]
    assert split(BatchPlan(9, 1)) == [[9]]


def test_all_ranks_make_as_many_passes():
    """With single samples, a rank with fewer samples makes one pass without a sample."""
    plan = BatchPlan(5, 2, 1)
    assert split(plan) == [[1, 1, 1], [1, 1]]
    assert [plan.for_rank(rank).empty_passes for rank in range(2)] == [0, 1]
    assert plan.empty_passes == 1


def test_fixed_microbatches_are_cut_alike_in_every_world():
    one, three, four = (BatchPlan(10, world, 3, microbatch=3) for world in (1, 3, 4))
    assert split(one) == [[3, 3, 3, 1]]
    assert split(three) == [[3, 3], [3], [1]]
    assert split(four) == [[3], [3], [3], [1]]
    assert three.for_rank(2).microbatches == (PlannedMicrobatch(3, 9, 1),)
    assert [three.for_rank(rank).empty_passes for rank in range(3)] == [0, 1, 1]
    assert three.quotas == (RankQuota(1, 6), RankQuota(1, 3), RankQuota(1, 1))
    assert three.is_world_independent


def test_ranks_that_share_samples_count_as_a_single_rank():
    """64 devices with tensor parallelism over 8: the plan is that of 8 devices."""
    assert BatchPlan(128, 64 // 8, 2) == BatchPlan(128, 8, 2)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"global_batch": 0, "world_size": 1}, "global_batch is 0"),
        ({"global_batch": 8, "world_size": -1}, "world_size is -1"),
        ({"global_batch": 8, "world_size": None}, "world_size is None"),
        ({"global_batch": 8.0, "world_size": 1}, "global_batch is 8.0"),
        ({"global_batch": True, "world_size": 1}, "global_batch is True"),
        ({"global_batch": 8, "world_size": 1, "max_microbatch": 0}, "max_microbatch is 0"),
        ({"global_batch": 8, "world_size": 1, "microbatch": 0}, "microbatch is 0"),
        (
            {"global_batch": 8, "world_size": 1, "max_microbatch": 2, "microbatch": 4},
            "microbatch is 4 and must not exceed max_microbatch, which is 2",
        ),
        ({"global_batch": 128, "world_size": 130}, "world_size is 130, but global_batch has 128 samples: 2 ranks"),
        (
            {"global_batch": 128, "world_size": 24, "microbatch": 8},
            "at most 16 ranks or a microbatch of at most 5;",
        ),
    ],
)
def test_impossible_batch_names_the_limit(asked, named):
    with pytest.raises(PolicyError) as impossible:
        BatchPlan(**asked)
    assert named in str(impossible.value)


def test_the_advice_is_right():
    with pytest.raises(PolicyError, match="microbatch of at most 5;"):
        BatchPlan(128, 24, microbatch=6)
    assert BatchPlan(128, 24, microbatch=5).min_rank_samples > 0


def test_idle_ranks_get_empty_quotas_when_allowed():
    plan = BatchPlan(3, 5, allow_idle=True)
    assert split(plan) == [[1], [1], [1], [], []]
    assert [plan.for_rank(rank).empty_passes for rank in range(5)] == [0, 0, 0, 1, 1]
    assert (plan.for_rank(4).samples, plan.for_rank(4).weight, plan.min_rank_samples, plan.empty_passes) == (0, 0, 0, 2)
    assert plan.quotas == (RankQuota(3, 1), RankQuota(2, 0))
    fixed = BatchPlan(5, 4, microbatch=2, allow_idle=True)
    assert split(fixed) == [[2], [2], [1], []]
    assert fixed.quotas == (RankQuota(2, 2), RankQuota(1, 1), RankQuota(1, 0))


def test_index_outside_the_plan_is_refused():
    plan = BatchPlan(10, 4, 2)
    for call, place in (
        (plan.for_rank, 4),
        (plan.for_rank, -1),
        (plan.rank_of_sample, 10),
        (plan.rank_of_microbatch, 8),
        (plan.rank_of_microbatch, -1),
    ):
        with pytest.raises(PolicyError, match="counted from 0"):
            call(place)


def microbatches(plan):
    return [microbatch for rank in range(plan.world_size) for microbatch in plan.for_rank(rank).microbatches]


@st.composite
def plans(draw):
    batch, limit = draw(SIZES), draw(LIMITS)
    fixed = draw(st.none() | st.integers(1, limit or 40))
    return BatchPlan(batch, draw(st.integers(1, 100)), limit, microbatch=fixed, allow_idle=True)


@given(plans())
def test_every_sample_is_computed_once_and_in_order(plan):
    shares = [plan.for_rank(rank) for rank in range(plan.world_size)]
    samples, ids = 0, 0
    for share in shares:
        assert share.first == samples
        for microbatch in share.microbatches:
            assert microbatch == PlannedMicrobatch(ids, samples, microbatch.samples)
            assert microbatch.samples >= 1
            assert plan.rank_of_microbatch(ids) == share.rank
            assert {plan.rank_of_sample(samples + n) for n in range(microbatch.samples)} == {share.rank}
            samples, ids = samples + microbatch.samples, ids + 1
        assert share.first + share.samples == samples
    assert (samples, ids) == (plan.global_batch, plan.microbatch_count)
    assert [plan.for_rank(rank) for rank in range(plan.world_size)] == shares


@given(plans())
def test_the_totals_are_those_of_the_shares(plan):
    shares = [plan.for_rank(rank) for rank in range(plan.world_size)]
    sizes = [microbatch.samples for share in shares for microbatch in share.microbatches]
    samples = [share.samples for share in shares]
    assert {len(share.microbatches) + share.empty_passes for share in shares} == {plan.accumulation_steps}
    assert sum(share.empty_passes for share in shares) == plan.empty_passes
    assert max(sizes) == plan.microbatch_size <= (plan.max_microbatch or plan.global_batch)
    assert (max(samples), min(samples)) == (plan.max_rank_samples, plan.min_rank_samples)
    assert [quota.samples for quota in plan.quotas for _ in range(quota.ranks)] == samples
    assert all(before.samples > after.samples for before, after in zip(plan.quotas, plan.quotas[1:], strict=False))
    assert sum(share.weight for share in shares) == pytest.approx(1)


@given(plans())
def test_no_rank_has_more_to_do_than_must_be(plan):
    shares = [plan.for_rank(rank) for rank in range(plan.world_size)]
    if plan.microbatch is not None:
        counts = [len(share.microbatches) for share in shares]
        assert max(counts) - min(counts) <= 1
        assert all(microbatch.samples == plan.microbatch for microbatch in microbatches(plan)[:-1])
        return
    assert plan.max_rank_samples - plan.min_rank_samples <= 1
    fewest = -(-plan.max_rank_samples // (plan.max_microbatch or plan.max_rank_samples))
    assert plan.accumulation_steps == fewest
    for share in shares:
        sizes = [microbatch.samples for microbatch in share.microbatches]
        assert not sizes or max(sizes) - min(sizes) <= 1
        assert share.empty_passes == max(0, plan.accumulation_steps - share.samples)


@given(SIZES, st.integers(1, 12), st.integers(1, 100), st.integers(1, 100))
def test_fixed_microbatches_do_not_know_the_world(batch, size, world, other):
    one, two = (BatchPlan(batch, n, microbatch=size, allow_idle=True) for n in (world, other))
    assert one.microbatch_count == two.microbatch_count
    assert microbatches(one) == microbatches(two)


@given(SIZES, st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(1, 16))
def test_a_microbatch_for_many_worlds_costs_none_of_them_anything(batch, worlds, limit):
    worlds = [min(world, batch) for world in worlds]
    size = common_microbatch(batch, worlds, limit)
    assert 1 <= size <= limit
    for world in worlds:
        assert (
            BatchPlan(batch, world, limit, microbatch=size).max_rank_samples == BatchPlan(batch, world).max_rank_samples
        )
    larger = range(size + 1, min(limit, batch) + 1)
    plans = [[BatchPlan(batch, world, microbatch=more, allow_idle=True) for world in worlds] for more in larger]
    assert all(
        any(p.max_rank_samples > -(-batch // p.world_size) or not p.min_rank_samples for p in each) for each in plans
    )


def test_a_microbatch_for_worlds_of_a_job():
    assert common_microbatch(128, [8, 16, 32], 8) == 4
    assert common_microbatch(128, [8, 16, 24, 32], 8) == 2
    with pytest.raises(PolicyError, match="world_size is 129"):
        common_microbatch(128, [8, 129], 8)


@pytest.mark.parametrize("fixed", [None, 3])
def test_huge_world_costs_no_more_than_a_small_one(fixed):
    """A plan that listed its ranks would not finish for a world of 10**15 ranks."""
    world = 10**15
    plan = BatchPlan(7 * world + 5, world, 4, microbatch=fixed)
    last = plan.for_rank(world - 1)
    assert last.first + last.samples == plan.global_batch
    assert plan.rank_of_sample(plan.global_batch - 1) == world - 1
    assert plan.rank_of_microbatch(plan.microbatch_count - 1) == world - 1
    assert last.microbatches[-1].id == plan.microbatch_count - 1
    assert sum(quota.ranks * quota.samples for quota in plan.quotas) == plan.global_batch
    assert sum(quota.ranks for quota in plan.quotas) == world


def test_plans_are_values():
    plan = BatchPlan(128, 24, 8)
    assert pickle.loads(pickle.dumps(plan)) == plan == dataclasses.replace(plan)
    assert len({plan, BatchPlan(128, 24, 8)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.world_size = 8
