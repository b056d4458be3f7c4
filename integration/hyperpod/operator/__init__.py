"""HyperPod's training operator, reimplemented: ``decide_job`` and its values. Pure.

Repeat this loop for one job::

    spec = parse_job_resource(resource)                      # a HyperPodPyTorchJob
    state = JobState()
    while not decision.finished:
        decision = decide_job(spec, state, observed, now_s)  # pure
        store(decision.state)                                # before any action
        state = decision.state
        carry_out(decision.actions)

The operator repeats an action until the observations show its effect, and sends nothing to an agent that already
complied. An operator killed between any two lines therefore resumes from its stored state. ``hyperpod-operator-sim``
runs this loop with agents on one machine, the controller of :mod:`integration.kubernetes` runs it with pods.
"""

from integration.hyperpod.job_resource import JobSpec, JobSpecError, ReplicaGroup, RestartMode, parse_job_resource
from integration.hyperpod.operator.decision import (
    DesiredPods,
    OperatorAction,
    OperatorDecision,
    OperatorEvent,
    ReleasePod,
    ReplacePod,
    ShutdownAgent,
    StartAgent,
    StartRequest,
    StopAgent,
    StopRequest,
    UpdateAgent,
)
from integration.hyperpod.operator.job_state import (
    AssignedWorld,
    JobCondition,
    JobFault,
    JobPhase,
    JobState,
    RunningPhase,
    StoppingPhase,
    TransitionCause,
    resource_status,
)
from integration.hyperpod.operator.observed_pods import (
    AgentState,
    AgentStatus,
    ObservedJob,
    ObservedPod,
    parse_agent_status,
)
from integration.hyperpod.operator.state_machine import decide_job

__all__ = [
    "AgentState",
    "AgentStatus",
    "AssignedWorld",
    "DesiredPods",
    "JobCondition",
    "JobFault",
    "JobPhase",
    "JobSpec",
    "JobSpecError",
    "JobState",
    "ObservedJob",
    "ObservedPod",
    "OperatorAction",
    "OperatorDecision",
    "OperatorEvent",
    "ReleasePod",
    "ReplacePod",
    "ReplicaGroup",
    "RestartMode",
    "RunningPhase",
    "ShutdownAgent",
    "StartAgent",
    "StartRequest",
    "StopAgent",
    "StopRequest",
    "StoppingPhase",
    "TransitionCause",
    "UpdateAgent",
    "decide_job",
    "parse_agent_status",
    "parse_job_resource",
    "resource_status",
]
