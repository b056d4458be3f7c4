"""A job's state as the ``status`` of its resource has it: names and shapes are the CRD's, and no other ones."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from integration.hyperpod.operator.seen import RestartMode, Situation
from integration.hyperpod.operator.spec import JobSpec
from integration.hyperpod.operator.state import Fault, JobState, Phase


def status_of(spec: JobSpec, state: JobState, seen: Situation) -> dict[str, Any]:
    """What people and other programs read. The operator itself reads only the state it stored."""
    restart_status = {
        "currentEvalPeriod": state.period,
        "fullJobRestartCount": state.period_full_restarts,
        "restartCount": state.period_restarts,
    }
    found: dict[str, Any] = {
        "startTime": _time(state.created_s),
        "completionTime": _time(state.ended_s),
        "conditions": [
            {
                "type": one.type,
                "status": str(one.status),
                "reason": one.reason,
                "message": one.message,
                "lastTransitionTime": _time(one.at_s),
            }
            for one in state.conditions
        ],
        "masterAddr": state.master_addr or None,
        "masterPort": state.master_port or None,
        "restartCount": state.restarts,
        "restartStatus": restart_status,
        "latestFaultyPodInstanceList": _faulty(state.fault or state.last_fault),
        "elasticScalingStatus": _scaling(spec, state, seen) if spec.elastic else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _faulty(fault: Fault | None) -> dict[str, Any] | None:
    if fault is None:
        return None
    return {
        "restartType": "JLR" if fault.mode is RestartMode.JOB else "PLR",
        "faultyInstanceIdList": list(fault.nodes),
        "faultyPodList": list(fault.pods),
        "faultyRankList": [str(rank) for rank in fault.ranks],
    }


def _scaling(spec: JobSpec, state: JobState, seen: Situation) -> dict[str, Any]:
    groups = {pod.name: pod.group or spec.groups[0].name for pod in seen.pods}
    counts = dict.fromkeys((group.name for group in spec.groups), 0)
    for name in state.members:
        if name in groups:
            counts[groups[name]] += 1
    scaling = state.scaling
    found = {
        "targetReplicas": counts,
        "lastUpdated": _time(scaling.updated_s),
        "lastScalingTime": _time(scaling.scaled_s),
        "lastRestartTime": _time(state.last_fault.at_s if state.last_fault is not None else None),
        "podsScaled": state.phase is Phase.RUNNING,
        "isFaultyPodScaleDown": scaling.after_fault,
        "consecutiveScalingFailures": scaling.failures,
    }
    return {name: value for name, value in found.items() if value is not None}


def _time(at_s: float | None) -> str | None:
    if at_s is None:
        return None
    return datetime.fromtimestamp(at_s, timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
