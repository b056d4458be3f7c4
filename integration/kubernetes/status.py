"""The status of a job: what HyperPod's clients read there, and in it all that the controller has to remember. Pure.

The operator's state is the message of a condition of its own (``OperatorState``). HyperPod's published models refuse
every field they do not know, and a condition they do know; so their commands read the jobs of this controller, too.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from integration.hyperpod.operator import Condition, Fault, JobState, RestartMode, Wanted

Object = Mapping[str, Any]

STATE_CONDITION = "OperatorState"
INVALID_CONDITION = "InvalidSpec"
TOTAL = "total"


class DamagedStateError(Exception):
    """What is stored of a job is not what was written; the job is left as it is until a person looks."""


def stored_state(job: Object) -> JobState | None:
    """What was written last; nothing for a job that is new."""
    for condition in _conditions(job):
        if condition.get("type") == STATE_CONDITION:
            try:
                return msgspec.json.decode(condition.get("message", ""), type=JobState)
            except msgspec.DecodeError as error:
                name = job["metadata"]["name"]
                raise DamagedStateError(
                    f"the condition {STATE_CONDITION} of job {name} cannot be read ({error}): remove the job's status "
                    "to have it begin anew"
                ) from None
    return None


def status_for(state: JobState, wanted: Wanted, pods: Sequence[Object]) -> dict[str, Any]:
    """The whole status that belongs to ``state``; a merge patch, so what is ``None`` is taken away."""
    kept = Condition(STATE_CONDITION, status=False, reason="Stored", message="", at_s=state.since_s)
    conditions = [_condition(one) for one in state.conditions]
    stored = msgspec.json.encode(state).decode()
    conditions.append({**_condition(kept), "status": "Unknown", "message": stored})
    scaling = state.scaling
    return {
        "startTime": _moment(state.started_s),
        "completionTime": _moment(state.ended_s),
        "conditions": conditions,
        "jobPods": [_reference(pod) for pod in pods],
        "masterAddr": state.master_addr or None,
        "masterPort": state.master_port or None,
        "restartCount": state.restarts,
        "restartStatus": {
            "currentEvalPeriod": state.period,
            "fullJobRestartCount": state.period_full_restarts,
            "restartCount": state.period_restarts,
        },
        "latestFaultyPodInstanceList": _faulty(state.last_fault),
        "elasticScalingStatus": {
            "targetReplicas": {**wanted.pods, TOTAL: len(state.members)},
            "lastUpdated": _moment(scaling.updated_s),
            "lastScalingTime": _moment(scaling.scaled_s),
            "isFaultyPodScaleDown": scaling.after_fault,
            "consecutiveScalingFailures": scaling.failures,
        },
    }


def with_invalid_spec(job: Object, problem: str, now_s: float) -> dict[str, Any]:
    """What there was, and why nothing is done about it."""
    others = [one for one in _conditions(job) if one.get("type") != INVALID_CONDITION]
    invalid = Condition(INVALID_CONDITION, status=True, reason="JobSpecError", message=problem, at_s=now_s)
    return {"conditions": [*others, _condition(invalid)]}


def says_invalid(job: Object, problem: str) -> bool:
    return any(one.get("type") == INVALID_CONDITION and one.get("message") == problem for one in _conditions(job))


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
    moment = _moment(one.at_s)
    return {
        "type": one.type,
        "status": str(one.status),
        "reason": one.reason,
        "message": one.message,
        "lastTransitionTime": moment,
        "lastProbeTime": moment,
    }


def _reference(pod: Object) -> dict[str, str]:
    meta = pod["metadata"]
    return {"apiVersion": "v1", "kind": "Pod", **{name: meta[name] for name in ("name", "namespace", "uid")}}


def _faulty(fault: Fault | None) -> dict[str, Any] | None:
    if fault is None:
        return None
    return {
        "restartType": "JLR" if fault.mode is RestartMode.JOB else "PLR",
        "faultyInstanceIdList": list(fault.nodes),
        "faultyPodList": list(fault.pods),
        "faultyRankList": [str(rank) for rank in fault.ranks],
    }


def _moment(at_s: float | None) -> str | None:
    if at_s is None:
        return None
    return dt.datetime.fromtimestamp(at_s, dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
