"""``elastic inject``: faults in a running job, from outside and in a rank, and refused requests."""

from __future__ import annotations

import pytest

from elastic.fault_injection import FaultPlan, InjectionPhase
from tests.support.golden_runs import golden_run  # noqa: F401 - a fixture
from tests.support.injections import injected_faults
from tests.support.local_nodes import wait_until

pytestmark = pytest.mark.e2e
TOTAL = 1_000_000
"""More steps than the job can complete before the test stops it."""


def test_running_job_is_injected_at_the_requested_place_and_time(golden_run) -> None:  # noqa: F811
    job = golden_run("fsdp", FaultPlan())
    run = job.start_run(settle_s=30, total=TOTAL)

    def happened(name: str):
        return wait_until(
            lambda: next((one for one in injected_faults(job.record) if one.injection.name == name), None), name
        )

    wait_until(lambda: job.log_lines("step"), "the first step completes")
    refused = [
        job.run_json("inject", "--at", *words.split())
        for words in (
            "rank=2 --kind sigkill",
            "node=n9 --kind node",
            "rank=0 local_rank=1 --kind oom",
            "rank=0 --kind no",
        )
    ]
    words = [one["error"]["message"] for one in refused]
    assert "rank=2: the job has 2 ranks" in words[0]
    assert "there is no node n9" in words[1]
    assert "local_rank=1: a node has 1 ranks" in words[2]
    assert "kind=no: one of" in words[3]
    assert "error" not in job.run_json("inject", "--at", "rank=1", "name=kill", "--kind", "sigkill")
    killed = happened("kill")
    assert (killed.rank, killed.phase) == (1, None)
    wait_until(lambda: any(one["epoch"] == 1 for one in job.log_lines("step")), "the next world forms")
    assert "error" not in job.run_json(
        "inject", "--at", "step=1 rank=0 phase=backward name=raise", "--kind", "exception"
    )
    raised = happened("raise")
    assert (raised.rank, raised.phase) == (0, InjectionPhase.BACKWARD)
    wait_until(lambda: any(one["epoch"] == 2 for one in job.log_lines("step")), "the next world forms")
    assert "error" not in job.run_json("inject", "--at", "rank=0 seconds=3.5 name=cut", "--kind", "partition")
    cut = happened("cut")
    wait_until(
        lambda: any(one["epoch"] > 2 and one["size"] == 2 for one in job.log_lines("step")),
        "a world without the node forms",
    )
    wait_until(lambda: state_of(job, cut.node) in ("standby", "training"), "a world with the node forms")
    job.run_json("stop")
    assert job.wait_ended(run) == 7


def state_of(job, node: str) -> str:
    status = job.status()
    return "" if status is None else next((one.state for one in status.nodes if one.node == node), "")
