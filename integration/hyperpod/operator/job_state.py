"""The operator's state of a job between two reconciles, and the resource's ``status`` derived from it. Pure.

CREATED -> FORMING -> ARRANGED -> STARTING -> RUNNING -> SUCCEEDED
              ^           a fault |               | a fault, another size, suspended
              +------------- STOPPING <-----------+
                                 +--> SUSPENDED         FAILED from anywhere
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import msgspec

from integration.hyperpod.operator.job_spec import JobSpec
from integration.hyperpod.operator.observed_pods import AgentRestartMode, CheckpointProgress, ObservedJob


class JobPhase(enum.Enum):
    FORMING = "Forming"
    """Waiting for enough agents that are ready, or (in-process) about to be."""
    RANKS_ASSIGNED = "Arranged"
    """Ranks are given out; in-process agents get them and gather at their barrier."""
    STARTING = "Starting"
    RUNNING = "Running"
    STOPPING = "Stopping"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def is_final(self) -> bool:
        return self in {JobPhase.SUCCEEDED, JobPhase.FAILED}


class TransitionCause(enum.Enum):
    """Why a world is stopped, or formed."""

    BEGIN = "Begin"
    FAULT = "Fault"
    SCALE = "Scale"
    SUSPEND = "Suspend"


class JobFault(msgspec.Struct, frozen=True):
    """What is being remediated."""

    reason: str
    message: str
    pods: tuple[str, ...]
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    at_s: float
    mode: AgentRestartMode = AgentRestartMode.PROCESS


class NodeFaultRecord(msgspec.Struct, frozen=True):
    node: str
    at_s: float


class JobCondition(msgspec.Struct, frozen=True):
    """As Kubernetes has them; the time is in seconds."""

    type: str
    status: bool
    reason: str
    message: str
    at_s: float


class ScalingState(
    msgspec.Struct,
    frozen=True,
):
    """What the elastic part of the status says."""

    target: int = 0
    updated_at_s: float | None = None
    scaled_at_s: float | None = None
    after_fault: bool = False
    consecutive_failures: int = 0
    """Changes of size in a row that ended in a fault before the job ran again."""


class JobState(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
):
    phase: JobPhase = JobPhase.FORMING
    cause: TransitionCause = TransitionCause.BEGIN
    phase_since_s: float = 0.0
    """When this phase began."""
    created_s: float | None = None
    admitted_s: float | None = None
    """Since when it has been allowed to run without a break; nothing while it waits in a queue."""
    started_s: float | None = None
    """When the job ran for the first time."""
    ended_s: float | None = None

    epoch: int = 0
    """Worlds so far. An agent hears ``epoch - 1`` as its count of faults: no two worlds have the same."""
    version: str = ""
    """The ``ipVersion`` of this world."""
    members: tuple[str, ...] = ()
    """Pods by rank."""
    spares: tuple[str, ...] = ()
    """Pods that have a rank behind the last one, and wait."""
    previous_members: tuple[str, ...] = ()
    """Who had which rank in the last world: as few as possible get another one."""
    master_addr: str = ""
    master_port: str = ""

    target: int = 0
    """So many members are waited for until ``deadline_s``; then as many as there are."""
    deadline_s: float | None = None
    grow_since_s: float | None = None
    """Since when more could have a rank than have one."""
    no_scale_up_until_s: float = 0.0
    scaling: ScalingState = ScalingState()

    restart_mode: AgentRestartMode = AgentRestartMode.PROCESS
    """How the world is stopped."""
    graceful: bool = False
    stop_escalated: tuple[str, ...] = ()
    """Pods that did not stop in time and were told so in harder words."""
    fault: JobFault | None = None
    last_fault: JobFault | None = None

    restarts: int = 0
    """After faults, in the whole life of the job."""
    period: int = 0
    period_restarts: int = 0
    """In this evaluation period since the last restart of the whole job."""
    period_full_restarts: int = 0
    node_faults: tuple[NodeFaultRecord, ...] = ()

    unexplained_since_s: float | None = None
    """Since when agents are faulted that only saw another one's end, or say nothing."""
    silent_since_s: Mapping[str, float] = {}
    """Pods that do not answer."""
    stale_since_s: Mapping[str, float] = {}
    """Pods that run what an earlier ``/start`` said."""
    replaced_pods: tuple[str, ...] = ()
    """Pods that are to go; they count no more."""
    progress: Mapping[str, CheckpointProgress] = {}
    conditions: tuple[JobCondition, ...] = ()


def resource_status(spec: JobSpec, state: JobState, seen: ObservedJob) -> dict[str, Any]:
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


def _faulty(fault: JobFault | None) -> dict[str, Any] | None:
    if fault is None:
        return None
    return {
        "restartType": "JLR" if fault.mode is AgentRestartMode.JOB else "PLR",
        "faultyInstanceIdList": list(fault.nodes),
        "faultyPodList": list(fault.pods),
        "faultyRankList": [str(rank) for rank in fault.ranks],
    }


def _scaling(spec: JobSpec, state: JobState, seen: ObservedJob) -> dict[str, Any]:
    groups = {pod.name: pod.group or spec.groups[0].name for pod in seen.pods}
    counts = dict.fromkeys((group.name for group in spec.groups), 0)
    for name in state.members:
        if name in groups:
            counts[groups[name]] += 1
    scaling = state.scaling
    found = {
        "targetReplicas": counts,
        "lastUpdated": _time(scaling.updated_at_s),
        "lastScalingTime": _time(scaling.scaled_at_s),
        "lastRestartTime": _time(state.last_fault.at_s if state.last_fault is not None else None),
        "podsScaled": state.phase is JobPhase.RUNNING,
        "isFaultyPodScaleDown": scaling.after_fault,
        "consecutiveScalingFailures": scaling.consecutive_failures,
    }
    return {name: value for name, value in found.items() if value is not None}


def _time(at_s: float | None) -> str | None:
    if at_s is None:
        return None
    return datetime.fromtimestamp(at_s, timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
