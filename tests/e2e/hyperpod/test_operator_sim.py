"""``hyperpod-operator-sim`` with real agents: start, faults, resizes, and a killed operator."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from integration.hyperpod.operator import JobPhase, RestartMode
from integration.hyperpod.operator.sim_loop import SIM_DIRECTORY_ENV, SimDirectory, StoredSimulation
from integration.hyperpod.operator.sim_pods import kill_pod_processes
from tests.support.hyperpod_agents import ROOT, running_agents, wait_for_states
from tests.support.local_nodes import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
pytest.importorskip("hyperpod_elastic_agent")

RANK = ROOT / "tests/support/operated_rank.py"
IN_PROCESS = ROOT / "tests/support/operated_in_process.py"
_PATIENCE_S = 240.0


class Operator:
    """The simulated operator's command and its stored state."""

    def __init__(self, folder: Path, nproc: int) -> None:
        self.folder = folder
        self.place = SimDirectory("job", folder / "sim")
        self.environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            SIM_DIRECTORY_ENV: str(folder / "sim"),
            "OMP_NUM_THREADS": "1",
        }
        self.job = folder / "job.yaml"
        command = ["hyperpodrun", "--nnodes=2", f"--nproc-per-node={nproc}", "--server-log-level=warning"]
        container = {"name": "ranks", "command": [*command, str(RANK), str(folder)]}
        resource = {
            "apiVersion": "sagemaker.amazonaws.com/v1",
            "kind": "HyperPodPyTorchJob",
            "metadata": {"name": "job"},
            "spec": {
                "nprocPerNode": str(nproc),
                "replicaSpecs": [
                    {"name": "pods", "replicas": 2, "template": {"spec": {"containers": [container]}}},
                ],
                "elasticPolicy": {
                    "minReplicas": 1, "maxReplicas": 2, "gracefulShutdownTimeoutInSeconds": 60,
                    "scalingTimeoutInSeconds": 60, "faultyScaleDownTimeoutInSeconds": 120,
                },
            },
        }  # fmt: skip
        self.job.write_text(yaml.safe_dump(resource))
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, *where: str) -> None:
        log, answer = self.folder / "operator.log", self.folder / "answer.json"
        command = [*_COMMAND, "run", str(self.job), *where, "--every=0.1", "--json"]
        with log.open("ab") as err, answer.open("wb") as out:
            self.process = subprocess.Popen(command, cwd=ROOT, env=self.environ, stdout=out, stderr=err)

    def run_json(self, *words: str) -> Any:
        done = subprocess.run([*_COMMAND, *words, "--json"], env=self.environ, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout)

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(_PATIENCE_S)

    def stored_simulation(self) -> StoredSimulation:
        return wait_until(self.place.load, "the simulator has stored its state", _PATIENCE_S)

    def wait_running(self, size: int, *, after: int = 0) -> StoredSimulation:
        """Wait for a world newer than ``after`` with ``size`` agents, in which all ranks have met."""

        def there() -> StoredSimulation | None:
            assert self.process is None or self.process.poll() is None, self.log()
            kept = self.place.load()
            state = None if kept is None else kept.state
            good = state is not None and state.phase is JobPhase.RUNNING and state.epoch > after
            return kept if good and len(state.members) == size and self.has_met(state.epoch - 1, size) else None

        try:
            return wait_until(there, f"a world of {size} agents after {after}", _PATIENCE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}\n{self.place.load()}") from None

    def has_met(self, restarts: int, size: int) -> bool:
        nproc = len(list(self.folder.glob(f"in-{restarts}-*-*"))) / size
        return nproc >= 1 and all(
            (self.folder / f"in-{restarts}-{int(nproc) * size}-{r}").exists() for r in range(size)
        )

    def log(self) -> str:
        return (self.folder / "operator.log").read_text(errors="replace")

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(200)
        for pod in (self.place.folder / "pods").glob("*"):
            kill_pod_processes(pod)


_COMMAND = [sys.executable, "-m", "integration.hyperpod.operator"]


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    one = Operator(tmp_path, nproc=2)
    yield one
    one.close()


