"""A node that was in no world of the job stores replicas and resumes the job without the others."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import pytest

from tests.support.elastic_runs import ROOT, kill
from tests.support.local_nodes import wait_until
from tests.support.training_runs import assert_each_sample_once, assert_same_results, committed_steps
from tieredckpt.agent.agent_client import NodeAgentClient
from tieredckpt.settings import Settings, override_settings

pytestmark = pytest.mark.e2e

TOTAL = 16


def prepare(name, training_run):
    """Return a job that skips no save, and whose replicas outlast the detection of lost nodes."""
    job = training_run(name, "tree", TOTAL)
    job.environ |= {"TIEREDCKPT_AGENT_JOB_TTL_S": "30", "TIEREDCKPT_MEMORY_ON_BUSY": "wait"}
    return job


def agent_directory(job, node):
    return job.folder / "run" / job.name / node / "agent"


def wait_replicated(job, node, step):
    """Wait until ``node`` knows that its job's newest replicated step is ``step``."""
    settings = override_settings(Settings(), agent={"directory": str(agent_directory(job, node)), "embedded": False})
    with contextlib.closing(NodeAgentClient(settings, "")) as agent:

        def newest():
            views = agent.cluster_status("whole").nodes
            found = next((view.newest_replicated for view in views if view.node.id == node), None)
            return found is not None and found.version == step

        wait_until(newest, f"{node} knows that step {step} is replicated")


def cluster_status(job, node):
    """Return the output of ``tieredckpt status --cluster`` on ``node``."""
    done = subprocess.run(
        [sys.executable, "-m", "tieredckpt", "status", "whole", "--cluster", "--json",
         "--agent-dir", str(agent_directory(job, node))],
        cwd=ROOT, env=job.environ, capture_output=True, check=False, timeout=200,
    )  # fmt: skip
    return json.loads(done.stdout)


def wait_standby(job, count):
    """Wait until ``count`` nodes have ranks that wait for a world; return their names."""

    def standby():
        status = job.status()
        found = [] if status is None else [node.node for node in status.nodes if node.state == "standby"]
        return found if len(found) == count else []

    return wait_until(standby, f"{count} standby nodes")


def ranked_node(job):
    (node,) = (node.node for node in job.status().nodes if node.node_rank is not None)
    return node


def assert_resumed_from(job, resumed, reference_steps):
    """Assert that the last world restored step ``resumed`` from memory on a node without an earlier world."""
    worlds = job.log_lines("world")
    assert len({one["pid"] for one in worlds}) == 2
    last = max(worlds, key=lambda one: one["epoch"])
    assert last["first"] == resumed
    assert {tier for tier, count in last["tiers"].items() if count} == {"memory"}
    assert {one["size"] for one in worlds} == {1}
    moved = committed_steps(job)
    assert_same_results(moved, reference_steps)
    assert_each_sample_once(moved)


def test_node_that_was_in_no_world_resumes_from_its_replicas(training_run, reference_steps) -> None:
    job = prepare("spare", training_run)
    job.allow_steps(0)
    run = job.start_run(2, "--nnodes", "1")
    (outside,) = wait_standby(job, 1)
    inside = ranked_node(job)
    job.allow_steps(10)
    job.wait_step_in_world(1, 9)
    wait_replicated(job, outside, 9)
    said = cluster_status(job, inside)
    assert (said["steps"][-1]["step"], said["steps"][-1]["copies"]) == (9, 2)
    assert {one["node"]: one["state"] for one in said["nodes"]} == {inside: "alive", outside: "alive"}

    job.lose_node(inside)
    job.allow_steps(TOTAL)
    job.wait_finished(run)
    assert_resumed_from(job, 10, reference_steps)


def test_node_that_joins_during_a_world_gets_replicas(training_run, reference_steps) -> None:
    job = prepare("late", training_run)
    job.environ["TIEREDCKPT_PEER_COPIES"] = "3"
    job.allow_steps(0)
    run = job.start_run(2, "--nnodes", "1")
    (outside,) = wait_standby(job, 1)
    inside = ranked_node(job)
    job.allow_steps(4)
    job.wait_step_in_world(1, 3)
    wait_replicated(job, outside, 3)
    late = job.start("join", "late", "--node", "n7")
    wait_standby(job, 2)
    job.allow_steps(10)
    job.wait_step_in_world(1, 9)
    wait_replicated(job, "n7", 9)
    said = cluster_status(job, inside)
    assert (said["steps"][-1]["step"], said["steps"][-1]["copies"]) == (9, 3)

    job.lose_node(outside)
    job.lose_node(inside)
    job.allow_steps(TOTAL)
    job.wait_finished(run)
    assert job.wait_ended(late) == 0
    assert_resumed_from(job, 10, reference_steps)


def test_next_run_starts_on_a_node_that_has_the_newest_step(training_run, reference_steps) -> None:
    job = prepare("again", training_run)
    job.environ |= {"TIEREDCKPT_AGENT_LINGER_S": "3600", "TIEREDCKPT_AGENT_JOB_TTL_S": "3600"}
    job.allow_steps(0)
    run = job.start_run(2, "--nnodes", "1")
    (outside,) = wait_standby(job, 1)
    inside = ranked_node(job)
    job.allow_steps(10)
    job.wait_step_in_world(1, 9)
    wait_replicated(job, outside, 9)
    for pid in job.pids('"type":"node"', f'"node":"{outside}"'):
        kill(pid)
    job.lose_node(inside)
    assert job.wait_ended(run) == 7
    assert "the same command resumes it from step 9" in job.output()

    before = job.log_lines("world")
    job.allow_steps(TOTAL)
    job.wait_finished(job.start_run(2, "--nnodes", "1"))
    (resumed,) = (one for one in job.log_lines("world") if one not in before)
    assert resumed["first"] == 10
    moved = committed_steps(job)
    assert_same_results(moved, reference_steps)
    assert_each_sample_once(moved)


@pytest.mark.parametrize("durable", ["durable", pytest.param("", marks=pytest.mark.nightly)])
def test_finished_job_frees_durable_steps_on_a_node_that_was_in_no_world(training_run, durable) -> None:
    job = prepare("freed", training_run)
    if durable:
        job.environ |= {"TIEREDCKPT_DURABLE_URL": str(job.folder / durable), "TIEREDCKPT_DURABLE_EVERY": "5"}
    job.allow_steps(0)
    run = job.start_run(2, "--nnodes", "1")
    (outside,) = wait_standby(job, 1)
    inside = ranked_node(job)
    job.allow_steps(10)
    job.wait_step_in_world(1, 9)
    wait_replicated(job, outside, 9)
    job.allow_steps(TOTAL)
    job.wait_finished(run)
    left = {node: any((agent_directory(job, node) / "slots").glob("*")) for node in (inside, outside)}
    assert left == dict.fromkeys((inside, outside), not durable)
    assert ("the checkpoints of whole remain in" in job.output()) == (not durable)
