"""``elastic run`` with everything: 2, 4, 3, 1 and 4 ranks and one killed, of which no bit shows in what was learned."""

from __future__ import annotations

import pytest

from tests.support.elastic_runs import kill
from tests.support.local_nodes import wait_until
from tests.support.training_runs import assert_each_sample_once, assert_same_results, committed_steps

pytestmark = pytest.mark.e2e

TOTAL = 24


def test_resizes_and_a_killed_rank_do_not_change_the_result(training_run, reference_steps) -> None:
    job = training_run("moved", "tree", TOTAL)
    job.allow(0)
    run = job.begin(4)
    wait_until(lambda: job.ask("resize", "--nodes", "2").get("max_nodes") == 2, "the job has a coordinator")
    job.gathered(4)
    job.allow(4)
    job.in_world(2, 3)
    job.change("max")
    job.allow(8)
    job.in_world(4, 7)
    job.change("3")
    job.allow(12)
    three = job.in_world(3, 11)
    kill(three[1]["pid"])
    job.allow(16)
    job.in_world(3, 15)
    job.change("1")
    job.allow(20)
    job.in_world(1, 19)
    job.change("max")
    job.allow(TOTAL)
    job.finished(run)
    moved = committed_steps(job)
    assert {one["size"] for one in moved} == {1, 2, 3, 4}
    assert_same_results(moved, reference_steps)
    assert_each_sample_once(moved)
    tiers = {tier for one in job.lines("world") for tier, count in one["tiers"].items() if count}
    assert tiers <= {"memory", "peer"}
    assert "peer" in tiers
