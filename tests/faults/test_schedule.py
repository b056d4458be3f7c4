"""What a seed stands for is the same everywhere, and within what a job can be."""

from __future__ import annotations

import math

from tests.faults.schedule import Kind, plan_of

SEEDS = range(400)


def test_seed_determines_the_plan():
    assert [plan_of(seed) for seed in SEEDS] == [plan_of(seed) for seed in SEEDS]
    assert len({repr(plan_of(seed)) for seed in SEEDS}) > 350


def test_worlds_have_between_one_and_seven_ranks():
    sizes = {plan_of(seed).shape.nodes * plan_of(seed).shape.nproc for seed in SEEDS}
    assert min(sizes) == 1
    assert max(sizes) == 7
    assert len(sizes) >= 5


def test_every_fault_kind_occurs_only_where_possible():
    here = {fault.kind for seed in SEEDS for fault in plan_of(seed).faults}
    hosts = {fault.kind for seed in SEEDS for fault in plan_of(seed, hosts=True).faults}
    assert here | hosts == set(Kind)
    assert {Kind.CUT, Kind.CUT_ONE_WAY, Kind.UNPLUGGED} <= hosts - here
    assert Kind.MEMORY_FULL not in {fault.kind for seed in SEEDS for fault in plan_of(seed, full=False).faults}


def test_each_seed_has_few_kinds_and_some_of_them_together():
    plans = [plan_of(seed, faults=20) for seed in SEEDS]
    assert max(len({fault.kind for fault in plan.faults}) for plan in plans) <= len(Kind) // 2
    assert any(fault.after_steps < 0 for plan in plans for fault in plan.faults)
    assert all(plan.faults[0].after_steps > 0 for plan in plans)


def test_only_replaceable_processes_stop_forever():
    lasting = {fault.kind for seed in SEEDS for fault in plan_of(seed, faults=20).faults if math.isinf(fault.lasts_s)}
    assert lasting == {Kind.RANK_STOPPED, Kind.SPARE_STOPPED, Kind.AGENT_STOPPED, Kind.SUPERVISOR_STOPPED}


def test_clocks_are_present_where_a_fault_sets_them():
    for seed in SEEDS:
        plan = plan_of(seed)
        assert plan.clocks or Kind.CLOCK_SET not in {fault.kind for fault in plan.faults}
