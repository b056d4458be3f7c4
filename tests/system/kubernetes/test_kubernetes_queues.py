"""Queued jobs on a real API server, with real agents and a stand-in for Kueue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from integration.hyperpod.operator import parse_job_resource
from integration.kubernetes.kueue_admission import PriorityClass, build_workload, workload_steps
from tests.support.kube_jobs import ControllerProcess, RunningJob
from tests.support.kube_objects import job_object
from tests.support.kube_server import ApiRefusedError, KubeClient
from tests.support.kueue_definitions import install
from tests.support.queue_manager import WORKLOADS, QueueManager, has_condition

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

QUEUE = {"kueue.x-k8s.io/queue-name": "team-a"}
ELASTIC = {
    "minReplicas": 1, "maxReplicas": 2, "scalingTimeoutInSeconds": 120, "gracefulShutdownTimeoutInSeconds": 120,
    "faultyScaleDownTimeoutInSeconds": 120,
}  # fmt: skip
FLAVOR = {
    "apiVersion": "kueue.x-k8s.io/v1beta2",
    "kind": "ResourceFlavor",
    "metadata": {"name": "reserved"},
    "spec": {"nodeLabels": {"pool": "reserved"}},
}
CLASS = {
    "apiVersion": "kueue.x-k8s.io/v1beta2",
    "kind": "WorkloadPriorityClass",
    "metadata": {"name": "high"},
    "value": 1000,
}


@pytest.fixture(scope="module")
def kueue(kube: KubeClient) -> KubeClient:
    install(kube)
    kube.create("/apis/kueue.x-k8s.io/v1beta2/resourceflavors", FLAVOR)
    kube.create("/apis/kueue.x-k8s.io/v1beta2/workloadpriorityclasses", CLASS)
    return kube


@pytest.fixture
def manager(kueue: KubeClient, nodes: list[str]) -> Iterator[QueueManager]:
    for node in nodes[1:]:
        kueue.patch(f"/api/v1/nodes/{node}", {"metadata": {"labels": {"pool": "reserved"}}})
    with QueueManager(kueue, "team-a", flavor="reserved").running() as manager:
        yield manager


def test_queued_job_waits_runs_resizes_and_releases_its_quota(
    manager: QueueManager, job: RunningJob, controller: ControllerProcess, nodes: list[str]
) -> None:
    job.create(labels={**QUEUE, "kueue.x-k8s.io/priority-class": "high"}, elasticPolicy=ELASTIC)
    job.wait_until(lambda: "insufficient unused quota" in _admitted(job).get("message", ""), "a reason for the wait")
    assert not job.pods()
    (first,) = manager.workloads()
    assert first["spec"]["priority"] == 1000
    assert first["metadata"]["ownerReferences"][0]["uid"] == job.kube.get(job.path)["metadata"]["uid"]

    # Admitted: it runs on the nodes of its quota. The controller is killed as soon as a pod exists.
    manager.quota = 1
    job.wait_until(job.pods, "a pod")
    controller.restart()
    job.wait_world(1, restarts=0)
    assert _admitted(job)["status"] == "True"
    assert job.nodes() <= set(nodes[1:])
    job.wait_until(lambda: len(manager.workloads()) == 2, "it requests more quota")

    # Another step is admitted: it grows.
    manager.quota = 2
    job.wait_world(2, restarts=0)
    for pod in job.pods():
        assert not [label for label in pod["metadata"]["labels"] if label.startswith("kueue.x-k8s.io/")]
    job.wait_until(
        lambda: all(has_condition(one, "PodsReady") for one in manager.workloads()), "all workloads are PodsReady"
    )

    # Evicted while no controller runs: the next one shrinks the job and only then releases the quota.
    controller.kill()
    manager.quota = 1
    job.wait_until(lambda: has_condition(manager.workloads()[1], "Evicted"), "the second step is evicted")
    controller.start()
    job.wait_world(1, restarts=0)
    stops = [note for note in job.rank_notes("stops") if note["restart"] == job.worlds()[-2][0]["restart"]]
    assert len(stops) == 2, "both ranks were asked to stop and did so themselves"
    assert len({note["step"] for note in stops}) == 1
    job.wait_until(lambda: not has_condition(manager.workloads()[1], "QuotaReserved"), "its quota is released")
    assert manager.workloads()[1]["status"].get("admission") is None
    assert {pod["metadata"]["labels"]["HPWorkload"] for pod in job.pods()} == {first["metadata"]["name"]}

    job.touch("finish")
    job.wait_until(lambda: job.has_condition("Succeeded"), "the job is done")
    job.wait_until(lambda: all(has_condition(one, "Finished") for one in manager.workloads()), "workloads are finished")
    assert manager.used_quota() == 0
    assert manager.overdrawn == []


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
@pytest.mark.parametrize("of_kueue", [True, False])
def test_workloads_pass_validation_of_either_kueue_version(kube: KubeClient, version: str, of_kueue: bool) -> None:
    group = f"{version}.example"
    install(kube, version, group=group)
    job = job_object(elasticPolicy={"minReplicas": 1, "maxReplicas": 2})
    job["metadata"] |= {"labels": QUEUE}
    (step,) = workload_steps(job, parse_job_resource(job), ())
    workload = build_workload(job, step, version, PriorityClass("high", of_kueue), 1000)
    workload["apiVersion"] = f"{group}/{version}"
    made = kube.create(f"/apis/{group}/{version}/namespaces/default/workloads", workload, dry_run=True)
    for key, value in workload["spec"].items():
        assert made["spec"][key] == value, "the server keeps every field"


def test_controller_account_may_write_only_needed_workload_fields(kueue: KubeClient) -> None:
    account = kueue.as_service_account("tieredckpt-system", "hyperpod-controller")
    try:
        for method, path in (
            ("PATCH", f"{WORKLOADS}/any"),
            ("GET", f"{WORKLOADS}/any"),
            ("PUT", f"{WORKLOADS}/any/status"),
            ("PATCH", "/apis/kueue.x-k8s.io/v1beta2/resourceflavors/reserved"),
            ("GET", "/apis/kueue.x-k8s.io/v1beta2/workloadpriorityclasses"),
        ):
            with pytest.raises(ApiRefusedError) as refused:
                account.request(method, path, {}, kind="application/merge-patch+json")
            assert refused.value.status == 403, (method, path)
        assert account.get("/apis/kueue.x-k8s.io/v1beta2/resourceflavors/reserved")["spec"] == FLAVOR["spec"]
    finally:
        account.close()


def _admitted(job: RunningJob) -> dict[str, Any]:
    found = [one for one in job.status().get("conditions", ()) if one["type"] == "Admitted"]
    return found[0] if found else {}
