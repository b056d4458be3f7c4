"""The ``status`` of a job resource: the operator's stored state and the conditions HyperPod's clients read. Pure.

The operator's state is the message of a condition of its own (``OperatorState``). HyperPod's published models refuse
every field they do not know, and a condition they do know; so their commands read the jobs of this controller, too.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from integration.hyperpod.operator import JobCondition, JobSpec, JobState, ObservedJob
from integration.hyperpod.operator.job_state import resource_status
from integration.kubernetes.labels import KubeObject
from peerstore.message_codec import from_json

STATE_CONDITION = "OperatorState"
INVALID_CONDITION = "InvalidSpec"
ADMITTED_CONDITION = "Admitted"
TOTAL_REPLICAS = "total"


class DamagedStateError(Exception):
    """What is stored of a job is not what was written; the job is left as it is until a person looks."""


def load_job_state(job: KubeObject) -> JobState | None:
    """What was written last; nothing for a job that is new."""
    for condition in _conditions(job):
        if condition.get("type") == STATE_CONDITION:
            try:
                return from_json(condition.get("message", ""), JobState)
            except msgspec.DecodeError as error:
                name = job["metadata"]["name"]
                raise DamagedStateError(
                    f"the condition {STATE_CONDITION} of job {name} cannot be read ({error}): remove the job's status "
                    "to have it begin anew"
                ) from None
    return None


def build_job_status(
    spec: JobSpec, state: JobState, seen: ObservedJob, pods: Sequence[KubeObject], more: Sequence[KubeObject] = ()
) -> dict[str, Any]:
    """The whole status that belongs to ``state``, for a merge patch; with ``more`` conditions."""
    status = resource_status(spec, state, seen)
    stored = JobCondition(STATE_CONDITION, False, "Stored", msgspec.json.encode(state).decode(), state.phase_since_s)
    scaling = status.get("elasticScalingStatus", {})
    targets = {**scaling.get("targetReplicas", {}), TOTAL_REPLICAS: len(state.members)}
    return {
        **status,
        "conditions": [*status["conditions"], *more, {**_condition(stored), "status": "Unknown"}],
        "jobPods": [_reference(pod) for pod in pods],
        "elasticScalingStatus": {**scaling, "targetReplicas": targets},
    }


def invalid_spec_status(job: KubeObject, problem: str, now_s: float) -> dict[str, Any]:
    """What there was, and why nothing is done about it."""
    others = [one for one in _conditions(job) if one.get("type") != INVALID_CONDITION]
    invalid = JobCondition(INVALID_CONDITION, True, "JobSpecError", problem, now_s)
    return {"conditions": [*others, _condition(invalid)]}


def is_marked_invalid(job: KubeObject, problem: str) -> bool:
    return any(one.get("type") == INVALID_CONDITION and one.get("message") == problem for one in _conditions(job))


def admission_conditions(job: KubeObject, state: JobState, waits: str, capacity: int, now_s: float) -> list[KubeObject]:
    """Whether a queue lets the job run: what it ``waits`` for, or how much it has. At its end that stays as it was."""
    old = [one for one in _conditions(job) if one.get("type") == ADMITTED_CONDITION]
    if state.phase.is_final:
        return old
    reason, message = ("Pending", waits) if waits else ("Admitted", f"{capacity} replicas are admitted")
    found = _condition(JobCondition(ADMITTED_CONDITION, not waits, reason, message, now_s))
    same = bool(old) and old[0].get("status") == found["status"]
    return [{**found, "lastTransitionTime": old[0]["lastTransitionTime"]} if same else found]


def status_differs(job: KubeObject, status: KubeObject) -> bool:
    """Whether writing ``status`` would change anything."""
    return not _contains(job.get("status") or {}, status)


def _contains(there: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        return isinstance(there, Mapping) and all(_contains(there.get(name), value) for name, value in wanted.items())
    return bool(there == wanted)


def _conditions(job: KubeObject) -> Sequence[KubeObject]:
    return (job.get("status") or {}).get("conditions") or ()


def _condition(one: JobCondition) -> dict[str, Any]:
    return {
        "type": one.type,
        "status": str(one.status),
        "reason": one.reason,
        "message": one.message,
        "lastTransitionTime": _moment(one.at_s),
    }


def _reference(pod: KubeObject) -> dict[str, str]:
    meta = pod["metadata"]
    return {"apiVersion": "v1", "kind": "Pod", **{name: meta[name] for name in ("name", "namespace", "uid")}}


def _moment(at_s: float) -> str:
    return dt.datetime.fromtimestamp(at_s, dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
