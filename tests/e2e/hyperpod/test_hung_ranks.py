"""Real agents and an operator recover by themselves from every kind of hang, in both modes."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.hyperpod.operator import JobPhase
from tests.support.hyperpod_inprocess import TOTAL, step_results
from tests.support.operated_jobs import RANKS, operated_job, reference_steps
from tests.support.zygote import Zygote

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
pytest.importorskip("hyperpod_elastic_agent")

IN_PROCESS = ("--inprocess-restart", "--inprocess-timeout=10")
NEW_PROCESSES = ()


@pytest.mark.parametrize(
    ("options", "kind", "rank"),
    [
        pytest.param(IN_PROCESS, "hang", 1, marks=pytest.mark.nightly),
        pytest.param(IN_PROCESS, "stop", 0, marks=pytest.mark.nightly),
        pytest.param(IN_PROCESS, "native", 2),
        pytest.param(NEW_PROCESSES, "hang", 3, marks=pytest.mark.nightly),
        pytest.param(NEW_PROCESSES, "stop", 2, marks=pytest.mark.nightly),
        pytest.param(NEW_PROCESSES, "native", 0, marks=pytest.mark.nightly),
    ],
)
def test_operated_job_with_a_hung_rank_resumes_by_itself(
    tmp_path: Path, zygote: Zygote, options: tuple[str, ...], kind: str, rank: int
) -> None:
    """Rank 0 detects the hangs and hosts the rendezvous store."""
    (tmp_path / f"break-{kind}").write_text(f"{rank} 5")
    with operated_job(tmp_path, environ={"ELASTIC_HANG_TIMEOUT": "8"}, options=options) as job:
        job.set_limit(TOTAL)
        job.wait_until(lambda: job.state.phase.is_final, "the job has ended")
        assert job.state.phase is JobPhase.SUCCEEDED, job.report()
        said = job.process_lines()
        assert said.count(["ended", "finished"]) == RANKS
        assert not (tmp_path / f"break-{kind}").exists()
        assert job.restart_modes(), job.report()
    assert step_results(said) == reference_steps(zygote)
