"""Pods of a job: a replica's manifest, the effect of an admission, pods as ObservedJob. Pure."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from integration.hyperpod.job_resource import AGENT_PORT, NODE_HEALTH_LABEL, NodeHealth
from integration.hyperpod.operator import AgentStatus, DesiredPods, JobState, ObservedJob, ObservedPod
from integration.kubernetes.labels import (
    HOST_LABEL,
    INDEX_LABEL,
    JOB_LABEL,
    KUEUE_PREFIX,
    REPLICA_SPEC_LABEL,
    WORKLOAD_LABEL,
    KubeObject,
    owned_metadata,
)

_POD_FIELDS = {
    "POD_NAME": "metadata.name",
    "POD_NAMESPACE": "metadata.namespace",
    "POD_IP": "status.podIP",
    "NODE_NAME": "spec.nodeName",
    "NODE_IP": "status.hostIP",
}


@dataclass(frozen=True, order=True)
class ReplicaSlot:
    """One replica of a replica spec. Every pod that fills it has the same name."""

    replica_spec: str
    index: int

    def pod_name(self, job: str) -> str:
        return f"{job}-{self.replica_spec}-{self.index}"


def slot_of(pod: KubeObject) -> ReplicaSlot:
    """Return the slot that the pod fills, according to its labels."""
    labels = pod["metadata"]["labels"]
    return ReplicaSlot(labels[REPLICA_SPEC_LABEL], int(labels[INDEX_LABEL]))


def is_owned_by(pod: KubeObject, job_uid: str) -> bool:
    """Return whether this job created the pod, and not an earlier job of the same name."""
    return any(owner["uid"] == job_uid for owner in pod["metadata"].get("ownerReferences", ()))


def agent_port(pod: KubeObject) -> int:
    """Return the agent's port: ``--server-port`` of its command, the port named ``agent``, or the default."""
    container = pod["spec"]["containers"][0]
    for port in container.get("ports") or ():
        if port.get("name") == "agent":
            return int(port["containerPort"])
    words = [*(container.get("command") or ()), *(container.get("args") or ()), ""]
    for word, following in pairwise(words):
        name, equals, value = str(word).partition("=")
        if name == "--server-port" and (value if equals else following).isdigit():
            return int(value if equals else following)
    return AGENT_PORT


def build_pod(
    job: KubeObject, slot: ReplicaSlot, *, nodes: int, avoid: Sequence[str] = (), grant: PodAdmission | None = None
) -> dict[str, Any]:
    """Return the pod for a slot of ``job``, which runs on ``nodes`` nodes.

    The pod prefers nodes other than those in ``avoid``. With a ``grant`` the pod is already admitted and carries no
    labels that would queue it separately. Kubernetes never restarts it (``restartPolicy: Never``): restarts of
    processes and nodes are decided for the whole job.
    """
    meta = job["metadata"]
    (spec,) = (group for group in job["spec"]["replicaSpecs"] if group["name"] == slot.replica_spec)
    template = copy.deepcopy(dict(spec["template"]))
    metadata = template.get("metadata") or {}
    pod = dict(template["spec"])
    pod["restartPolicy"] = "Never"
    pod["containers"] = [
        _with_environment(container, job["spec"].get("nprocPerNode", "auto"), nodes) for container in pod["containers"]
    ]
    pod["affinity"] = _with_anti_affinity(pod.get("affinity") or {}, avoid)
    labels = {
        **_pod_annotations(meta.get("labels"), metadata.get("labels"), grant),
        JOB_LABEL: meta["name"],
        REPLICA_SPEC_LABEL: slot.replica_spec,
        INDEX_LABEL: str(slot.index),
    }
    annotations = _pod_annotations(meta.get("annotations"), metadata.get("annotations"), grant)
    if grant is not None:
        labels |= grant.labels
        annotations |= grant.annotations
        pod["nodeSelector"] = {**(pod.get("nodeSelector") or {}), **grant.node_selector}
        pod["tolerations"] = [*(pod.get("tolerations") or ()), *grant.tolerations]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": slot.pod_name(meta["name"]),
            "namespace": meta["namespace"],
            "labels": labels,
            "annotations": annotations,
            "ownerReferences": [owned_metadata(meta)],
        },
        "spec": pod,
    }


