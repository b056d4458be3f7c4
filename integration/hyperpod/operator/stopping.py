"""From a world that runs, or is broken, to agents that wait."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from integration.hyperpod.operator import ending, forming, restarts
from integration.hyperpod.operator.actions import Stop, StopBody
from integration.hyperpod.operator.seen import AgentState, Pod, RestartMode
from integration.hyperpod.operator.state import Cause, Fault, Phase
from integration.hyperpod.operator.turn import Turn, state_of

_BUSY = {AgentState.RUNNING, AgentState.COMPLETED, AgentState.FAULTED}


def broken(turn: Turn, fault: Fault) -> None:
    """A fault: all are stopped. One that comes before an earlier one is remediated takes new processes."""
    before = turn.state
    mode = restarts.asked(turn.members)
    if before.fault is not None or not before.members:
        mode = mode.at_least(RestartMode.PROCESS)
    state, mode, beyond = restarts.counted(before, turn.spec.policy, mode, turn.now_s)
    turn.state = restarts.blamed(state, turn.spec.policy, fault.nodes, turn.now_s)
    at_s = fault.at_s if before.fault is None else before.fault.at_s
    fault = msgspec.structs.replace(fault, mode=mode, at_s=at_s)
    turn.tell(fault.reason, fault.message.strip() or fault.reason, warning=True)
    turn.condition("Running", False, fault.reason, fault.message.strip())
    turn.set(fault=fault, unexplained_since_s=None)
    if beyond:
        ending.fail(turn, "RestartLimitExceeded", f"gave up after {fault.reason}: more than {beyond}")
        return
    if before.cause is Cause.SCALE and before.phase is not Phase.RUNNING:
        turn.set(scaling=msgspec.structs.replace(before.scaling, failures=before.scaling.failures + 1))
    turn.tell("Restarting", f"restart {turn.state.restarts}, {mode.value}")
    _stop(turn, Cause.FAULT, mode, target=len(before.members) or before.target)
    let_go(turn, [pod for pod in turn.seen.pods if mode is RestartMode.JOB or _gone_bad(turn, pod)])


def explained(turn: Turn, fault: Fault) -> None:
    """The same fault, for the reason that it really had; machines that were blamed for it are not any more."""
    before = turn.state.fault
    wrongly = () if before is None else before.nodes
    offences = list(turn.state.offences)
    for one in reversed(turn.state.offences):
        if one.node in wrongly:
            offences.remove(one)
            break
    turn.state = restarts.blamed(
        msgspec.structs.replace(turn.state, fault=fault, offences=tuple(offences)),
        turn.spec.policy, fault.nodes, turn.now_s,
    )  # fmt: skip
    turn.tell(fault.reason, fault.message.strip() or fault.reason, warning=True)
    turn.condition("Running", False, fault.reason, fault.message.strip())


def stop_for(turn: Turn, cause: Cause, why: str, *, target: int = 0) -> None:
    """Gracefully: ranks agree on a step, save, and end."""
    turn.tell("Scaling" if cause is Cause.SCALE else "Suspending", why)
    turn.condition("Running", False, cause.value, why)
    if cause is Cause.SCALE:
        scaling = msgspec.structs.replace(
            turn.state.scaling,
            target=target,
            updated_s=turn.now_s,
            after_fault=any(pod.leaving for pod in turn.members),
        )
        turn.set(scaling=scaling)
    _stop(turn, cause, restarts.asked(turn.members), graceful=True, target=target)


def _stop(turn: Turn, cause: Cause, mode: RestartMode, *, target: int, graceful: bool = False) -> None:
    if mode is RestartMode.JOB and not turn.seen.can_replace:
        mode = RestartMode.PROCESS
    seats = turn.state.members or turn.state.seats
    turn.enter(
        Phase.STOPPING, cause=cause, mode=mode, graceful=graceful, told_again=(), seats=seats, target=target
    )  # fmt: skip


def _gone_bad(turn: Turn, pod: Pod) -> bool:
    ranked = pod.name in turn.state.members
    return bool(pod.node_fault) or (ranked and turn.is_lost(pod))


def let_go(turn: Turn, pods: Iterable[Pod]) -> None:
    """These count no more, where others can be had."""
    if turn.seen.can_replace:
        names = [pod.name for pod in pods if pod.name not in turn.state.replaced and not pod.leaving]
        turn.set(replaced=(*turn.state.replaced, *names))


def stopping(turn: Turn) -> None:
    """``/stop`` to whoever is not stopped; in time all wait again, or are given up."""
    let_go(turn, [pod for pod in turn.present if _gone_bad(turn, pod)])
    busy = [pod for pod in turn.seen.pods if pod.name not in turn.state.replaced and _keeps_waiting(turn, pod)]
    for pod in busy:
        if state_of(pod) in _BUSY:
            turn.do(Stop(pod.name, _body(turn)))
    limit_s = turn.spec.stop_s + (turn.spec.policy.graceful_shutdown_timeout_s if turn.state.graceful else 0.0)
    if busy and turn.in_phase_s >= limit_s:
        _tell_again(turn, [pod for pod in busy if pod.name not in turn.state.told_again])
    if busy and turn.in_phase_s >= limit_s + turn.spec.stop_s:
        turn.tell("StopTimeout", f"did not stop: {', '.join(pod.name for pod in busy)}", warning=True)
        let_go(turn, busy)
        busy = []
    if not busy:
        _stopped(turn)


def _keeps_waiting(turn: Turn, pod: Pod) -> bool:
    state = state_of(pod)
    if state is None:
        return pod.name in turn.state.members and not turn.is_lost(pod)
    return state in _BUSY or state is AgentState.STOPPING


def _body(turn: Turn) -> StopBody:
    """In-process agents know nothing of graceful stops: theirs is the barrier, whatever the reason."""
    state = turn.state
    if not state.graceful:
        return StopBody(restart_mode=state.mode.value)
    grace_s = math.ceil(turn.spec.policy.graceful_shutdown_timeout_s)
    return StopBody(restart_mode=state.mode.value, is_graceful=True, timeout=max(1, grace_s))


def _tell_again(turn: Turn, pods: list[Pod]) -> None:
    """Once, since every such word begins a restart of processes anew."""
    body = StopBody(restart_mode=RestartMode.PROCESS.value)
    told = [pod.name for pod in pods if state_of(pod) is AgentState.STOPPING]
    turn.do(*(Stop(name, body) for name in told))
    turn.set(told_again=(*turn.state.told_again, *told))


def _stopped(turn: Turn) -> None:
    if turn.state.cause is Cause.SUSPEND:
        turn.enter(Phase.SUSPENDED, members=(), spares=())
        return
    policy = turn.spec.policy
    if turn.state.cause is Cause.FAULT and turn.state.fault is not None:
        whole = turn.state.fault.mode is RestartMode.JOB
        patience_s = max(policy.faulty_scale_down_timeout_s, policy.scaling_timeout_s if whole else 0.0)
        forming.await_members(turn, Cause.FAULT, patience_s=patience_s)
    else:
        forming.await_members(turn, turn.state.cause)
