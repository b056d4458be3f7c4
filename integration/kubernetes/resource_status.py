"""The ``status`` of a job resource: the stored state and conditions of HyperPod's clients. Pure.

The operator's state is the message of the condition ``OperatorState``. HyperPod's published models reject unknown
fields but accept unknown conditions, so HyperPod's commands can read these jobs.
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
    """The stored state is invalid. The job remains unchanged until a user intervenes."""


def load_job_state(job: KubeObject) -> JobState | None:
    """Return the stored state; None for a new job. Raise :class:`DamagedStateError` if it is invalid."""
    for condition in _conditions(job):
        if condition.get("type") == STATE_CONDITION:
            try:
                return from_json(condition.get("message", ""), JobState)
            except msgspec.DecodeError as error:
                name = job["metadata"]["name"]
                raise DamagedStateError(
                    f"the condition {STATE_CONDITION} of job {name} cannot be read ({error}): remove the job's status "
                    "to start the job again"
                ) from None
    return None


def build_job_status(
    spec: JobSpec, state: JobState, seen: ObservedJob, pods: Sequence[KubeObject], more: Sequence[KubeObject] = ()
) -> dict[str, Any]:
    """Return the whole status for ``state``, with ``more`` conditions, for a merge patch."""
    status = resource_status(spec, state, seen)
    stored = JobCondition(STATE_CONDITION, False, "Stored", msgspec.json.encode(state).decode(), state.current.since_s)
    scaling = status.get("elasticScalingStatus", {})
    targets = {**scaling.get("targetReplicas", {}), TOTAL_REPLICAS: len(state.members)}
    return {
        **status,
        "conditions": [*status["conditions"], *more, {**_condition(stored), "status": "Unknown"}],
        "jobPods": [_reference(pod) for pod in pods],
        "elasticScalingStatus": {**scaling, "targetReplicas": targets},
    }


def invalid_spec_status(job: KubeObject, problem: str, now_s: float) -> dict[str, Any]:
    """Return the existing conditions, and the reason why the job is ignored as a further one."""
    others = [condition for condition in _conditions(job) if condition.get("type") != INVALID_CONDITION]
    invalid = JobCondition(INVALID_CONDITION, True, "JobSpecError", problem, now_s)
    return {"conditions": [*others, _condition(invalid)]}


def is_marked_invalid(job: KubeObject, problem: str) -> bool:
    return any(
        condition.get("type") == INVALID_CONDITION and condition.get("message") == problem
        for condition in _conditions(job)
    )


def admission_conditions(job: KubeObject, state: JobState, waits: str, capacity: int, now_s: float) -> list[KubeObject]:
    """Return the condition of the job's admission.

    ``waits`` is the reason why the job waits, "" if it is admitted. A final job retains its condition.
    """
    old = [condition for condition in _conditions(job) if condition.get("type") == ADMITTED_CONDITION]
    if state.phase.is_final:
        return old
    reason, message = ("Pending", waits) if waits else ("Admitted", f"{capacity} replicas are admitted")
    new = _condition(JobCondition(ADMITTED_CONDITION, not waits, reason, message, now_s))
    same = bool(old) and old[0].get("status") == new["status"]
    return [{**new, "lastTransitionTime": old[0]["lastTransitionTime"]} if same else new]


def status_differs(job: KubeObject, status: KubeObject) -> bool:
    """Return whether writing ``status`` would change the job."""
    return not _contains(job.get("status") or {}, status)


def _contains(existing: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        return isinstance(existing, Mapping) and all(
            _contains(existing.get(name), value) for name, value in wanted.items()
        )
    return bool(existing == wanted)


def _conditions(job: KubeObject) -> Sequence[KubeObject]:
    return (job.get("status") or {}).get("conditions") or ()


def _condition(condition: JobCondition) -> dict[str, Any]:
    return {
        "type": condition.type,
        "status": str(condition.status),
        "reason": condition.reason,
        "message": condition.message,
        "lastTransitionTime": _timestamp(condition.at_s),
    }


def _reference(pod: KubeObject) -> dict[str, str]:
    meta = pod["metadata"]
    return {"apiVersion": "v1", "kind": "Pod", **{name: meta[name] for name in ("name", "namespace", "uid")}}


def _timestamp(at_s: float) -> str:
    return dt.datetime.fromtimestamp(at_s, dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
