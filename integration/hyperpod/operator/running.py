"""A world from its start to its end, or to the size that comes next."""

from __future__ import annotations

import msgspec

from integration.hyperpod.operator import ending, placing, sizing, stopping
from integration.hyperpod.operator.actions import Release
from integration.hyperpod.operator.seen import AgentState
from integration.hyperpod.operator.state import Cause, Phase
from integration.hyperpod.operator.turn import Turn, state_of

_RUNS = {AgentState.RUNNING, AgentState.COMPLETED}


def starting(turn: Turn) -> None:
    """``/start`` again to whoever has not obeyed; the world runs when all say so."""
    for pod in turn.members:
        if state_of(pod) is AgentState.READY:
            turn.do(placing.start(turn, pod))
    size = len(turn.state.members)
    if sum(state_of(pod) in _RUNS and not turn.is_stale(pod) for pod in turn.members) == size:
        _runs(turn)


def _runs(turn: Turn) -> None:
    state, size = turn.state, len(turn.state.members)
    message = f"{size} agents run"
    reason = "Started"
    if state.fault is not None:
        took_ms = round(1000 * (turn.now_s - state.fault.at_s))
        reason, message = (
            "FaultRemediated",
            (f"The fault of reason {state.fault.reason} was remediated in {took_ms} milliseconds."),
        )
        turn.set(snooze_until_s=turn.now_s + turn.spec.policy.scale_up_snooze_s)
    elif state.cause is Cause.SCALE:
        reason, message = "Scaled", f"the job runs with {size} replicas now"
        scaling = msgspec.structs.replace(state.scaling, scaled_s=turn.now_s, updated_s=turn.now_s, failures=0)
        turn.set(scaling=scaling)
    turn.condition("Running", True, reason, message)
    turn.tell(reason, message)
    turn.enter(
        Phase.RUNNING,
        started_s=turn.now_s if state.started_s is None else state.started_s,
        last_fault=state.fault or state.last_fault,
        fault=None,
        grow_since_s=None,
    )


def running(turn: Turn) -> None:
    states = [state_of(pod) for pod in turn.members]
    if len(states) == len(turn.state.members) and all(one is AgentState.COMPLETED for one in states):
        ending.succeed(turn)
        return
    if turn.spec.suspend:
        stopping.stop_for(turn, Cause.SUSPEND, "the job is suspended")
        return
    if not (_shrinks(turn) or _grows(turn, finishing=AgentState.COMPLETED in states)):
        turn.do(*(Release(pod.name, "not wanted any more") for pod in sizing.surplus(turn)))


def _shrinks(turn: Turn) -> bool:
    """Less is admitted than runs, or members are asked back: the rest goes on without them, or with spares."""
    size, most = len(turn.state.members), sizing.limit(turn)
    leaving = [pod.name for pod in turn.members if pod.leaving]
    if leaving:
        stopping.stop_for(turn, Cause.SCALE, f"asked back: {', '.join(leaving)}", target=min(size, most))
    elif most < size:
        stopping.stop_for(turn, Cause.SCALE, f"{turn.seen.capacity} replicas are admitted", target=most)
    return bool(leaving) or most < size


def _grows(turn: Turn, *, finishing: bool) -> bool:
    """Once more can have a rank for long enough, or all there can ever be."""
    size = sizing.size_to_grow(turn)
    if finishing or turn.now_s < turn.state.snooze_until_s or size <= len(turn.state.members):
        turn.set(grow_since_s=None)
        return False
    since = turn.now_s if turn.state.grow_since_s is None else turn.state.grow_since_s
    if size < sizing.limit(turn) and turn.now_s - since < turn.spec.policy.scaling_timeout_s:
        turn.set(grow_since_s=since)
        return False
    stopping.stop_for(turn, Cause.SCALE, f"{size} replicas can run", target=size)
    return True
