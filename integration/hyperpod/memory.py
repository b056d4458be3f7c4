"""Where a pod's checkpoints are kept: volumes, mounts, variables and, where it is a sidecar, the agent. Pure."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peerstore.units import parse_size
from tieredckpt.settings import Settings

SHM = "/dev/shm"  # noqa: S108 - of a container, or of the node as the node agent's volume
DIRECTORY = f"{SHM}/tieredckpt"
"""The same on the node, in the node agent's container and in the trainers'."""
CLUSTER_MOUNT = "/etc/tieredckpt/cluster"
PEERS_PORT, HTTP_PORT = 7070, 9464
POD_IP = "POD_IP"
AGENT_OVERHEAD = "512Mi"
"""What an agent needs beside its arena."""


class Memory(enum.Enum):
    NODE = "node"
    """The node agent's, a DaemonSet: outlives the pods."""
    SIDECAR = "sidecar"
    """An agent in each pod, in a container of its own: outlives the trainers, not the pod. Needs no host path."""
    EMBEDDED = "embedded"
    """An agent that the first trainer of each pod starts: nothing else is needed."""


@dataclass(frozen=True)
class PodMemory:
    """What a pod needs for it."""

    volumes: tuple[Mapping[str, Any], ...]
    mounts: tuple[Mapping[str, Any], ...]
    env: tuple[Mapping[str, Any], ...]
    """That other variables and arguments may refer to, so they come first."""
    ports: tuple[Mapping[str, Any], ...] = ()
    sidecars: tuple[Mapping[str, Any], ...] = ()


def pod_memory(kind: Memory, size: str, *, image: str, user: int | None) -> PodMemory:
    mount = {"name": "checkpoints", "mountPath": DIRECTORY}
    env = ({"name": POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},)
    if kind is Memory.NODE:
        volume = {"name": "checkpoints", "hostPath": {"path": DIRECTORY, "type": "Directory"}}
        shm = {"name": "shm", "emptyDir": {"medium": "Memory"}}
        return PodMemory((shm, volume), ({"name": "shm", "mountPath": SHM}, mount), env)
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": quantity(_arena_and_more(size))}}
    mounts = ({"name": "shm", "mountPath": SHM},)
    ports = ({"name": "peers", "containerPort": PEERS_PORT},)
    if kind is Memory.EMBEDDED:
        return PodMemory((shm,), mounts, env, ports)
    return PodMemory((shm,), mounts, env, (), (_sidecar(size, image, user, env),))


def _arena_and_more(size: str) -> int:
    """The trainers' libraries use shared memory too, which they share with the arena."""
    return parse_size(size) + parse_size("8Gi")


def _sidecar(size: str, image: str, user: int | None, env: tuple[Mapping[str, Any], ...]) -> dict[str, Any]:
    """An init container that goes on beside the others: it is ready before the first trainer starts."""
    memory = quantity(parse_size(size) + parse_size(AGENT_OVERHEAD))
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
        "volumeMounts": [{"name": "shm", "mountPath": SHM}],
        **container_security(user, read_only=True),
    }


def agent_arguments(*others: str) -> list[str]:
    """Of an agent in a container, where its pod's address is ``$POD_IP``."""
    return [f"--dir={DIRECTORY}", f"--http=$({POD_IP}):{HTTP_PORT}", f"--peers=$({POD_IP}):{PEERS_PORT}", *others]


def container_security(user: int | None, *, read_only: bool) -> dict[str, Any]:
    """As little as works. Trainers write where their images have their caches; the agent writes to its volume alone."""
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


def setting_variables(settings: Settings, memory: Memory, size: str = "") -> dict[str, str]:
    """The environment that makes a trainer's settings what ``settings`` are, its agent being where ``memory`` says."""
    variables = {} if settings.enabled else {"TIEREDCKPT_ENABLED": "0"}
    for section in dataclasses.fields(settings):
        ours, usual = getattr(settings, section.name), getattr(Settings(), section.name)
        for key in dataclasses.fields(ours) if dataclasses.is_dataclass(ours) else ():
            value = getattr(ours, key.name)
            if value != getattr(usual, key.name):
                variables[f"TIEREDCKPT_{section.name}_{key.name}".upper()] = _text(value)
    variables["TIEREDCKPT_AGENT_DIRECTORY"] = DIRECTORY
    if memory is Memory.EMBEDDED:
        variables["TIEREDCKPT_AGENT_BUDGET"] = size
        variables["TIEREDCKPT_AGENT_PEERS"] = f"$({POD_IP}):{PEERS_PORT}"
    else:
        variables["TIEREDCKPT_AGENT_EMBEDDED"] = "0"
    return variables


def _text(value: Any) -> str:
    """``$(`` would begin a variable of Kubernetes."""
    if isinstance(value, Mapping):
        value = ",".join(f"{key}={text}" for key, text in value.items())
    return (str(int(value)) if isinstance(value, bool) else str(value)).replace("$(", "$$(")


def size_problem(what: str, text: str) -> str:
    """What is wrong with a size; "" where nothing is. Kubernetes' ``64Gi`` is one, and so is ``64GiB``."""
    try:
        return "" if parse_size(text) else f"{what} is 0"
    except ValueError as error:
        return f"{what} {error}"


def quantity(size_bytes: int) -> str:
    """As Kubernetes has it, in the largest unit that needs no fraction."""
    for unit in ("", "Ki", "Mi"):
        if size_bytes % 1024:
            return f"{size_bytes}{unit}"
        size_bytes //= 1024
    return f"{size_bytes}Gi"
