"""What to do now. One call looks at everything and says all that is to be done; nothing here waits or asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from integration.hyperpod.operator import ending, forming, running, sizing, stopping, watching
from integration.hyperpod.operator.actions import Action, Decision, Replace, Stop, StopBody
from integration.hyperpod.operator.seen import AgentState, RestartMode, Situation
from integration.hyperpod.operator.spec import JobSpec
from integration.hyperpod.operator.state import JobState, Phase
from integration.hyperpod.operator.turn import Turn, state_of

_PHASES: Mapping[Phase, Callable[[Turn], None]] = {
    Phase.FORMING: forming.forming,
    Phase.ARRANGED: forming.arranged,
    Phase.STARTING: running.starting,
    Phase.RUNNING: running.running,
    Phase.STOPPING: stopping.stopping,
    Phase.SUSPENDED: ending.suspended,
    Phase.SUCCEEDED: ending.over,
    Phase.FAILED: ending.over,
}
_BUSY = {AgentState.RUNNING, AgentState.COMPLETED, AgentState.FAULTED}
_WITH_RANKS = {Phase.ARRANGED, Phase.STARTING, Phase.RUNNING}


def decide(spec: JobSpec, state: JobState, seen: Situation, now_s: float) -> Decision:
    """What an operator does that sees this, remembers that, and is asked at ``now_s`` (seconds since 1970)."""
    turn = Turn(spec, state, seen, now_s)
    if state.created_s is None:
        forming.begin(turn)
    watching.remember(turn)
    if not turn.state.phase.over:
        _look_after_faults(turn)
    for _ in () if turn.waits else Phase:
        phase = turn.state.phase
        _PHASES[phase](turn)
        if turn.state.phase is phase:
            break
    if turn.state.phase in _WITH_RANKS and not turn.waits:
        forming.tell_spares(turn)
    if not turn.waits:
        turn.do(*_aside(turn))
    return Decision(
        state=turn.state,
        actions=tuple(turn.actions),
        events=tuple(turn.events),
        wanted=sizing.wanted(turn),
        finished=turn.state.phase.over and all(state_of(pod) is None for pod in seen.pods),
    )


def _look_after_faults(turn: Turn) -> None:
    late = ending.overdue(turn)
    if late is not None:
        ending.fail(turn, *late)
        return
    idle = (pod for pod in turn.present if pod.name not in turn.state.members)
    stopping.let_go(turn, (pod for pod in idle if pod.node_fault))
    found, better = watching.fault(turn), watching.explain(turn)
    if found is not None:
        stopping.broken(turn, found)
    elif better is not None:
        stopping.explained(turn, better)


def _aside(turn: Turn) -> list[Action]:
    """What goes on beside the world: pods on their way out, and those without a rank that do what only ranks do."""
    found: list[Action] = []
    if turn.seen.can_replace:
        why = turn.state.fault.reason if turn.state.fault is not None else "replaced"
        found += [Replace(name, why) for name in turn.state.replaced if name in turn.pods]
    if turn.state.phase in _WITH_RANKS:
        body = StopBody(restart_mode=RestartMode.PROCESS.value)
        idle = (pod for pod in turn.present if pod.name not in turn.state.members)
        found += [Stop(pod.name, body) for pod in idle if state_of(pod) in _BUSY]
    return found
