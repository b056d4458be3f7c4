"""Pods of the Kubeflow runtime and of the JobSet, run as processes with a Lease on a real API server."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic.fault_injection import FaultPlan
from integration.hyperpod.job_manifest import ARENA_DIRECTORY
from integration.kubernetes.tiered_pods import MANIFESTS, PREEMPTED_STATUS, SECRET_NAME
from tests.support.elastic_runs import kill
from tests.support.golden_runs import (
    EVERY,
    SETTLE_S,
    TRAINER,
    GoldenRun,
    assert_same_training,
    assert_worlds_consistent,
    reference_run,
)
from tests.support.jobset_pods import JobSetPod, jobset_of_train_job
from tests.support.kube_server import KubeClient
from tests.support.local_nodes import wait_until

pytestmark = pytest.mark.system

_STEPS = 60
_NAME = "tiered"
_SECRET = "a secret that two pods know"


def _documents(name: str) -> Iterator[dict[str, Any]]:
    return yaml.safe_load_all((MANIFESTS / name).read_text(encoding="utf-8"))


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Yield a folder whose name leaves room for a pod's name in the path of a socket."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _train_job_set(args: list[str]) -> dict[str, Any]:
    (runtime,) = _documents("kubeflow/torch-tiered.yaml")
    trainer = {"image": "train:1", "args": args, "numNodes": 2, "numProcPerNode": 1}
    return jobset_of_train_job(runtime, {"metadata": {"name": _NAME}, "spec": {"trainer": trainer}})


def _plain_job_set(args: list[str]) -> dict[str, Any]:
    (jobset,) = _documents("training/jobset.yaml")
    jobset["metadata"]["name"] = _NAME
    (container,) = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    container["args"] = args
    (nproc,) = [one for one in container["env"] if one["name"] == "PET_NPROC_PER_NODE"]
    nproc["value"] = "1"
    return jobset


class PodProcesses:
    """The containers of one pod as processes of this machine."""

    def __init__(self, job: GoldenRun, pod: JobSetPod, kubeconfig: Path) -> None:
        self.job, self.name = job, pod.name
        memory = job.folder / pod.name
        memory.mkdir()
        put = {  # each pod has these to itself in a cluster
            ARENA_DIRECTORY: str(memory / "tieredckpt"),
            "--budget=68719476736": "--budget=67108864",
            "--log-dir=/tmp/elastic-logs": f"--log-dir={job.folder / 'logs'}",
            "kubernetes:///": "kubernetes://default/",
            **{f":{port}": ":0" for port in (7070, 7400, 9464)},
        }
        self._put = put
        (sidecar,), (trainer,) = pod.spec["initContainers"], pod.spec["containers"]
        environ = {**job.environ, "KUBECONFIG": str(kubeconfig), "no_proxy": "*"}
        for name in ("TIEREDCKPT_AGENT_DIRECTORY", "TIEREDCKPT_AGENT_BUDGET"):
            environ.pop(name)
        self.agent = self._start(pod, sidecar, environ)
        wait_until(lambda: self.agent.poll() is not None or (memory / "tieredckpt" / "agent.sock").exists(), "an agent")
        assert self.agent.poll() is None, job.output()
        self.launcher = self._start(pod, trainer, environ)

    def _start(self, pod: JobSetPod, container: dict[str, Any], environ: dict[str, str]) -> subprocess.Popen[bytes]:
        program, *words = [self._local(word) for word in pod.words(container)]
        values = {key: self._local(value) for key, value in pod.environ(container).items()}
        with (self.job.folder / f"output-{len(self.job.started)}").open("wb") as output:
            one = subprocess.Popen(
                [sys.executable, "-m", program, *words],
                cwd=self.job.folder, env={**environ, **values}, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.job.started.append(one)
        return one

    def _local(self, text: str) -> str:
        for name, value in self._put.items():
            text = text.replace(name, value)
        return text

    def rank_pids(self) -> set[int]:
        return {one["pid"] for one in self.job.log_lines("world") if _node_of(one["pid"]) == self.name}

    def lose(self) -> set[int]:
        """Kill all processes of the pod at once, as with its machine, and return their pids."""
        named = self.job.pids(f'"node":"{self.name}"') + self.job.pids(f'"candidate":"{self.name}-')
        gone = {self.launcher.pid, self.agent.pid, *named, *self.job.pids(f"--node={self.name}"), *self.rank_pids()}
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in gone:
                if Path(f"/proc/{pid}").exists():
                    kill(pid, number)
        assert self.launcher.wait(60) == -signal.SIGKILL
        return gone


def _node_of(pid: int) -> str:
    """Return the node of a rank, or an empty string if the process is gone."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((one.partition(b"=")[2].decode() for one in environ if one.startswith(b"ELASTIC_NODE=")), "")


