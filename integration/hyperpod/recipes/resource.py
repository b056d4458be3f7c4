"""The ``HyperPodPyTorchJob`` of a recipe: what HyperPod's own launcher would submit, with this system in the image."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.world.policy import ScalingPolicy
from integration.hyperpod.recipes import launch
from integration.hyperpod.recipes.recipe import Recipe

API_VERSION, KIND = "sagemaker.amazonaws.com/v1", "HyperPodPyTorchJob"
_AGENT_PORT = 8080


@dataclass(frozen=True)
class Pods:
    """What a recipe does not know of the pods that train it."""

    image: str
    script: Sequence[str]
    """For ``hyperpodrun``: a file, or ``-m`` and a module, and its arguments."""
    name: str = ""
    namespace: str = "default"
    queue: str = ""
    """Of Kueue."""
    instance: str = ""
    memory: str = "200Gi"
    """Of /dev/shm, where the memory tier is."""
    environ: Mapping[str, str] = field(default_factory=dict)


def resource(recipe: Recipe, policy: ScalingPolicy, pods: Pods, *, elastic: bool) -> dict[str, Any]:
    """Ready for ``kubectl apply``."""
    name = pods.name or recipe.name
    metadata: dict[str, Any] = {"name": name, "namespace": pods.namespace}
    if pods.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": pods.queue}
    replica: dict[str, Any] = {
        "name": "pods",
        "replicas": policy.least if elastic else recipe.nodes,
        "template": {"spec": pod_of(recipe, pods)},
    }
    if elastic:
        replica["maxReplicas"] = max(policy.sizes)
    spec: dict[str, Any] = {
        "nprocPerNode": str(recipe.devices),
        "replicaSpecs": [replica],
        "runPolicy": run_policy(policy),
    }
    if elastic:
        spec["elasticPolicy"] = elastic_policy(policy)
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}


def elastic_policy(policy: ScalingPolicy) -> dict[str, Any]:
    """``spec.elasticPolicy``; either a step or a list of sizes, never both."""
    found: dict[str, Any] = {"minReplicas": policy.least, "maxReplicas": max(policy.sizes)}
    if policy.replica_discrete_values:
        found["replicaDiscreteValues"] = sorted(policy.replica_discrete_values)
    else:
        found["replicaIncrementStep"] = policy.replica_increment_step or 1
    return {
        **found,
        "scalingTimeoutInSeconds": _seconds(policy.scaling_timeout_s),
        "gracefulShutdownTimeoutInSeconds": _seconds(policy.graceful_shutdown_timeout_s),
        "faultyScaleDownTimeoutInSeconds": _seconds(policy.faulty_scale_down_timeout_s),
    }


def run_policy(policy: ScalingPolicy) -> dict[str, Any]:
    """``spec.runPolicy``. Pods stay when the job is done: a step that is in their memory can still be read."""
    restart = {
        "evalPeriodSeconds": _seconds(policy.eval_period_s),
        "numRestartBeforeFullJobRestart": policy.num_restart_before_full_job_restart,
        "maxFullJobRestarts": policy.max_full_job_restarts,
        "maxNumRepeatOffendersToAvoid": policy.max_num_repeat_offenders_to_avoid,
        "scaleUpSnoozeTimeInSeconds": _seconds(policy.scale_up_snooze_s),
    }
    found: dict[str, Any] = {
        "cleanPodPolicy": "None",
        "restartPolicy": {name: value for name, value in restart.items() if value is not None},
    }
    if policy.job_max_retry_count is not None:
        found["jobMaxRetryCount"] = policy.job_max_retry_count
    if policy.startup_timeout_s is not None:
        found["startupDeadlineSeconds"] = _seconds(policy.startup_timeout_s)
    return found


def pod_of(recipe: Recipe, pods: Pods) -> dict[str, Any]:
    """One container with the ranks of a node, and shared memory for what they keep."""
    environ = _flat(launch.settings_tree(recipe)) | {"TIEREDCKPT_PEER_DISCOVERY": "hyperpod"}
    if recipe.ahead is not None and recipe.ahead.directory:
        environ["ELASTIC_PREPARED_DIR"] = recipe.ahead.directory
    environ |= pods.environ
    devices = {"nvidia.com/gpu": str(recipe.devices)}
    container = {
        "name": "pytorch",
        "image": pods.image,
        "command": launch.hyperpodrun(recipe, pods.script),
        "env": [{"name": name, "value": value} for name, value in sorted(environ.items())],
        "ports": [{"containerPort": _AGENT_PORT, "name": "agent"}],
        "resources": {"requests": devices, "limits": dict(devices)},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108 - in a pod
    }
    found: dict[str, Any] = {
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": pods.memory}}],
    }
    if pods.instance:
        found["nodeSelector"] = {"node.kubernetes.io/instance-type": pods.instance}
    return found


def _flat(tree: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The same settings by environment."""
    return {
        f"TIEREDCKPT_{section.upper()}_{name.upper()}": value if isinstance(value, str) else json.dumps(value)
        for section, keys in tree.items()
        for name, value in keys.items()
    }


def _seconds(seconds: float) -> int:
    """Whole ones are all that the resource has; never less than was asked for."""
    return -int(-seconds // 1)
