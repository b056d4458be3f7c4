"""``elastic run`` handles Slurm's signals in the tasks of a step.

The system tests use Slurm itself.
"""

from __future__ import annotations

import signal
import stat

import pytest

from tests.support.elastic_runs import elastic_job, kill
from tests.support.local_nodes import wait_until
from tests.support.ports import free_port

pytestmark = pytest.mark.e2e


@pytest.fixture
def job():
    with elastic_job() as one:
        one.environ["ELASTIC_SHARED_DIRECTORY"] = str(one.folder / "shared")
        yield one


def start(job, node, nodes, *options):
    """Start a task of a step as Slurm does."""
    count = nodes.count(",") + 1
    job.environ |= {
        "SLURM_JOB_ID": "12",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{count})",
        "SLURMD_NODENAME": node,
    }
    job.name = "job"
    return job.run(*options)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_notice_stops_a_single_node_job(job, number):
    run = start(job, "n1", "n1")
    job.wait_world(1)
    kill(run.pid, number)
    assert job.wait_ended(run) == 7
    assert f"stopped: {number.name}" in job.output()
    assert {one["node"] for one in job.rank_messages("in")} == {"n1"}


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_notice_to_any_node_stops_the_job_of_all(job, number):
    port = free_port()
    runs = [start(job, node, "n1,n2", "--coordinator", f"127.0.0.1:{port}") for node in ("n1", "n2")]
    job.wait_world(2)
    kill(runs[1].pid, number)
    assert [job.wait_ended(run) for run in runs] == [7, 7]
    assert {one["want"] for one in job.rank_messages("notice")} == {"stop"}


def test_secret_is_private_and_removed_with_the_job(job):
    port = free_port()
    runs = [start(job, node, "n1,n2", "--coordinator", f"127.0.0.1:{port}") for node in ("n2", "n1")]
    job.wait_world(2)
    (secret,) = (job.folder / "shared").iterdir()
    assert secret.name == "slurm-12.0-0.secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(secret.parent.stat().st_mode) == 0o700
    job.finish()
    assert [job.wait_ended(run) for run in runs] == [0, 0]
    wait_until(lambda: not [*secret.parent.iterdir()], "the secret is deleted")
