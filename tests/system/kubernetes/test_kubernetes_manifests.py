"""Validation of every manifest in the repository by a real API server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.kube_jobs import ROOT
from tests.support.kube_server import ApiRefusedError, KubeClient

pytestmark = pytest.mark.system

_FOREIGN = ("jobset.x-k8s.io/", "kubeflow.org/", "trainer.kubeflow.org/", "kueue.x-k8s.io/")
"""API groups of other projects, whose CRDs are not installed."""
_TOOLS = ("kustomize.config.k8s.io/",)


def _documents() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted((ROOT / "integration").rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if isinstance(document, dict) and {"apiVersion", "kind"} <= set(document):
                yield f"{path.relative_to(ROOT)}:{document['kind']}", document


ALL = [(name, one) for name, one in _documents() if not one["apiVersion"].startswith(_TOOLS)]
OURS = [(name, one) for name, one in ALL if not one["apiVersion"].startswith(_FOREIGN)]


@pytest.mark.parametrize("document", [one for _, one in OURS], ids=[name for name, _ in OURS])
def test_manifest_passes_server_validation(kube: KubeClient, document: dict[str, Any]) -> None:
    """Use a dry run in an existing namespace, which includes real admission and validation."""
    _in_our_namespace(document)
    kept = kube.apply(document, dry_run=True)
    assert _lost(document, kept) == [], "the server silently drops unknown fields"


def test_checked_manifests_include_those_of_the_controller() -> None:
    kinds = {one["kind"] for name, one in OURS if name.startswith("integration/kubernetes/")}
    assert kinds >= {"CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding", "Deployment", "NetworkPolicy"}


def test_controller_account_is_refused_unneeded_requests(kube: KubeClient) -> None:
    account = kube.as_service_account("tieredckpt-system", "hyperpod-controller")
    try:
        for path in (
            "/api/v1/secrets", "/api/v1/configmaps", "/apis/apps/v1/deployments", "/api/v1/namespaces",
            "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
        ):  # fmt: skip
            with pytest.raises(ApiRefusedError) as refused:
                account.get(path)
            assert refused.value.status == 403
        assert account.list("/api/v1/pods") == []
    finally:
        account.close()


def test_kustomizations_of_all_integrations_name_existing_files() -> None:
    for kustomization in (ROOT / "integration").rglob("kustomization.yaml"):
        for name in yaml.safe_load(kustomization.read_text()).get("resources", ()):
            assert (Path(kustomization.parent) / name).exists(), f"{kustomization}: {name}"


def _in_our_namespace(document: dict[str, Any]) -> None:
    if document["kind"] not in {"Namespace", "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}:
        document["metadata"]["namespace"] = "tieredckpt-system"


def _lost(sent: Any, kept: Any, at: str = "") -> list[str]:
    if isinstance(sent, dict):
        if not isinstance(kept, dict):
            return [at] if sent else []
        return [one for key, value in sent.items() for one in _lost(value, kept.get(key), f"{at}.{key}")]
    if isinstance(sent, list):
        if not isinstance(kept, list) or len(kept) < len(sent):
            return [at] if sent else []
        return [one for number, value in enumerate(sent) for one in _lost(value, kept[number], f"{at}[{number}]")]
    return [at] if kept is None and sent not in (None, "", False, 0) else []
