"""The job CRD on a real API server: accepted jobs, refused jobs and error messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from integration.hyperpod.operator import parse_job_resource
from tests.support.kube_jobs import JOBS, with_changes
from tests.support.kube_objects import job_object
from tests.support.kube_server import ApiRefusedError, KubeClient

pytestmark = pytest.mark.system


def _job(*changes: tuple[str, Any]) -> dict[str, Any]:
    job = job_object()
    job["metadata"] = {"name": "schema", "namespace": "default"}
    return with_changes(job, changes)


_RULE = {"name": "JobStart", "logPattern": ".*step=.*", "expectedStartCutOffInSeconds": 60, "faultOnMatch": True}

GOOD = {
    "minimal": [],
    "all of runPolicy": [
        (
            "spec.runPolicy",
            {
                "activeDeadlineSeconds": 1, "cleanPodPolicy": "OnlyComplete", "faultDeadlineSeconds": 5,
                "jobMaxRetryCount": 0, "logMonitoringConfiguration": [_RULE], "startupDeadlineSeconds": 1,
                "restartPolicy": {"evalPeriodSeconds": 60, "maxFullJobRestarts": 0}, "suspend": True,
                "ttlSecondsAfterFinished": -1, "workloadMode": "Deployment",
            },
        )
    ],
    "both size settings, as in recipes": [
        (
            "spec.elasticPolicy",
            {"minReplicas": 1, "maxReplicas": 2, "replicaIncrementStep": 1, "replicaDiscreteValues": [1, 2]},
        ),
    ],
    "two replica specs": [
        ("spec.replicaSpecs", [{**job_object()["spec"]["replicaSpecs"][0], "name": name} for name in ("a", "b")])
    ],
}  # fmt: skip

BAD = {
    "no replica specs": ([("spec.replicaSpecs", [])], "replicaSpecs"),
    "no spec": ([("spec", ...)], "spec"),
    "a negative number of nodes": ([("spec.replicaSpecs.0.replicas", -1)], "replicas"),
    "a number of nodes in words": ([("spec.replicaSpecs.0.replicas", "two")], "replicas"),
    "no template": ([("spec.replicaSpecs.0.template", ...)], "template"),
    "no containers": ([("spec.replicaSpecs.0.template.spec.containers", [])], "containers"),
    "a container without a name": ([("spec.replicaSpecs.0.template.spec.containers.0.name", ...)], "name"),
    "a name that no pod can have": ([("spec.replicaSpecs.0.name", "Workers_1")], "name"),
    "the name that the scale subresource has": ([("spec.replicaSpecs.0.name", "total")], "name"),
    "a number of processes in words": ([("spec.nprocPerNode", "many")], "nprocPerNode"),
    "no processes": ([("spec.nprocPerNode", "0")], "nprocPerNode"),
    "an unknown policy": ([("spec.runPolicy", {"cleanPodPolicy": "Some"})], "cleanPodPolicy"),
    "no deadline at all": ([("spec.runPolicy", {"activeDeadlineSeconds": 0})], "activeDeadlineSeconds"),
    "limits without a period": ([("spec.runPolicy", {"restartPolicy": {"maxFullJobRestarts": 1}})], "evalPeriod"),
    "a rule without a pattern": ([("spec.runPolicy", {"logMonitoringConfiguration": [{"name": "x"}]})], "logPattern"),
    "an unknown operator": (
        [("spec.runPolicy", {"logMonitoringConfiguration": [{**_RULE, "operator": "near"}]})], "operator",
    ),
    "a minimum of zero nodes": ([("spec.elasticPolicy", {"minReplicas": 0})], "minReplicas"),
    "a step of zero nodes": ([("spec.elasticPolicy", {"replicaIncrementStep": 0})], "replicaIncrementStep"),
    "a size of zero nodes": ([("spec.elasticPolicy", {"replicaDiscreteValues": [0]})], "replicaDiscreteValues"),
    "a name too long for its pods": ([("metadata.name", "x" * 41)], "name"),
    "the same spec twice": (
        [("spec.replicaSpecs", [job_object()["spec"]["replicaSpecs"][0]] * 2)], "Duplicate",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", GOOD)
def test_valid_job_passes_the_schema(kube: KubeClient, case: str) -> None:
    made = kube.create(JOBS, _job(*GOOD[case]), dry_run=True)
    assert made["spec"]["nprocPerNode"] == "2"
    parse_job_resource(made)


@pytest.mark.parametrize("case", BAD)
def test_invalid_job_is_refused_by_the_schema(kube: KubeClient, case: str) -> None:
    changes, word = BAD[case]
    with pytest.raises(ApiRefusedError, match=word) as refused:
        kube.create(JOBS, _job(*changes), dry_run=True)
    assert refused.value.status == 422


def test_schema_keeps_every_field_of_the_aws_client(kube: KubeClient) -> None:
    models = pytest.importorskip("sagemaker.hyperpod.training.config.hyperpod_pytorch_job_unified_config")
    job = _job(*GOOD["both size settings, as in recipes"])
    job["spec"]["runPolicy"] = {"restartPolicy": {"evalPeriodSeconds": 60}, "suspend": False}
    sent = {
        **job,
        "spec": models._HyperPodPytorchJob.model_validate(job["spec"], by_name=True).model_dump(exclude_none=True),
    }
    made = kube.create(JOBS, sent, dry_run=True)
    assert made["spec"] == json.loads(json.dumps(sent["spec"])), "the server keeps every field"


def test_status_changes_only_through_the_status_subresource(kube: KubeClient) -> None:
    kube.create(JOBS, _job(("metadata.name", "doors"), ("spec.runPolicy", {"suspend": True})))
    path = f"{JOBS}/doors"
    try:
        changed = kube.patch(path, {"status": {"restartCount": 7}, "metadata": {"labels": {"a": "b"}}})
        assert "restartCount" not in changed.get("status", {})
        kube.patch(f"{path}/status", {"status": {"restartCount": 7}, "spec": {"nprocPerNode": "9"}})
        assert kube.get(path)["status"]["restartCount"] == 7
        assert kube.get(path)["spec"]["nprocPerNode"] == "2"
        kube.patch(f"{path}/scale", {"spec": {"replicas": 3}})
        kube.patch(f"{path}/status", {"status": {"elasticScalingStatus": {"targetReplicas": {"total": 2}}}})
        scale = kube.get(f"{path}/scale")
        assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (3, 2)
    finally:
        kube.delete(path)


def test_second_status_writer_is_refused(kube: KubeClient) -> None:
    kube.create(JOBS, _job(("metadata.name", "second"), ("spec.runPolicy", {"suspend": True})))
    path = f"{JOBS}/second"
    try:
        version = kube.get(path)["metadata"]["resourceVersion"]
        late = {"metadata": {"resourceVersion": version}, "status": {"restartCount": 1}}
        kube.patch(f"{path}/status", late)
        with pytest.raises(ApiRefusedError) as refused:
            kube.patch(f"{path}/status", {**late, "status": {"restartCount": 2}})
        assert refused.value.status == 409
    finally:
        kube.delete(path)


def test_definition_is_a_single_document() -> None:
    manifests = Path(__file__).parents[3] / "integration" / "kubernetes" / "manifests"
    kustomization = yaml.safe_load((manifests / "kustomization.yaml").read_text())
    on_disk = {path.name for path in manifests.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == on_disk, "the kustomization lists every manifest"
