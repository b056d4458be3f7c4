"""Kueue admission: a job's Workloads, the admitted replicas, and pending updates. Pure.

A Workload is admitted as a whole or not at all, so what can run by itself is one: the least size, and then each step
of the elastic policy. A step is asked for once all before it are admitted, and all of them only while the least size
is: nothing waits for quota that would be of no use.

Whoever makes pods for a Workload is the one who gives its quota back. Kueue says ``Evicted`` and waits; once the last
of the pods is gone ``QuotaReserved`` and ``Admitted`` are set to false here, and Kueue may give what they held to
somebody else.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.world.scaling_policy import ScalingPolicy
from integration.hyperpod.operator import JobSpec
from integration.hyperpod.operator.rank_assignment import replicas_by_group
from integration.kubernetes.labels import (
    CONTENT_ANNOTATION,
    JOB_LABEL,
    KUEUE_GROUP,
    KUEUE_PREFIX,
    PRIORITY_LABEL,
    QUEUE_LABEL,
    WORKLOAD_LABEL,
    KubeObject,
    owned_metadata,
)
from integration.kubernetes.pods import ReplicaSlot, has_ended, is_terminating, slot_of


@dataclass(frozen=True)
class PriorityClass:
    """By which name a Workload's priority is known, and to whom."""

    name: str
    is_kueue_class: bool

    @property
    def kind(self) -> str:
        return "WorkloadPriorityClass" if self.is_kueue_class else "PriorityClass"


@dataclass(frozen=True)
class WorkloadStep:
    """From ``previous_size`` replicas to ``size``; from 0 to the least size for the first one, which has the spares."""

    name: str
    previous_size: int
    size: int
    replicas_by_group: Mapping[str, int]
    """Pods of each replica spec."""


def queue_name(job: KubeObject) -> str:
    """The LocalQueue it waits in; "" where it is nobody's business."""
    return (job["metadata"].get("labels") or {}).get(QUEUE_LABEL, "")


def workload_steps(job: KubeObject, spec: JobSpec, admitted: Collection[str]) -> list[WorkloadStep]:
    """What the job asks for, given the names of what it has."""
    by_hand = job["spec"].get("replicas")
    most = spec.policy.largest_size_within(spec.policy.max_replicas if by_hand is None else by_hand)
    found: list[WorkloadStep] = []
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


def priority_class_for(job: KubeObject, step: WorkloadStep) -> PriorityClass | None:
    """Its replica spec's where that has one of its own, the job's, or that of its pods."""
    templates = [one["template"] for one in job["spec"]["replicaSpecs"] if step.replicas_by_group.get(one["name"])]
    labels = [((one.get("metadata") or {}).get("labels") or {}).get(PRIORITY_LABEL) for one in templates]
    own = labels[0] if labels and len(set(labels)) == 1 else None
    name = own or (job["metadata"].get("labels") or {}).get(PRIORITY_LABEL)
    if name:
        return PriorityClass(name, is_kueue_class=True)
    of_pods = (one["spec"].get("priorityClassName") for one in templates)
    return next((PriorityClass(one, is_kueue_class=False) for one in of_pods if one), None)


def build_workload(
    job: KubeObject, step: WorkloadStep, version: str, named: PriorityClass | None = None, priority: int = 0
) -> dict[str, Any]:
    """The object to be made, in a version of Kueue's API."""
    meta = job["metadata"]
    spec: dict[str, Any] = {"queueName": queue_name(job), "podSets": _pod_sets(job, step)}
    if named is not None:
        spec |= {"priority": priority, **_reference(named, version)}
    return {
        "apiVersion": f"{KUEUE_GROUP}/{version}",
        "kind": "Workload",
        "metadata": {
            "name": step.name,
            "namespace": meta["namespace"],
            "labels": {JOB_LABEL: meta["name"], f"{KUEUE_PREFIX}job-uid": meta["uid"]},
            "annotations": {CONTENT_ANNOTATION: workload_content(job, step)},
            "ownerReferences": [owned_metadata(meta)],
        },
        "spec": spec,
    }


def workload_content(job: KubeObject, step: WorkloadStep) -> str:
    """Of the queue, the priority and the pods: one that waits and says something older is made anew."""
    named = priority_class_for(job, step)
    said = [queue_name(job), _pod_sets(job, step), None if named is None else [named.kind, named.name]]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def _sizes(policy: ScalingPolicy) -> Iterator[int]:
    if policy.replica_discrete_values:
        return iter(sorted(set(policy.replica_discrete_values)))
    return iter(range(policy.min_replicas, policy.max_replicas + 1, policy.replica_increment_step or 1))


def _step(job: KubeObject, spec: JobSpec, before: int, size: int) -> WorkloadStep:
    """Another job of that name has other Workloads, and so have other steps."""
    meta = job["metadata"]
    mark = hashlib.sha256(str(meta["uid"]).encode()).hexdigest()[:5]
    below, whole = replicas_by_group(spec.groups, before), replicas_by_group(spec.groups, size)
    counts = {group.name: whole[group.name] - below[group.name] for group in spec.groups}
    if not before:
        counts = {group.name: counts[group.name] + group.spares for group in spec.groups}
    counts = {name: count for name, count in counts.items() if count}
    return WorkloadStep(f"{meta['name']}-{before}-{size}-{mark}", before, size, counts)


