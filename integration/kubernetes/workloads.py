"""Kueue's Workloads of a job: one for its least size and its spares, one for every step up from there. Pure.

A Workload is admitted as a whole or not at all, so what can run by itself is one: the least size, and then each step
of the elastic policy. A step is asked for once all before it are admitted, and all of them only while the least size
is: nothing waits for quota that would be of no use.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elastic.world.policy import ScalingPolicy
from integration.hyperpod.operator import JobSpec
from integration.hyperpod.operator.sizing import shares
from integration.kubernetes.names import (
    CONTENT_ANNOTATION,
    JOB_LABEL,
    KUEUE_GROUP,
    KUEUE_PREFIX,
    PRIORITY_LABEL,
    QUEUE_LABEL,
    owned_by,
)

Object = Mapping[str, Any]


@dataclass(frozen=True)
class PriorityClass:
    """By which name a Workload's priority is known, and to whom."""

    name: str
    of_kueue: bool

    @property
    def kind(self) -> str:
        return "WorkloadPriorityClass" if self.of_kueue else "PriorityClass"


@dataclass(frozen=True)
class Step:
    """From ``before`` replicas to ``size``; from 0 to the least size for the first one, which has the spares."""

    name: str
    before: int
    size: int
    counts: Mapping[str, int]
    """Pods of each replica spec."""


def queue_of(job: Object) -> str:
    """The LocalQueue it waits in; "" where it is nobody's business."""
    return (job["metadata"].get("labels") or {}).get(QUEUE_LABEL, "")


def steps_for(job: Object, spec: JobSpec, admitted: Collection[str]) -> list[Step]:
    """What the job asks for, given the names of what it has."""
    by_hand = job["spec"].get("replicas")
    most = spec.policy.at_most(spec.policy.max_replicas if by_hand is None else by_hand)
    found: list[Step] = []
    if spec.suspend:
        return found
    left, asks, before = set(admitted), False, 0
    for size in _sizes(spec.policy):
        if size > most or (asks and not left):
            break
        step = _step(job, spec, before, size)
        if step.name in left or not asks:
            found.append(step)
        if step.name not in left:
            asks = True
            if not before:
                break
        left.discard(step.name)
        before = size
    return found


def priority_class_of(job: Object, step: Step) -> PriorityClass | None:
    """Its replica spec's where that has one of its own, the job's, or that of its pods."""
    templates = [one["template"] for one in job["spec"]["replicaSpecs"] if step.counts.get(one["name"])]
    labels = [((one.get("metadata") or {}).get("labels") or {}).get(PRIORITY_LABEL) for one in templates]
    own = labels[0] if labels and len(set(labels)) == 1 else None
    name = own or (job["metadata"].get("labels") or {}).get(PRIORITY_LABEL)
    if name:
        return PriorityClass(name, of_kueue=True)
    of_pods = (one["spec"].get("priorityClassName") for one in templates)
    return next((PriorityClass(one, of_kueue=False) for one in of_pods if one), None)


def workload_for(
    job: Object, step: Step, version: str, named: PriorityClass | None = None, priority: int = 0
) -> dict[str, Any]:
    """The object to be made, in a version of Kueue's API."""
    meta = job["metadata"]
    spec: dict[str, Any] = {"queueName": queue_of(job), "podSets": _pod_sets(job, step)}
    if named is not None:
        spec |= {"priority": priority, **_reference(named, version)}
    return {
        "apiVersion": f"{KUEUE_GROUP}/{version}",
        "kind": "Workload",
        "metadata": {
            "name": step.name,
            "namespace": meta["namespace"],
            "labels": {JOB_LABEL: meta["name"], f"{KUEUE_PREFIX}job-uid": meta["uid"]},
            "annotations": {CONTENT_ANNOTATION: content_of(job, step)},
            "ownerReferences": [owned_by(meta)],
        },
        "spec": spec,
    }


def content_of(job: Object, step: Step) -> str:
    """Of the queue, the priority and the pods: one that waits and says something older is made anew."""
    named = priority_class_of(job, step)
    said = [queue_of(job), _pod_sets(job, step), None if named is None else [named.kind, named.name]]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def _sizes(policy: ScalingPolicy) -> Iterator[int]:
    if policy.replica_discrete_values:
        return iter(sorted(set(policy.replica_discrete_values)))
    return iter(range(policy.min_replicas, policy.max_replicas + 1, policy.replica_increment_step or 1))


def _step(job: Object, spec: JobSpec, before: int, size: int) -> Step:
    """Another job of that name has other Workloads, and so have other steps."""
    meta = job["metadata"]
    mark = hashlib.sha256(str(meta["uid"]).encode()).hexdigest()[:5]
    below, whole = shares(spec.groups, before), shares(spec.groups, size)
    counts = {group.name: whole[group.name] - below[group.name] for group in spec.groups}
    if not before:
        counts = {group.name: counts[group.name] + group.spares for group in spec.groups}
    counts = {name: count for name, count in counts.items() if count}
    return Step(f"{meta['name']}-{before}-{size}-{mark}", before, size, counts)


def _pod_sets(job: Object, step: Step) -> list[dict[str, Any]]:
    """As the pods will be, as far as it matters to who decides about room."""
    found = []
    for one in job["spec"]["replicaSpecs"]:
        if step.counts.get(one["name"]):
            about = {key: (one["template"].get("metadata") or {}).get(key) for key in ("labels", "annotations")}
            template = {
                "metadata": {key: value for key, value in about.items() if value},
                "spec": {**one["template"]["spec"], "restartPolicy": "Never"},
            }
            found.append({"name": one["name"], "count": step.counts[one["name"]], "template": template})
    return found


def _reference(named: PriorityClass, version: str) -> dict[str, Any]:
    group = KUEUE_GROUP if named.of_kueue else "scheduling.k8s.io"
    if version == "v1beta1":
        return {"priorityClassName": named.name, "priorityClassSource": f"{group}/{named.kind.lower()}"}
    return {"priorityClassRef": {"group": group, "kind": named.kind, "name": named.name}}
