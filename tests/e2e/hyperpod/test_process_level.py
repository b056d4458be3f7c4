"""Real agents in process-level mode, two pods of two ranks: faults, resizes, progress and signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from peerstore.membership.discovery import parse_discovery
from tests.support import hyperpod_processes
from tests.support.agents import stop_agent
from tests.support.hyperpod_agents import ROOT, AgentPod, running_agents, start_pods, wait_for_states
from tests.support.hyperpod_processes import ACT, JOB, LIMIT
from tests.support.leaks import process_prefix
from tests.support.local_nodes import wait_until

pytestmark = pytest.mark.e2e

TOTAL = 24
FAR = 1_000


class ProcessLevelRun:
    """The pods, and the folder that the ranks share with the test."""

    def __init__(self, folder: Path, pods: list[AgentPod]) -> None:
        self.folder, self.pods = folder, pods

    def write_instruction(self, name: str, what: object) -> None:
        (self.folder / f"{name}.tmp").write_text(str(what))
        (self.folder / f"{name}.tmp").replace(self.folder / name)

    def lines(self, what: str) -> list[dict[str, Any]]:
        found = []
        for path in sorted((self.folder / "diary").glob("*.jsonl")):
            lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            found += [one for one in map(json.loads, lines) if one["what"] == what]
        return sorted(found, key=lambda one: one["at"])

    def wait_step(self, step: int, ranks: int, restarts: int, size: int) -> list[dict[str, Any]]:
        """Wait until ``ranks`` ranks have done and sealed the step, after ``restarts`` faults."""

        def there() -> list[dict[str, Any]]:
            found = [
                one
                for one in self.lines("step")
                if (one["step"], one["restarts"], one["size"]) == (step, restarts, size)
            ]
            for pod in self.pods:
                status = pod.status()
                assert status["status"] != "faulted", f"{status}\n{pod.rank_output()[-4000:]}"
            return found if len(found) == ranks else []

        return wait_until(there, f"{ranks} ranks have done step {step}", 120)

    def progress(self) -> list[int]:
        """Return the progress that each agent reports."""
        found = [pod.status().get("progress") or {} for pod in self.pods]
        return [one[JOB]["progressCount"] if JOB in one else -1 for one in found]

    def operator_progress(self) -> dict[str, Any]:
        """Return the operator's view: the newest progress that any pod reports."""
        step = max(self.progress())
        return {JOB: {"progressData": f"{JOB}/step-{step}", "progressCount": step}}

    def stop_gracefully(self, pod: AgentPod, handlers: int) -> None:
        """Stop the agent gracefully, and wait until its ranks have received the signal."""
        pod.stop(graceful=True, timeout_s=100)
        wait_until(lambda: len(self.lines("handler")) == handlers, "the ranks have received the signal", 60)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessLevelRun]:
    folder = tmp_path_factory.mktemp("hyperpod")
    (folder / "diary").mkdir()
    memory = Path("/dev/shm") / (process_prefix("tieredckpt") + uuid.uuid4().hex[:8])
    environ = {
        "TEST_MEMORY": str(memory),
        "HYPERPOD_SIGNAL_COORDINATION": "distributed",
        "TIEREDCKPT_AGENT_BUDGET": "64MiB",
        "TIEREDCKPT_AGENT_LINGER_S": "1",
        "TIEREDCKPT_AGENT_JOB_TTL_S": "300",
    }
    script = [hyperpod_processes.__file__, str(folder), str(TOTAL)]
    try:
        with running_agents(2, script, folder=folder, nproc=2, environ=environ) as pods:
            yield ProcessLevelRun(folder, pods)
    finally:
        for number in range(2):
            stop_agent(Path(f"{memory}pod{number}"), signal.SIGKILL)
            shutil.rmtree(f"{memory}pod{number}", ignore_errors=True)


