"""The operator's state of a job between two reconciles, and the resource's ``status``. Pure.

CREATED -> FORMING -> ARRANGED -> STARTING -> RUNNING -> SUCCEEDED
              ^           a fault |               | a fault, another size, suspended
              +------------- STOPPING <-----------+
                                 +--> SUSPENDED         FAILED from anywhere
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, ClassVar

import msgspec

from integration.hyperpod.job_resource import JobSpec, RestartMode
from integration.hyperpod.operator.observed_pods import CheckpointProgress, ObservedJob


class JobPhase(enum.Enum):
    FORMING = "Forming"
    """Waiting for enough agents that are ready or, in-process, about to be."""
    RANKS_ASSIGNED = "Arranged"
    """Ranks are assigned; in-process agents receive them and wait at their barrier."""
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
    """Reason to stop or form a world."""

    BEGIN = "Begin"
    FAULT = "Fault"
    SCALE = "Scale"
    SUSPEND = "Suspend"


class JobFault(msgspec.Struct, frozen=True):
    """The fault under remediation."""

    reason: str
    message: str
    pods: tuple[str, ...]
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    at_s: float
    mode: RestartMode = RestartMode.PROCESS


class NodeFaultRecord(msgspec.Struct, frozen=True):
    node: str
    at_s: float


class JobCondition(msgspec.Struct, frozen=True):
    """A Kubernetes condition. Its time is in seconds since 1970."""

    type: str
    status: bool
    reason: str
    message: str
    at_s: float


class ScalingState(
    msgspec.Struct,
    frozen=True,
):
    """Source of ``elasticScalingStatus``."""

    target: int = 0
    updated_at_s: float | None = None
    scaled_at_s: float | None = None
    after_fault: bool = False
    consecutive_failures: int = 0
    """Consecutive changes of size that a fault interrupted before the job ran again."""


class AssignedWorld(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks of one world."""

    version: str = ""
    """Its ``ipVersion``."""
    members: tuple[str, ...] = ()
    """Names of the pods, by rank."""
    spares: tuple[str, ...] = ()
    """Waiting pods, with the ranks after the last member."""
    master_addr: str = ""
    master_port: str = ""


class _Phase(msgspec.Struct, frozen=True, kw_only=True):
    """Data of a job in one phase, replaced when the job enters the next one."""

    kind: ClassVar[JobPhase]

    since_s: float = 0.0
    """Time at which the phase began."""


class FormingPhase(_Phase, frozen=True, kw_only=True, tag="Forming"):
    kind = JobPhase.FORMING

    cause: TransitionCause = TransitionCause.BEGIN
    target: int = 0
    """Number of members to wait for until ``deadline_s``. After that, fewer suffice."""
    deadline_s: float | None = None


class RanksAssignedPhase(_Phase, frozen=True, kw_only=True, tag="Arranged"):
    kind = JobPhase.RANKS_ASSIGNED

    world: AssignedWorld
    forming: FormingPhase
    """Phase to go back to if a member does not become ready."""

    @property
    def cause(self) -> TransitionCause:
        return self.forming.cause


class StartingPhase(_Phase, frozen=True, kw_only=True, tag="Starting"):
    kind = JobPhase.STARTING

    world: AssignedWorld
    cause: TransitionCause


class RunningPhase(_Phase, frozen=True, kw_only=True, tag="Running"):
    kind = JobPhase.RUNNING

    world: AssignedWorld
    grow_since_s: float | None = None
    """Time since which a larger world has been possible; None if it is not."""
    unexplained_since_s: float | None = None
    """Time since which faulted agents report only another rank's failure, or no reason."""


class StoppingPhase(_Phase, frozen=True, kw_only=True, tag="Stopping"):
    kind = JobPhase.STOPPING

    world: AssignedWorld
    cause: TransitionCause
    mode: RestartMode
    target: int = 0
    """Number of members that the next world waits for."""
    graceful: bool = False
    escalated: tuple[str, ...] = ()
    """Pods that did not stop in time and received a more severe stop request."""


class SuspendedPhase(_Phase, frozen=True, kw_only=True, tag="Suspended"):
    kind = JobPhase.SUSPENDED


class SucceededPhase(_Phase, frozen=True, kw_only=True, tag="Succeeded"):
    kind = JobPhase.SUCCEEDED

    world: AssignedWorld


class FailedPhase(_Phase, frozen=True, kw_only=True, tag="Failed"):
    kind = JobPhase.FAILED

    world: AssignedWorld
    graceful: bool = False
    """Whether its agents were stopping gracefully, so that they need more time to exit."""


