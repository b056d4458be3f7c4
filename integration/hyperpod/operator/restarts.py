"""How much is started anew after a fault, how often that is done, and which machines are avoided for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from elastic.world.policy import ScalingPolicy
from integration.hyperpod.operator.seen import Pod, RestartMode
from integration.hyperpod.operator.state import JobState, Offence


def asked(members: Iterable[Pod]) -> RestartMode:
    """The least that all agents can do and any of their workers has asked for."""
    mode = RestartMode.IN_PROCESS
    for pod in members:
        if pod.answer is not None:
            mode = mode.at_least(pod.answer.restart_mode)
    return mode


def in_period(state: JobState, policy: ScalingPolicy, now_s: float) -> JobState:
    """Counts are those of the current evaluation period: they begin again with the next."""
    period = int((now_s - (state.created_s or now_s)) / policy.eval_period_s)
    if period == state.period:
        return state
    return msgspec.structs.replace(state, period=period, period_restarts=0, period_full_restarts=0)


def counted(
    state: JobState, policy: ScalingPolicy, mode: RestartMode, now_s: float
) -> tuple[JobState, RestartMode, str]:
    """One more restart: how it is done in the end, and which limit it is beyond ("" for none)."""
    state = in_period(state, policy, now_s)
    state = msgspec.structs.replace(state, restarts=state.restarts + 1)
    before_full = policy.num_restart_before_full_job_restart
    if mode is RestartMode.JOB or (before_full is not None and state.period_restarts >= before_full):
        full = state.period_full_restarts + 1
        state = msgspec.structs.replace(state, period_full_restarts=full, period_restarts=0)
        mode = RestartMode.JOB
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


def blamed(state: JobState, policy: ScalingPolicy, nodes: Iterable[str], now_s: float) -> JobState:
    """Only what happened within the evaluation period is remembered."""
    recent = tuple(one for one in state.offences if now_s < one.at_s + policy.eval_period_s)
    return msgspec.structs.replace(state, offences=(*recent, *(Offence(node, now_s) for node in nodes)))


def avoided(state: JobState, policy: ScalingPolicy, now_s: float) -> tuple[str, ...]:
    """The worst of the repeated offenders: their pods get no rank while others can be had, and none go there anew."""
    recent = [one for one in state.offences if now_s < one.at_s + policy.eval_period_s]
    counts = Counter(one.node for one in recent)
    latest = {one.node: one.at_s for one in recent}
    worst = sorted(
        (node for node, count in counts.items() if count >= policy.repeat_offender_faults),
        key=lambda node: (-counts[node], -latest[node], node),
    )
    return tuple(worst[: policy.max_num_repeat_offenders_to_avoid])
