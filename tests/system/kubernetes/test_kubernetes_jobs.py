"""Whole jobs on a real API server: real agents, and a controller whose restarts no job notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from integration.hyperpod.operator import RestartMode
from integration.kubernetes.resource_status import load_job_state
from tests.support import kube_recoverable
from tests.support.kube_jobs import RunningJob
from tests.support.kube_server import KubeClient

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

HEALTH = "sagemaker.amazonaws.com/node-health-status"
ELASTIC = {
    "minReplicas": 1, "maxReplicas": 3, "scalingTimeoutInSeconds": 120, "gracefulShutdownTimeoutInSeconds": 120,
    "faultyScaleDownTimeoutInSeconds": 120,
}  # fmt: skip
QUICK = "--silent=25"


def test_job_completes_despite_faults_resizes_and_controller_restarts(job: RunningJob, kube: KubeClient) -> None:
    job.create(elasticPolicy=ELASTIC, replicas=2)
    job.wait_world(2, restarts=0)
    owner = kube.get(job.path)["metadata"]
    for pod in job.pods():
        (found,) = pod["metadata"]["ownerReferences"]
        assert (found["uid"], found["kind"], found["controller"]) == (owner["uid"], "HyperPodPyTorchJob", True)

    # A worker dies; its pod stays.
    pods = {pod["metadata"]["uid"] for pod in job.pods()}
    job.touch("crash-1")
    job.wait_world(2, restarts=1)
    assert {pod["metadata"]["uid"] for pod in job.pods()} == pods

    # The idle controller is killed: neither ranks nor agents notice.
    before = job.rank_notes("begins")
    job.controller.restart()
    step = job.step()
    job.wait_until(lambda: job.step() > step + 40, "training goes on")
    assert job.rank_notes("begins") == before

    # A worker dies while no controller runs; the next controller restarts the job.
    job.controller.kill()
    job.touch("crash-0")
    job.wait_until(lambda: not (job.folder / "crash-0").exists(), "rank 0 dies")
    job.controller.start()
    job.wait_world(2, restarts=2)

    # The scale subresource adds a node; the controller is killed as soon as the new pod exists.
    job.scale(3)
    job.wait_until(lambda: len(job.pods()) == 3, "a third pod")
    job.controller.restart()
    job.wait_world(3, restarts=2)
    stops = [note for note in job.rank_notes("stops") if note["restart"] == job.worlds()[-2][0]["restart"]]
    assert len(stops) == 2, "both ranks were asked to stop and did so themselves"
    assert len({note["step"] for note in stops}) == 1

    # A node is labeled unhealthy; the controller is killed while it replaces the node's pod.
    bad = job.node_of_rank(1)
    kube.patch(f"/api/v1/nodes/{bad}", {"metadata": {"labels": {HEALTH: "UnschedulablePendingReplacement"}}})
    job.wait_until(lambda: job.restarts() == 3, "the fault is noticed")
    job.controller.restart()
    job.wait_world(3, restarts=3)
    assert bad not in job.nodes()
    assert job.status()["latestFaultyPodInstanceList"]["faultyInstanceIdList"] == [bad]

    # The job shrinks and finishes.
    job.scale(1)
    job.wait_world(1, restarts=3)
    job.wait_until(lambda: len(job.pods()) == 1, "surplus pods are deleted")
    job.touch("finish")
    job.wait_until(lambda: job.has_condition("Succeeded"), "the job is done")
    job.wait_until(lambda: not job.pods(), "cleanPodPolicy: All")
    assert job.status()["completionTime"]
    begins = [world[0]["step"] for world in job.worlds()]
    assert begins == sorted(begins), "every world resumed at its predecessor's last step"


@pytest.mark.parametrize("controller", [QUICK], indirect=True)
def test_job_shrinks_after_a_machine_loss_and_grows_later(job: RunningJob, kube: KubeClient, nodes: list[str]) -> None:
    """No kubelet answers for or ends the lost machine's pod."""
    job.create(elasticPolicy={**ELASTIC, "maxReplicas": 2, "faultyScaleDownTimeoutInSeconds": 3})
    job.wait_world(2, restarts=0)
    lost = job.node_of_rank(1)
    try:
        _cordon(kube, nodes)
        job.kubelet.lose_node(lost)
        job.wait_world(1, restarts=1)
        _cordon(kube, [node for node in nodes if node != lost], on=False)
        job.wait_world(2, restarts=1)
        assert job.node_of_rank(1) != lost
        job.touch("finish")
        job.wait_until(lambda: job.has_condition("Succeeded"), "the job is done")
        job.wait_until(
            lambda: {pod["spec"]["nodeName"] for pod in job.pods()} == {lost}, "only the lost one's pod is left"
        )
    finally:
        _cordon(kube, nodes, on=False)
        job.kubelet.recover_node(lost)


