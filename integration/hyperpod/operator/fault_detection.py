"""Faults in the observations of a job, restart budgets, and nodes to avoid. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import NamedTuple

import msgspec

from elastic.world.peer_loss import blames_another_rank
from elastic.world.scaling_policy import ScalingPolicy
from integration.hyperpod.operator.decision import DecisionBuilder, agent_state_of
from integration.hyperpod.operator.job_state import JobFault, JobPhase, JobState, NodeFaultRecord, TransitionCause
from integration.hyperpod.operator.observed_pods import AgentRestartMode, AgentState, CheckpointProgress, ObservedPod

_STALE_S = 5.0
"""An agent says that it runs a moment before it says which version: so long that is believed."""
_REASON_S = 3.0
"""So long whoever has the reason may take to say so, when others have only seen its end."""
_OF_MACHINES = {"PodLost", "NodeFault", "AgentUnreachable"}
_AS_ASKED = "ElasticWorld"
"""Ranks of ours that were told to end by others (:mod:`integration.hyperpod.elastic_agent.in_process_mode`)."""
_UNKNOWN = "An unknown fault occurred"
"""Of HyperPod's agent, where it knows no more; ``WorkerReportedFault`` is its word for a worker that gave no reason."""
_RANKED = {JobPhase.RANKS_ASSIGNED, JobPhase.STARTING, JobPhase.RUNNING}


def record_observations(turn: DecisionBuilder) -> None:
    """Who is silent, who runs something old, who is gone, and what every member has whole."""
    state = turn.state
    waits = turn.observed.capacity == 0 or turn.spec.suspend
    turn.update_state(
        admitted_s=None if waits else turn.now_s if state.admitted_s is None else state.admitted_s,
        silent_since_s=_since(
            turn, state.silent_since_s, [pod for pod in turn.observed.pods if agent_state_of(pod) is None]
        ),
        stale_since_s=_since(turn, state.stale_since_s, [pod for pod in turn.member_pods if turn.is_stale(pod)]),
        replaced_pods=tuple(name for name in state.replaced_pods if name in turn.pods),
        progress={**state.progress, **common_progress(turn.member_pods, len(state.members))},
    )


def _since(turn: DecisionBuilder, before: Mapping[str, float], now: Iterable[ObservedPod]) -> dict[str, float]:
    return {pod.name: before.get(pod.name, turn.now_s) for pod in now}


def common_progress(members: Iterable[ObservedPod], count: int) -> dict[str, CheckpointProgress]:
    """Under each prefix the newest step that all of ``count`` members have.

    One that lags behind has not yet what the others have, and of one that says nothing nobody knows what it has.
    """
    reports = [pod.agent_status.progress for pod in members if pod.agent_status is not None]
    if len(reports) < count or not reports:
        return {}
    prefixes = set(reports[0]).intersection(*reports[1:])
    return {
        prefix: min((report[prefix] for report in reports), key=lambda one: one.progress_count)
        for prefix in sorted(prefixes)
    }


_MACHINE, _OWN, _ANOTHERS, _NONE = range(4)
"""Whose words are quoted: a machine's, those of one that failed by itself, or saw another's end, or has none."""


class _Finding(NamedTuple):
    order: tuple[int, float, int]
    """By weight, then by when it happened: what breaks first takes others with it."""
    pod: str
    node: str
    rank: int
    reason: str
    message: str


def detect_fault(turn: DecisionBuilder) -> JobFault | None:
    """What is wrong with the world, if anything; quoted is who has the reason, and of these the first to break.

    Where nobody has one yet, and somebody may, ``turn.waits`` is set for a while instead.
    """
    found = sorted(_faults(turn))
    if not found or _may_be_explained(turn, found):
        return None
    first = found[0]
    return JobFault(
        reason=first.reason,
        message=first.message,
        pods=tuple(one.pod for one in found),
        ranks=tuple(one.rank for one in found if one.rank >= 0),
        nodes=(first.node,) if first.node else (),
        at_s=turn.now_s,
    )


