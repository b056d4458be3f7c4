"""A job of ``tests.support.hyperpod_inprocess`` under a simulated operator, with real agents as pods.

The node agent belongs to no pod, as in a DaemonSet: it outlives the pods and so does its memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from integration.hyperpod.job_resource import parse_job_resource
from integration.hyperpod.operator.decision import OperatorEvent
from integration.hyperpod.operator.elastic_agent_client import ElasticAgentClient
from integration.hyperpod.operator.job_state import JobState
from integration.hyperpod.operator.observed_pods import AgentStatus
from integration.hyperpod.operator.sim_cli import _PORTS
from integration.hyperpod.operator.sim_loop import SimDirectory, SimulatedOperator
from integration.hyperpod.operator.sim_pods import LocalPods
from tests.support import hyperpod_inprocess
from tests.support.agents import agent_directory, agent_pid
from tests.support.hyperpod_agents import ROOT
from tests.support.hyperpod_inprocess import TOTAL, Process, processes, run_training, step_results
from tests.support.launched import start_ranks
from tests.support.local_nodes import wait_until
from tests.support.zygote import Zygote

RANKS = 4
PATIENCE_S = 240.0
Steps = dict[tuple[int, int], str]


@functools.cache
def reference_steps(zygote: Zygote) -> Steps:
    """Return the result of every rank and step of an undisturbed run."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with (
        tempfile.TemporaryDirectory() as folder,
        agent_directory() as directory,
        pytest.MonkeyPatch.context() as patch,
    ):
        (Path(folder) / "limit").write_text(str(TOTAL))
        patch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(directory))
        patch.setenv("TIEREDCKPT_AGENT_BUDGET", "1GiB")
        ended = [one.wait() for one in start_ranks(zygote, RANKS, store.port, run_training, folder)]
    assert [one.result for one in ended] == ["finished"] * RANKS
    found = step_results([line.split() for one in ended for line in one.lines])
    assert len(found) == RANKS * TOTAL
    return found


class OperatedJob:
    """Two pods of two ranks each, with their operator."""

    def __init__(
        self, folder: Path, operating: SimulatedOperator, place: SimDirectory, events: list[OperatorEvent]
    ) -> None:
        self.folder, self.operating, self.place, self.events = folder, operating, place, events

    @property
    def state(self) -> JobState:
        return self.operating.state

    def set_limit(self, limit: int) -> None:
        path = self.folder / "limit.new"
        path.write_text(str(limit))
        path.replace(self.folder / "limit")

    def break_at(self, kind: str, rank: int, step: int) -> None:
        (self.folder / f"break-{kind}").write_text(f"{rank} {step}")
        self.set_limit(step + 1)

    def wait_step(self, world: int, step: int) -> list[Process]:
        """Wait until all ranks have done a step in a running world (the first is 1); return their processes."""

        def there() -> list[Process]:
            assert not self.state.phase.is_final, self.report()
            at = [one for one in processes(self.folder) if one.newest_step == (world - 1, step)]
            runs = self.state.phase.value == "Running" and self.state.epoch == world
            return at if runs and len(at) == RANKS else []

        return self.wait_until(there, f"step {step} of world {world}")

    def wait_until(self, there: Any, what: str) -> Any:
        try:
            return wait_until(there, what, PATIENCE_S)
        except AssertionError as late:
            raise AssertionError(f"{late}\n{self.report()}") from None

    def process_lines(self) -> list[list[str]]:
        return [line for one in processes(self.folder) for line in one.lines]

    def restart_modes(self) -> list[str]:
        """Return the mode of each restart, in order."""
        return [one.message.rpartition(" ")[2] for one in self.events if one.reason == "Restarting"]

    def pod_folder(self, name: str) -> Path:
        """Return the folder with the output of a pod and its ranks, which outlives the pod."""
        return self.place.folder / "pods" / name

    def rank_output(self, name: str) -> str:
        files = sorted((self.pod_folder(name) / "logs").rglob("std*.log"), key=lambda path: path.stat().st_mtime_ns)
        return "\n".join(path.read_text(errors="replace") for path in files)

    def count_requests(self, name: str, path: str) -> int:
        """Count the requests for ``path`` in the log of the pod's agent."""
        return (self.pod_folder(name) / "agent.log").read_text(errors="replace").count(f'"POST {path} HTTP')

    def last_status(self, name: str) -> AgentStatus:
        """Return the last reported status of the pod's agent."""
        kept = self.place.load()
        found = [one.agent_status for one in kept.observed.pods if one.name == name] if kept else []
        assert found, self.report()
        assert found[0] is not None, self.report()
        return found[0]

    def node_of(self, name: str) -> str:
        return str(self._pod(name)["node"])

    def rank_pids(self, name: str) -> set[int]:
        """Return the pids of a pod's processes except its agent."""
        mark = f"HYPERPOD_SIM_POD={self.pod_folder(name)}".encode()
        found = set()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    found.add(int(path.parent.name))
        return found - {self.agent_pid(name)}

    def agent_pid(self, name: str) -> int:
        """Return the pid of a pod's agent."""
        return int(self._pod(name)["pid"])

    def _pod(self, name: str) -> dict[str, Any]:
        pods = msgspec.json.decode((self.place.folder / "pods.json").read_bytes())
        return next(pod for pod in pods if pod["name"] == name)

    def _ask_for_stacks(self, pod: str) -> None:
        """Make the ranks print their stacks to their output."""
        bit = 1 << (signal.SIGUSR1 - 1)
        asked = False
        for pid in self.rank_pids(pod):
            with contextlib.suppress(OSError):
                caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
                if caught is not None and int(caught[1], 16) & bit:
                    os.kill(pid, signal.SIGUSR1)
                    asked = True
        time.sleep(2.0 if asked else 0.0)  # the ranks do not report when they have written them

    def report(self) -> str:
        told = "\n".join(f"{one.reason}: {one.message}" for one in self.events)
        kept = self.place.load()
        for one in kept.observed.pods if kept else ():
            self._ask_for_stacks(one.name)
        pods = (
            "\n".join(f"--- {one.name}\n{self.rank_output(one.name)[-9000:]}" for one in kept.observed.pods)
            if kept
            else ""
        )
        return f"{told}\n{self.state}\n{kept.observed if kept else ''}\n{pods}"


