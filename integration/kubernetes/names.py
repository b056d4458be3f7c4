"""What things are called in the cluster: HyperPod's and Kueue's names, so that what knows those knows these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GROUP = "sagemaker.amazonaws.com"
VERSION = "v1"
PLURAL = "hyperpodpytorchjobs"
KIND = "HyperPodPyTorchJob"

JOB_LABEL = "HPJob"
REPLICA_SPEC_LABEL = "HPReplicaSpec"
INDEX_LABEL = "HPReplicaIndex"
WORKLOAD_LABEL = "HPWorkload"
"""Which of the job's Workloads a pod runs for. Ours, as the next one is."""
CONTENT_ANNOTATION = "HPWorkloadContent"
"""A digest of what a Workload asks for. A server fills in defaults, so contents themselves cannot be compared."""

KUEUE_GROUP = "kueue.x-k8s.io"
KUEUE_VERSIONS = ("v1beta2", "v1beta1")
"""Those that are spoken here, best first."""
KUEUE_PREFIX = f"{KUEUE_GROUP}/"
QUEUE_LABEL = f"{KUEUE_PREFIX}queue-name"
PRIORITY_LABEL = f"{KUEUE_PREFIX}priority-class"

HEALTH_LABEL = "sagemaker.amazonaws.com/node-health-status"
UNHEALTHY = ("Unschedulable", "UnschedulablePendingReboot", "UnschedulablePendingReplacement")

HOST_LABEL = "kubernetes.io/hostname"


def owned_by(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What is made for the job with this metadata goes with it."""
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
