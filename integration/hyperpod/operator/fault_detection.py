"""Faults in the observations of a job, restart budgets, and nodes to avoid. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import NamedTuple

import msgspec

from elastic.world.peer_loss import blames_another_rank
from elastic.world.scaling_policy import ScalingPolicy
from integration.hyperpod.job_resource import RestartMode
from integration.hyperpod.operator.decision import DecisionBuilder, agent_state_of
from integration.hyperpod.operator.job_state import (
    FormingPhase,
    JobFault,
    JobPhase,
    JobState,
    NodeFaultRecord,
    RankedPhase,
    RunningPhase,
    StoppingPhase,
    TransitionCause,
)
from integration.hyperpod.operator.observed_pods import AgentState, CheckpointProgress, ObservedPod

_STALE_S = 5.0
"""Seconds an agent may report the old version: it reports RUNNING before the new version."""
_REASON_S = 3.0
"""Seconds to wait for the rank that caused a fault, when the other ranks only observed it."""
_MACHINE_REASONS = {"PodLost", "NodeFault", "AgentUnreachable"}
_PEER_FAILURE_REASON = "ElasticWorld"
"""Reason of our ranks that ended because other ranks failed.

:mod:`integration.hyperpod.elastic_agent.in_process_mode` reports it.
"""
_UNKNOWN_MESSAGE = "An unknown fault occurred"
"""Message of HyperPod's agent for an unknown fault.

