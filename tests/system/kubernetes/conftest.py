from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.kube_jobs import ROOT, ControllerProcess, RunningJob
from tests.support.kube_server import KubeClient, add_node, control_plane, missing_reason
from tests.support.process_kubelet import ProcessKubelet

PATIENT = "--silent=120"
_OURS = ROOT / "integration" / "kubernetes" / "manifests"


@pytest.fixture(scope="session")
def bare_kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeClient]:
    """Start a control plane without any of our resources."""
    if reason := missing_reason():
        pytest.skip(reason)
    with control_plane(tmp_path_factory.mktemp("kube")) as kube:
        kube.wait_served("/api/v1/namespaces/default/serviceaccounts/default")  # its controller creates it later
        yield kube


@pytest.fixture(scope="session")
def kube(bare_kube: KubeClient) -> KubeClient:
    """Install the CRD and the controller's rights; tests start the controller themselves."""
    for name in ("namespace.yaml", "crd.yaml", "rbac.yaml"):
        for document in yaml.safe_load_all((_OURS / name).read_text()):
            if document["kind"] == "ServiceAccount":
                document["metadata"]["namespace"] = "tieredckpt-system"
            bare_kube.apply(document)
    bare_kube.wait_served("/apis/sagemaker.amazonaws.com/v1/namespaces/default/hyperpodpytorchjobs")
    return bare_kube


@pytest.fixture(scope="module")
def account(bare_kube: KubeClient) -> Iterator[KubeClient]:
    """Yield the service account of jobs that elect their leader through a Lease."""
    for document in yaml.safe_load_all((_OURS / "training" / "leadership.yaml").read_text()):
        document["metadata"]["namespace"] = "default"
        for subject in document.get("subjects", ()):
            subject["namespace"] = "default"
        bare_kube.apply(document)
    account = bare_kube.as_service_account("default", "elastic-job")
    try:
        yield account
    finally:
        account.close()


@pytest.fixture
def controller_kubeconfig(kube: KubeClient, tmp_path: Path) -> Path:
    """Write a kubeconfig of the controller's service account, so that missing rights fail here, too."""
    account = kube.as_service_account("tieredckpt-system", "hyperpod-controller")
    try:
        return account.kubeconfig(tmp_path / "kubeconfig")
    finally:
        account.close()


@pytest.fixture(scope="session")
def nodes(kube: KubeClient) -> list[str]:
    names = [f"node-{number}" for number in range(4)]
    for name in names:
        add_node(kube, name)
    return names


@pytest.fixture
def kubelet(kube: KubeClient, nodes: list[str], tmp_path: Path) -> Iterator[ProcessKubelet]:
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PATH": str(Path(sys.executable).parent), "HOME": "/root"}
    paths = {"PYTHONPATH": str(ROOT), "no_proxy": "*"}
    with ProcessKubelet(kube, tmp_path / "pods", environ={**quiet, **paths}).running() as kubelet:
        yield kubelet


@pytest.fixture
def controller(
    request: pytest.FixtureRequest, controller_kubeconfig: Path, tmp_path: Path
) -> Iterator[ControllerProcess]:
    first = 20000 + os.getpid() % 250 * 40  # below the ephemeral port range
    ports = f"--master-ports={first}-{first + 39}"
    silent = getattr(request, "param", PATIENT)
    with ControllerProcess(tmp_path, controller_kubeconfig, ports, silent).running() as controller:
        yield controller


@pytest.fixture
def job(
    kube: KubeClient, kubelet: ProcessKubelet, controller: ControllerProcess, tmp_path: Path
) -> Iterator[RunningJob]:
    job = RunningJob(kube, kubelet, controller, tmp_path / "job", "llama")
    yield job
    kube.delete(job.path)
    job.wait_until(lambda: not job.pods() and kube.find(job.path) is None, "the job's pods go with it")