def _pod_annotations(
    of_job: KubeObject | None, of_template: KubeObject | None, grant: PodAdmission | None
) -> dict[str, str]:
    """Return labels or annotations of a pod.

    Without a grant, Kueue admits and preempts each pod separately, so pods inherit the job's queue, priority and
    topology.
    """
    if grant is not None:
        return {name: value for name, value in (of_template or {}).items() if not name.startswith(KUEUE_PREFIX)}
    for_kueue = {name: value for name, value in (of_job or {}).items() if name.startswith(KUEUE_PREFIX)}
    return {**for_kueue, **(of_template or {})}


def _with_environment(container: KubeObject, nproc: str, nodes: int) -> dict[str, Any]:
    """Add the variables that the agent needs to start. Variables of the template have precedence."""
    template_variables = list(container.get("env") or ())
    known = {variable["name"] for variable in template_variables}
    plain = {"NNODES": str(nodes), "PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": nproc}
    variables: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in plain.items()]
    variables += [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in _POD_FIELDS.items()]
    # Our variables come first: $(POD_IP) in a later variable of the template can then be expanded.
    return {
        **container,
        "env": [variable for variable in variables if variable["name"] not in known] + template_variables,
    }


_MAX_PREFERENCE_WEIGHT = 100
"""Maximum weight of a preference in Kubernetes."""
_UNHEALTHY_STATUSES = [health.value for health in NodeHealth if health is not NodeHealth.SCHEDULABLE]


def _with_anti_affinity(affinity: KubeObject, avoid: Sequence[str]) -> dict[str, Any]:
    """Exclude unhealthy nodes in every term, because terms are alternatives.

    Nodes to avoid are used if no others exist: a node that failed twice is better than waiting forever.
    """
    rule: dict[str, Any] = {"key": NODE_HEALTH_LABEL, "operator": "NotIn", "values": _UNHEALTHY_STATUSES}
    on_nodes = dict(affinity.get("nodeAffinity") or {})
    required = dict(on_nodes.get("requiredDuringSchedulingIgnoredDuringExecution") or {})
    terms = required.get("nodeSelectorTerms") or [{}]
    required["nodeSelectorTerms"] = [
        {**term, "matchExpressions": [*term.get("matchExpressions", ()), rule]} for term in terms
    ]
    on_nodes["requiredDuringSchedulingIgnoredDuringExecution"] = required
    if avoid:
        others = {"matchExpressions": [{"key": HOST_LABEL, "operator": "NotIn", "values": sorted(avoid)}]}
        preferred = on_nodes.get("preferredDuringSchedulingIgnoredDuringExecution") or ()
        on_nodes["preferredDuringSchedulingIgnoredDuringExecution"] = [
            *preferred,
            {"weight": _MAX_PREFERENCE_WEIGHT, "preference": others},
        ]
    return {**affinity, "nodeAffinity": on_nodes}


@dataclass(frozen=True)
class PodAdmission:
    """Additions of an admission to the pods of one replica spec in one Workload."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    node_selector: Mapping[str, str]
    tolerations: tuple[KubeObject, ...] = ()


def flavor_names(workload: KubeObject, replica_spec: str) -> list[str]:
    """Return the names of the ResourceFlavors that provide the quota."""
    admission = (workload.get("status") or {}).get("admission") or {}
    for entry in admission.get("podSetAssignments") or ():
        if entry["name"] == replica_spec:
            return sorted(set((entry.get("flavors") or {}).values()))
    return []


def pod_admission(workload: KubeObject, replica_spec: str, flavors: Sequence[KubeObject]) -> PodAdmission:
    """Return the flavors' and admission checks' additions to a pod, and the label of its Workload."""
    checks = (workload.get("status") or {}).get("admissionChecks") or ()
    updates = [item for check in checks for item in check.get("podSetUpdates") or () if item["name"] == replica_spec]
    specs = [flavor.get("spec") or {} for flavor in flavors]
    selectors = [*(item.get("nodeLabels") for item in specs), *(item.get("nodeSelector") for item in updates)]
    tolerated = [toleration for item in (*specs, *updates) for toleration in item.get("tolerations") or ()]
    return PodAdmission(
        labels={**_merge(item.get("labels") for item in updates), WORKLOAD_LABEL: workload["metadata"]["name"]},
        annotations=_merge(item.get("annotations") for item in updates),
        node_selector=_merge(selectors),
        tolerations=tuple(item for index, item in enumerate(tolerated) if item not in tolerated[:index]),
    )


def _merge(tables: Any) -> dict[str, str]:
    return {name: value for table in tables for name, value in (table or {}).items()}


_ENDED_PHASES = ("Succeeded", "Failed")
_HEALTHY_LABELS = ("", NodeHealth.SCHEDULABLE.value)


def has_ended(pod: KubeObject) -> bool:
    """Return whether the pod's containers will never run again."""
    return (pod.get("status") or {}).get("phase") in _ENDED_PHASES


