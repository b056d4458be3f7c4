"""A job under ``torchrun`` recovers by itself from every kind of hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import hyperpod_inprocess
from tests.support.hyperpod_inprocess import TOTAL, processes, step_results
from tests.support.launched import run_torchrun
from tests.support.operated_jobs import RANKS, reference_steps

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


_NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    ("kind", "rank"),
    [("hang", 1), pytest.param("stop", 0, marks=_NIGHTLY), pytest.param("native", 2, marks=_NIGHTLY)],
)
def test_job_with_a_hung_rank_resumes_by_itself(agent_dir: Path, tmp_path: Path, zygote, kind: str, rank: int):
    """Rank 0 detects the hangs of the others, and it may hang, too."""
    (tmp_path / "limit").write_text(str(TOTAL))
    (tmp_path / f"break-{kind}").write_text(f"{rank} 5")
    environ = {"OMP_NUM_THREADS": "1", "STORY": str(tmp_path), "ELASTIC_HANG_TIMEOUT": "8"}
    options = [f"--nproc-per-node={RANKS}", "--max-restarts=2", "--shutdown-timeout=2"]
    ended = zygote.start(run_torchrun, hyperpod_inprocess.__file__, options, environ=environ).wait(timeout_s=300)
    found = processes(tmp_path)
    assert ended.status == 0, ended
    assert not (tmp_path / f"break-{kind}").exists()
    lines = [line for one in found for line in one.lines]
    assert lines.count(["ended", "finished"]) == RANKS
    assert max(one.newest_step[0] for one in found) > 0  # torchrun restarted all of them
    assert step_results(lines) == reference_steps(zygote)
