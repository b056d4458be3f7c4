"""``HyperPodPyTorchJob`` resources made of this project's settings: values in, a resource out. Pure.

Where the checkpoints' memory is, is said by :class:`Memory`; everything about sizes, patience and restarts by
:class:`~elastic.world.policy.ScalingPolicy`, whose words are the resource's own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from elastic.errors import PolicyError
from elastic.world.policy import ScalingPolicy
from integration.hyperpod.memory import (
    CLUSTER_MOUNT,
    POD_IP,
    Memory,
    container_security,
    pod_memory,
    quantity,
    setting_variables,
    size_problem,
)
from peerstore.units import parse_size
from tieredckpt.settings import CLUSTER, AgentSettings, Settings

API_VERSION, KIND = "sagemaker.amazonaws.com/v1", "HyperPodPyTorchJob"
CONTAINER = "trainer"
MEMORY_LABEL = "tieredckpt-memory"
"""On every pod of a job, for network policies; its value is that of :class:`Memory`."""
AGENT_PORT = 8080
"""Of HyperPod's elastic agent, which the operator speaks to."""
_CONFIG = "/opt/ml/input/config"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_PROCESSES = ("auto", "cpu", "gpu")
_RULE_KEYS: Mapping[str, type] = {
    "name": str,
    "logPattern": str,
    "expectedRecurringFrequencyInSeconds": int,
    "expectedStartCutOffInSeconds": int,
    "metricEvaluationDataPoints": int,
    "metricThreshold": int,
    "operator": str,
    "stopPattern": str,
}
_OPERATORS = ("gt", "lt", "eq", "gteq", "lteq")


class JobError(PolicyError):
    """A job is described that HyperPod would not take; says everything that is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """What a resource is made of. Impossible ones cannot be made."""

    name: str
    image: str
    command: Sequence[str]
    """What each node runs: ``hyperpodrun ... train.py``."""
    policy: ScalingPolicy = field(default_factory=ScalingPolicy)
    settings: Settings = field(default_factory=Settings)
    """Where they differ from what is the default anyway, they become environment variables."""
    memory: Memory = Memory.NODE
    memory_size: str = ""
    """Of each pod's own volume ("64GiB"), where :attr:`memory` is in the pods."""
    nproc: str = "auto"
    namespace: str = "default"
    spares: int = 0
    resources: Mapping[str, int | str] = field(default_factory=dict)
    """Of each node: ``{"nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": 32}``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    secret: str = ""
    """A Kubernetes Secret whose ``secret`` is what the job's nodes prove to each other. Not given: they make one."""
    cluster_config: str = ""
    """A ConfigMap with the cluster's ``TieredStorageConfig``."""
    queue: str = ""
    priority: str = ""
    topology: str = ""
    """A node label, ``topology.k8s.aws/network-node-layer-3``: nodes are preferred that share it."""
    instance_type: str = ""
    user: int | None = 10001
    """Who the trainers are; the node agent's user. ``None``: the image's, which must be root."""
    log_rules: Sequence[Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        problems = [*_problems(self), *_rule_problems(self.log_rules)]
        if problems:
            raise JobError(f"job {self.name}: {'; '.join(problems)}")


def resource(job: TrainingJob) -> dict[str, Any]:
    """The ``HyperPodPyTorchJob``."""
    labels = {"kueue.x-k8s.io/queue-name": job.queue, "kueue.x-k8s.io/priority-class": job.priority}
    policy = job.policy
    replicas: dict[str, Any] = {"name": "nodes", "replicas": policy.replicas or policy.least}
    if is_elastic(policy):
        replicas["maxReplicas"] = policy.max_replicas
    if job.spares:
        replicas["spares"] = job.spares
    spec = {
        "nprocPerNode": job.nproc,
        "replicaSpecs": [{**replicas, "template": _template(job)}],
        "runPolicy": _run_policy(policy, job.log_rules),
        **({"elasticPolicy": elastic_policy(policy)} if is_elastic(policy) else {}),
    }
    metadata: dict[str, Any] = {"name": job.name, "namespace": job.namespace}
    if any(labels.values()):
        metadata["labels"] = {name: value for name, value in labels.items() if value}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}


