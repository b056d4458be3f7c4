"""A HyperPodPyTorchJob built from settings and a scaling policy, including the pod's memory. Pure.

:class:`MemoryLocation` selects the memory of checkpoints. :class:`~elastic.world.scaling_policy.ScalingPolicy` defines
sizes, timeouts and restarts, under the resource's own names.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from elastic.errors import PolicyError
from elastic.world.scaling_policy import ScalingPolicy
from integration.hyperpod.job_resource import (
    AGENT_PORT,
    FAULT_ON_MATCH,
    PRIORITY_LABEL,
    QUEUE_LABEL,
    JobSpec,
    ReplicaGroup,
    log_rule_problems,
    write_job_resource,
)
from peerstore.sizes_and_durations import parse_size
from tieredckpt.settings import CLUSTER_CONFIG_ENV, AgentSettings, Settings

TRAINER_CONTAINER = "trainer"
MEMORY_LABEL = "tieredckpt-memory"
"""Label of every pod of a job, for network policies. Its value is a :class:`MemoryLocation`."""
_CONFIG = "/opt/ml/input/config"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_PROCESSES = ("auto", "cpu", "gpu")


class JobManifestError(PolicyError):
    """Error of a job that HyperPod would reject, with all its problems."""


class MemoryLocation(enum.Enum):
    NODE = "node"
    """Memory of the node agent, a DaemonSet. It outlives the pods."""
    SIDECAR = "sidecar"
    """Agent in a separate container of each pod.

    It outlives the trainers, not the pod. Needs no host path.
    """
    EMBEDDED = "embedded"
    """Agent started by the first trainer of each pod. Nothing else is needed."""


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """Description of a resource. Invalid ones raise :class:`JobManifestError`."""

    name: str
    image: str
    command: Sequence[str]
    """Command of each node: ``hyperpodrun ... train.py``."""
    policy: ScalingPolicy = field(default_factory=ScalingPolicy)
    settings: Settings = field(default_factory=Settings)
    """Settings. Values other than the defaults become environment variables."""
    memory: MemoryLocation = MemoryLocation.NODE
    memory_size: str = ""
    """Size of each pod's volume ("64GiB"), if :attr:`memory` is in the pods."""
    nproc: str = "auto"
    namespace: str = "default"
    spares: int = 0
    resources: Mapping[str, int | str] = field(default_factory=dict)
    """Resources of each node: ``{"nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": 32}``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    secret: str = ""
    """Kubernetes Secret whose ``secret`` authenticates the job's nodes. If "", the nodes create one."""
    cluster_config: str = ""
    """ConfigMap with the cluster's ``TieredStorageConfig``."""
    queue: str = ""
    priority: str = ""
    topology: str = ""
    """Node label, like ``topology.k8s.aws/network-node-layer-3``: prefer nodes with the same value."""
    instance_type: str = ""
    user: int | None = 10001
    """User id of the trainers and the node agent. None: the image's user, which must be root."""
    log_rules: Sequence[Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise JobManifestError(f"job {self.name}: {'; '.join(problems)}")


def job_manifest(job: TrainingJob) -> dict[str, Any]:
    """Return the ``HyperPodPyTorchJob``."""
    policy = job.policy
    elastic, replicas = len(policy.sizes) > 1, policy.replicas or policy.smallest_size
    most = policy.max_replicas if elastic else replicas
    group = ReplicaGroup(name="nodes", replicas=replicas, max_replicas=most, spares=job.spares, template=_template(job))
    spec = JobSpec(
        name=job.name,
        groups=(group,),
        policy=policy,
        nproc=job.nproc,
        elastic=elastic,
        log_rules=tuple(job.log_rules),
        startup_deadline_s=policy.startup_timeout_s,
        clean_pod_policy="None",
    )
    labels = {QUEUE_LABEL: job.queue, PRIORITY_LABEL: job.priority}
    return write_job_resource(spec, namespace=job.namespace, labels=labels)


def manifest_yaml(document: Mapping[str, Any]) -> str:
    """Return the YAML for ``kubectl apply``, without aliases."""
    return yaml.dump(document, Dumper=_Plain, sort_keys=False, width=120)


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _template(job: TrainingJob) -> dict[str, Any]:
    memory = pod_memory_spec(job.memory, job.memory_size, image=job.image, user=job.user)
    volumes: list[Mapping[str, Any]] = [*memory.volumes, {"name": "hyperpod-config", "emptyDir": {"sizeLimit": "16Mi"}}]
    mounts: list[Mapping[str, Any]] = [*memory.mounts, {"name": "hyperpod-config", "mountPath": _CONFIG}]
    variables = {**settings_environ(job.settings, job.memory, job.memory_size), **job.environment}
    if job.cluster_config:
        volumes.append({"name": "cluster-config", "configMap": {"name": job.cluster_config}})
        mounts.append({"name": "cluster-config", "mountPath": CLUSTER_MOUNT, "readOnly": True})
        variables[CLUSTER_CONFIG_ENV] = f"hyperpod:{CLUSTER_MOUNT}"
    env: list[Mapping[str, Any]] = [*memory.env, *({"name": key, "value": text} for key, text in variables.items())]
    if job.secret:
        env.append(_secret(job.secret))
    container: dict[str, Any] = {
        "name": TRAINER_CONTAINER,
        "image": job.image,
        "command": list(job.command),
        "env": env,
        "ports": [{"name": "agent", "containerPort": AGENT_PORT}, *memory.ports],
        "volumeMounts": mounts,
        **security_context(job.user, read_only=False),
    }
    if job.resources:
        amounts = {name: str(amount) for name, amount in job.resources.items()}
        if "memory" in amounts and job.memory is MemoryLocation.EMBEDDED:  # the volume counts as the container's memory
            amounts["memory"] = kubernetes_quantity(parse_size(amounts["memory"]) + parse_size(job.memory_size))
        container["resources"] = {"requests": amounts, "limits": amounts}
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": volumes,
        **({"initContainers": list(memory.sidecars)} if memory.sidecars else {}),
        **({"nodeSelector": {"node.kubernetes.io/instance-type": job.instance_type}} if job.instance_type else {}),
    }
    metadata: dict[str, Any] = {"labels": {MEMORY_LABEL: job.memory.value}}
    if job.topology:
        metadata["annotations"] = {"kueue.x-k8s.io/podset-preferred-topology": job.topology}
    return {"metadata": metadata, "spec": spec}