def _may_be_explained(turn: DecisionBuilder, found: list[_Finding]) -> bool:
    """Who is stopped says no more why it failed: all but the faulted are left alone for a moment."""
    state = turn.state
    mute = {pod.name for pod in turn.member_pods} - {one.pod for one in found}
    if found[0].order[0] < _ANOTHERS or not mute or state.phase is not JobPhase.RUNNING:
        return False
    since = turn.now_s if state.unexplained_since_s is None else state.unexplained_since_s
    turn.update_state(unexplained_since_s=since)
    turn.waits = turn.now_s - since < _REASON_S
    return turn.waits


def explain(turn: DecisionBuilder) -> JobFault | None:
    """While all are being stopped: the fault, where somebody has a better reason now than the one that is quoted."""
    quoted = turn.state.fault
    if quoted is None or turn.state.phase is not JobPhase.STOPPING or turn.state.cause is not TransitionCause.FAULT:
        return None
    found = []
    for rank, name in enumerate(turn.state.members):
        pod = turn.pods.get(name)
        outside = None if pod is None else _node_fault(turn, pod)
        if pod is not None and outside is not None:
            found.append(_Finding((_MACHINE, 0.0, rank), name, pod.node, rank, *outside))
        elif pod is not None and agent_state_of(pod) is AgentState.FAULTED:
            found.append(_reported_fault(pod, rank))
    first = min(found, default=None)
    if first is None or first.order[0] >= _weight(quoted.reason, quoted.message):
        return None
    return msgspec.structs.replace(
        quoted,
        reason=first.reason,
        message=first.message,
        pods=tuple(dict.fromkeys((first.pod, *quoted.pods))),
        ranks=tuple(dict.fromkeys((first.rank, *quoted.ranks))),
        nodes=(first.node,) if first.node else (),
    )


def _faults(turn: DecisionBuilder) -> Iterable[_Finding]:
    state = turn.state
    if state.phase is JobPhase.FORMING:
        for pod in turn.active_pods:
            if agent_state_of(pod) is AgentState.FAULTED:
                yield _reported_fault(pod, -1)
    if state.phase not in _RANKED:
        return
    for rank, name in enumerate(state.members):
        if name not in turn.pods:
            yield _Finding((_MACHINE, 0.0, rank), name, "", rank, "PodLost", f"pod {name} is gone")
            continue
        pod = turn.pods[name]
        outside = _node_fault(turn, pod)
        if outside is not None:
            yield _Finding((_MACHINE, 0.0, rank), name, pod.node, rank, *outside)
        elif agent_state_of(pod) is AgentState.FAULTED:
            yield _reported_fault(pod, rank)
        else:
            wrong = _agent_fault(turn, pod)
            if wrong is not None:
                yield _Finding((_OWN, turn.now_s, rank), name, pod.node, rank, *wrong)


def _node_fault(turn: DecisionBuilder, pod: ObservedPod) -> tuple[str, str] | None:
    if pod.node_health_problem:
        return "NodeFault", f"node {pod.node or '(unknown)'} of pod {pod.name} is {pod.node_health_problem}"
    if turn.is_lost(pod):
        return "AgentUnreachable", f"the agent of pod {pod.name} has not answered for {turn.silent_for(pod):.0f} s"
    return None


def _agent_fault(turn: DecisionBuilder, pod: ObservedPod) -> tuple[str, str] | None:
    """Agents that are not where they were brought."""
    now, phase = agent_state_of(pod), turn.state.phase
    idle = now in {AgentState.INIT, AgentState.READY}
    if phase is JobPhase.RUNNING and idle:
        return "AgentRestarted", f"the agent of pod {pod.name} runs nothing any more"
    since = turn.state.stale_since_s.get(pod.name)
    if phase is not JobPhase.RANKS_ASSIGNED and since is not None and turn.now_s - since >= _STALE_S:
        return "StaleStart", f"the agent of pod {pod.name} runs what an earlier start said"
    if phase is JobPhase.STARTING and idle and turn.in_phase_s >= turn.spec.start_timeout_s:
        return "StartTimeout", f"the agent of pod {pod.name} did not start within {turn.spec.start_timeout_s:g} s"
    return None


