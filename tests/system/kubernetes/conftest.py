from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.kube_jobs import ROOT
from tests.support.kube_server import Kube, control_plane, why_not

_OURS = ROOT / "integration" / "kubernetes" / "manifests"


@pytest.fixture(scope="session")
def bare_kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    """A control plane with nothing in it."""
    if reason := why_not():
        pytest.skip(reason)
    with control_plane(tmp_path_factory.mktemp("kube")) as kube:
        yield kube


@pytest.fixture(scope="session")
def kube(bare_kube: Kube) -> Kube:
    """With the resource's definition, and the rights of the controller; no Deployment, tests start it themselves."""
    for name in ("namespace.yaml", "crd.yaml", "rbac.yaml"):
        for document in yaml.safe_load_all((_OURS / name).read_text()):
            if document["kind"] == "ServiceAccount":
                document["metadata"]["namespace"] = "tieredckpt-system"
            bare_kube.apply(document)
    bare_kube.until_served("/apis/sagemaker.amazonaws.com/v1/namespaces/default/hyperpodpytorchjobs")
    return bare_kube


@pytest.fixture
def controllers_config(kube: Kube, tmp_path: Path) -> Path:
    """As the controller's own service account: what its rights do not allow fails here, too."""
    account = kube.as_service_account("tieredckpt-system", "hyperpod-controller")
    try:
        return account.kubeconfig(tmp_path / "kubeconfig")
    finally:
        account.close()
