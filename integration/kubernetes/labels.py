"""Labels and annotations of the objects that the controller creates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from integration.hyperpod.job_resource import JOB_API_VERSION, JOB_KIND, KUEUE_GROUP

JOB_LABEL = "HPJob"
REPLICA_SPEC_LABEL = "HPReplicaSpec"
INDEX_LABEL = "HPReplicaIndex"
WORKLOAD_LABEL = "HPWorkload"
"""Name of a pod's Workload. Defined by this project, like the next one."""
CONTENT_ANNOTATION = "HPWorkloadContent"
"""Digest of a Workload's content.

The server fills in defaults, so contents themselves cannot be compared.
"""

KUEUE_VERSIONS = ("v1beta2", "v1beta1")
"""Supported versions, best first."""
KUEUE_PREFIX = f"{KUEUE_GROUP}/"

HOST_LABEL = "kubernetes.io/hostname"


def owned_metadata(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the owner reference that deletes an object together with the job."""
    return {
        "apiVersion": JOB_API_VERSION,
        "kind": JOB_KIND,
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


KubeObject = Mapping[str, Any]