class PatientPods(LocalPods):
    """Pods whose ranks may take any time to start."""

    launcher = "tests.support.patient_agent"


@contextlib.contextmanager
def operated_job(
    folder: Path,
    *,
    spares: int = 0,
    limits: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    options: Sequence[str] = ("--inprocess-restart",),
) -> Iterator[OperatedJob]:
    """Run a job with one node for each pod, spares included. ``limits`` is its ``restartPolicy``."""
    (folder / "limit").write_text("0")
    with contextlib.ExitStack() as stack:
        memory = stack.enter_context(_node_agent(folder))
        known = {
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "STORY": str(folder),
            "TIEREDCKPT_AGENT_DIRECTORY": str(memory), **(environ or {}),
        }  # fmt: skip
        spec = parse_job_resource(
            _resource(spares, limits, known, options), master_port=random.choice(_PORTS), agent_timeout_s=60.0
        )
        place = SimDirectory(spec.name, folder / "sim")
        stack.enter_context(place.lock())
        client = stack.enter_context(ElasticAgentClient(30.0))
        pods = PatientPods(spec, 2 + spares, place.folder)
        stack.callback(pods.close)
        events: list[OperatorEvent] = []
        operating = SimulatedOperator(
            spec, pods, place, client, told=lambda _, event: events.append(event), every_s=0.1
        )
        stop = threading.Event()
        thread = threading.Thread(target=operating.run, args=(stop,))
        thread.start()
        stack.callback(thread.join)
        stack.callback(stop.set)
        yield OperatedJob(folder, operating, place, events)


def _resource(
    spares: int, limits: Mapping[str, Any] | None, environ: Mapping[str, str], options: Sequence[str]
) -> dict[str, Any]:
    command = ["hyperpodrun", "--nnodes=2", "--nproc-per-node=2", *options, "--server-log-level=info"]
    command += ["--monitor-interval=0.1", "--redirects=3", "--shutdown-timeout=5", str(hyperpod_inprocess.__file__)]
    env = [{"name": name, "value": value} for name, value in environ.items()]
    env.append({"name": "TEST_POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}})
    container = {"name": "ranks", "command": command, "env": env}
    group = {"name": "pods", "replicas": 2, "spares": spares, "template": {"spec": {"containers": [container]}}}
    run = {"restartPolicy": {"evalPeriodSeconds": 3600, **limits}} if limits else {}
    return {
        "kind": "HyperPodPyTorchJob",
        "metadata": {"name": "job"},
        "spec": {"nprocPerNode": "2", "replicaSpecs": [group], "runPolicy": run},
    }


@contextlib.contextmanager
def _node_agent(folder: Path) -> Iterator[Path]:
    with agent_directory() as directory, (folder / "memory.log").open("wb") as out:
        command = [sys.executable, "-m", "tieredckpt.agent", "--dir", str(directory), "--budget", "1GiB"]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen([*command, "--linger-s", "600"], env=environ, stdout=out, stderr=out)
        try:
            wait_until(lambda: agent_pid(directory) == process.pid, "the node's agent is there")
            yield directory
        finally:
            process.terminate()
            process.wait(200)