def _wait_steps(job: GoldenRun, size: int, step: int = 0) -> None:
    """Wait for ``step`` or a later one in a world of ``size`` ranks."""
    try:
        wait_until(lambda: any(one["size"] == size and one["step"] >= step for one in job.log_lines("step")), "a step")
    except AssertionError as error:
        raise AssertionError(f"{error}: {job.failure_report()}") from None


@pytest.mark.parametrize("make_jobset", [_train_job_set, _plain_job_set])
def test_lost_pod_is_replaced_while_the_other_pod_keeps_its_ranks(
    make_jobset: Callable[[list[str]], dict[str, Any]],
    account: KubeClient,
    bare_kube: KubeClient,
    short_path: Path,
    tmp_path: Path,
) -> None:
    quiet = reference_run(tmp_path / "quiet", _STEPS)
    job = GoldenRun(short_path, _NAME, "ddp", FaultPlan())
    job.total = _STEPS
    jobset = make_jobset([str(TRAINER), str(job.diary), str(_STEPS), "ddp", str(SETTLE_S), str(EVERY["ddp"]), "gloo"])
    kubeconfig = account.kubeconfig(tmp_path / "kubeconfig")

    def start(index: int, suffix: str) -> PodProcesses:
        pod = JobSetPod(jobset, index, suffix, secrets={SECRET_NAME: _SECRET})
        return PodProcesses(job, pod, kubeconfig)

    try:
        first, second = start(0, "aaaaa"), start(1, "bbbbb")
        _wait_steps(job, 2, 6)
        survivors = first.rank_pids()
        epoch = max(one["epoch"] for one in job.log_lines("world"))
        lost = second.lose()
        third = start(1, "ccccc")
        for pod in (first, third):
            assert pod.launcher.wait(200) == 0, job.failure_report()
        after = [one for one in job.log_lines("world") if one["epoch"] > epoch]
        assert {one["pid"] for one in after} >= survivors
        assert all(one["first"] > 0 for one in after)
        assert_worlds_consistent(job)
        committed = job.committed_steps(lost)
        assert committed[-1]["size"] == 2
        assert_same_training(committed, quiet)
    finally:
        job.close()
    (lease,) = [
        one for one in bare_kube.list("/apis/coordination.k8s.io/v1/namespaces/default/leases")
        if one["metadata"]["name"].startswith(f"{_NAME}-")
    ]  # fmt: skip
    assert lease["metadata"]["annotations"]["elastic.tieredckpt/over"] == "finished"
    bare_kube.delete(f"/apis/coordination.k8s.io/v1/namespaces/default/leases/{lease['metadata']['name']}")


def test_preempted_pod_exits_with_the_status_that_replaces_it(
    account: KubeClient, bare_kube: KubeClient, short_path: Path, tmp_path: Path
) -> None:
    job = GoldenRun(short_path, _NAME, "ddp", FaultPlan())
    jobset = _train_job_set([str(TRAINER), str(job.diary), "100000", "ddp", str(SETTLE_S), str(EVERY["ddp"]), "gloo"])
    kubeconfig = account.kubeconfig(tmp_path / "kubeconfig")
    pods = [
        PodProcesses(job, JobSetPod(jobset, index, "aaaaa", secrets={SECRET_NAME: _SECRET}), kubeconfig)
        for index in range(2)
    ]
    try:
        _wait_steps(job, 2)
        pods[1].launcher.terminate()
        assert pods[1].launcher.wait(120) == PREEMPTED_STATUS, job.failure_report()
        _wait_steps(job, 1)
        assert pods[0].launcher.poll() is None
    finally:
        job.close()
    for lease in bare_kube.list("/apis/coordination.k8s.io/v1/namespaces/default/leases"):
        if lease["metadata"]["name"].startswith(f"{_NAME}-"):
            bare_kube.delete(f"/apis/coordination.k8s.io/v1/namespaces/default/leases/{lease['metadata']['name']}")
