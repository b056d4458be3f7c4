"""A decision of the operator: calls to agents, pods to replace or release, events, and its builder. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from integration.hyperpod.operator.job_spec import JobSpec
from integration.hyperpod.operator.job_state import JobCondition, JobPhase, JobState
from integration.hyperpod.operator.observed_pods import AgentState, CheckpointProgress, ObservedJob, ObservedPod


class StartRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``/start``; of ``/update`` without its progress. ``rank`` is the node's."""

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
    """The body of ``/stop``."""

    restart_mode: str | None = None
    is_graceful: bool | None = None
    timeout: int | None = None


class StartAgent(msgspec.Struct, frozen=True, tag=True):
    """``POST /start``."""

    pod: str
    body: StartRequest


class UpdateAgent(msgspec.Struct, frozen=True, tag=True):
    """``POST /update``: ranks for processes that wait for them before they are ready, and for spares."""

    pod: str
    body: StartRequest


class StopAgent(msgspec.Struct, frozen=True, tag=True):
    """``POST /stop``."""

    pod: str
    body: StopRequest


class ShutdownAgent(msgspec.Struct, frozen=True, tag=True):
    """``POST /shutdown``: the agent ends, and with it the pod's container."""

    pod: str


class ReplacePod(msgspec.Struct, frozen=True, tag=True):
    """This pod is to go, at once, and another to come, which the number of wanted pods says anyway."""

    pod: str
    reason: str


class ReleasePod(msgspec.Struct, frozen=True, tag=True):
    """This pod has nothing to do any more and none is to come for it: shut its agent down and take it away."""

    pod: str
    reason: str


OperatorAction = StartAgent | UpdateAgent | StopAgent | ShutdownAgent | ReplacePod | ReleasePod


class OperatorEvent(msgspec.Struct, frozen=True):
    """Something worth telling a person; as events of Kubernetes are."""

    reason: str
    message: str
    warning: bool = False


class DesiredPods(msgspec.Struct, frozen=True):
    """So many pods of each replica spec there should be, spares counted, and machines they should not be on."""

    pods: Mapping[str, int]
    avoid_nodes: tuple[str, ...] = ()


class OperatorDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What to do now. ``state`` is stored before any of it is done."""

    state: JobState
    actions: tuple[OperatorAction, ...] = ()
    events: tuple[OperatorEvent, ...] = ()
    wanted: DesiredPods
    finished: bool = False
    """Nothing more will be decided: the job has ended, and so have its agents."""


class DecisionBuilder:
    """Lives within one call of ``decide``."""

    def __init__(self, spec: JobSpec, state: JobState, seen: ObservedJob, now_s: float) -> None:
        self.spec, self.state, self.observed, self.now_s = spec, state, seen, now_s
        self.pods = {pod.name: pod for pod in seen.pods}
        self.actions: list[OperatorAction] = []
        self.events: list[OperatorEvent] = []
        self.waits = False
        """For who has a reason to say it; nothing is done meanwhile."""

    def update_state(self, **fields: Any) -> None:
        self.state = msgspec.structs.replace(self.state, **fields)

    def enter_phase(self, phase: JobPhase, **fields: Any) -> None:
        self.update_state(phase=phase, phase_since_s=self.now_s, **fields)

    def add_actions(self, *actions: OperatorAction) -> None:
        self.actions += actions

    def add_event(self, reason: str, message: str, *, warning: bool = False) -> None:
        self.events.append(OperatorEvent(reason, message, warning))

    def set_condition(self, kind: str, status: bool, reason: str, message: str = "") -> None:
        """Its time is when its status last changed, as everywhere in Kubernetes."""
        old = next((one for one in self.state.conditions if one.type == kind), None)
        at_s = old.at_s if old is not None and old.status is status else self.now_s
        new = JobCondition(kind, status, reason, message, at_s)
        if old is None:
            self.update_state(conditions=(*self.state.conditions, new))
        elif old != new:
            self.update_state(conditions=tuple(new if one is old else one for one in self.state.conditions))

    # -- pods ---------------------------------------------------------------------------------------------------------

    @property
    def member_pods(self) -> list[ObservedPod]:
        """Those that are there yet."""
        return [self.pods[name] for name in self.state.members if name in self.pods]

    @property
    def active_pods(self) -> list[ObservedPod]:
        """Pods that are not on their way out."""
        return [pod for pod in self.observed.pods if pod.name not in self.state.replaced_pods and not pod.terminating]

    def silent_for(self, pod: ObservedPod) -> float:
        since = self.state.silent_since_s.get(pod.name)
        return 0.0 if since is None else self.now_s - since

    def is_lost(self, pod: ObservedPod) -> bool:
        return self.silent_for(pod) >= self.spec.agent_timeout_s

    def is_stale(self, pod: ObservedPod) -> bool:
        """It runs, but what another world's ``/start`` said."""
        answer = pod.agent_status
        running = answer is not None and answer.state in {AgentState.RUNNING, AgentState.COMPLETED}
        return running and answer is not None and answer.version not in {None, self.state.version}

    @property
    def in_phase_s(self) -> float:
        return self.now_s - self.state.phase_since_s


def agent_state_of(pod: ObservedPod) -> AgentState | None:
    """Nothing for one that does not answer, or is about to end."""
    if pod.agent_status is None or pod.agent_status.state is AgentState.SHUTDOWN:
        return None
    return pod.agent_status.state