def _secret(name: str) -> dict[str, Any]:
    """Return a variable, not a file: only root could read it, as AWS's models lack ``fsGroup`` for a pod."""
    return {"name": "TIEREDCKPT_PEER_SECRET", "valueFrom": {"secretKeyRef": {"name": name, "key": "secret"}}}


def _problems(job: TrainingJob) -> list[str]:
    names = (("name", job.name), ("namespace", job.namespace), ("secret", job.secret), ("queue", job.queue))
    wrong = [f"{what} {name!r} is no DNS label" for what, name in names if name and not _NAME.fullmatch(name)]
    wrong += [f"{what} is empty" for what in ("name", "namespace", "image", "command") if not getattr(job, what)]
    if job.nproc not in _PROCESSES and not (job.nproc.isascii() and job.nproc.isdigit() and int(job.nproc)):
        wrong.append(f"nproc {job.nproc!r} is neither a number nor one of {', '.join(_PROCESSES)}")
    if job.spares < 0:
        wrong.append(f"spares is {job.spares}, must be 0 or more")
    in_pods = job.memory is not MemoryLocation.NODE
    if in_pods != bool(job.memory_size):
        where = "in the pods needs memory_size, the size of each" if in_pods else "of the node agent has its own size"
        wrong.append(f"memory {where}")
    sizes = (("memory_size", job.memory_size), ("resources: memory", str(job.resources.get("memory", ""))))
    wrong += [problem for what, size in sizes if size and (problem := size_error(what, size))]
    if job.settings.agent != AgentSettings() and job.memory is not MemoryLocation.EMBEDDED:
        wrong.append("settings.agent has no effect: the agent is started by its own manifest, not by the trainers")
    if any("," in f"{key}{value}" or "=" in key for key, value in job.settings.durable.options.items()):
        wrong.append("settings.durable.options with commas do not go into a variable: put them into a file")
    for rule in job.log_rules:
        wrong += log_rule_problems(rule)
        if FAULT_ON_MATCH in rule:
            wrong.append(f"log rule {rule.get('name')}: {FAULT_ON_MATCH} is not known to AWS's resource")
    if job.settings.peer.secret:
        wrong.append("settings.peer.secret would be readable in the resource: name a Kubernetes Secret (secret=)")
    ours = {CLUSTER_CONFIG_ENV, "TIEREDCKPT_PEER_SECRET", POD_IP_ENV, *settings_environ(job.settings, job.memory)}
    clash = sorted(ours & job.environment.keys())
    if clash:
        wrong.append(f"{', '.join(clash)} is made of the settings, and cannot be given beside them")
    return wrong


SHM_PATH = "/dev/shm"  # noqa: S108 - of a container, or of the node as the node agent's volume
ARENA_DIRECTORY = f"{SHM_PATH}/tieredckpt"
"""Arena on the node, and in the containers of the node agent and the trainers."""
CLUSTER_MOUNT = "/etc/tieredckpt/cluster"
PEERS_PORT, HTTP_PORT = 7070, 9464
POD_IP_ENV = "POD_IP"
AGENT_OVERHEAD = "512Mi"
"""Memory of an agent besides its arena."""


@dataclass(frozen=True)
class PodMemorySpec:
    """Parts of a pod that its checkpoint memory needs."""

    volumes: tuple[Mapping[str, Any], ...]
    mounts: tuple[Mapping[str, Any], ...]
    env: tuple[Mapping[str, Any], ...]
    """Variables that others and arguments refer to, so they come first."""
    ports: tuple[Mapping[str, Any], ...] = ()
    sidecars: tuple[Mapping[str, Any], ...] = ()


