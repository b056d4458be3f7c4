"""The pods of a job: what is asked of Kubernetes for one seat of one replica spec. Pure."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from integration.kubernetes.grants import Grant
from integration.kubernetes.names import (
    HEALTH_LABEL,
    HOST_LABEL,
    INDEX_LABEL,
    JOB_LABEL,
    KUEUE_PREFIX,
    REPLICA_SPEC_LABEL,
    UNHEALTHY,
    owned_by,
)

Object = Mapping[str, Any]

_FROM_POD = {
    "POD_NAME": "metadata.name",
    "POD_NAMESPACE": "metadata.namespace",
    "POD_IP": "status.podIP",
    "NODE_NAME": "spec.nodeName",
    "NODE_IP": "status.hostIP",
}


@dataclass(frozen=True, order=True)
class Seat:
    """One place of one replica spec: whatever pod fills it has the same name."""

    replica_spec: str
    index: int

    def pod_name(self, job: str) -> str:
        return f"{job}-{self.replica_spec}-{self.index}"


def seat_of(pod: Object) -> Seat:
    """Which place a pod fills, as its labels say."""
    labels = pod["metadata"]["labels"]
    return Seat(labels[REPLICA_SPEC_LABEL], int(labels[INDEX_LABEL]))


def belongs_to(pod: Object, job_uid: str) -> bool:
    """Whether this very job made it, and not one of the same name before it."""
    return any(owner["uid"] == job_uid for owner in pod["metadata"].get("ownerReferences", ()))


def port_of(pod: Object) -> int:
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


def pod_for(
    job: Object, seat: Seat, *, nodes: int, avoid: Sequence[str] = (), grant: Grant | None = None
) -> dict[str, Any]:
    """The pod for a seat of ``job``, in a job of so many nodes, on none of the machines to ``avoid``.

    With a ``grant`` it is admitted already, and says nothing that would have it wait in a queue by itself. It is never
    started again where it was (``restartPolicy: Never``): whether a node gets another process, or the job another node,
    is decided for the job as a whole.
    """
    meta = job["metadata"]
    (spec,) = (one for one in job["spec"]["replicaSpecs"] if one["name"] == seat.replica_spec)
    template = copy.deepcopy(dict(spec["template"]))
    about = template.get("metadata") or {}
    pod = dict(template["spec"])
    pod["restartPolicy"] = "Never"
    pod["containers"] = [
        _with_environment(container, job["spec"].get("nprocPerNode", "auto"), nodes) for container in pod["containers"]
    ]
    pod["affinity"] = _keeping_away(pod.get("affinity") or {}, avoid)
    labels = {
        **_carried(meta.get("labels"), about.get("labels"), grant),
        JOB_LABEL: meta["name"],
        REPLICA_SPEC_LABEL: seat.replica_spec,
        INDEX_LABEL: str(seat.index),
    }
    annotations = _carried(meta.get("annotations"), about.get("annotations"), grant)
    if grant is not None:
        labels |= grant.labels
        annotations |= grant.annotations
        pod["nodeSelector"] = {**(pod.get("nodeSelector") or {}), **grant.node_selector}
        pod["tolerations"] = [*(pod.get("tolerations") or ()), *grant.tolerations]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": seat.pod_name(meta["name"]),
            "namespace": meta["namespace"],
            "labels": labels,
            "annotations": annotations,
            "ownerReferences": [owned_by(meta)],
        },
        "spec": pod,
    }


def _carried(of_job: Object | None, of_template: Object | None, grant: Grant | None) -> dict[str, str]:
    """A job's queue, priority and topology are its pods' where each of them is admitted, or asked back, by itself."""
    if grant is not None:
        return {name: value for name, value in (of_template or {}).items() if not name.startswith(KUEUE_PREFIX)}
    for_kueue = {name: value for name, value in (of_job or {}).items() if name.startswith(KUEUE_PREFIX)}
    return {**for_kueue, **(of_template or {})}


def _with_environment(container: Object, nproc: str, nodes: int) -> dict[str, Any]:
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


def _keeping_away(affinity: Object, avoid: Sequence[str]) -> dict[str, Any]:
    """The same wishes, and no node that is said to be unhealthy. Terms are alternatives, so each of them says it.

    Nodes to avoid are taken where there is no other: one that failed twice is better than a job that waits for ever.
    """
    rule: dict[str, Any] = {"key": HEALTH_LABEL, "operator": "NotIn", "values": list(UNHEALTHY)}
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
