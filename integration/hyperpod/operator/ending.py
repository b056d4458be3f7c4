"""How a job ends, and how it rests."""

from __future__ import annotations

from integration.hyperpod.operator.actions import Release, Shutdown
from integration.hyperpod.operator.seen import AgentState
from integration.hyperpod.operator.state import Cause, Phase
from integration.hyperpod.operator.turn import Turn, state_of

_ENDS_WHEN_TOLD = set(AgentState) - {AgentState.STOPPING, AgentState.SHUTDOWN}
"""An agent that is stopping listens again when it has stopped."""


def succeed(turn: Turn) -> None:
    message = f"all {len(turn.state.members)} agents completed"
    turn.tell("Completed", message)
    turn.condition("Running", False, "Completed", message)
    turn.condition("Succeeded", True, "Completed", message)
    turn.enter(Phase.SUCCEEDED, ended_s=turn.now_s)


def fail(turn: Turn, reason: str, message: str) -> None:
    turn.tell(reason, message, warning=True)
    turn.condition("Running", False, reason, message)
    turn.condition("Failed", True, reason, message)
    turn.enter(Phase.FAILED, ended_s=turn.now_s)


def overdue(turn: Turn) -> tuple[str, str] | None:
    """Which deadline has passed."""
    spec, state, now_s = turn.spec, turn.state, turn.now_s
    created_s = now_s if state.created_s is None else state.created_s
    if spec.active_deadline_s is not None and now_s - created_s >= spec.active_deadline_s:
        return "DeadlineExceeded", f"active for {spec.active_deadline_s:g} s (activeDeadlineSeconds)"
    startup_s = spec.startup_deadline_s
    starts = state.started_s is None and state.admitted_s is not None
    if starts and startup_s is not None and now_s - (state.admitted_s or 0.0) >= startup_s:
        return "StartupDeadlineExceeded", f"not running after {startup_s:g} s (startupDeadlineSeconds)"
    fault_s = spec.fault_deadline_s
    if state.fault is not None and fault_s is not None and now_s - state.fault.at_s >= fault_s:
        why = f"the fault of reason {state.fault.reason} was not remediated"
        return "FaultDeadlineExceeded", f"{why} within {fault_s:g} s (faultDeadlineSeconds)"
    return None


def over(turn: Turn) -> None:
    """Agents are told to end; those that do not in time hold a machine, and a queue's quota, for nothing."""
    turn.do(*(Shutdown(pod.name) for pod in turn.seen.pods if state_of(pod) in _ENDS_WHEN_TOLD))
    grace_s = turn.spec.policy.graceful_shutdown_timeout_s if turn.state.graceful else 0.0
    if turn.in_phase_s >= grace_s + 2 * turn.spec.stop_s:
        stuck = (pod for pod in turn.present if state_of(pod) is not None)
        turn.do(*(Release(pod.name, "the job has ended, and its agent does not") for pod in stuck))


def suspended(turn: Turn) -> None:
    """No pod is kept; the job goes on where it was when it is asked to."""
    if turn.spec.suspend:
        turn.condition("Suspended", True, "Suspended", "the job is suspended")
        turn.do(*(Release(pod.name, "the job is suspended") for pod in turn.present))
        return
    turn.condition("Suspended", False, "Resumed", "the job goes on")
    deadline_s = turn.now_s + turn.spec.policy.scaling_timeout_s if turn.spec.elastic else None
    turn.enter(Phase.FORMING, cause=Cause.BEGIN, target=0, deadline_s=deadline_s)