def test_suspended_job_has_no_pods_and_resumes_at_its_step(job: RunningJob, kube: KubeClient) -> None:
    job.create()
    job.wait_world(2, restarts=0)
    kube.patch(job.path, {"spec": {"runPolicy": {"suspend": True}}})
    job.wait_until(lambda: not job.pods(), "no pods")
    step = job.step()
    kube.patch(job.path, {"spec": {"runPolicy": {"suspend": False, "ttlSecondsAfterFinished": 2}}})
    job.wait_world(2, restarts=0)
    assert job.worlds()[-1][0]["step"] >= step
    job.touch("finish")
    job.wait_until(lambda: kube.find(job.path) is None, "ttlSecondsAfterFinished")
    job.create()  # the fixture deletes it; a new job may reuse a deleted job's name
    job.wait_until(job.pods, "pods of its own")


def test_in_process_ranks_recover_without_new_pods_or_processes(job: RunningJob, kube: KubeClient) -> None:
    """Check pod UIDs and pids after faults of ranks with in-process agents."""
    job.script, job.options = Path(kube_recoverable.__file__), ("--inprocess-restart", "--inprocess-timeout=120")
    job.create()
    job.wait_world(2, restarts=0)
    first = job.worlds()[-1]
    pods = _lives(job)

    job.touch("raise-1")
    job.wait_world(2, restarts=1)
    assert _who(job.worlds()[-1]) == _who(first)
    state = load_job_state(kube.get(job.path))
    assert state is not None
    assert state.last_fault is not None
    assert state.last_fault.mode is RestartMode.IN_PROCESS
    assert "ZeroDivisionError" in state.last_fault.message
    assert "1" in job.status()["latestFaultyPodInstanceList"]["faultyRankList"]

    # A rank fails while no controller runs; the next controller restarts the job.
    job.controller.kill()
    job.touch("raise-0")
    job.wait_until(lambda: not (job.folder / "raise-0").exists(), "rank 0 fails")
    job.controller.start()
    job.wait_world(2, restarts=2)
    assert _who(job.worlds()[-1]) == _who(first)
    assert _lives(job) == pods
    begins = [world[0]["step"] for world in job.worlds()]
    assert begins == sorted(begins)
    job.touch("finish")
    job.wait_until(lambda: job.has_condition("Succeeded"), "the job is done")


def _who(world: list[dict[str, Any]]) -> list[tuple[int, str, int]]:
    return [(note["rank"], note["pod"], note["pid"]) for note in world]


def _lives(job: RunningJob) -> set[tuple[str, int]]:
    """Return the pods' UIDs and their agents' pids."""
    found = set()
    for pod in job.pods():
        process = job.kubelet.container(pod["metadata"]["name"]).process
        assert process is not None
        assert process.poll() is None
        found.add((pod["metadata"]["uid"], process.pid))
    return found


def _cordon(kube: KubeClient, nodes: list[str], *, on: bool = True) -> None:
    for node in nodes:
        kube.patch(f"/api/v1/nodes/{node}", {"spec": {"unschedulable": on or None, "taints": None}})