It reports ``WorkerReportedFault`` for a worker that gave no reason.
"""


def record_observations(builder: DecisionBuilder) -> None:
    """Record silent, stale and removed pods, the admission time, and the progress common to all members."""
    state = builder.state
    waits = builder.observed.capacity == 0 or builder.spec.suspend
    builder.update_state(
        admitted_s=None if waits else builder.now_s if state.admitted_s is None else state.admitted_s,
        silent_since_s=_since(
            builder, state.silent_since_s, [pod for pod in builder.observed.pods if agent_state_of(pod) is None]
        ),
        stale_since_s=_since(
            builder, state.stale_since_s, [pod for pod in builder.member_pods if builder.is_stale(pod)]
        ),
        replaced_pods=tuple(name for name in state.replaced_pods if name in builder.pods),
        progress={**state.progress, **common_progress(builder.member_pods, len(state.members))},
    )


def _since(builder: DecisionBuilder, before: Mapping[str, float], now: Iterable[ObservedPod]) -> dict[str, float]:
    return {pod.name: before.get(pod.name, builder.now_s) for pod in now}


def common_progress(members: Iterable[ObservedPod], count: int) -> dict[str, CheckpointProgress]:
    """Return, by prefix, the newest step that all ``count`` members have.

    Empty if a member does not report, because its progress is unknown.
    """
    reports = [pod.agent_status.progress for pod in members if pod.agent_status is not None]
    if len(reports) < count or not reports:
        return {}
    prefixes = set(reports[0]).intersection(*reports[1:])
    return {
        prefix: min((report[prefix] for report in reports), key=lambda progress: progress.progress_count)
        for prefix in sorted(prefixes)
    }


_FROM_MACHINE, _FROM_RANK, _FROM_OTHER_RANK, _NO_REASON = range(4)
"""Sources of a fault's reason, best first: the machine, the rank itself, another rank's failure, none."""


class _Finding(NamedTuple):
    order: tuple[int, float, int]
    """Weight, then time in seconds since 1970: the first failure causes the others. Then the rank."""
    pod: str
    node: str
    rank: int
    reason: str
    message: str


def detect_fault(builder: DecisionBuilder) -> JobFault | None:
    """Return the fault of the world, with the reason of its most likely cause, or None.

    If only consequences are known and another rank may still report the cause, set ``builder.waits`` and return None.
    """
    found = sorted(_faults(builder))
    if not found or _may_be_explained(builder, found):
        return None
    first = found[0]
    return JobFault(
        reason=first.reason,
        message=first.message,
        pods=tuple(finding.pod for finding in found),
        ranks=tuple(finding.rank for finding in found if finding.rank >= 0),
        nodes=(first.node,) if first.node else (),
        at_s=builder.now_s,
    )


def _may_be_explained(builder: DecisionBuilder, found: list[_Finding]) -> bool:
    """Return whether to wait for a better reason.

    A stopped agent no longer reports why it failed, so the other agents continue to run meanwhile.
    """
    phase = builder.state.current
    mute = {pod.name for pod in builder.member_pods} - {finding.pod for finding in found}
    if found[0].order[0] < _FROM_OTHER_RANK or not mute or not isinstance(phase, RunningPhase):
        return False
    since = builder.now_s if phase.unexplained_since_s is None else phase.unexplained_since_s
    builder.update_state(current=msgspec.structs.replace(phase, unexplained_since_s=since))
    builder.waits = builder.now_s - since < _REASON_S
    return builder.waits


def explain(builder: DecisionBuilder) -> JobFault | None:
    """Return the current fault with a better reason that an agent reported while stopping, or None."""
    current, phase = builder.state.fault, builder.state.current
    if current is None or not isinstance(phase, StoppingPhase) or phase.cause is not TransitionCause.FAULT:
        return None
    found = []
    for rank, name in enumerate(phase.world.members):
        pod = builder.pods.get(name)
        problem = None if pod is None else _node_fault(builder, pod)
        if pod is not None and problem is not None:
            found.append(_Finding((_FROM_MACHINE, 0.0, rank), name, pod.node, rank, *problem))
        elif pod is not None and agent_state_of(pod) is AgentState.FAULTED:
            found.append(_reported_fault(pod, rank))
    first = min(found, default=None)
    if first is None or first.order[0] >= _weight(current.reason, current.message):
        return None
    return msgspec.structs.replace(
        current,
        reason=first.reason,
        message=first.message,
        pods=tuple(dict.fromkeys((first.pod, *current.pods))),
        ranks=tuple(dict.fromkeys((first.rank, *current.ranks))),
        nodes=(first.node,) if first.node else (),
    )


def _faults(builder: DecisionBuilder) -> Iterable[_Finding]:
    phase = builder.state.current
    if isinstance(phase, FormingPhase):
        for pod in builder.active_pods:
            if agent_state_of(pod) is AgentState.FAULTED:
                yield _reported_fault(pod, -1)
    if not isinstance(phase, RankedPhase):
        return
    for rank, name in enumerate(phase.world.members):
        if name not in builder.pods:
            yield _Finding((_FROM_MACHINE, 0.0, rank), name, "", rank, "PodLost", f"pod {name} is gone")
            continue
        pod = builder.pods[name]
        problem = _node_fault(builder, pod)
        if problem is not None:
            yield _Finding((_FROM_MACHINE, 0.0, rank), name, pod.node, rank, *problem)
        elif agent_state_of(pod) is AgentState.FAULTED:
            yield _reported_fault(pod, rank)
        else:
            problem = _agent_fault(builder, pod)
            if problem is not None:
                yield _Finding((_FROM_RANK, builder.now_s, rank), name, pod.node, rank, *problem)


def _node_fault(builder: DecisionBuilder, pod: ObservedPod) -> tuple[str, str] | None:
    if pod.node_health_problem:
        return "NodeFault", f"node {pod.node or '(unknown)'} of pod {pod.name} is {pod.node_health_problem}"
    if builder.is_lost(pod):
        return "AgentUnreachable", f"the agent of pod {pod.name} has not answered for {builder.silent_for(pod):.0f} s"
    return None


def _agent_fault(builder: DecisionBuilder, pod: ObservedPod) -> tuple[str, str] | None:
    """Return reason and message if the agent is not in the state that the phase expects."""
    agent_state, phase = agent_state_of(pod), builder.state.phase
    idle = agent_state in {AgentState.INIT, AgentState.READY}
    if phase is JobPhase.RUNNING and idle:
        return "AgentRestarted", f"the agent of pod {pod.name} runs nothing any more"
    since = builder.state.stale_since_s.get(pod.name)
    if phase is not JobPhase.RANKS_ASSIGNED and since is not None and builder.now_s - since >= _STALE_S:
        return "StaleStart", f"the agent of pod {pod.name} runs what an earlier start said"
    if phase is JobPhase.STARTING and idle and builder.in_phase_s >= builder.spec.start_timeout_s:
        return "StartTimeout", f"the agent of pod {pod.name} did not start within {builder.spec.start_timeout_s:g} s"
    return None


def _reported_fault(pod: ObservedPod, rank: int) -> _Finding:
    """Return the fault in the agent's own words."""
    since = {} if pod.agent_status is None else pod.agent_status.transition_times
    reason, message = ("", "") if pod.agent_status is None else (pod.agent_status.reason, pod.agent_status.message)
    order = (_weight(reason, message), _seconds(since.get("FAULTED", "")), rank)
    return _Finding(order, pod.name, pod.node, rank, reason or "WorkerFault", message)


