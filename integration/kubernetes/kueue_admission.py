"""Kueue admission: a job's Workloads, the admitted replicas, and pending updates. Pure.

Kueue admits a Workload as a whole or not at all. A job therefore has one Workload for its smallest size, and one for
each step of its elastic policy. A step is requested after all steps before it are admitted. Without the smallest size
no step is requested, because its quota would be useless.

The creator of a Workload's pods also releases its quota. Kueue sets ``Evicted`` and waits. After the last pod is gone,
this module sets ``QuotaReserved`` and ``Admitted`` to false, and Kueue may assign the quota to another Workload.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.world.scaling_policy import ScalingPolicy
from integration.hyperpod.job_resource import KUEUE_GROUP, PRIORITY_LABEL, QUEUE_LABEL
from integration.hyperpod.operator import JobSpec
from integration.hyperpod.operator.rank_assignment import replicas_by_group
from integration.kubernetes.labels import (
    CONTENT_ANNOTATION,
    JOB_LABEL,
    KUEUE_PREFIX,
    WORKLOAD_LABEL,
    KubeObject,
    owned_metadata,
)
from integration.kubernetes.pods import ReplicaSlot, has_ended, is_terminating, slot_of


@dataclass(frozen=True)
class PriorityClass:
    """Name of a Workload's priority class, and whether Kueue or Kubernetes defines it."""

    name: str
    is_kueue_class: bool

    @property
    def kind(self) -> str:
        return "WorkloadPriorityClass" if self.is_kueue_class else "PriorityClass"


@dataclass(frozen=True)
class WorkloadStep:
    """One Workload's step from ``previous_size`` to ``size`` replicas.

    The first step begins at 0 and includes the spares.
    """

    name: str
    previous_size: int
    size: int
    replicas_by_group: Mapping[str, int]
    """Pods of each replica spec."""


def queue_name(job: KubeObject) -> str:
    """Return the name of the job's LocalQueue; "" if it has none."""
    return (job["metadata"].get("labels") or {}).get(QUEUE_LABEL, "")


def workload_steps(job: KubeObject, spec: JobSpec, admitted: Collection[str]) -> list[WorkloadStep]:
    """Return the steps to request or retain. ``admitted`` names the admitted Workloads."""
    manual_size = job["spec"].get("replicas")
    max_size = spec.policy.largest_size_within(spec.policy.max_replicas if manual_size is None else manual_size)
    steps: list[WorkloadStep] = []
    if spec.suspend:
        return steps
    remaining, requesting, previous = set(admitted), False, 0
    for size in _sizes(spec.policy):
        if size > max_size or (requesting and not remaining):
            break
        step = _step(job, spec, previous, size)
        if step.name in remaining or not requesting:
            steps.append(step)
        if step.name not in remaining:
            requesting = True
            if not previous:
                break
        remaining.discard(step.name)
        previous = size
    return steps


def priority_class_for(job: KubeObject, step: WorkloadStep) -> PriorityClass | None:
    """Return the priority class of the step's replica specs, of the job or of the pods, in this order."""
    templates = [spec["template"] for spec in job["spec"]["replicaSpecs"] if step.replicas_by_group.get(spec["name"])]
    labels = [((spec.get("metadata") or {}).get("labels") or {}).get(PRIORITY_LABEL) for spec in templates]
    own = labels[0] if labels and len(set(labels)) == 1 else None
    name = own or (job["metadata"].get("labels") or {}).get(PRIORITY_LABEL)
    if name:
        return PriorityClass(name, is_kueue_class=True)
    of_pods = (spec["spec"].get("priorityClassName") for spec in templates)
    return next((PriorityClass(pod_class, is_kueue_class=False) for pod_class in of_pods if pod_class), None)


def build_workload(
    job: KubeObject, step: WorkloadStep, version: str, named: PriorityClass | None = None, priority: int = 0
) -> dict[str, Any]:
    """Return the Workload to create, in ``version`` of Kueue's API."""
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
    """Return a digest of queue, priority and pods. A waiting Workload with another digest is recreated."""
    named = priority_class_for(job, step)
    content = [queue_name(job), _pod_sets(job, step), None if named is None else [named.kind, named.name]]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _sizes(policy: ScalingPolicy) -> Iterator[int]:
    if policy.replica_discrete_values:
        return iter(sorted(set(policy.replica_discrete_values)))
    return iter(range(policy.min_replicas, policy.max_replicas + 1, policy.replica_increment_step or 1))


def _step(job: KubeObject, spec: JobSpec, previous: int, size: int) -> WorkloadStep:
    """Return the step between two sizes.

    Its name contains a digest of the job's uid, so each job has its own.
    """
    meta = job["metadata"]
    digest = hashlib.sha256(str(meta["uid"]).encode()).hexdigest()[:5]
    below, total = replicas_by_group(spec.groups, previous), replicas_by_group(spec.groups, size)
    counts = {group.name: total[group.name] - below[group.name] for group in spec.groups}
    if not previous:
        counts = {group.name: counts[group.name] + group.spares for group in spec.groups}
    counts = {name: count for name, count in counts.items() if count}
    return WorkloadStep(f"{meta['name']}-{previous}-{size}-{digest}", previous, size, counts)