def has_begun(pod: KubeObject) -> bool:
    """Return whether all containers of the pod have been started."""
    return (pod.get("status") or {}).get("phase", "Pending") != "Pending"


def is_terminating(resource: KubeObject) -> bool:
    """Return whether the object is being deleted."""
    return bool(resource["metadata"].get("deletionTimestamp"))


def pod_address(pod: KubeObject) -> str:
    return (pod.get("status") or {}).get("podIP") or ""


def observe_job(
    pods: Sequence[KubeObject],
    answers: Mapping[str, AgentStatus | None],
    health: Mapping[str, str],
    *,
    capacity: int | None = None,
    asked_back: Collection[str] = (),
) -> ObservedJob:
    """Return the observed job, without ended pods.

    ``answers`` maps a pod's name to its agent's status, and ``health`` a node's name to its health label.
    ``asked_back`` contains the names of preempted pods.
    """
    return ObservedJob(
        pods=tuple(_observed_pod(pod, answers, health, asked_back) for pod in pods if not has_ended(pod)),
        capacity=capacity,
        can_replace=True,
    )


def node_health_status(node: KubeObject) -> str:
    return (node["metadata"].get("labels") or {}).get(NODE_HEALTH_LABEL, "")


def missing_slots(job_name: str, wanted: DesiredPods, state: JobState, pods: Sequence[KubeObject]) -> list[ReplicaSlot]:
    """Return slots for the pods that are missing.

    The operator identifies pods by name. A new pod therefore receives the first name that neither its state nor the API
    server contains. Until the pod exists, every call returns the same name, so no second pod is created.
    """
    state_text = msgspec.json.encode(state).decode()
    pod_names = " ".join(pod["metadata"]["name"] for pod in pods)
    slots = []
    for group, count in wanted.pods.items():
        alive = sum(_is_counted(pod, group, state) for pod in pods)
        used = {*_indices(job_name, group, state_text), *_indices(job_name, group, pod_names)}
        free = (index for index in range(len(used) + count) if index not in used)
        slots += [ReplicaSlot(group, index) for _, index in zip(range(count - alive), free, strict=False)]
    return slots


def _is_counted(pod: KubeObject, group: str, state: JobState) -> bool:
    """Return whether the pod counts as one of the desired pods of ``group``."""
    leaving = is_terminating(pod) or pod["metadata"]["name"] in state.replaced_pods
    return slot_of(pod).replica_spec == group and not leaving and not has_ended(pod)


def _indices(job_name: str, group: str, text: str) -> Iterator[int]:
    for match in re.finditer(rf"(?<![a-z0-9-]){re.escape(job_name)}-{re.escape(group)}-(\d+)(?![a-z0-9-])", text):
        yield int(match[1])


def _observed_pod(
    pod: KubeObject, answers: Mapping[str, AgentStatus | None], health: Mapping[str, str], asked_back: Collection[str]
) -> ObservedPod:
    name, node = pod["metadata"]["name"], pod["spec"].get("nodeName") or ""
    label = health.get(node, "")
    return ObservedPod(
        name=name,
        group=slot_of(pod).replica_spec,
        node=node,
        ip=pod_address(pod),
        agent_status=answers.get(name),
        node_health_problem="" if label in _HEALTHY_LABELS else label,
        terminating=is_terminating(pod) or name in asked_back,
    )