def _weight(reason: str, message: str) -> int:
    if reason in _MACHINE_REASONS:
        return _FROM_MACHINE
    if not (reason or message) or reason == "WorkerReportedFault" or message.startswith(_UNKNOWN_MESSAGE):
        return _NO_REASON
    return _FROM_OTHER_RANK if reason == _PEER_FAILURE_REASON or blames_another_rank(message) else _FROM_RANK


def _seconds(moment: str) -> float:
    try:
        return datetime.fromisoformat(moment).timestamp()
    except (ValueError, OverflowError, OSError):
        return float("inf")


def requested_restart_mode(members: Iterable[ObservedPod]) -> RestartMode:
    """Return the most severe restart mode that any member's agent reports, or ``IN_PROCESS``."""
    mode = RestartMode.IN_PROCESS
    for pod in members:
        if pod.agent_status is not None:
            mode = mode.at_least(pod.agent_status.restart_mode)
    return mode


def in_current_period(state: JobState, policy: ScalingPolicy, now_s: float) -> JobState:
    """Return the state with the restart counts reset if a new evaluation period has begun."""
    period = int((now_s - (state.created_s or now_s)) / policy.eval_period_s)
    if period == state.period:
        return state
    return msgspec.structs.replace(state, period=period, period_restarts=0, period_full_restarts=0)


def count_restart(
    state: JobState, policy: ScalingPolicy, mode: RestartMode, now_s: float
) -> tuple[JobState, RestartMode, str]:
    """Count one restart. Return the state, the final restart mode, and the exceeded limit ("" if none)."""
    state = in_current_period(state, policy, now_s)
    state = msgspec.structs.replace(state, restarts=state.restarts + 1)
    before_full = policy.num_restart_before_full_job_restart
    if mode is RestartMode.JOB or (before_full is not None and state.period_restarts >= before_full):
        full = state.period_full_restarts + 1
        state = msgspec.structs.replace(state, period_full_restarts=full, period_restarts=0)
        mode = RestartMode.JOB
    else:
        state = msgspec.structs.replace(state, period_restarts=state.period_restarts + 1)
    return state, mode, _exceeded_limit(state, policy)


def _exceeded_limit(state: JobState, policy: ScalingPolicy) -> str:
    max_restarts, max_full = policy.job_max_retry_count, policy.max_full_job_restarts
    if max_restarts is not None and state.restarts > max_restarts:
        return f"{max_restarts} restarts in all (jobMaxRetryCount)"
    if max_full is not None and state.period_full_restarts > max_full:
        return f"{max_full} restarts of the whole job within {policy.eval_period_s:g} s (maxFullJobRestarts)"
    return ""


def record_node_faults(state: JobState, policy: ScalingPolicy, nodes: Iterable[str], now_s: float) -> JobState:
    """Add faults of ``nodes``, and remove faults older than the evaluation period."""
    recent = tuple(fault for fault in state.node_faults if now_s < fault.at_s + policy.eval_period_s)
    return msgspec.structs.replace(state, node_faults=(*recent, *(NodeFaultRecord(node, now_s) for node in nodes)))


def nodes_to_avoid(state: JobState, policy: ScalingPolicy, now_s: float) -> tuple[str, ...]:
    """Return the nodes with the most repeated faults, worst first.

    Their pods get a rank only if no others exist, and new pods avoid them.
    """
    recent = [fault for fault in state.node_faults if now_s < fault.at_s + policy.eval_period_s]
    counts = Counter(fault.node for fault in recent)
    latest = {fault.node: fault.at_s for fault in recent}
    worst = sorted(
        (node for node, count in counts.items() if count >= policy.repeat_offender_faults),
        key=lambda node: (-counts[node], -latest[node], node),
    )
    return tuple(worst[: policy.max_num_repeat_offenders_to_avoid])
