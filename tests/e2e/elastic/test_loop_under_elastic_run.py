"""``elastic.Loop`` under ``elastic run`` trains the same bits with any ranks, faults and resizes."""

from __future__ import annotations

import pytest

from tests.support.elastic_runs import kill
from tests.support.local_nodes import wait_until
from tests.support.training_runs import assert_each_sample_once, assert_same_results, committed_steps

pytestmark = pytest.mark.e2e


def test_killed_rank_and_resizes_do_not_change_the_result(training_run, reference_steps):
    job = training_run("loop", "loop", 16)
    job.allow_steps(0)
    run = job.start_run(3)
    wait_until(lambda: job.run_json("resize", "--nodes", "2").get("max_nodes") == 2, "the job has a coordinator")
    job.wait_nodes_ready(3)
    job.allow_steps(4)
    two = job.wait_step_in_world(2, 3)
    kill(two[1]["pid"])
    job.allow_steps(8)
    job.wait_step_in_world(2, 7)
    job.resize_and_wait("3")
    job.allow_steps(12)
    job.wait_step_in_world(3, 11)
    job.resize_and_wait("2")
    job.allow_steps(16)
    job.wait_finished(run)
    moved = committed_steps(job)
    assert {one["size"] for one in moved} >= {2, 3}, "one rank may do steps alone while the killed one is replaced"
    assert_same_results(moved, reference_steps)
    assert_each_sample_once(moved)
