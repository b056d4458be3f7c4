"""What of a job is admitted, and what is to be done about its Workloads. Pure.

Whoever makes pods for a Workload is the one who gives its quota back. Kueue says ``Evicted`` and waits; once the last
of the pods is gone ``QuotaReserved`` and ``Admitted`` are set to false here, and Kueue may give what they held to
somebody else.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from integration.hyperpod.operator import JobSpec
from integration.kubernetes.names import CONTENT_ANNOTATION, WORKLOAD_LABEL
from integration.kubernetes.pods import Seat, seat_of
from integration.kubernetes.seeing import has_ended, is_leaving
from integration.kubernetes.workloads import Step, content_of, queue_of, steps_for

Object = Mapping[str, Any]

_REQUEUED_AT_ONCE = ("Preempted", "AdmissionCheck")
"""After other evictions it is Kueue that says when a Workload may be considered again."""
_OVERDUE_S = 60.0
"""So long after its grace a pod may be shown yet; then its machine is lost, and holds nothing that could be given."""


@dataclass(frozen=True)
class Plan:
    """For one pass over one job."""

    capacity: int
    """Replicas that are admitted; nothing at all where the least size is not."""
    asked_back: frozenset[str]
    """Pods whose Workload is not admitted (any more), or not wanted."""
    admitted: tuple[Object, ...]
    create: tuple[Step, ...]
    delete: tuple[Object, ...]
    statuses: tuple[tuple[Object, Object], ...]
    """Workloads, and what is to be written of them."""
    waits: str
    """What is waited for before the job can run; "" where it can."""

    @property
    def is_settled(self) -> bool:
        """Nothing is to be written."""
        return not (self.create or self.delete or self.statuses)


def condition_of(workload: Object, kind: str) -> Object:
    found = (one for one in (workload.get("status") or {}).get("conditions") or () if one["type"] == kind)
    return next(found, {})


def says(workload: Object, kind: str) -> bool:
    return condition_of(workload, kind).get("status") == "True"


def is_admitted(workload: Object) -> bool:
    over = is_leaving(workload) or says(workload, "Finished") or says(workload, "Evicted")
    return says(workload, "Admitted") and not over and workload["spec"].get("active") is not False


def workload_of(pod: Object) -> str:
    return (pod["metadata"].get("labels") or {}).get(WORKLOAD_LABEL, "")


def plan_for(job: Object, spec: JobSpec, workloads: Sequence[Object], pods: Sequence[Object], now_s: float) -> Plan:
    """``workloads`` and ``pods``: all that there are of this job."""
    known = {one["metadata"]["name"]: one for one in workloads}
    steps = steps_for(job, spec, {name for name, one in known.items() if is_admitted(one)})
    wanted = {step.name: step for step in steps}
    runs = [step for step in steps if step.name in known and is_admitted(known[step.name])]
    names = {step.name for step in runs}
    held = {workload_of(pod) for pod in pods if _is_there(pod, now_s)}
    delete, statuses = [], []
    for name, one in known.items():
        if name not in held and not is_leaving(one) and _is_of_no_use(job, one, wanted.get(name)):
            delete.append(one)
        elif name in names:
            if not says(one, "PodsReady") and _ready(name, pods) >= sum(wanted[name].counts.values()):
                ready = _condition("PodsReady", True, "Started", "all pods of this step run", now_s)
                statuses.append((one, {"conditions": _with(one, ready)}))
        elif name not in held and says(one, "Evicted") and says(one, "QuotaReserved"):
            statuses.append((one, given_back(one, now_s)))
    return Plan(
        capacity=sum(step.size - step.before for step in runs),
        asked_back=frozenset(
            pod["metadata"]["name"] for pod in pods if workload_of(pod) not in names and not has_ended(pod)
        ),
        admitted=tuple(known[step.name] for step in runs),
        create=tuple(step for step in steps if step.name not in known),
        delete=tuple(delete),
        statuses=tuple(statuses),
        waits=_what_is_waited_for(job, spec, known, steps, bool(runs)),
    )


def given_back(workload: Object, now_s: float) -> dict[str, Any]:
    """The status of one that was evicted and has no pods any more."""
    evicted = condition_of(workload, "Evicted")
    reason, message = evicted.get("reason") or "Pending", evicted.get("message", "")
    changed = [
        _condition("QuotaReserved", False, "Pending", message, now_s),
        _condition("Admitted", False, "NoReservation", "it has no quota any more", now_s),
        _condition("PodsReady", False, "WaitForStart", "its pods are gone", now_s),
        _condition("Requeued", reason in _REQUEUED_AT_ONCE, reason, message, now_s),
    ]
    return {"admission": None, "conditions": _with(workload, *changed)}


def finished(
    workloads: Sequence[Object], pods: Sequence[Object], now_s: float, *, succeeded: bool
) -> list[tuple[Object, Object]]:
    """What is to be written once a job is over: whatever its Workloads wait for, or hold without pods, is free."""
    reason = "Succeeded" if succeeded else "Failed"
    said = _condition("Finished", True, reason, f"the job has {reason.lower()}", now_s)
    held = {workload_of(pod) for pod in pods if _is_there(pod, now_s)}
    free = [one for one in workloads if not says(one, "Finished") and one["metadata"]["name"] not in held]
    return [(one, {"conditions": _with(one, said)}) for one in free]


def placed(
    plan: Plan, seats: Sequence[Seat], pods: Sequence[Object], replaced: Sequence[str]
) -> list[tuple[Seat, Object]]:
    """The admitted Workload for each seat that has room in one; the others wait."""
    room = {}
    for workload in plan.admitted:
        name = workload["metadata"]["name"]
        here = [pod for pod in pods if workload_of(pod) == name and pod["metadata"]["name"] not in replaced]
        here = [pod for pod in here if not (is_leaving(pod) or has_ended(pod))]
        for group, count in _assigned(workload).items():
            room[name, group] = count - sum(seat_of(pod).replica_spec == group for pod in here)
    found = []
    for seat in seats:
        for workload in plan.admitted:
            key = workload["metadata"]["name"], seat.replica_spec
            if room.get(key, 0) > 0:
                room[key] -= 1
                found.append((seat, workload))
                break
    return found


def _assigned(workload: Object) -> dict[str, int]:
    """Pods by replica spec; Kueue may have admitted fewer than were asked for."""
    admission = (workload.get("status") or {}).get("admission") or {}
    granted = {one["name"]: one.get("count") for one in admission.get("podSetAssignments") or ()}
    asked = {one["name"]: one.get("count", 1) for one in workload["spec"]["podSets"]}
    return {name: count if granted.get(name) is None else granted[name] for name, count in asked.items()}


def _is_of_no_use(job: Object, workload: Object, step: Step | None) -> bool:
    if step is None or says(workload, "Finished"):
        return True
    content = (workload["metadata"].get("annotations") or {}).get(CONTENT_ANNOTATION)
    return not says(workload, "QuotaReserved") and content != content_of(job, step)


def _is_there(pod: Object, now_s: float) -> bool:
    """Whether it may use what its Workload was given."""
    until = pod["metadata"].get("deletionTimestamp")
    lost = until is not None and _seconds(until) + _OVERDUE_S < now_s
    return not (has_ended(pod) or lost)


def _seconds(moment: str) -> float:
    return dt.datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()


def _ready(name: str, pods: Sequence[Object]) -> int:
    here = (pod for pod in pods if workload_of(pod) == name and not is_leaving(pod))
    return sum((pod.get("status") or {}).get("phase") == "Running" for pod in here)


def _what_is_waited_for(
    job: Object, spec: JobSpec, known: Mapping[str, Object], steps: Sequence[Step], runs: bool
) -> str:
    if runs:
        return ""
    if not steps:
        return "no replicas are asked for"
    workload = known.get(steps[0].name, {})
    why = ""
    for kind in ("Evicted", "QuotaReserved"):
        condition = condition_of(workload, kind)
        if (condition.get("status") == "True") == (kind == "Evicted"):
            why = why or condition.get("message", "")
    if says(workload, "QuotaReserved") and not says(workload, "Evicted"):
        why = "admission checks are not done"
    return f"{spec.policy.least} replicas wait in queue {queue_of(job)}" + (f": {why}" if why else "")


def _with(workload: Object, *changed: Object) -> list[Object]:
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
