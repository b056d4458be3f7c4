"""``elastic run`` with 2, 4, 3, 1 and 4 ranks and a killed rank trains the same bits."""

from __future__ import annotations

import pytest

from tests.support.elastic_runs import kill
from tests.support.local_nodes import wait_until
from tests.support.training_runs import assert_each_sample_once, assert_same_results, committed_steps

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]  # test_loop_under_elastic_run.py is the short case

TOTAL = 24


def test_resizes_and_a_killed_rank_do_not_change_the_result(training_run, reference_steps) -> None:
    job = training_run("moved", "tree", TOTAL)
    job.allow_steps(0)
    run = job.start_run(4)
    wait_until(lambda: job.run_json("resize", "--nodes", "2").get("max_nodes") == 2, "the job has a coordinator")
    job.wait_nodes_ready(4)
    job.allow_steps(4)
    job.wait_step_in_world(2, 3)
    job.resize_and_wait("max")
    job.allow_steps(8)
    job.wait_step_in_world(4, 7)
    job.resize_and_wait("3")
    job.allow_steps(12)
    three = job.wait_step_in_world(3, 11)
    kill(three[1]["pid"])
    job.allow_steps(16)
    job.wait_step_in_world(3, 15)
    job.resize_and_wait("1")
    job.allow_steps(20)
    job.wait_step_in_world(1, 19)
    job.resize_and_wait("max")
    job.allow_steps(TOTAL)
    job.wait_finished(run)
    moved = committed_steps(job)
    assert {one["size"] for one in moved} == {1, 2, 3, 4}
    assert_same_results(moved, reference_steps)
    assert_each_sample_once(moved)
    tiers = {tier for one in job.log_lines("world") for tier, count in one["tiers"].items() if count}
    assert tiers <= {"memory", "peer"}
    assert "peer" in tiers