def _pod_sets(job: KubeObject, step: WorkloadStep) -> list[dict[str, Any]]:
    """As the pods will be, as far as it matters to who decides about room."""
    found = []
    for one in job["spec"]["replicaSpecs"]:
        if step.replicas_by_group.get(one["name"]):
            about = {key: (one["template"].get("metadata") or {}).get(key) for key in ("labels", "annotations")}
            template = {
                "metadata": {key: value for key, value in about.items() if value},
                "spec": {**one["template"]["spec"], "restartPolicy": "Never"},
            }
            found.append({"name": one["name"], "count": step.replicas_by_group[one["name"]], "template": template})
    return found


def _reference(named: PriorityClass, version: str) -> dict[str, Any]:
    group = KUEUE_GROUP if named.is_kueue_class else "scheduling.k8s.io"
    if version == "v1beta1":
        return {"priorityClassName": named.name, "priorityClassSource": f"{group}/{named.kind.lower()}"}
    return {"priorityClassRef": {"group": group, "kind": named.kind, "name": named.name}}


_REQUEUED_AT_ONCE = ("Preempted", "AdmissionCheck")
"""After other evictions it is Kueue that says when a Workload may be considered again."""
_OVERDUE_S = 60.0
"""So long after its grace a pod may be shown yet; then its machine is lost, and holds nothing that could be given."""


@dataclass(frozen=True)
class AdmissionPlan:
    """For one pass over one job."""

    capacity: int
    """Replicas that are admitted; nothing at all where the least size is not."""
    preempted_pods: frozenset[str]
    """Pods whose Workload is not admitted (any more), or not wanted."""
    admitted: tuple[KubeObject, ...]
    create: tuple[WorkloadStep, ...]
    delete: tuple[KubeObject, ...]
    status_updates: tuple[tuple[KubeObject, KubeObject], ...]
    """Workloads, and what is to be written of them."""
    waiting_for: str
    """What is waited for before the job can run; "" where it can."""

    @property
    def is_empty(self) -> bool:
        """Nothing is to be written."""
        return not (self.create or self.delete or self.status_updates)


def workload_condition(workload: KubeObject, kind: str) -> KubeObject:
    found = (one for one in (workload.get("status") or {}).get("conditions") or () if one["type"] == kind)
    return next(found, {})


def has_condition(workload: KubeObject, kind: str) -> bool:
    return workload_condition(workload, kind).get("status") == "True"


def is_workload_admitted(workload: KubeObject) -> bool:
    over = is_terminating(workload) or has_condition(workload, "Finished") or has_condition(workload, "Evicted")
    return has_condition(workload, "Admitted") and not over and workload["spec"].get("active") is not False


def workload_name_of(pod: KubeObject) -> str:
    return (pod["metadata"].get("labels") or {}).get(WORKLOAD_LABEL, "")


def plan_admission(
    job: KubeObject, spec: JobSpec, workloads: Sequence[KubeObject], pods: Sequence[KubeObject], now_s: float
) -> AdmissionPlan:
    """``workloads`` and ``pods``: all that there are of this job."""
    known = {one["metadata"]["name"]: one for one in workloads}
    steps = workload_steps(job, spec, {name for name, one in known.items() if is_workload_admitted(one)})
    wanted = {step.name: step for step in steps}
    runs = [step for step in steps if step.name in known and is_workload_admitted(known[step.name])]
    names = {step.name for step in runs}
    held = {workload_name_of(pod) for pod in pods if _is_there(pod, now_s)}
    delete, statuses = [], []
    for name, one in known.items():
        if name not in held and not is_terminating(one) and _is_obsolete(job, one, wanted.get(name)):
            delete.append(one)
        elif name in names:
            if not has_condition(one, "PodsReady") and _ready(name, pods) >= sum(
                wanted[name].replicas_by_group.values()
            ):
                ready = _condition("PodsReady", True, "Started", "all pods of this step run", now_s)
                statuses.append((one, {"conditions": _merged_conditions(one, ready)}))
        elif name not in held and has_condition(one, "Evicted") and has_condition(one, "QuotaReserved"):
            statuses.append((one, released_quota_status(one, now_s)))
    return AdmissionPlan(
        capacity=sum(step.size - step.previous_size for step in runs),
        preempted_pods=frozenset(
            pod["metadata"]["name"] for pod in pods if workload_name_of(pod) not in names and not has_ended(pod)
        ),
        admitted=tuple(known[step.name] for step in runs),
        create=tuple(step for step in steps if step.name not in known),
        delete=tuple(delete),
        status_updates=tuple(statuses),
        waiting_for=_waiting_reason(job, spec, known, steps, bool(runs)),
    )


