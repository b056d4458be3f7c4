"""From agents that wait to a world that may start."""

from __future__ import annotations

from integration.hyperpod.operator import placing, sizing
from integration.hyperpod.operator.actions import Stop, StopBody
from integration.hyperpod.operator.seen import AgentState, Pod, RestartMode
from integration.hyperpod.operator.state import Cause, Phase
from integration.hyperpod.operator.turn import Turn, state_of

_IDLE = {AgentState.INIT, AgentState.READY}
_RUNS = {AgentState.RUNNING, AgentState.COMPLETED}
_HEARD_S = 10.0
"""What a spare does not take in so long is left to ``/start``, which says the same."""


def begin(turn: Turn) -> None:
    """The first look at a job."""
    turn.set(created_s=turn.now_s)
    turn.condition("Created", True, "JobCreated", f"job {turn.spec.name} was accepted")
    await_members(turn, Cause.BEGIN)


def await_members(turn: Turn, cause: Cause, *, patience_s: float | None = None) -> None:
    """Jobs that are not elastic wait for all of them, however long it takes."""
    if patience_s is None:
        patience_s = turn.spec.policy.scaling_timeout_s
    deadline_s = turn.now_s + patience_s if turn.spec.elastic else None
    turn.enter(Phase.FORMING, cause=cause, members=(), spares=(), deadline_s=deadline_s)


def forming(turn: Turn) -> None:
    if turn.spec.suspend:
        turn.enter(Phase.SUSPENDED)
        return
    if turn.state.epoch == 0 and _adopt(turn):
        return
    there = sizing.candidates(turn)
    size = sizing.size_to_form(turn, len(there))
    if size:
        turn.condition("PodsRunning", True, "AgentsAnswer", f"{len(there)} agents wait, {size} get a rank")
        placing.give_ranks(turn, there[:size], there[size:])
        turn.enter(Phase.ARRANGED)
        return
    body = StopBody(restart_mode=RestartMode.PROCESS.value)
    turn.do(*(Stop(pod.name, body) for pod in turn.present if state_of(pod) in _RUNS))


def arranged(turn: Turn) -> None:
    """``/update`` to processes that wait for their ranks, and to spares that take a place; then all start."""
    spares = [pod for pod in turn.members if _is_still_spare(turn, pod)]
    waiting = [pod for pod in turn.members if _wants_rank(turn, pod, {AgentState.INIT})]
    turn.do(*(placing.update(turn, pod) for pod in (*waiting, *spares)))
    states = [state_of(pod) for pod in turn.members]
    if all(state is AgentState.READY for state in states) and not spares:
        turn.enter(Phase.STARTING)
    elif any(state not in {*_IDLE, None} for state in states):
        turn.enter(Phase.FORMING, seats=turn.state.members, members=(), spares=())
    elif turn.in_phase_s >= turn.spec.policy.restart_timeout_s and turn.seen.can_replace:
        late = tuple(pod.name for pod in turn.members if state_of(pod) is not AgentState.READY)
        turn.tell("StartTimeout", f"not ready in time, replaced: {', '.join(late)}", warning=True)
        seats = turn.state.members
        turn.enter(Phase.FORMING, seats=seats, members=(), spares=(), replaced=(*turn.state.replaced, *late))


def tell_spares(turn: Turn) -> None:
    """Theirs come behind the last one; a spare that began anew has forgotten it. One may come after the world began."""
    kept = [name for name in turn.state.spares if name in turn.pods and name not in turn.state.replaced]
    placed = {*turn.state.members, *kept}
    late = [pod.name for pod in sizing.candidates(turn) if pod.name not in placed]
    turn.set(spares=(*kept, *late[: max(0, turn.spec.spares - len(kept))]))
    spares = (turn.pods[name] for name in turn.state.spares if name in turn.pods)
    turn.do(*(placing.update(turn, pod) for pod in spares if _wants_rank(turn, pod, _IDLE)))


def _wants_rank(turn: Turn, pod: Pod, states: set[AgentState]) -> bool:
    answer = pod.answer
    if answer is None or answer.restart_mode is not RestartMode.IN_PROCESS or answer.version == turn.state.version:
        return False
    return answer.state in states


def _is_still_spare(turn: Turn, pod: Pod) -> bool:
    """It has a rank, and its processes, which stand at the barrier, were told of another one or of none."""
    spare = pod.answer is not None and pod.answer.spare
    return spare and turn.in_phase_s < _HEARD_S and _wants_rank(turn, pod, {AgentState.READY})


def _adopt(turn: Turn) -> bool:
    """A world that runs already, of an operator that has not left its state: it is taken over as it is."""
    ranked = {}
    for pod in turn.present:
        answer = pod.answer
        if answer is not None and answer.state in _RUNS and answer.rank is not None and answer.version:
            ranked[answer.rank, answer.version] = pod
    versions = {version for _, version in ranked}
    ranks = sorted(rank for rank, _ in ranked)
    everybody = len(ranks) + turn.spec.spares >= len(turn.present)
    whole = len(versions) == 1 and ranks == list(range(len(ranks))) and everybody
    if not whole or not turn.spec.policy.allows(len(ranks)):
        return False
    (version,) = versions
    members = [ranked[rank, version] for rank in ranks]
    turn.enter(
        Phase.RUNNING,
        epoch=max(1, placing.epoch_of(version)),
        version=version,
        members=tuple(pod.name for pod in members),
        master_addr=members[0].ip,
        started_s=turn.now_s,
    )
    turn.condition("Running", True, "Adopted", f"{len(members)} agents ran already")
    turn.tell("Adopted", f"{len(members)} agents run already; they are left alone")
    return True
