"""Scripts that cannot train in their world, or that ignore requests."""

from __future__ import annotations

import pytest

from peerstore.daemon_process import process_start_time
from tests.support.elastic_runs import ElasticRun, elastic_job
from tests.support.local_nodes import wait_until

pytestmark = pytest.mark.e2e

TOO_SMALL_A_BATCH = """
from elastic import BatchPlan, recoverable
from elastic.workers.train_loop import RecoveryPolicy

@recoverable(policy=RecoveryPolicy(backend="none"))
def train(world):
    BatchPlan(1, world.size)

train()
"""


@pytest.fixture
def job():
    with elastic_job() as one:
        yield one


def test_batch_too_small_for_the_ranks_fails_the_job_with_a_reason(job: ElasticRun) -> None:
    script = job.folder / "train.py"
    script.write_text(TOO_SMALL_A_BATCH)
    quick = ("--no-agent", "--store", "nowhere:1", "--job", "job", "--log-dir", str(job.folder / "logs"))
    run = job.start("run", *quick, "--nproc", "2", "--max-restarts", "1", str(script))
    assert job.wait_ended(run) == 8
    said = " ".join(job.output().split())
    assert "attempts: 2 faults; at most 1 restart allowed (job_max_retry_count)" in said
    assert "PolicyError: world_size is 2, but global_batch has 1 samples: 1 ranks would have nothing to do" in said
    logs = [log.read_text() for log in (job.folder / "logs").glob("*/*.log")]
    assert all("JobFailedError" in log for log in logs)
    assert any("BatchPlan(1, world.size)" in log for log in logs)  # a rank may receive the other's fault first


FAILS_AT_ONCE = """
from elastic import recoverable
from elastic.workers.train_loop import RecoveryPolicy

@recoverable(policy=RecoveryPolicy(backend="none", on_error={how!r}))
def train(world):
    raise ValueError("bad")

train()
"""


@pytest.mark.parametrize("how", ["retry", "raise"])
def test_error_before_the_first_step_ends_the_job_when_it_repeats(job: ElasticRun, how: str) -> None:
    script = job.folder / "train.py"
    script.write_text(FAILS_AT_ONCE.format(how=how))
    quick = ("--no-agent", "--store", "nowhere:1", "--job", "job", "--log-dir", str(job.folder / "logs"))
    run = job.start("run", *quick, str(script))
    assert job.wait_ended(run) == 8
    failed, attempts, resumes, command = job.output().splitlines()[-4:]
    assert failed.endswith("reported a fault: ValueError: bad (train.py:7 in train)")
    assert attempts == "attempts: 2 in a row failed in the same way before the first step"
    assert resumes == "resumes from: the newest complete checkpoint of the job; this run saved none"
    assert command.startswith("command: elastic run ")


FAILS_AT_STEP_TWO = """
from elastic import recoverable
from elastic.workers.train_loop import RecoveryPolicy

@recoverable(policy=RecoveryPolicy(backend="none"))
def train(world):
    for step in world.steps(0, 10):
        if step == 2:
            raise ValueError("bad")

train()
"""


def test_error_at_the_same_step_ends_the_job_when_it_repeats(job: ElasticRun) -> None:
    script = job.folder / "train.py"
    script.write_text(FAILS_AT_STEP_TWO)
    quick = ("--no-agent", "--store", "nowhere:1", "--job", "job", "--log-dir", str(job.folder / "logs"))
    run = job.start("run", *quick, "--nproc", "2", str(script))
    assert job.wait_ended(run) == 8
    failed, attempts, resumes, command = job.output().splitlines()[-4:]
    assert failed.endswith("reported a fault: ValueError: bad (train.py:9 in train)")
    assert attempts == "attempts: 3 in a row failed in the same way at step 2"
    assert resumes == "resumes from: the newest complete checkpoint of the job; this run saved none"
    assert command.startswith("command: elastic run ")


@pytest.mark.parametrize("ending", [pytest.param("", marks=pytest.mark.nightly), "import nowhere_to_be_found"])
def test_script_that_never_joins_runs_once_per_rank(job: ElasticRun, ending: str) -> None:
    script = job.folder / "p.py"
    script.write_text(f"open({str(job.folder / 'runs')!r}, 'a').write('run\\n')\n{ending}\n")
    quick = ("--no-agent", "--store", "nowhere:1", "--log-dir", str(job.folder / "logs"))
    run = job.start("run", *quick, "--simulate-nodes", "2", "--nnodes", "2", str(script))
    assert job.wait_ended(run) == 2
    assert (job.folder / "runs").read_text().count("run") <= 2
    said = job.output().splitlines()[-1]
    if ending:
        assert "p.py exited with status 1 before it called elastic.run" in said
        assert "ModuleNotFoundError: No module named 'nowhere_to_be_found'" in said
    else:
        assert "p.py exited without calling elastic.run / @elastic.recoverable; not retried" in said
        assert said.endswith("To run an unmodified script use torchrun")


def test_rank_that_ignores_a_resize_is_killed_and_the_job_continues(job: ElasticRun) -> None:
    run = job.run("--simulate-nodes", "3", "--nnodes", "1:3", "--shrink-after", "0", "--pause-timeout", "0.5")
    before = job.wait_world(3)
    job.touch("ignore-n1")
    job.run_json("resize", "--nodes", "2")
    ignorant = next(one["pid"] for one in before if one["node"] == "n1")
    wait_until(lambda: process_start_time(ignorant) < 0)
    after = job.wait_world(2, after=before[0]["epoch"])
    assert after[0]["epoch"] > before[0]["epoch"]
    assert ignorant not in {one["pid"] for one in after}
    assert {one["pid"] for one in after} & {one["pid"] for one in before}
    job.finish()
    assert job.wait_ended(run) == 0