def _pod_sets(job: KubeObject, step: WorkloadStep) -> list[dict[str, Any]]:
    """Return the pod sets, as far as they matter for admission."""
    pod_sets = []
    for spec in job["spec"]["replicaSpecs"]:
        if step.replicas_by_group.get(spec["name"]):
            metadata = {key: (spec["template"].get("metadata") or {}).get(key) for key in ("labels", "annotations")}
            template = {
                "metadata": {key: value for key, value in metadata.items() if value},
                "spec": {**spec["template"]["spec"], "restartPolicy": "Never"},
            }
            pod_sets.append({"name": spec["name"], "count": step.replicas_by_group[spec["name"]], "template": template})
    return pod_sets


def _reference(named: PriorityClass, version: str) -> dict[str, Any]:
    group = KUEUE_GROUP if named.is_kueue_class else "scheduling.k8s.io"
    if version == "v1beta1":
        return {"priorityClassName": named.name, "priorityClassSource": f"{group}/{named.kind.lower()}"}
    return {"priorityClassRef": {"group": group, "kind": named.kind, "name": named.name}}


_REQUEUED_AT_ONCE = ("Preempted", "AdmissionCheck")
"""Eviction reasons after which a Workload is requeued immediately. After others, Kueue decides when."""
_OVERDUE_S = 60.0
"""Seconds after the end of its grace period until a terminating pod no longer counts.

Its machine is lost then, and the pod occupies no quota that could be reused.
"""


@dataclass(frozen=True)
class AdmissionPlan:
    """Plan for one reconcile of one job."""

    capacity: int
    """Admitted replicas; 0 if the smallest size is not admitted."""
    preempted_pods: frozenset[str]
    """Names of the pods without an admitted or wanted Workload."""
    admitted: tuple[KubeObject, ...]
    create: tuple[WorkloadStep, ...]
    delete: tuple[KubeObject, ...]
    status_updates: tuple[tuple[KubeObject, KubeObject], ...]
    """Workloads and their new statuses."""
    waiting_for: str
    """Reason why the job cannot run; "" if it can."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing must be written."""
        return not (self.create or self.delete or self.status_updates)


def workload_condition(workload: KubeObject, kind: str) -> KubeObject:
    matches = (one for one in (workload.get("status") or {}).get("conditions") or () if one["type"] == kind)
    return next(matches, {})


def has_condition(workload: KubeObject, kind: str) -> bool:
    return workload_condition(workload, kind).get("status") == "True"


def is_workload_admitted(workload: KubeObject) -> bool:
    ended = is_terminating(workload) or has_condition(workload, "Finished") or has_condition(workload, "Evicted")
    return has_condition(workload, "Admitted") and not ended and workload["spec"].get("active") is not False


def workload_name_of(pod: KubeObject) -> str:
    return (pod["metadata"].get("labels") or {}).get(WORKLOAD_LABEL, "")


def plan_admission(
    job: KubeObject, spec: JobSpec, workloads: Sequence[KubeObject], pods: Sequence[KubeObject], now_s: float
) -> AdmissionPlan:
    """Return the plan. ``workloads`` and ``pods`` are all that exist of this job."""
    known = {workload["metadata"]["name"]: workload for workload in workloads}
    steps = workload_steps(job, spec, {name for name, workload in known.items() if is_workload_admitted(workload)})
    wanted = {step.name: step for step in steps}
    admitted = [step for step in steps if step.name in known and is_workload_admitted(known[step.name])]
    names = {step.name for step in admitted}
    held = {workload_name_of(pod) for pod in pods if _uses_quota(pod, now_s)}
    delete, statuses = [], []
    for name, workload in known.items():
        if name not in held and not is_terminating(workload) and _is_obsolete(job, workload, wanted.get(name)):
            delete.append(workload)
        elif name in names:
            if not has_condition(workload, "PodsReady") and _running_pods(name, pods) >= sum(
                wanted[name].replicas_by_group.values()
            ):
                ready = _condition("PodsReady", True, "Started", "all pods of this step run", now_s)
                statuses.append((workload, {"conditions": _merged_conditions(workload, ready)}))
        elif name not in held and has_condition(workload, "Evicted") and has_condition(workload, "QuotaReserved"):
            statuses.append((workload, released_quota_status(workload, now_s)))
    return AdmissionPlan(
        capacity=sum(step.size - step.previous_size for step in admitted),
        preempted_pods=frozenset(
            pod["metadata"]["name"] for pod in pods if workload_name_of(pod) not in names and not has_ended(pod)
        ),
        admitted=tuple(known[step.name] for step in admitted),
        create=tuple(step for step in steps if step.name not in known),
        delete=tuple(delete),
        status_updates=tuple(statuses),
        waiting_for=_waiting_reason(job, spec, known, steps, bool(admitted)),
    )