@pytest.mark.nightly
def test_operator_runs_a_single_machine_job_to_its_end(operator):
    operator.run("--spawn=3")
    first = operator.wait_running(2).state
    (operator.folder / "crash").touch()
    second = operator.wait_running(2, after=first.epoch).state
    assert second.restarts == 1
    assert second.members == first.members, "a process crash replaces no pod"
    assert second.last_fault.reason == "WorkerCrash"
    assert "The fault of reason WorkerCrash was remediated in" in operator.log()

    operator.run_json("scale", "1")
    third = operator.wait_running(1, after=second.epoch).state
    assert third.restarts == 1
    assert operator.run_json("status")["capacity"] == 1
    operator.process.send_signal(signal.SIGKILL)
    operator.process.wait()
    assert [pod["answer"]["state"] for pod in operator.run_json("status")["pods"] if pod["name"] in third.members] == [
        "running"
    ]

    operator.run("--spawn=3")  # continues the running job
    operator.run_json("scale", "max")
    fourth = operator.wait_running(2, after=third.epoch).state
    assert fourth.epoch == third.epoch + 1, "the new operator changed the size and nothing else"
    assert fourth.restarts == 1

    (operator.folder / "finish").touch()
    assert operator.wait() == 0, operator.log()
    answer = json.loads((operator.folder / "answer.json").read_text())
    assert answer["phase"] == "Succeeded"
    assert answer["status"]["elasticScalingStatus"]["consecutiveScalingFailures"] == 0


def test_example_job_runs_to_its_end(operator):
    """The example runs as its first line shows, with its memory in the test's folder."""
    words = (ROOT / "examples" / "hyperpod_job.yaml").read_text()
    operator.job.write_text(words.replace("/dev/shm/example-hyperpod", str(operator.folder / "memory")))
    operator.place = SimDirectory("example", operator.folder / "sim")
    operator.run("--spawn=2")
    assert operator.wait() == 0, operator.log()
    answer = json.loads((operator.folder / "answer.json").read_text())
    assert (answer["phase"], answer["status"]["restartCount"]) == ("Succeeded", 0)


def test_operator_adopts_external_agents_and_abandons_a_bad_node(tmp_path):
    operator = Operator(tmp_path, nproc=1)
    with running_agents(2, [RANK, str(tmp_path)], folder=tmp_path / "pods") as pods:
        try:
            operator.run("--agents=" + ",".join(pod.address for pod in pods))
            first = operator.wait_running(2).state
            assert set(first.members) == {pod.address for pod in pods}
            operator.run_json("fault", first.members[1])
            wait_until(
                lambda: operator.stored_simulation().state.restarts == 1,
                "the operator replaces the bad node",
                _PATIENCE_S,
            )
            assert operator.stored_simulation().state.last_fault is None
            operator.run_json("fault", first.members[1], "--healthy")
            second = operator.wait_running(2, after=first.epoch).state
            assert second.last_fault.reason == "NodeFault"
            (tmp_path / "finish").touch()
            assert operator.wait() == 0, operator.log()
            for pod in pods:
                assert pod.process.wait(200) == 0
            wait_for_states(pods, "down")
        finally:
            operator.close()


def test_in_process_ranks_are_assigned_and_restarted(tmp_path):
    """In-process ranks get their assignment from /update, and survive a fault."""
    operator = Operator(tmp_path, nproc=1)
    with running_agents(2, [IN_PROCESS, str(tmp_path)], folder=tmp_path / "pods", inprocess=True, ready=False) as pods:
        try:
            operator.run("--agents=" + ",".join(pod.address for pod in pods))
            first = operator.wait_running(2).state
            ranks = [(tmp_path / f"in-{first.epoch - 1}-2-{rank}").read_text() for rank in range(2)]
            assert all((tmp_path / f"told-{rank}-{pid}").exists() for rank, pid in enumerate(ranks))
            (tmp_path / "crash").touch()
            second = operator.wait_running(2, after=first.epoch).state
            assert second.last_fault.reason == "Broken"
            assert second.last_fault.mode is RestartMode.IN_PROCESS
            assert [(tmp_path / f"in-{second.epoch - 1}-2-{rank}").read_text() for rank in range(2)] == ranks
            (tmp_path / "finish").touch()
            assert operator.wait() == 0, operator.log()
        finally:
            operator.close()