@pytest.fixture(scope="module")
def resized_job(job: ProcessLevelRun) -> dict[str, Any]:
    """Kill a rank, shrink and grow the job, complete it, and return the observations."""
    seen: dict[str, Any] = {}
    job.write_instruction(ACT, "ours")
    job.write_instruction(LIMIT, 6)
    start_pods(
        job.pods, version="2026-01-31T12:00:00Z", rankIps=[{"rank": n, "ip": f"10.0.0.{n + 1}"} for n in range(2)]
    )
    doomed = job.wait_step(5, 4, 0, 4)
    seen["rosters"] = [
        parse_discovery(f"hyperpod:{pod.folder}/config/pod_resourceconfig.json").member_list() for pod in job.pods
    ]
    seen["first progress"] = wait_until(lambda: min(found := job.progress()) >= 4 and found, "progress is reported")
    os.kill(next(one["pid"] for one in doomed if one["rank"] == 3), signal.SIGKILL)
    wait_for_states(job.pods, "faulted", any_of=True)
    seen["fault"] = job.pods[1].status()
    given = {JOB: {"progressData": f"{JOB}/step-4", "progressCount": 4}}  # older than the newest step
    for pod in job.pods:
        pod.stop()
    wait_for_states(job.pods, "ready")

    job.write_instruction(LIMIT, 12)
    start_pods(job.pods, fault_count=1, progress=given)
    job.wait_step(11, 4, 1, 4)
    job.stop_gracefully(job.pods[0], 2)
    job.write_instruction(LIMIT, FAR)
    wait_for_states(
        job.pods[:1], "ready"
    )  # its ranks have ended with status 0, after all have sealed and left the world
    seen["not asked"] = job.pods[1].status()["status"], len(job.pods[1].ranks())
    job.pods[1].stop(graceful=True, timeout_s=100)
    wait_for_states(job.pods[1:], "ready")
    seen["progress of a stop"] = job.progress()
    seen["printed"] = job.pods[0].rank_output()  # the next start with the same fault count truncates the files

    job.write_instruction(LIMIT, 18)
    start_pods(job.pods[:1], fault_count=1, progress=job.operator_progress())
    job.wait_step(17, 2, 1, 2)
    job.stop_gracefully(job.pods[0], 6)
    job.write_instruction(LIMIT, FAR)
    wait_for_states(job.pods[:1], "ready")
    start_pods(job.pods, fault_count=1, progress=job.operator_progress())
    wait_for_states(job.pods, "completed")
    seen["last progress"] = job.progress()
    for pod in job.pods:
        pod.stop()
    wait_for_states(job.pods, "ready")
    return seen


def test_killed_rank_loses_no_sealed_step(job, resized_job):
    assert resized_job["fault"]["status"] == "faulted"
    worlds = [one for one in job.lines("world") if (one["restarts"], one["size"]) == (1, 4)][:4]
    assert {one["first"] for one in worlds} == {6}
    assert {tier for one in worlds for tier in one["tiers"]} <= {"memory", "peer"}


def test_progress_is_reported_and_the_returned_step_respected(job, resized_job):
    assert all(step in (4, 5) for step in resized_job["first progress"])
    assert len(set(resized_job["progress of a stop"])) == 1
    assert resized_job["progress of a stop"][0] >= 12
    assert resized_job["last progress"] == [TOTAL - 1, TOTAL - 1]
    said = (
        "the agent was told to go on from step 4 (tiered://golden/step-4); resuming from step 5, which is newer and "
        "complete"
    )
    assert said in resized_job["printed"]


def test_rank_that_stops_before_its_agents_request_is_not_completed(resized_job):
    state, ranks = resized_job["not asked"]
    assert state == "running"
    assert ranks >= 2


def test_member_list_file_lists_all_nodes(resized_job):
    first, second = resized_job["rosters"]
    assert first == second
    assert [node.address for node in first.nodes] == ["10.0.0.1:7070", "10.0.0.2:7070"]
    assert first.version == 1769860800000  # milliseconds


def test_job_resized_down_and_up_resumes_at_the_common_step(job, resized_job):
    worlds = [(one["size"], one["first"]) for one in job.lines("world")]
    stopped = resized_job["progress of a stop"][0] + 1
    assert worlds.count((2, stopped)) == 2
    larger = [first for size, first in worlds if size == 4 and first > stopped]
    assert len(larger) == 4
    assert len(set(larger)) == 1


