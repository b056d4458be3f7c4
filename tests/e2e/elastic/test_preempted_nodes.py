"""A lost node, a joined node and a node preempted with 10 s notice do not change the result."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.support.local_nodes import wait_until
from tests.support.training_runs import assert_each_sample_once, assert_same_results, committed_steps

pytestmark = pytest.mark.e2e

TOTAL = 16


def test_lost_joined_and_preempted_nodes_do_not_change_the_result(training_run, reference_steps) -> None:
    job = training_run("preempted", "tree", TOTAL)
    job.environ["TIEREDCKPT_PEER_REQUIRE"] = "copied"  # then at most one step's replicas are in flight
    job.allow_steps(0)
    run = job.start_run(3)
    job.wait_nodes_ready(3)
    job.allow_steps(4)
    three = job.wait_step_in_world(3, 3)

    job.lose_node("n1")
    job.allow_steps(8)
    two = job.wait_step_in_world(2, 7)
    assert {one["pid"] for one in two} < {one["pid"] for one in three}
    assert done_again(job) in ([], [3])

    again = job.start("join", "preempted", "--node", "n1")
    job.wait_stop_requested()
    job.allow_steps(12)
    more = job.wait_step_in_world(3, 11)
    assert {one["pid"] for one in more} > {one["pid"] for one in two}

    job.run_json("drain", "n2", "--deadline", "10")
    job.wait_stop_requested()
    job.allow_steps(TOTAL)
    wait_until(lambda: not job.pids('"node":"n2"'), "n2 has left")
    job.lose_memory("n2")  # the machine is switched off
    assert "dismissed after" in job.node_output("n2")  # it left by itself, before the deadline

    job.wait_finished(run)
    assert job.wait_ended(again) == 0
    assert sizes_after(job, three[0]["epoch"]) == [2, 3, 2]
    assert done_again(job) in ([], [3])
    moved = committed_steps(job)
    assert moved[-1]["size"] == 2
    assert_same_results(moved, reference_steps)
    assert_each_sample_once(moved)
    tiers = {tier for one in job.log_lines("world") for tier, count in one["tiers"].items() if count}
    assert tiers == {"memory", "peer"}


def test_node_outside_the_world_keeps_the_steps_of_a_lost_one(training_run, reference_steps) -> None:
    job = training_run("outside", "tree", TOTAL)
    job.environ["TIEREDCKPT_PEER_REQUIRE"] = "copied"
    job.allow_steps(0)
    run = job.start_run(2)
    job.wait_nodes_ready(2)
    job.allow_steps(4)
    job.wait_step_in_world(2, 3)
    job.resize_and_wait("1")
    job.allow_steps(10)
    (alone,) = job.wait_step_in_world(1, 9)

    inside = [node.node for node in job.status().nodes if node.node_rank is not None]
    assert len(inside) == 1
    job.lose_node(inside[0])
    job.allow_steps(TOTAL)
    job.wait_finished(run)
    assert done_again(job) in ([], [9])
    moved = committed_steps(job)
    assert moved[-1]["pid"] != alone["pid"]
    assert_same_results(moved, reference_steps)
    assert_each_sample_once(moved)


def sizes_after(job, epoch):
    """Return the sizes of the worlds after this one."""
    return [size for at, size in sorted({(one["epoch"], one["size"]) for one in job.log_lines("world")}) if at > epoch]


def done_again(job):
    """Return the steps that more than one world completed."""
    epochs = defaultdict(set)
    for one in job.log_lines("step"):
        epochs[one["step"]].add(one["epoch"])
    return [step for step, those in sorted(epochs.items()) if len(those) > 1]
