"""Real agents, real ranks and an operator escalate from process restarts to new pods to failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.hyperpod.operator import JobPhase
from tests.support.hyperpod_inprocess import Process, step_results
from tests.support.operated_jobs import OperatedJob, operated_job, reference_steps
from tests.support.zygote import Zygote

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
pytest.importorskip("hyperpod_elastic_agent")

IN_PROCESS, PROCESS, JOB = "in_process_restart", "process_level_restart", "job_level_restart"


@pytest.mark.nightly
def test_exhausted_restart_budgets_escalate_until_the_job_fails(tmp_path: Path, zygote: Zygote) -> None:
    """A process survives one restart and the pods survive two; then the job fails, without new pods."""
    limits = {"numRestartBeforeFullJobRestart": 2, "maxFullJobRestarts": 0}
    with operated_job(tmp_path, limits=limits, environ={"STORY_BUDGET": "1"}) as job:
        restart_in_new_processes(job)
        job.break_at("raise", rank=3, step=4)
        wait_given_up(job)
        assert job.restart_modes() == [IN_PROCESS, PROCESS]
        said = job.process_lines()
    assert_given_up(job, 0)
    assert step_results(said) == {key: value for key, value in reference_steps(zygote).items() if key[1] < 4}


@pytest.mark.nightly
def test_new_pods_resume_the_job_and_may_be_requested_by_a_rank(tmp_path: Path, zygote: Zygote) -> None:
    """As above, but the job may restart once in new pods."""
    limits = {"numRestartBeforeFullJobRestart": 2, "maxFullJobRestarts": 1}
    with operated_job(tmp_path, limits=limits, environ={"STORY_BUDGET": "1"}) as job:
        pods = {one.pod for one in restart_in_new_processes(job)}
        job.break_at("raise", rank=3, step=4)  # the processes would continue, but the pods have no restarts left
        fourth = job.wait_step(4, 4)
        assert not {one.pod for one in fourth} & pods
        assert all(one.steps == [4] for one in fourth)
        job.break_at("nan", rank=1, step=5)  # at every attempt; the second requests a restart of the job
        wait_given_up(job)
        assert job.restart_modes() == [IN_PROCESS, PROCESS, JOB, IN_PROCESS]
        said = job.process_lines()
    assert_given_up(job, 1)
    assert "the loss of step 5 is not finite (nan), in 2 attempts" in job.state.fault.message
    assert step_results(said) == {key: value for key, value in reference_steps(zygote).items() if key[1] < 5}


def restart_in_new_processes(job: OperatedJob) -> list[Process]:
    """Cause two faults: the processes survive the first and are replaced in their pods after the second."""
    job.set_limit(2)
    first = job.wait_step(1, 1)
    pods = job.state.members
    job.break_at("raise", rank=1, step=2)
    second = job.wait_step(2, 2)
    assert {one.pid for one in second} == {one.pid for one in first}
    job.break_at("raise", rank=2, step=3)
    third = job.wait_step(3, 3)
    assert not {one.pid for one in third} & {one.pid for one in second}
    assert job.state.members == pods
    assert all(one.steps == [3] for one in third), "the new processes resume at the step of the old ones"
    return third


def wait_given_up(job: OperatedJob) -> None:
    job.wait_until(lambda: job.state.phase.is_final, "the job has ended")
    job.wait_until(
        lambda: all(job.count_requests(pod, "/shutdown") for pod in job.state.members),
        "all agents receive a shutdown request",
    )


def assert_given_up(job: OperatedJob, full: int) -> None:
    assert job.state.phase is JobPhase.FAILED
    failed = next(one for one in job.state.conditions if one.type == "Failed")
    assert failed.reason == "RestartLimitExceeded"
    first = {
        "WorkerFault",
        "ElasticWorld",
    }  # either the faulty rank's agent or a notified one reports first
    ends = {f"the job failed after {why}: more than {full} restarts of the whole job within 3600 s" for why in first}
    assert failed.message.removesuffix(" (maxFullJobRestarts)") in ends
