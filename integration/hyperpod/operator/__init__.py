"""The operator of a job: what AWS's does with the agents of its pods, here as values in and values out.

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

from integration.hyperpod.operator.actions import (
    Action,
    Decision,
    Event,
    Release,
    Replace,
    Shutdown,
    Start,
    StartBody,
    Stop,
    StopBody,
    Update,
    Wanted,
)
from integration.hyperpod.operator.decide import decide
from integration.hyperpod.operator.seen import AgentState, Answer, Pod, RestartMode, Situation, read_answer
from integration.hyperpod.operator.spec import JobSpec, JobSpecError, ReplicaGroup, read_job
from integration.hyperpod.operator.state import Cause, Condition, Fault, JobState, Phase
from integration.hyperpod.operator.status import status_of

__all__ = [
    "Action",
    "AgentState",
    "Answer",
    "Cause",
    "Condition",
    "Decision",
    "Event",
    "Fault",
    "JobSpec",
    "JobSpecError",
    "JobState",
    "Phase",
    "Pod",
    "Release",
    "Replace",
    "ReplicaGroup",
    "RestartMode",
    "Shutdown",
    "Situation",
    "Start",
    "StartBody",
    "Stop",
    "StopBody",
    "Update",
    "Wanted",
    "decide",
    "read_answer",
    "read_job",
    "status_of",
]
