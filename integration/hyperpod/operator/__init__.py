"""HyperPod's training operator, reimplemented: ``decide_job`` and its values. Pure.

spec = read_job(resource)                               # a HyperPodPyTorchJob
    state = JobState()
    while not decision.finished:
        decision = decide(spec, state, situation, now_s)    # pure
        state = keep(decision.state)                        # stored before anything is done
        carry_out(decision.actions)

Everything in it is told again as long as it is not seen to have happened, and nothing is told twice to an agent that
has obeyed: an operator that is killed between any two lines goes on from the state it stored. Whoever runs pods builds
on this: ``hyperpod-operator-sim`` with agents of one machine, the controller of :mod:`integration.kubernetes` with
pods.
"""

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
from integration.hyperpod.operator.job_spec import JobSpec, JobSpecError, ReplicaGroup, parse_job_resource
from integration.hyperpod.operator.job_state import (
    JobCondition,
    JobFault,
    JobPhase,
    JobState,
    TransitionCause,
    resource_status,
)
from integration.hyperpod.operator.observed_pods import (
    AgentRestartMode,
    AgentState,
    AgentStatus,
    ObservedJob,
    ObservedPod,
    parse_agent_status,
)
from integration.hyperpod.operator.state_machine import decide_job

__all__ = [
    "AgentRestartMode",
    "AgentState",
    "AgentStatus",
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
    "ShutdownAgent",
    "StartAgent",
    "StartRequest",
    "StopAgent",
    "StopRequest",
    "TransitionCause",
    "UpdateAgent",
    "decide_job",
    "parse_agent_status",
    "parse_job_resource",
    "resource_status",
]
