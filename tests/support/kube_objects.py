"""Minimal Kubernetes objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TEMPLATE = {"spec": {"containers": [{"name": "pytorch", "image": "train:1", "command": ["hyperpodrun", "train.py"]}]}}


def job_object(name: str = "llama", **changes: Any) -> dict[str, Any]:
    """Return a job of two nodes; ``changes`` override fields of its spec."""
    spec: dict[str, Any] = {
        "nprocPerNode": "2",
        "replicaSpecs": [{"name": "workers", "replicas": 2, "template": TEMPLATE}],
    }
    return {
        "apiVersion": "sagemaker.amazonaws.com/v1",
        "kind": "HyperPodPyTorchJob",
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-of-{name}", "resourceVersion": "1"},
        "spec": {**spec, **changes},
    }


def pod_object(
    index: int, *, job: str = "llama", group: str = "workers", phase: str = "Running", node: str = "", **meta: Any
) -> dict[str, Any]:
    name = f"{job}-{group}-{index}"
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-of-{name}",
            "labels": {"HPJob": job, "HPReplicaSpec": group, "HPReplicaIndex": str(index)},
            "ownerReferences": [{"uid": f"uid-of-{job}"}],
            **meta,
        },
        "spec": {"nodeName": node or f"n{index}", "containers": [{"name": "pytorch"}]},
        "status": {"phase": phase, "podIP": f"10.0.0.{index + 1}"},
    }


def pod_objects(*indices: int, **more: Any) -> Sequence[dict[str, Any]]:
    return [pod_object(index, **more) for index in indices]
