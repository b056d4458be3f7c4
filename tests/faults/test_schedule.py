"""Plans are determined by their seed and stay within the limits of a job."""

from __future__ import annotations

import math

from tests.faults.schedule import FaultKind, make_plan

SEEDS = range(400)


def test_seed_determines_the_plan():
    assert [make_plan(seed) for seed in SEEDS] == [make_plan(seed) for seed in SEEDS]
    assert len({repr(make_plan(seed)) for seed in SEEDS}) > 350


def test_worlds_have_between_one_and_seven_ranks():
    sizes = {make_plan(seed).shape.nodes * make_plan(seed).shape.nproc for seed in SEEDS}
    assert min(sizes) == 1
    assert max(sizes) == 7
    assert len(sizes) >= 5


def test_every_fault_kind_occurs_only_where_possible():
    here = {fault.kind for seed in SEEDS for fault in make_plan(seed).faults}
    hosts = {fault.kind for seed in SEEDS for fault in make_plan(seed, hosts=True).faults}
    assert here | hosts == set(FaultKind)
    assert {FaultKind.CUT, FaultKind.CUT_ONE_WAY, FaultKind.UNPLUGGED} <= hosts - here
    assert FaultKind.MEMORY_FULL not in {fault.kind for seed in SEEDS for fault in make_plan(seed, full=False).faults}


def test_each_seed_has_few_kinds_and_some_of_them_together():
    plans = [make_plan(seed, faults=20) for seed in SEEDS]
    assert max(len({fault.kind for fault in plan.faults}) for plan in plans) <= len(FaultKind) // 2
    assert any(fault.after_steps < 0 for plan in plans for fault in plan.faults)
    assert all(plan.faults[0].after_steps > 0 for plan in plans)


def test_only_replaceable_processes_stop_forever():
    lasting = {fault.kind for seed in SEEDS for fault in make_plan(seed, faults=20).faults if math.isinf(fault.lasts_s)}
    assert lasting == {
        FaultKind.RANK_STOPPED,
        FaultKind.SPARE_STOPPED,
        FaultKind.AGENT_STOPPED,
        FaultKind.SUPERVISOR_STOPPED,
    }


def test_clocks_are_present_where_a_fault_sets_them():
    for seed in SEEDS:
        plan = make_plan(seed)
        assert plan.clocks or FaultKind.CLOCK_SET not in {fault.kind for fault in plan.faults}
