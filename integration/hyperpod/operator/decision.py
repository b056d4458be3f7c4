"""One decision of the operator (calls to agents, pod changes, events) and its builder. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from integration.hyperpod.job_resource import JobSpec
from integration.hyperpod.operator.job_state import JobCondition, JobState
from integration.hyperpod.operator.observed_pods import AgentState, CheckpointProgress, ObservedJob, ObservedPod


class StartRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``/start`` and ``/update``. ``rank`` is the node's rank."""

    rank: int
    nnodes: int
    fault_count: int = msgspec.field(name="faultCount")
    master_addr: str
    master_port: str
    version: str = msgspec.field(name="ipVersion")
    rank_ips: tuple[Mapping[str, Any], ...] = msgspec.field(name="rankIps")
    worker_data: Any = None
    spare: bool = False
    progress: Mapping[str, CheckpointProgress] | None = None
    log_rules: tuple[Mapping[str, Any], ...] | None = msgspec.field(default=None, name="log_monitoring_configuration")


class StopRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of ``/stop``."""

    restart_mode: str | None = None
    is_graceful: bool | None = None
    timeout: int | None = None


class StartAgent(msgspec.Struct, frozen=True, tag=True):
    """``POST /start``."""

    pod: str
    body: StartRequest


class UpdateAgent(msgspec.Struct, frozen=True, tag=True):
    """``POST /update``: ranks for spares and for processes that need a rank to become ready."""

    pod: str
    body: StartRequest


class StopAgent(msgspec.Struct, frozen=True, tag=True):
    """``POST /stop``."""

    pod: str
    body: StopRequest


class ShutdownAgent(msgspec.Struct, frozen=True, tag=True):
    """``POST /shutdown``: the agent exits, and the pod's container with it."""

    pod: str


class ReplacePod(msgspec.Struct, frozen=True, tag=True):
    """Immediate removal of a pod. :class:`DesiredPods` requests its replacement."""

    pod: str
    reason: str


class ReleasePod(msgspec.Struct, frozen=True, tag=True):
    """Removal of a pod without a replacement, after its agent shuts down."""

    pod: str
    reason: str


OperatorAction = StartAgent | UpdateAgent | StopAgent | ShutdownAgent | ReplacePod | ReleasePod


class OperatorEvent(msgspec.Struct, frozen=True):
    """One event for the job's owner, in the form of a Kubernetes event."""

    reason: str
    message: str
    warning: bool = False


class DesiredPods(msgspec.Struct, frozen=True):
    """Desired number of pods of each replica spec, including spares, and nodes to avoid."""

    pods: Mapping[str, int]
    avoid_nodes: tuple[str, ...] = ()


class OperatorDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Actions, events and next state of one reconcile.

    Store ``state`` before carrying out any action.
    """

    state: JobState
    actions: tuple[OperatorAction, ...] = ()
    events: tuple[OperatorEvent, ...] = ()
    wanted: DesiredPods
    finished: bool = False
    """Whether the job and all its agents have ended, so no more decisions follow."""


class DecisionBuilder:
    """Mutable draft of one decision, used within one call of ``decide_job``."""

    def __init__(self, spec: JobSpec, state: JobState, observed: ObservedJob, now_s: float) -> None:
        self.spec, self.state, self.observed, self.now_s = spec, state, observed, now_s
        self.pods = {pod.name: pod for pod in observed.pods}
        self.actions: list[OperatorAction] = []
        self.events: list[OperatorEvent] = []
        self.waits = False
        """Whether to postpone all actions until an agent reports the reason of a fault."""

    def update_state(self, **fields: Any) -> None:
        self.state = msgspec.structs.replace(self.state, **fields)

    def update_world(self, **fields: Any) -> None:
        """Change the world of the current phase, which has one."""
        world = msgspec.structs.replace(self.state.world, **fields)
        self.update_state(current=msgspec.structs.replace(self.state.current, world=world))

    def add_actions(self, *actions: OperatorAction) -> None:
        self.actions += actions

    def add_event(self, reason: str, message: str, *, warning: bool = False) -> None:
        self.events.append(OperatorEvent(reason, message, warning))

    def set_condition(self, kind: str, status: bool, reason: str, message: str = "") -> None:
        """Set a condition. Its time is the time of the last change of its status, as in Kubernetes."""
        old = next((condition for condition in self.state.conditions if condition.type == kind), None)
        at_s = old.at_s if old is not None and old.status is status else self.now_s
        new = JobCondition(kind, status, reason, message, at_s)
        if old is None:
            self.update_state(conditions=(*self.state.conditions, new))
        elif old != new:
            self.update_state(
                conditions=tuple(new if condition is old else condition for condition in self.state.conditions)
            )

    @property
    def member_pods(self) -> list[ObservedPod]:
        """Return the existing pods of the members, by rank."""
        return [self.pods[name] for name in self.state.members if name in self.pods]

    @property
    def active_pods(self) -> list[ObservedPod]:
        """Return the pods that are neither terminating nor marked for replacement."""
        return [pod for pod in self.observed.pods if pod.name not in self.state.replaced_pods and not pod.terminating]

    def silent_for(self, pod: ObservedPod) -> float:
        """Return the seconds since the pod's agent stopped answering; 0 if it answers."""
        since = self.state.silent_since_s.get(pod.name)
        return 0.0 if since is None else self.now_s - since

    def is_lost(self, pod: ObservedPod) -> bool:
        return self.silent_for(pod) >= self.spec.agent_timeout_s

    def is_stale(self, pod: ObservedPod) -> bool:
        """Return whether the agent runs a world with another version."""
        status = pod.agent_status
        running = status is not None and status.state in {AgentState.RUNNING, AgentState.COMPLETED}
        return running and status is not None and status.version not in {None, self.state.world.version}

    @property
    def in_phase_s(self) -> float:
        return self.now_s - self.state.current.since_s


def agent_state_of(pod: ObservedPod) -> AgentState | None:
    """Return the agent's state; None if it does not answer or is shutting down."""
    if pod.agent_status is None or pod.agent_status.state is AgentState.SHUTDOWN:
        return None
    return pod.agent_status.state
