"""A job whose processes are all stopped and continued (``scontrol suspend``, ``docker pause``)."""

from __future__ import annotations

import signal
import time

import pytest

from tests.support.elastic_runs import ElasticRun, elastic_job, kill
from tests.support.local_nodes import wait_until

pytestmark = pytest.mark.e2e

_SUSPENDED_S = 13.0
"""Seconds of suspension, longer than the limits for silent nodes and for a step."""


@pytest.fixture
def job():
    with elastic_job() as one:
        yield one


def suspend(job: ElasticRun, seconds: float) -> None:
    """Stop all processes of the job for ``seconds``."""
    stopped = job.pids()
    for pid in stopped:
        kill(pid, signal.SIGSTOP)
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        time.sleep(left_s)
    for pid in stopped:
        kill(pid, signal.SIGCONT)


def test_suspended_job_resumes_in_the_same_world_without_faults(job: ElasticRun) -> None:
    run = job.run("--simulate-nodes", "2", "--nnodes", "2", "--nproc", "2", "--hang-timeout", "6")
    before = job.wait_world(4)
    steps = {node.node: node.step for node in wait_until(lambda: _status_with_steps(job)).nodes}
    suspend(job, _SUSPENDED_S)
    status = wait_until(lambda: _further(job, steps), "the job completes steps after the suspension")
    assert (status.epoch, status.restarts, status.phase.value) == (before[0]["epoch"], 0, "running")
    assert job.rank_messages("notice") == []
    assert job.rank_messages("stale") == []
    job.finish()
    assert job.wait_ended(run) == 0
    assert {one["pid"] for one in job.rank_messages("finished")} == {one["pid"] for one in before}


def test_single_suspended_node_is_lost(job: ElasticRun) -> None:
    run = job.run("--simulate-nodes", "2", "--nnodes", "1:2", "--shrink-after", "0", "--grow-after", "600")
    before = job.wait_world(2)
    stopped = [job.supervisor_pid("n1"), next(one["pid"] for one in before if one["node"] == "n1")]
    for pid in stopped:
        kill(pid, signal.SIGSTOP)
    job.wait_world(1, after=before[0]["epoch"])
    for pid in stopped:
        kill(pid, signal.SIGCONT)
    wait_until(lambda: len(job.status().nodes) == 2)
    job.finish()
    assert job.wait_ended(run) == 0


def _status_with_steps(job: ElasticRun):
    status = job.status()
    return status if status is not None and all(node.step > 0 for node in status.nodes) else None


def _further(job: ElasticRun, steps: dict[str, int]):
    status = job.status()
    return status if status is not None and all(node.step > steps[node.node] + 50 for node in status.nodes) else None
