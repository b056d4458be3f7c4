"""Faults of every kind under real elastic agents, with an unchanged script in surviving processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import hyperpod_inprocess
from tests.support.hyperpod_agents import AgentPod, running_agents, start_pods, stop_pods, wait_for_states
from tests.support.hyperpod_inprocess import TOTAL, Process, processes, step_results
from tests.support.local_nodes import wait_until
from tests.support.operated_jobs import reference_steps

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
PATIENCE_S = 240.0
RANKS = 4


class InProcessJob:
    """A job of two pods with two ranks each, its spare pods, and its operator."""

    def __init__(self, pods: list[AgentPod], folder: Path) -> None:
        self.pods, self.spares, self.folder = pods[:2], pods[2:], folder
        self.count = 0
        start_pods(self.pods)

    def set_limit(self, limit: int) -> None:
        path = self.folder / "limit.new"
        path.write_text(str(limit))
        path.replace(self.folder / "limit")

    def break_at(self, kind: str, rank: int, step: int) -> None:
        (self.folder / f"break-{kind}").write_text(f"{rank} {step}")
        self.set_limit(step + 1)

    def wait_step(self, step: int) -> list[Process]:
        """Wait until all ranks have done this step since the newest start, and return their processes."""

        def there() -> list[Process]:
            at = [one for one in processes(self.folder) if one.newest_step == (self.count, step)]
            return at if len(at) == RANKS else []

        try:
            return wait_until(there, f"step {step} of start {self.count}", PATIENCE_S)
        except AssertionError as late:
            raise AssertionError(f"{late}\n" + "\n".join(pod.rank_output()[-3000:] for pod in self.pods)) from None

    def wait_fault(self) -> dict[str, Any]:
        """Wait for a fault and return the status of the first agent that reports one."""
        wait_for_states(self.pods, "faulted", any_of=True, timeout_s=PATIENCE_S)
        return next(found for pod in self.pods if (found := pod.status())["status"] == "faulted")

    def restart(self) -> None:
        stop_pods(self.pods, mode="in_process_restart")
        self.count += 1
        start_pods(self.pods, fault_count=self.count)

    def step_until_stopped(self, step: int) -> dict[str, Any]:
        """Run one step after the other until the ranks stop, and return the status of a faulted agent."""

        def stops() -> bool:
            return any(pod.status()["status"] == "faulted" for pod in self.pods)

        def done_by_all() -> bool:
            return sum(one.newest_step == (self.count, step) for one in processes(self.folder)) == RANKS

        while not stops():
            self.set_limit(step + 1)
            wait_until(lambda: stops() or done_by_all(), f"step {step} is done, or the ranks stop", PATIENCE_S)
            step += 1
        return self.wait_fault()

    def replace_pod(self, number: int, step: int) -> None:
        """Kill a pod before this step completes, and replace it with a spare."""
        lost = self.pods[number]
        lost.kill()
        self.set_limit(step + 1)
        others = [pod for pod in self.pods if pod is not lost]
        for pod in others:
            pod.stop(mode="in_process_restart")
        self.pods[number] = self.spares.pop()
        wait_for_states(self.pods, "ready", timeout_s=PATIENCE_S)
        self.count += 1
        start_pods(self.pods, fault_count=self.count)


@contextlib.contextmanager
def in_process_job(folder: Path, agent_dir: Path, *, spares: int = 0, **options: Any) -> Iterator[InProcessJob]:
    environ = {
        "STORY": str(folder),
        "TIEREDCKPT_AGENT_DIRECTORY": str(agent_dir),
        "TIEREDCKPT_AGENT_BUDGET": "2GiB",
        "TEST_HANGS": "hangs",  # in each pod's folder
    }
    (folder / "limit").write_text("0")
    script = hyperpod_inprocess.__file__
    options = {"folder": folder / "pods", "nproc": 2, "inprocess": True, "environ": environ, **options}
    with running_agents(2 + spares, script, **options, launcher="tests.support.patient_agent") as pods:
        yield InProcessJob(pods, folder)


def pids_of(found: list[Process], pod: str = "") -> set[int]:
    return {one.pid for one in found if pod in ("", one.pod)}


def raise_in_rank(job: InProcessJob, step: int, first: list[Process]) -> None:
    """Raise in a rank, and check that all processes stay."""
    job.break_at("raise", rank=1, step=step)
    assert "ZeroDivisionError" in job.wait_fault()["message"]
    job.restart()
    assert pids_of(job.wait_step(step)) == pids_of(first)


def kill_in_rank(job: InProcessJob, step: int, first: list[Process]) -> list[Process]:
    """Kill a rank, and check that the processes of the other pod stay."""
    job.break_at("kill", rank=2, step=step)
    assert job.wait_fault()["reason"] == "WorkerCrash"
    job.restart()
    second = job.wait_step(step)
    assert pids_of(second, "pod0") == pids_of(first, "pod0")
    assert not pids_of(second, "pod1") & pids_of(first)
    return second


def run_to_completion(job: InProcessJob) -> list[list[str]]:
    """Wait until the job has completed, and return the lines of all ranks."""
    job.set_limit(TOTAL)
    wait_for_states(job.pods, "completed", timeout_s=PATIENCE_S)
    return [line for one in processes(job.folder) for line in one.lines]


def test_other_processes_survive_ranks_that_raise_or_are_killed(agent_dir, tmp_path, zygote):
    """A short selection; the nightly test has all other kinds of faults."""
    with in_process_job(tmp_path, agent_dir) as job:
        job.set_limit(2)
        first = job.wait_step(1)
        raise_in_rank(job, 2, first)
        kill_in_rank(job, 3, first)
        said = run_to_completion(job)
    assert said.count(["ended", "finished"]) == RANKS
    assert step_results(said) == reference_steps(zygote)


@pytest.mark.nightly
def test_faults_of_all_kinds_under_real_agents(agent_dir, tmp_path, zygote):
    with in_process_job(tmp_path, agent_dir, spares=1, inprocess_timeout_s=5) as job:
        job.set_limit(2)
        first = job.wait_step(1)

        # A rank raises twice, and the operator receives its number.
        raise_in_rank(job, 2, first)
        job.break_at("raise", rank=1, step=3)
        assert job.wait_fault()["rank_labels"] == {"elastic-repeat-offender": "2"}
        job.restart()
        assert pids_of(job.wait_step(3)) == pids_of(first)

        # A rank requests a new world: all stop at one step, and no step is repeated.
        os.kill(max(pids_of(first)), signal.SIGUSR1)
        asked = job.step_until_stopped(4)
        assert (asked["reason"], asked["restartMode"]) == ("ElasticWorld", "in_process_restart")
        job.restart()
        at = 1 + max(one.steps[-1] for one in job.wait_step(-1))
        job.set_limit(at + 1)
        calm = job.wait_step(at)
        assert pids_of(calm) == pids_of(first)
        assert all(one.steps[-(at - 3) :] == list(range(4, at + 1)) for one in calm)

        second = kill_in_rank(job, at + 1, first)

        # A rank hangs and no abort wakes it: its agent times out and starts new processes for the pod.
        job.break_at("hang", rank=1, step=at + 2)
        wait_until(lambda: not (tmp_path / "break-hang").exists(), "the rank hangs", PATIENCE_S)
        hangs = job.pods[0].folder / "hangs"
        hangs.touch()
        job.restart()
        hangs.unlink()
        third = job.wait_step(at + 2)
        assert not pids_of(third, "pod0") & pids_of(second)
        assert pids_of(third, "pod1") == pids_of(second, "pod1")

        # A pod is lost, and the rendezvous store with it: a warm spare takes its place.
        waiting = job.spares[0].ranks()
        job.replace_pod(0, step=at + 3)
        fourth = job.wait_step(at + 3)
        assert pids_of(fourth, "pod1") == pids_of(second, "pod1")
        assert pids_of(fourth, "pod2") <= set(waiting)
        assert not pids_of(fourth, "pod0")

        said = run_to_completion(job)
    assert said.count(["ended", "finished"]) == RANKS
    assert step_results(said) == reference_steps(zygote)