def released_quota_status(workload: KubeObject, now_s: float) -> dict[str, Any]:
    """The status of one that was evicted and has no pods any more."""
    evicted = workload_condition(workload, "Evicted")
    reason, message = evicted.get("reason") or "Pending", evicted.get("message", "")
    changed = [
        _condition("QuotaReserved", False, "Pending", message, now_s),
        _condition("Admitted", False, "NoReservation", "it has no quota any more", now_s),
        _condition("PodsReady", False, "WaitForStart", "its pods are gone", now_s),
        _condition("Requeued", reason in _REQUEUED_AT_ONCE, reason, message, now_s),
    ]
    return {"admission": None, "conditions": _merged_conditions(workload, *changed)}


def finished_workload_statuses(
    workloads: Sequence[KubeObject], pods: Sequence[KubeObject], now_s: float, *, succeeded: bool
) -> list[tuple[KubeObject, KubeObject]]:
    """What is to be written once a job is over: whatever its Workloads wait for, or hold without pods, is free."""
    reason = "Succeeded" if succeeded else "Failed"
    said = _condition("Finished", True, reason, f"the job has {reason.lower()}", now_s)
    held = {workload_name_of(pod) for pod in pods if _is_there(pod, now_s)}
    free = [one for one in workloads if not has_condition(one, "Finished") and one["metadata"]["name"] not in held]
    return [(one, {"conditions": _merged_conditions(one, said)}) for one in free]


def assign_workloads(
    plan: AdmissionPlan, slots: Sequence[ReplicaSlot], pods: Sequence[KubeObject], replaced: Sequence[str]
) -> list[tuple[ReplicaSlot, KubeObject]]:
    """The admitted Workload for each seat that has room in one; the others wait."""
    room = {}
    for workload in plan.admitted:
        name = workload["metadata"]["name"]
        here = [pod for pod in pods if workload_name_of(pod) == name and pod["metadata"]["name"] not in replaced]
        here = [pod for pod in here if not (is_terminating(pod) or has_ended(pod))]
        for group, count in _assigned(workload).items():
            room[name, group] = count - sum(slot_of(pod).replica_spec == group for pod in here)
    found = []
    for slot in slots:
        for workload in plan.admitted:
            key = workload["metadata"]["name"], slot.replica_spec
            if room.get(key, 0) > 0:
                room[key] -= 1
                found.append((slot, workload))
                break
    return found


def _assigned(workload: KubeObject) -> dict[str, int]:
    """Pods by replica spec; Kueue may have admitted fewer than were asked for."""
    admission = (workload.get("status") or {}).get("admission") or {}
    granted = {one["name"]: one.get("count") for one in admission.get("podSetAssignments") or ()}
    asked = {one["name"]: one.get("count", 1) for one in workload["spec"]["podSets"]}
    return {name: count if granted.get(name) is None else granted[name] for name, count in asked.items()}


def _is_obsolete(job: KubeObject, workload: KubeObject, step: WorkloadStep | None) -> bool:
    if step is None or has_condition(workload, "Finished"):
        return True
    content = (workload["metadata"].get("annotations") or {}).get(CONTENT_ANNOTATION)
    return not has_condition(workload, "QuotaReserved") and content != workload_content(job, step)


def _is_there(pod: KubeObject, now_s: float) -> bool:
    """Whether it may use what its Workload was given."""
    until = pod["metadata"].get("deletionTimestamp")
    lost = until is not None and _seconds(until) + _OVERDUE_S < now_s
    return not (has_ended(pod) or lost)


def _seconds(moment: str) -> float:
    return dt.datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()


def _ready(name: str, pods: Sequence[KubeObject]) -> int:
    here = (pod for pod in pods if workload_name_of(pod) == name and not is_terminating(pod))
    return sum((pod.get("status") or {}).get("phase") == "Running" for pod in here)


def _waiting_reason(
    job: KubeObject, spec: JobSpec, known: Mapping[str, KubeObject], steps: Sequence[WorkloadStep], runs: bool
) -> str:
    if runs:
        return ""
    if not steps:
        return "no replicas are asked for"
    workload = known.get(steps[0].name, {})
    why = ""
    for kind in ("Evicted", "QuotaReserved"):
        condition = workload_condition(workload, kind)
        if (condition.get("status") == "True") == (kind == "Evicted"):
            why = why or condition.get("message", "")
    if has_condition(workload, "QuotaReserved") and not has_condition(workload, "Evicted"):
        why = "admission checks are not done"
    return f"{spec.policy.smallest_size} replicas wait in queue {queue_name(job)}" + (f": {why}" if why else "")


def _merged_conditions(workload: KubeObject, *changed: KubeObject) -> list[KubeObject]:
    """All conditions, these among them; the time of one whose status stays the same is what it was."""
    there = {one["type"]: one for one in (workload.get("status") or {}).get("conditions") or ()}
    for one in changed:
        old = there.get(one["type"], {})
        same = old.get("status") == one["status"]
        there[one["type"]] = {**one, "lastTransitionTime": old["lastTransitionTime"]} if same else one
    return list(there.values())


def _condition(kind: str, status: bool, reason: str, message: str, now_s: float) -> dict[str, Any]:
    moment = dt.datetime.fromtimestamp(now_s, dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "type": kind, "status": str(status), "reason": reason, "message": message[:1000], "lastTransitionTime": moment,
    }  # fmt: skip