def as_yaml(document: Mapping[str, Any]) -> str:
    """For ``kubectl apply``; what stands there twice is written twice."""
    return yaml.dump(document, Dumper=_Plain, sort_keys=False, width=120)


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def is_elastic(policy: ScalingPolicy) -> bool:
    return len(policy.sizes) > 1


def elastic_policy(policy: ScalingPolicy) -> dict[str, Any]:
    """``elasticPolicy``; :meth:`ScalingPolicy.from_elastic_policy` reads it back. Parts of a second are a whole one."""
    if policy.replica_discrete_values:
        sizes: dict[str, Any] = {"replicaDiscreteValues": list(policy.sizes)}
    else:
        sizes = {"replicaIncrementStep": policy.replica_increment_step or 1}
    return {
        "minReplicas": policy.least,
        "maxReplicas": policy.max_replicas,
        **sizes,
        "scalingTimeoutInSeconds": math.ceil(policy.scaling_timeout_s),
        "gracefulShutdownTimeoutInSeconds": math.ceil(policy.graceful_shutdown_timeout_s),
        "faultyScaleDownTimeoutInSeconds": math.ceil(policy.faulty_scale_down_timeout_s),
    }


def _run_policy(policy: ScalingPolicy, rules: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    restart = {
        "evalPeriodSeconds": math.ceil(policy.eval_period_s),
        "numRestartBeforeFullJobRestart": policy.num_restart_before_full_job_restart,
        "maxFullJobRestarts": policy.max_full_job_restarts,
        "maxNumRepeatOffendersToAvoid": policy.max_num_repeat_offenders_to_avoid,
        "scaleUpSnoozeTimeInSeconds": math.ceil(policy.scale_up_snooze_s),
    }
    startup_s = policy.startup_timeout_s
    return {
        "cleanPodPolicy": "None",
        "restartPolicy": {key: value for key, value in restart.items() if value is not None},
        **({} if policy.job_max_retry_count is None else {"jobMaxRetryCount": policy.job_max_retry_count}),
        **({} if startup_s is None else {"startupDeadlineSeconds": math.ceil(startup_s)}),
        **({"logMonitoringConfiguration": [dict(rule) for rule in rules]} if rules else {}),
    }


def _template(job: TrainingJob) -> dict[str, Any]:
    kept = pod_memory(job.memory, job.memory_size, image=job.image, user=job.user)
    volumes: list[Mapping[str, Any]] = [*kept.volumes, {"name": "hyperpod-config", "emptyDir": {"sizeLimit": "16Mi"}}]
    mounts: list[Mapping[str, Any]] = [*kept.mounts, {"name": "hyperpod-config", "mountPath": _CONFIG}]
    variables = {**setting_variables(job.settings, job.memory, job.memory_size), **job.environment}
    if job.cluster_config:
        volumes.append({"name": "cluster-config", "configMap": {"name": job.cluster_config}})
        mounts.append({"name": "cluster-config", "mountPath": CLUSTER_MOUNT, "readOnly": True})
        variables[CLUSTER] = f"hyperpod:{CLUSTER_MOUNT}"
    env: list[Mapping[str, Any]] = [*kept.env, *({"name": key, "value": text} for key, text in variables.items())]
    if job.secret:
        env.append(_secret(job.secret))
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": job.image,
        "command": list(job.command),
        "env": env,
        "ports": [{"name": "agent", "containerPort": AGENT_PORT}, *kept.ports],
        "volumeMounts": mounts,
        **container_security(job.user, read_only=False),
    }
    if job.resources:
        amounts = {name: str(amount) for name, amount in job.resources.items()}
        if "memory" in amounts and job.memory is Memory.EMBEDDED:  # what is in the volume counts as the container's
            amounts["memory"] = quantity(parse_size(amounts["memory"]) + parse_size(job.memory_size))
        container["resources"] = {"requests": amounts, "limits": amounts}
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": volumes,
        **({"initContainers": list(kept.sidecars)} if kept.sidecars else {}),
        **({"nodeSelector": {"node.kubernetes.io/instance-type": job.instance_type}} if job.instance_type else {}),
    }
    about: dict[str, Any] = {"labels": {MEMORY_LABEL: job.memory.value}}
    if job.topology:
        about["annotations"] = {"kueue.x-k8s.io/podset-preferred-topology": job.topology}
    return {"metadata": about, "spec": spec}