def pod_memory_spec(kind: MemoryLocation, size: str, *, image: str, user: int | None) -> PodMemorySpec:
    mount = {"name": "checkpoints", "mountPath": ARENA_DIRECTORY}
    env = ({"name": POD_IP_ENV, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},)
    if kind is MemoryLocation.NODE:
        volume = {"name": "checkpoints", "hostPath": {"path": ARENA_DIRECTORY, "type": "Directory"}}
        shm = {"name": "shm", "emptyDir": {"medium": "Memory"}}
        return PodMemorySpec((shm, volume), ({"name": "shm", "mountPath": SHM_PATH}, mount), env)
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": kubernetes_quantity(_arena_and_more(size))}}
    mounts = ({"name": "shm", "mountPath": SHM_PATH},)
    ports = ({"name": "peers", "containerPort": PEERS_PORT},)
    if kind is MemoryLocation.EMBEDDED:
        return PodMemorySpec((shm,), mounts, env, ports)
    return PodMemorySpec((shm,), mounts, env, (), (_sidecar(size, image, user, env),))


def _arena_and_more(size: str) -> int:
    """Return the size of the shared memory. The trainers' libraries use it besides the arena."""
    return parse_size(size) + parse_size("8Gi")


def _sidecar(size: str, image: str, user: int | None, env: tuple[Mapping[str, Any], ...]) -> dict[str, Any]:
    """Return an init container that continues to run: it is ready before the first trainer starts."""
    memory = kubernetes_quantity(parse_size(size) + parse_size(AGENT_OVERHEAD))
    health = {"httpGet": {"path": "/health", "port": "http"}}
    return {
        "name": "agent",
        "image": image,
        "restartPolicy": "Always",
        "command": ["tieredckpt", "agent"],
        "args": agent_arguments(f"--budget={parse_size(size)}"),
        "env": list(env),
        "ports": [{"name": "peers", "containerPort": PEERS_PORT}, {"name": "http", "containerPort": HTTP_PORT}],
        "startupProbe": {**health, "periodSeconds": 2, "failureThreshold": 60},
        "livenessProbe": {**health, "periodSeconds": 20, "timeoutSeconds": 10, "failureThreshold": 6},
        "resources": {"requests": {"cpu": "1", "memory": memory}, "limits": {"memory": memory}},
        "volumeMounts": [{"name": "shm", "mountPath": SHM_PATH}],
        **security_context(user, read_only=True),
    }


def agent_arguments(*others: str) -> list[str]:
    """Return the arguments of an agent in a container; its pod's address is ``$POD_IP``."""
    return [
        f"--dir={ARENA_DIRECTORY}",
        f"--http=$({POD_IP_ENV}):{HTTP_PORT}",
        f"--peers=$({POD_IP_ENV}):{PEERS_PORT}",
        *others,
    ]


def security_context(user: int | None, *, read_only: bool) -> dict[str, Any]:
    """Return the least privileges that suffice.

    Trainers write to their images' caches, the agent only to its volume.
    """
    if user is None:
        return {"securityContext": {"allowPrivilegeEscalation": False, "seccompProfile": {"type": "RuntimeDefault"}}}
    context = {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    return {"securityContext": {**context, **({"readOnlyRootFilesystem": True} if read_only else {})}}


def settings_environ(settings: Settings, memory: MemoryLocation, size: str = "") -> dict[str, str]:
    """Return the variables that give a trainer these settings with its agent at ``memory``."""
    variables = {} if settings.enabled else {"TIEREDCKPT_ENABLED": "0"}
    for section in dataclasses.fields(settings):
        values, defaults = getattr(settings, section.name), getattr(Settings(), section.name)
        for key in dataclasses.fields(values) if dataclasses.is_dataclass(values) else ():
            value = getattr(values, key.name)
            if value != getattr(defaults, key.name):
                variables[f"TIEREDCKPT_{section.name}_{key.name}".upper()] = _text(value)
    variables["TIEREDCKPT_AGENT_DIRECTORY"] = ARENA_DIRECTORY
    if memory is MemoryLocation.EMBEDDED:
        variables["TIEREDCKPT_AGENT_BUDGET"] = size
        variables["TIEREDCKPT_AGENT_PEERS"] = f"$({POD_IP_ENV}):{PEERS_PORT}"
    else:
        variables["TIEREDCKPT_AGENT_EMBEDDED"] = "0"
    return variables


def _text(value: Any) -> str:
    """Return a value as text, with Kubernetes' ``$(`` escaped."""
    if isinstance(value, Mapping):
        value = ",".join(f"{key}={text}" for key, text in value.items())
    return (str(int(value)) if isinstance(value, bool) else str(value)).replace("$(", "$$(")


def size_error(what: str, text: str) -> str:
    """Return the error of a size, or "". Kubernetes' ``64Gi`` and ``64GiB`` are valid."""
    try:
        return "" if parse_size(text) else f"{what} is 0"
    except ValueError as error:
        return f"{what} {error}"


def kubernetes_quantity(size_bytes: int) -> str:
    """Return the size in Kubernetes' notation, in the largest unit without a fraction."""
    for unit in ("", "Ki", "Mi"):
        if size_bytes % 1024:
            return f"{size_bytes}{unit}"
        size_bytes //= 1024
    return f"{size_bytes}Gi"
