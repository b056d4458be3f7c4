"""The status of a job: what HyperPod's clients read there, and in it all that the controller has to remember. Pure.

The operator's state is the message of a condition of its own (``OperatorState``). HyperPod's published models refuse
every field they do not know, and a condition they do know; so their commands read the jobs of this controller, too.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from integration.hyperpod.operator import Condition, JobSpec, JobState, Situation
from integration.hyperpod.operator.status import status_of
from peerstore.decode import from_json

Object = Mapping[str, Any]

STATE_CONDITION = "OperatorState"
INVALID_CONDITION = "InvalidSpec"
ADMITTED_CONDITION = "Admitted"
TOTAL = "total"


class DamagedStateError(Exception):
    """What is stored of a job is not what was written; the job is left as it is until a person looks."""


def stored_state(job: Object) -> JobState | None:
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


def status_for(
    spec: JobSpec, state: JobState, seen: Situation, pods: Sequence[Object], more: Sequence[Object] = ()
) -> dict[str, Any]:
    """The whole status that belongs to ``state``, for a merge patch; with ``more`` conditions."""
    status = status_of(spec, state, seen)
    stored = Condition(STATE_CONDITION, False, "Stored", msgspec.json.encode(state).decode(), state.since_s)
    scaling = status.get("elasticScalingStatus", {})
    targets = {**scaling.get("targetReplicas", {}), TOTAL: len(state.members)}
    return {
        **status,
        "conditions": [*status["conditions"], *more, {**_condition(stored), "status": "Unknown"}],
        "jobPods": [_reference(pod) for pod in pods],
        "elasticScalingStatus": {**scaling, "targetReplicas": targets},
    }


def with_invalid_spec(job: Object, problem: str, now_s: float) -> dict[str, Any]:
    """What there was, and why nothing is done about it."""
    others = [one for one in _conditions(job) if one.get("type") != INVALID_CONDITION]
    invalid = Condition(INVALID_CONDITION, True, "JobSpecError", problem, now_s)
    return {"conditions": [*others, _condition(invalid)]}


def says_invalid(job: Object, problem: str) -> bool:
    return any(one.get("type") == INVALID_CONDITION and one.get("message") == problem for one in _conditions(job))


def with_admission(job: Object, state: JobState, waits: str, capacity: int, now_s: float) -> list[Object]:
    """Whether a queue lets the job run: what it ``waits`` for, or how much it has. At its end that stays as it was."""
    old = [one for one in _conditions(job) if one.get("type") == ADMITTED_CONDITION]
    if state.phase.over:
        return old
    reason, message = ("Pending", waits) if waits else ("Admitted", f"{capacity} replicas are admitted")
    found = _condition(Condition(ADMITTED_CONDITION, not waits, reason, message, now_s))
    same = bool(old) and old[0].get("status") == found["status"]
    return [{**found, "lastTransitionTime": old[0]["lastTransitionTime"]} if same else found]


def differs(job: Object, status: Object) -> bool:
    """Whether writing ``status`` would change anything."""
    return not _holds(job.get("status") or {}, status)


def _holds(there: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        return isinstance(there, Mapping) and all(_holds(there.get(name), value) for name, value in wanted.items())
    return bool(there == wanted)


def _conditions(job: Object) -> Sequence[Object]:
    return (job.get("status") or {}).get("conditions") or ()


def _condition(one: Condition) -> dict[str, Any]:
    return {
        "type": one.type,
        "status": str(one.status),
        "reason": one.reason,
        "message": one.message,
        "lastTransitionTime": _moment(one.at_s),
    }


def _reference(pod: Object) -> dict[str, str]:
    meta = pod["metadata"]
    return {"apiVersion": "v1", "kind": "Pod", **{name: meta[name] for name in ("name", "namespace", "uid")}}


def _moment(at_s: float) -> str:
    return dt.datetime.fromtimestamp(at_s, dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