def _secret(name: str) -> dict[str, Any]:
    """A variable, not a file: the file would be root's alone, and AWS's models know no ``fsGroup`` for a pod."""
    return {"name": "TIEREDCKPT_PEER_SECRET", "valueFrom": {"secretKeyRef": {"name": name, "key": "secret"}}}


def _problems(job: TrainingJob) -> list[str]:
    names = (("name", job.name), ("namespace", job.namespace), ("secret", job.secret), ("queue", job.queue))
    wrong = [f"{what} {name!r} is no DNS label" for what, name in names if name and not _NAME.fullmatch(name)]
    wrong += [f"{what} is empty" for what in ("name", "namespace", "image", "command") if not getattr(job, what)]
    if job.nproc not in _PROCESSES and not (job.nproc.isascii() and job.nproc.isdigit() and int(job.nproc)):
        wrong.append(f"nproc {job.nproc!r} is neither a number nor one of {', '.join(_PROCESSES)}")
    if job.spares < 0:
        wrong.append(f"spares is {job.spares}, must be 0 or more")
    in_pods = job.memory is not Memory.NODE
    if in_pods != bool(job.memory_size):
        where = "in the pods needs memory_size, the size of each" if in_pods else "of the node agent has its own size"
        wrong.append(f"memory {where}")
    sizes = (("memory_size", job.memory_size), ("resources: memory", str(job.resources.get("memory", ""))))
    wrong += [problem for what, size in sizes if size and (problem := size_problem(what, size))]
    if job.settings.agent != AgentSettings() and job.memory is not Memory.EMBEDDED:
        wrong.append("settings.agent has no effect: the agent is started by its own manifest, not by the trainers")
    if any("," in f"{key}{value}" or "=" in key for key, value in job.settings.durable.options.items()):
        wrong.append("settings.durable.options with commas do not go into a variable: put them into a file")
    if job.settings.peer.secret:
        wrong.append("settings.peer.secret would be readable in the resource: name a Kubernetes Secret (secret=)")
    ours = {CLUSTER, "TIEREDCKPT_PEER_SECRET", POD_IP, *setting_variables(job.settings, job.memory)}
    clash = sorted(ours & job.environment.keys())
    if clash:
        wrong.append(f"{', '.join(clash)} is made of the settings, and cannot be given beside them")
    return wrong


def _rule_problems(rules: Sequence[Mapping[str, Any]]) -> list[str]:
    wrong: list[str] = []
    for rule in rules:
        called = rule.get("name", "without a name")
        for key, value in rule.items():
            kind = _RULE_KEYS.get(key)
            if kind is None:
                wrong.append(f"log rule {called}: {key} is not known to AWS's resource")
            elif not isinstance(value, kind) or isinstance(value, bool):
                wrong.append(f"log rule {called}: {key} is {value!r}, must be {kind.__name__}")
        wrong += [f"log rule {called}: {key} is missing" for key in ("name", "logPattern") if not rule.get(key)]
        if rule.get("operator", "gt") not in _OPERATORS:
            wrong.append(f"log rule {called}: operator is none of {', '.join(_OPERATORS)}")
    return wrong
