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
"""Name of a pod's Workload. Defined by this project, like the next one."""
CONTENT_ANNOTATION = "HPWorkloadContent"
"""Digest of a Workload's content.

The server fills in defaults, so contents themselves cannot be compared.
"""

KUEUE_GROUP = "kueue.x-k8s.io"
KUEUE_VERSIONS = ("v1beta2", "v1beta1")
"""Supported versions, best first."""
KUEUE_PREFIX = f"{KUEUE_GROUP}/"
QUEUE_LABEL = f"{KUEUE_PREFIX}queue-name"
PRIORITY_LABEL = f"{KUEUE_PREFIX}priority-class"

NODE_HEALTH_STATUS_LABEL = "sagemaker.amazonaws.com/node-health-status"
UNHEALTHY_STATUSES = ("Unschedulable", "UnschedulablePendingReboot", "UnschedulablePendingReplacement")

HOST_LABEL = "kubernetes.io/hostname"


def owned_metadata(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the owner reference that deletes an object together with the job."""
    return {
        "apiVersion": f"{JOB_API_GROUP}/{JOB_API_VERSION}",
        "kind": JOB_RESOURCE_KIND,
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


KubeObject = Mapping[str, Any]