def released_quota_status(workload: KubeObject, now_s: float) -> dict[str, Any]:
    """Return the status of an evicted Workload without pods."""
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
    """Return the final statuses of an ended job's Workloads that have no pods."""
    reason = "Succeeded" if succeeded else "Failed"
    finished = _condition("Finished", True, reason, f"the job has {reason.lower()}", now_s)
    held = {workload_name_of(pod) for pod in pods if _uses_quota(pod, now_s)}
    free = [
        workload
        for workload in workloads
        if not has_condition(workload, "Finished") and workload["metadata"]["name"] not in held
    ]
    return [(workload, {"conditions": _merged_conditions(workload, finished)}) for workload in free]


def assign_workloads(
    plan: AdmissionPlan, slots: Sequence[ReplicaSlot], pods: Sequence[KubeObject], replaced: Sequence[str]
) -> list[tuple[ReplicaSlot, KubeObject]]:
    """Assign an admitted Workload with room to each slot. Slots without room wait."""
    room = {}
    for workload in plan.admitted:
        name = workload["metadata"]["name"]
        members = [pod for pod in pods if workload_name_of(pod) == name and pod["metadata"]["name"] not in replaced]
        members = [pod for pod in members if not (is_terminating(pod) or has_ended(pod))]
        for group, count in _admitted_counts(workload).items():
            room[name, group] = count - sum(slot_of(pod).replica_spec == group for pod in members)
    assigned = []
    for slot in slots:
        for workload in plan.admitted:
            key = workload["metadata"]["name"], slot.replica_spec
            if room.get(key, 0) > 0:
                room[key] -= 1
                assigned.append((slot, workload))
                break
    return assigned


def _admitted_counts(workload: KubeObject) -> dict[str, int]:
    """Return the admitted pods by replica spec. Kueue may admit fewer than requested."""
    admission = (workload.get("status") or {}).get("admission") or {}
    granted = {entry["name"]: entry.get("count") for entry in admission.get("podSetAssignments") or ()}
    asked = {entry["name"]: entry.get("count", 1) for entry in workload["spec"]["podSets"]}
    return {name: count if granted.get(name) is None else granted[name] for name, count in asked.items()}


def _is_obsolete(job: KubeObject, workload: KubeObject, step: WorkloadStep | None) -> bool:
    if step is None or has_condition(workload, "Finished"):
        return True
    content = (workload["metadata"].get("annotations") or {}).get(CONTENT_ANNOTATION)
    return not has_condition(workload, "QuotaReserved") and content != workload_content(job, step)


def _uses_quota(pod: KubeObject, now_s: float) -> bool:
    """Return whether the pod may still use its Workload's quota."""
    deadline = pod["metadata"].get("deletionTimestamp")
    lost = deadline is not None and _seconds(deadline) + _OVERDUE_S < now_s
    return not (has_ended(pod) or lost)


def _seconds(text: str) -> float:
    return dt.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def _running_pods(name: str, pods: Sequence[KubeObject]) -> int:
    members = (pod for pod in pods if workload_name_of(pod) == name and not is_terminating(pod))
    return sum((pod.get("status") or {}).get("phase") == "Running" for pod in members)


def _waiting_reason(
    job: KubeObject, spec: JobSpec, known: Mapping[str, KubeObject], steps: Sequence[WorkloadStep], admitted: bool
) -> str:
    if admitted:
        return ""
    if not steps:
        return "no replicas are asked for"
    workload = known.get(steps[0].name, {})
    reason = ""
    for kind in ("Evicted", "QuotaReserved"):
        condition = workload_condition(workload, kind)
        if (condition.get("status") == "True") == (kind == "Evicted"):
            reason = reason or condition.get("message", "")
    if has_condition(workload, "QuotaReserved") and not has_condition(workload, "Evicted"):
        reason = "admission checks are not done"
    return f"{spec.policy.smallest_size} replicas wait in queue {queue_name(job)}" + (f": {reason}" if reason else "")


def _merged_conditions(workload: KubeObject, *changed: KubeObject) -> list[KubeObject]:
    """Return all conditions with the changed ones.

    A condition with the same status retains its transition time.
    """
    conditions = {condition["type"]: condition for condition in (workload.get("status") or {}).get("conditions") or ()}
    for condition in changed:
        old = conditions.get(condition["type"], {})
        same = old.get("status") == condition["status"]
        conditions[condition["type"]] = (
            {**condition, "lastTransitionTime": old["lastTransitionTime"]} if same else condition
        )
    return list(conditions.values())


def _condition(kind: str, status: bool, reason: str, message: str, now_s: float) -> dict[str, Any]:
    timestamp = dt.datetime.fromtimestamp(now_s, dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "type": kind, "status": str(status), "reason": reason, "message": message[:1000],
        "lastTransitionTime": timestamp,
    }  # fmt: skip
