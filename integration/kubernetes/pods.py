"""A job's pods: the manifest for one replica, the effect of an admission, pods as ObservedJob. Pure."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from integration.hyperpod.operator import AgentStatus, DesiredPods, JobState, ObservedJob, ObservedPod
from integration.kubernetes.labels import (
    HOST_LABEL,
    INDEX_LABEL,
    JOB_LABEL,
    KUEUE_PREFIX,
    NODE_HEALTH_STATUS_LABEL,
    REPLICA_SPEC_LABEL,
    UNHEALTHY_STATUSES,
    WORKLOAD_LABEL,
    KubeObject,
    owned_metadata,
)

_FROM_POD = {
    "POD_NAME": "metadata.name",
    "POD_NAMESPACE": "metadata.namespace",
    "POD_IP": "status.podIP",
    "NODE_NAME": "spec.nodeName",
    "NODE_IP": "status.hostIP",
}


@dataclass(frozen=True, order=True)
class ReplicaSlot:
    """One place of one replica spec: whatever pod fills it has the same name."""

    replica_spec: str
    index: int

    def pod_name(self, job: str) -> str:
        return f"{job}-{self.replica_spec}-{self.index}"


def slot_of(pod: KubeObject) -> ReplicaSlot:
    """Which place a pod fills, as its labels say."""
    labels = pod["metadata"]["labels"]
    return ReplicaSlot(labels[REPLICA_SPEC_LABEL], int(labels[INDEX_LABEL]))


def is_owned_by(pod: KubeObject, job_uid: str) -> bool:
    """Whether this very job made it, and not one of the same name before it."""
    return any(owner["uid"] == job_uid for owner in pod["metadata"].get("ownerReferences", ()))


def agent_port(pod: KubeObject) -> int:
    """Where its agent listens: ``--server-port`` of its command, or a port that is called ``agent``, or 8080."""
    container = pod["spec"]["containers"][0]
    for port in container.get("ports") or ():
        if port.get("name") == "agent":
            return int(port["containerPort"])
    words = [*(container.get("command") or ()), *(container.get("args") or ()), ""]
    for word, following in pairwise(words):
        name, equals, value = str(word).partition("=")
        if name == "--server-port" and (value if equals else following).isdigit():
            return int(value if equals else following)
    return 8080


def build_pod(
    job: KubeObject, slot: ReplicaSlot, *, nodes: int, avoid: Sequence[str] = (), grant: PodAdmission | None = None
) -> dict[str, Any]:
    """The pod for a seat of ``job``, in a job of so many nodes, on none of the machines to ``avoid``.

    With a ``grant`` it is admitted already, and says nothing that would have it wait in a queue by itself. It is never
    started again where it was (``restartPolicy: Never``): whether a node gets another process, or the job another node,
    is decided for the job as a whole.
    """
    meta = job["metadata"]
    (spec,) = (one for one in job["spec"]["replicaSpecs"] if one["name"] == slot.replica_spec)
    template = copy.deepcopy(dict(spec["template"]))
    about = template.get("metadata") or {}
    pod = dict(template["spec"])
    pod["restartPolicy"] = "Never"
    pod["containers"] = [
        _with_environment(container, job["spec"].get("nprocPerNode", "auto"), nodes) for container in pod["containers"]
    ]
    pod["affinity"] = _with_anti_affinity(pod.get("affinity") or {}, avoid)
    labels = {
        **_pod_annotations(meta.get("labels"), about.get("labels"), grant),
        JOB_LABEL: meta["name"],
        REPLICA_SPEC_LABEL: slot.replica_spec,
        INDEX_LABEL: str(slot.index),
    }
    annotations = _pod_annotations(meta.get("annotations"), about.get("annotations"), grant)
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
    """A job's queue, priority and topology are its pods' where each of them is admitted, or preempted, by itself."""
    if grant is not None:
        return {name: value for name, value in (of_template or {}).items() if not name.startswith(KUEUE_PREFIX)}
    for_kueue = {name: value for name, value in (of_job or {}).items() if name.startswith(KUEUE_PREFIX)}
    return {**for_kueue, **(of_template or {})}


def _with_environment(container: KubeObject, nproc: str, nodes: int) -> dict[str, Any]:
    """What the agent needs to start. What the template sets itself is left as it is."""
    given = list(container.get("env") or ())
    known = {variable["name"] for variable in given}
    plain = {"NNODES": str(nodes), "PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": nproc}
    ours: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in plain.items()]
    ours += [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in _FROM_POD.items()]
    # Ours first: $(POD_IP) in a variable of the template means something only after it.
    return {**container, "env": [one for one in ours if one["name"] not in known] + given}


_HEAVIEST = 100
"""Of the wishes that Kubernetes takes."""


def _with_anti_affinity(affinity: KubeObject, avoid: Sequence[str]) -> dict[str, Any]:
    """The same wishes, and no node that is said to be unhealthy. Terms are alternatives, so each of them says it.

    Nodes to avoid are taken where there is no other: one that failed twice is better than a job that waits for ever.
    """
    rule: dict[str, Any] = {"key": NODE_HEALTH_STATUS_LABEL, "operator": "NotIn", "values": list(UNHEALTHY_STATUSES)}
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
            {"weight": _HEAVIEST, "preference": others},
        ]
    return {**affinity, "nodeAffinity": on_nodes}


@dataclass(frozen=True)
class PodAdmission:
    """For the pods of one replica spec in one Workload."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    node_selector: Mapping[str, str]
    tolerations: tuple[KubeObject, ...] = ()