def test_every_step_is_that_of_an_undisturbed_run(job, resized_job, tmp_path):
    alone = ProcessLevelRun(tmp_path, [])
    (tmp_path / "diary").mkdir()
    alone.write_instruction(ACT, "ours")
    alone.write_instruction(LIMIT, FAR)
    memory = Path("/dev/shm") / (process_prefix("tieredckpt") + uuid.uuid4().hex[:8])
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TEST_MEMORY": str(memory), "TIEREDCKPT_AGENT_LINGER_S": "1"}
    command = [sys.executable, hyperpod_processes.__file__, str(tmp_path), str(TOTAL)]
    agent = Path(f"{memory}{tmp_path.name}")
    try:
        subprocess.run(command, cwd=tmp_path, env={**environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=120)
    finally:
        stop_agent(agent, signal.SIGKILL)
        shutil.rmtree(agent, ignore_errors=True)
    undisturbed = {one["step"]: (one["loss"], one["sum"]) for one in alone.lines("step")}
    assert sorted(undisturbed) == list(range(TOTAL))
    disturbed = job.lines("step")
    assert {one["step"] for one in disturbed} == set(undisturbed)
    assert {one["size"] for one in disturbed} == {2, 4}
    for one in disturbed:
        assert (one["loss"], one["sum"]) == undisturbed[one["step"]]


# -- loops that poll for a stop ---------------------------------------------------------------------------------------


def stop_one_gracefully(job: ProcessLevelRun, act: str, signalled: Callable[[list[int]], bool]) -> list[dict[str, Any]]:
    """Stop one agent gracefully, and return how the ranks of both agents ended.

    The ranks do not end before ``signalled`` is true for the children of the stopped agent's ranks.
    """
    job.write_instruction(ACT, act)
    start_pods(job.pods)
    wait_until(lambda: len(list(job.folder.glob(f"{act}-begun-?"))) == 4, "all ranks are in their loop", 120)
    children = [int((job.folder / f"{act}-begun-{rank}").read_text()) for rank in (0, 1)]
    job.pods[0].stop(graceful=True, timeout_s=100)
    wait_until(lambda: signalled(children), "both ranks of the agent have been signalled", 60)
    job.write_instruction(f"{act}-end", "")
    wait_for_states(job.pods[:1], "ready")
    return wait_until(lambda: len(found := rank_endings(job, act)) == 4 and found, "all ranks have stopped", 60)


def rank_endings(job: ProcessLevelRun, act: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(job.folder.glob(f"{act}-ended-?"))]


def is_dead(pid: int) -> bool:
    """Return whether the process has ended, reaped or not."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def signalled_ranks(job: ProcessLevelRun, act: str) -> list[str]:
    """Return the ranks whose own signal handler ran."""
    return sorted(path.name[-1] for path in job.folder.glob(f"{act}-heard-?"))


def test_polling_loops_stop_at_the_same_step_and_keep_their_children(job):
    ended = stop_one_gracefully(job, "asking", lambda _children: signalled_ranks(job, "asking") == ["0", "1"])
    assert len({one["step"] for one in ended}) == 1
    assert [one["loader"] for one in ended] == [True] * 4
    assert [one["beside"] for one in ended] == [0] * 4
    assert signalled_ranks(job, "asking") == ["0", "1"]
    assert job.pods[1].status()["status"] == "running"
    job.pods[1].stop(graceful=True, timeout_s=100)
    wait_for_states(job.pods, "ready")
    assert signalled_ranks(job, "asking") == ["0", "1", "2", "3"]  # all its ranks were alive to receive the signal


def test_shipped_wrapper_reports_an_unrequested_stop_as_completed(job):
    ended = stop_one_gracefully(job, "shipped", lambda children: all(map(is_dead, children)))
    wait_for_states(job.pods[1:], "completed")
    job.pods[1].stop(graceful=True, timeout_s=100)
    wait_for_states(job.pods, "ready")
    assert [one["beside"] for one in ended][:2] == [-signal.SIGUSR1] * 2
    assert signalled_ranks(job, "shipped") == []
