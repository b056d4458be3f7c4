"""Validation of the node agent's manifests and example pods, and the rights to label nodes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from integration.hyperpod.cluster.node_health import (
    connect_node_labels,
    is_worse_health,
)
from integration.hyperpod.job_resource import NODE_HEALTH_LABEL, NodeHealth
from integration.kubernetes.tiered_pods import MANIFESTS, training_jobset, training_runtime
from tests.support.kube_jobs import ROOT
from tests.support.kube_server import ApiRefusedError, KubeClient, add_node
from tieredckpt.cli.exit_codes import CommandError, ExitCode

pytestmark = pytest.mark.system

FOLDER = ROOT / "integration" / "hyperpod" / "manifests"
FOLDERS = ("node-agent", "tls", "example-overlay", "node-health")


def built(folder: str) -> list[dict]:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    done = subprocess.run(
        ["kubectl", "kustomize", FOLDER / folder], capture_output=True, text=True, check=True, timeout=200
    )
    return [document for document in yaml.safe_load_all(done.stdout) if document]


@pytest.mark.parametrize("folder", FOLDERS)
def test_agent_manifests_pass_server_validation(kube: KubeClient, folder: str) -> None:
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "tieredckpt-agents"}})
    for document in built(folder):
        kube.apply(document, dry_run=True)


def test_pods_of_other_job_kinds_pass_server_validation(kube: KubeClient) -> None:
    """Validate only the pods that they create: this API server lacks the CRDs of those kinds."""
    (jobset,) = yaml.safe_load_all((FOLDER / "examples" / "jobset.yaml").read_text())
    (pytorch,) = yaml.safe_load_all((FOLDER / "examples" / "pytorchjob.yaml").read_text())
    tiered = [training_jobset()["spec"], training_runtime()["spec"]["template"]["spec"]]
    account, *_ = yaml.safe_load_all((MANIFESTS / "training" / "leadership.yaml").read_text())
    kube.apply({**account, "metadata": {**account["metadata"], "namespace": "default"}})
    kube.as_service_account("default", account["metadata"]["name"]).close()  # waits for the account's token
    for template in (
        jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"],
        pytorch["spec"]["pytorchReplicaSpecs"]["Worker"]["template"],
        *(one["replicatedJobs"][0]["template"]["spec"]["template"] for one in tiered),
    ):
        for container in template["spec"].get("initContainers", []):
            container.pop("restartPolicy")  # sidecars are younger than this API server
            container.pop("startupProbe")
            container.pop("livenessProbe")
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "trainer", "namespace": "default"}, **template}
        pod["metadata"] = {"name": "trainer", "namespace": "default", **template["metadata"]}
        kube.create("/api/v1/namespaces/default/pods", pod, dry_run=True)


def test_service_account_may_only_label_nodes(
    kube: KubeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "tieredckpt-agents"}})
    for document in built("node-health"):
        kube.apply(document)
    add_node(kube, "gpu-1")
    account = kube.as_service_account("tieredckpt-agents", "node-health")
    try:
        config = str(account.kubeconfig(tmp_path / "config"))
        monkeypatch.setenv("no_proxy", "*")
        labels = connect_node_labels(kubeconfig=config)
        assert labels.get("gpu-1") is None
        assert labels.set_if("gpu-1", NodeHealth.PENDING_REBOOT, when=lambda _: True) is None
        assert kube.get("/api/v1/nodes/gpu-1")["metadata"]["labels"][NODE_HEALTH_LABEL] == "UnschedulablePendingReboot"
        wanted = NodeHealth.PENDING_REPLACEMENT
        assert (
            labels.set_if("gpu-1", wanted, when=lambda was: is_worse_health(was, wanted))
            == "UnschedulablePendingReboot"
        )
        assert labels.get("gpu-1") == wanted.value
        with pytest.raises(CommandError) as absent:
            labels.get("gpu-2")
        assert absent.value.code is ExitCode.NOT_FOUND
        for path in ("/api/v1/nodes", "/api/v1/pods", "/api/v1/secrets"):
            with pytest.raises(ApiRefusedError) as refused:
                account.get(path)
            assert refused.value.status == 403
    finally:
        account.close()
        kube.delete("/api/v1/nodes/gpu-1")


def test_account_without_rights_gets_an_error_that_names_them(
    kube: KubeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = kube.as_service_account("default", "default")
    try:
        config = str(account.kubeconfig(tmp_path / "config"))
        monkeypatch.setenv("no_proxy", "*")
        with pytest.raises(CommandError, match="refuses") as refused:
            connect_node_labels(kubeconfig=config).set_if("gpu-1", NodeHealth.UNSCHEDULABLE, when=lambda _: True)
        assert refused.value.code is ExitCode.REFUSED
        assert "manifests/node-health" in refused.value.advice
    finally:
        account.close()