def flavor_names(workload: KubeObject, replica_spec: str) -> list[str]:
    """Names of the ResourceFlavors whose quota was given."""
    admission = (workload.get("status") or {}).get("admission") or {}
    for one in admission.get("podSetAssignments") or ():
        if one["name"] == replica_spec:
            return sorted(set((one.get("flavors") or {}).values()))
    return []


def pod_admission(workload: KubeObject, replica_spec: str, flavors: Sequence[KubeObject]) -> PodAdmission:
    """Nodes of those flavors, and whatever admission checks want added; every pod says which Workload it is for."""
    checks = (workload.get("status") or {}).get("admissionChecks") or ()
    updates = [one for check in checks for one in check.get("podSetUpdates") or () if one["name"] == replica_spec]
    specs = [flavor.get("spec") or {} for flavor in flavors]
    selectors = [*(one.get("nodeLabels") for one in specs), *(one.get("nodeSelector") for one in updates)]
    tolerated = [toleration for one in (*specs, *updates) for toleration in one.get("tolerations") or ()]
    return PodAdmission(
        labels={**_joined(one.get("labels") for one in updates), WORKLOAD_LABEL: workload["metadata"]["name"]},
        annotations=_joined(one.get("annotations") for one in updates),
        node_selector=_joined(selectors),
        tolerations=tuple(one for at, one in enumerate(tolerated) if one not in tolerated[:at]),
    )


def _joined(tables: Any) -> dict[str, str]:
    return {name: value for table in tables for name, value in (table or {}).items()}


_ENDED = ("Succeeded", "Failed")
_HEALTHY = ("", "Schedulable")


def has_ended(pod: KubeObject) -> bool:
    """Its container will never run again."""
    return (pod.get("status") or {}).get("phase") in _ENDED


def has_begun(pod: KubeObject) -> bool:
    """All of its containers have been started."""
    return (pod.get("status") or {}).get("phase", "Pending") != "Pending"


def is_terminating(thing: KubeObject) -> bool:
    """It is being deleted."""
    return bool(thing["metadata"].get("deletionTimestamp"))


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
    """``answers`` and ``asked_back`` by pod's name; ``health``: what the label of each node says.

    Pods that have ended are no pods.
    """
    return ObservedJob(
        pods=tuple(_observed_pod(pod, answers, health, asked_back) for pod in pods if not has_ended(pod)),
        capacity=capacity,
        can_replace=True,
    )


def node_health_status(node: KubeObject) -> str:
    return (node["metadata"].get("labels") or {}).get(NODE_HEALTH_STATUS_LABEL, "")


def missing_slots(job_name: str, wanted: DesiredPods, state: JobState, pods: Sequence[KubeObject]) -> list[ReplicaSlot]:
    """Places to be filled, so that as many pods live as are wanted.

    The operator knows pods by their names, so a new one takes the first name that neither its state nor the API server
    knows yet. Asked again before the pod is there it is the same name, and two are never made.
    """
    remembered = msgspec.json.encode(state).decode()
    known = " ".join(pod["metadata"]["name"] for pod in pods)
    found = []
    for group, count in wanted.pods.items():
        alive = sum(_counts(pod, group, state) for pod in pods)
        used = {*_indices(job_name, group, remembered), *_indices(job_name, group, known)}
        free = (index for index in range(len(used) + count) if index not in used)
        found += [ReplicaSlot(group, index) for _, index in zip(range(count - alive), free, strict=False)]
    return found


def _counts(pod: KubeObject, group: str, state: JobState) -> bool:
    """Whether a pod is one of those that are wanted."""
    going = is_terminating(pod) or pod["metadata"]["name"] in state.replaced_pods
    return slot_of(pod).replica_spec == group and not going and not has_ended(pod)


def _indices(job_name: str, group: str, text: str) -> Iterator[int]:
    for found in re.finditer(rf"(?<![a-z0-9-]){re.escape(job_name)}-{re.escape(group)}-(\d+)(?![a-z0-9-])", text):
        yield int(found[1])


def _observed_pod(
    pod: KubeObject, answers: Mapping[str, AgentStatus | None], health: Mapping[str, str], asked_back: Collection[str]
) -> ObservedPod:
    name, node = pod["metadata"]["name"], pod["spec"].get("nodeName") or ""
    said = health.get(node, "")
    return ObservedPod(
        name=name,
        group=slot_of(pod).replica_spec,
        node=node,
        ip=pod_address(pod),
        agent_status=answers.get(name),
        node_health_problem="" if said in _HEALTHY else said,
        terminating=is_terminating(pod) or name in asked_back,
    )
