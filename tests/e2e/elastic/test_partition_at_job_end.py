"""A node that is partitioned while the job ends still learns the result."""

from __future__ import annotations

import pytest

from elastic.fault_injection import FaultPlan, InjectionPhase
from tests.support.golden_runs import assert_all_injected_once, golden_run

pytestmark = pytest.mark.e2e

__all__ = ["golden_run"]


@pytest.mark.timeout(300)
def test_partitioned_run_ends_with_its_job(golden_run) -> None:
    job = golden_run("fsdp", FaultPlan().at(step=4, phase=InjectionPhase.FORWARD, rank=1).partition(600))
    run = job.start_run()
    job.wait_finished(run, 240)
    assert_all_injected_once(job)
    assert "cannot be reached" in job.output()
    assert not job.persistent_pids()
    assert not job.pids("golden_training.py")
