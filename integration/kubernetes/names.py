"""What things are called in the cluster. All of it is HyperPod's, so that what knows HyperPod's jobs knows these."""

from __future__ import annotations

GROUP = "sagemaker.amazonaws.com"
VERSION = "v1"
PLURAL = "hyperpodpytorchjobs"
KIND = "HyperPodPyTorchJob"

JOB_LABEL = "HPJob"
REPLICA_SPEC_LABEL = "HPReplicaSpec"
INDEX_LABEL = "HPReplicaIndex"
KUEUE_PREFIX = "kueue.x-k8s.io/"

HEALTH_LABEL = "sagemaker.amazonaws.com/node-health-status"
UNHEALTHY = ("Unschedulable", "UnschedulablePendingReboot", "UnschedulablePendingReplacement")

HOST_LABEL = "kubernetes.io/hostname"