def _reported_fault(pod: ObservedPod, rank: int) -> _Finding:
    """In the agent's own words."""
    since = {} if pod.agent_status is None else pod.agent_status.transition_times
    reason, message = ("", "") if pod.agent_status is None else (pod.agent_status.reason, pod.agent_status.message)
    order = (_weight(reason, message), _seconds(since.get("FAULTED", "")), rank)
    return _Finding(order, pod.name, pod.node, rank, reason or "WorkerFault", message)


def _weight(reason: str, message: str) -> int:
    if reason in _OF_MACHINES:
        return _MACHINE
    if not (reason or message) or reason == "WorkerReportedFault" or message.startswith(_UNKNOWN):
        return _NONE
    return _ANOTHERS if reason == _AS_ASKED or blames_another_rank(message) else _OWN


def _seconds(moment: str) -> float:
    try:
        return datetime.fromisoformat(moment).timestamp()
    except (ValueError, OverflowError, OSError):
        return float("inf")


def requested_restart_mode(members: Iterable[ObservedPod]) -> AgentRestartMode:
    """The least that all agents can do and any of their workers has asked for."""
    mode = AgentRestartMode.IN_PROCESS
    for pod in members:
        if pod.agent_status is not None:
            mode = mode.at_least(pod.agent_status.restart_mode)
    return mode


def in_current_period(state: JobState, policy: ScalingPolicy, now_s: float) -> JobState:
    """Counts are those of the current evaluation period: they begin again with the next."""
    period = int((now_s - (state.created_s or now_s)) / policy.eval_period_s)
    if period == state.period:
        return state
    return msgspec.structs.replace(state, period=period, period_restarts=0, period_full_restarts=0)


def count_restart(
    state: JobState, policy: ScalingPolicy, mode: AgentRestartMode, now_s: float
) -> tuple[JobState, AgentRestartMode, str]:
    """One more restart: how it is done in the end, and which limit it is beyond ("" for none)."""
    state = in_current_period(state, policy, now_s)
    state = msgspec.structs.replace(state, restarts=state.restarts + 1)
    before_full = policy.num_restart_before_full_job_restart
    if mode is AgentRestartMode.JOB or (before_full is not None and state.period_restarts >= before_full):
        full = state.period_full_restarts + 1
        state = msgspec.structs.replace(state, period_full_restarts=full, period_restarts=0)
        mode = AgentRestartMode.JOB
    else:
        state = msgspec.structs.replace(state, period_restarts=state.period_restarts + 1)
    return state, mode, _beyond(state, policy)


def _beyond(state: JobState, policy: ScalingPolicy) -> str:
    most, full = policy.job_max_retry_count, policy.max_full_job_restarts
    if most is not None and state.restarts > most:
        return f"{most} restarts in all (jobMaxRetryCount)"
    if full is not None and state.period_full_restarts > full:
        return f"{full} restarts of the whole job within {policy.eval_period_s:g} s (maxFullJobRestarts)"
    return ""


def record_node_faults(state: JobState, policy: ScalingPolicy, nodes: Iterable[str], now_s: float) -> JobState:
    """Only what happened within the evaluation period is remembered."""
    recent = tuple(one for one in state.node_faults if now_s < one.at_s + policy.eval_period_s)
    return msgspec.structs.replace(state, node_faults=(*recent, *(NodeFaultRecord(node, now_s) for node in nodes)))


def nodes_to_avoid(state: JobState, policy: ScalingPolicy, now_s: float) -> tuple[str, ...]:
    """The worst of the repeated offenders: their pods get no rank while others can be had, and none go there anew."""
    recent = [one for one in state.node_faults if now_s < one.at_s + policy.eval_period_s]
    counts = Counter(one.node for one in recent)
    latest = {one.node: one.at_s for one in recent}
    worst = sorted(
        (node for node, count in counts.items() if count >= policy.repeat_offender_faults),
        key=lambda node: (-counts[node], -latest[node], node),
    )
    return tuple(worst[: policy.max_num_repeat_offenders_to_avoid])
