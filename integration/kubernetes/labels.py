"""API groups, kinds, labels and annotations of HyperPod and Kueue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

JOB_API_GROUP = "sagemaker.amazonaws.com"
JOB_API_VERSION = "v1"
JOB_PLURAL = "hyperpodpytorchjobs"
JOB_RESOURCE_KIND = "HyperPodPyTorchJob"

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

NODE_HEALTH_STATUS_LABEL = "sagemaker.amazonaws.com/node-health-status"
UNHEALTHY_STATUSES = ("Unschedulable", "UnschedulablePendingReboot", "UnschedulablePendingReplacement")

HOST_LABEL = "kubernetes.io/hostname"


def owned_metadata(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What is made for the job with this metadata goes with it."""
    return {
        "apiVersion": f"{JOB_API_GROUP}/{JOB_API_VERSION}",
        "kind": JOB_RESOURCE_KIND,
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


KubeObject = Mapping[str, Any]
