"""``elastic run`` with training ranks on fewer nodes, then more, restores everything from memory."""

from __future__ import annotations

import signal

import pytest

from tests.support.agents import stop_agent
from tests.support.elastic_runs import ROOT, elastic_job
from tests.support.local_nodes import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]  # test_elastic_run_end_to_end.py shrinks and grows in every run

SCRIPT = ROOT / "tests/support/training_rank.py"


def test_job_continues_with_fewer_and_more_nodes(tmp_path):
    with elastic_job() as job:
        job.environ |= {"OMP_NUM_THREADS": "1", "TIEREDCKPT_AGENT_BUDGET": "256MiB"}
        try:
            trained = train(job)
        finally:
            for one in job.started:
                one.send_signal(signal.SIGKILL)
                one.wait()
            wait_until(lambda: not job.pids("training_rank"))
            for place in {path.parent for path in job.folder.rglob("agent.lock")}:
                stop_agent(place)
    assert trained


def train(job):
    options = ("--simulate-nodes", "2", "--nnodes", "1:2", "--grow-after", "0.2", "--shrink-after", "0", "--job", "job")
    logs = ("--log-dir", str(job.folder / "logs"))
    running = job.start("run", *options, *logs, str(SCRIPT), str(job.folder))

    both = job.wait_world(2)
    wait_until(lambda: job.rank_messages("step", epoch=both[0]["epoch"], rank=1, step=both[0]["restored"] + 2))
    assert job.run_json("resize", "--nodes", "1")["max_nodes"] == 1
    (alone,) = job.wait_world(1, after=both[0]["epoch"])
    assert alone["pid"] in [one["pid"] for one in both]
    assert_goes_on(job, both, [alone])

    job.run_json("resize", "--nodes", "max")
    more = job.wait_world(2, after=alone["epoch"])
    assert alone["pid"] in [one["pid"] for one in more]
    assert_goes_on(job, [alone], more)
    job.finish()
    assert job.wait_ended(running) == 0, job.output()
    return job.rank_messages("ended", how="finished")


def assert_goes_on(job, before, after):
    """Check that all ranks stopped after the same step and resumed from it in memory."""
    done = [
        max(one["step"] for one in job.rank_messages("step", epoch=one["epoch"], rank=one["rank"])) for one in before
    ]
    assert {one["restored"] for one in after} == set(done)
    assert {tier for one in after for tier in one["tiers"]} <= {"memory", "peer"}