RankedPhase = RanksAssignedPhase | StartingPhase | RunningPhase
"""The phases in which pods have ranks and must not fail."""
CurrentPhase = RankedPhase | FormingPhase | StoppingPhase | SuspendedPhase | SucceededPhase | FailedPhase
_NO_WORLD = AssignedWorld()


class JobState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Phase of a job, and data that all phases share."""

    current: CurrentPhase = FormingPhase()
    created_s: float | None = None
    admitted_s: float | None = None
    """Time since which the job has been admitted without interruption; None while it waits in a queue."""
    started_s: float | None = None
    """Time at which the job first ran."""
    ended_s: float | None = None

    epoch: int = 0
    """Number of worlds so far.

    Agents receive ``epoch - 1`` as their fault count, which is unique for each world.
    """
    previous_members: tuple[str, ...] = ()
    """Members of the last world, by rank. Ranks change only if necessary."""
    no_scale_up_until_s: float = 0.0
    scaling: ScalingState = ScalingState()
    fault: JobFault | None = None
    last_fault: JobFault | None = None

    restarts: int = 0
    """Restarts after faults since the job was created."""
    period: int = 0
    period_restarts: int = 0
    """Restarts in this evaluation period since the last restart of the whole job."""
    period_full_restarts: int = 0
    node_faults: tuple[NodeFaultRecord, ...] = ()

    silent_since_s: Mapping[str, float] = {}
    """Time of the first unanswered poll, by the name of the pod."""
    stale_since_s: Mapping[str, float] = {}
    """Time since which a pod has run a world of an earlier ``/start``, by its name."""
    replaced_pods: tuple[str, ...] = ()
    """Pods to be removed. They no longer count."""
    progress: Mapping[str, CheckpointProgress] = {}
    conditions: tuple[JobCondition, ...] = ()

    @property
    def phase(self) -> JobPhase:
        return self.current.kind

    @property
    def world(self) -> AssignedWorld:
        """The world of this phase; one without members while none is assigned."""
        return _NO_WORLD if isinstance(self.current, FormingPhase | SuspendedPhase) else self.current.world

    @property
    def members(self) -> tuple[str, ...]:
        return self.world.members

    @property
    def spares(self) -> tuple[str, ...]:
        return self.world.spares


def resource_status(spec: JobSpec, state: JobState, seen: ObservedJob) -> dict[str, Any]:
    """Return the resource's ``status`` for users and other programs.

    The operator itself reads only its stored state.
    """
    restart_status = {
        "currentEvalPeriod": state.period,
        "fullJobRestartCount": state.period_full_restarts,
        "restartCount": state.period_restarts,
    }
    status: dict[str, Any] = {
        "startTime": _format_time(state.created_s),
        "completionTime": _format_time(state.ended_s),
        "conditions": [
            {
                "type": condition.type,
                "status": str(condition.status),
                "reason": condition.reason,
                "message": condition.message,
                "lastTransitionTime": _format_time(condition.at_s),
            }
            for condition in state.conditions
        ],
        "masterAddr": state.world.master_addr or None,
        "masterPort": state.world.master_port or None,
        "restartCount": state.restarts,
        "restartStatus": restart_status,
        "latestFaultyPodInstanceList": _fault_status(state.fault or state.last_fault),
        "elasticScalingStatus": _scaling_status(spec, state, seen) if spec.elastic else None,
    }
    return {name: value for name, value in status.items() if value is not None}


def _fault_status(fault: JobFault | None) -> dict[str, Any] | None:
    if fault is None:
        return None
    return {
        "restartType": "JLR" if fault.mode is RestartMode.JOB else "PLR",
        "faultyInstanceIdList": list(fault.nodes),
        "faultyPodList": list(fault.pods),
        "faultyRankList": [str(rank) for rank in fault.ranks],
    }


def _scaling_status(spec: JobSpec, state: JobState, seen: ObservedJob) -> dict[str, Any]:
    groups = {pod.name: pod.group or spec.groups[0].name for pod in seen.pods}
    counts = dict.fromkeys((group.name for group in spec.groups), 0)
    for name in state.members:
        if name in groups:
            counts[groups[name]] += 1
    scaling = state.scaling
    status = {
        "targetReplicas": counts,
        "lastUpdated": _format_time(scaling.updated_at_s),
        "lastScalingTime": _format_time(scaling.scaled_at_s),
        "lastRestartTime": _format_time(state.last_fault.at_s if state.last_fault is not None else None),
        "podsScaled": state.phase is JobPhase.RUNNING,
        "isFaultyPodScaleDown": scaling.after_fault,
        "consecutiveScalingFailures": scaling.consecutive_failures,
    }
    return {name: value for name, value in status.items() if value is not None}


def _format_time(at_s: float | None) -> str | None:
    if at_s is None:
        return None
    return datetime.fromtimestamp(at_s, timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
