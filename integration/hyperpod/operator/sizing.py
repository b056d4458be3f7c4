"""How large the world may be, and how many pods there should be for it."""

from __future__ import annotations

from collections.abc import Sequence

from integration.hyperpod.operator import restarts
from integration.hyperpod.operator.actions import Wanted
from integration.hyperpod.operator.seen import AgentState, Pod, RestartMode
from integration.hyperpod.operator.spec import ReplicaGroup
from integration.hyperpod.operator.state import Phase
from integration.hyperpod.operator.turn import Turn, state_of


def limit(turn: Turn) -> int:
    """The greatest size that is allowed now; 0 when less is admitted than the least there can be."""
    most, admitted = turn.spec.policy.max_replicas, turn.seen.capacity
    return turn.spec.policy.at_most(most if admitted is None else min(most, admitted))


def candidates(turn: Turn) -> list[Pod]:
    """Who could have a rank, best first: no repeated offenders, who had a rank, the lower ranks, who came first."""
    seats = {name: seat for seat, name in enumerate(turn.state.seats)}
    avoid = restarts.avoided(turn.state, turn.spec.policy, turn.now_s)
    usable = [pod for pod in turn.present if not pod.node_fault and _waits(pod)]
    return sorted(usable, key=lambda pod: (pod.node in avoid, seats.get(pod.name, len(seats))))


def _waits(pod: Pod) -> bool:
    """In-process agents are not ready before their processes know their ranks and wait at the barrier."""
    if state_of(pod) is AgentState.READY:
        return True
    in_process = pod.answer is not None and pod.answer.restart_mode is RestartMode.IN_PROCESS
    return in_process and state_of(pod) is AgentState.INIT


def size_to_form(turn: Turn, there: int) -> int:
    """With how many of ``there`` candidates the world begins now; 0 to wait."""
    state, policy, most = turn.state, turn.spec.policy, limit(turn)
    target = policy.at_most(min(state.target or policy.wanted, most))
    if not target:
        return 0
    if there >= target:
        beyond = 0 if turn.now_s < state.snooze_until_s else policy.at_most(min(most, there - turn.spec.spares))
        return max(target, beyond)
    if state.deadline_s is not None and turn.now_s >= state.deadline_s:
        return policy.at_most(min(there, most))
    return 0


def size_to_grow(turn: Turn) -> int:
    """How large a running world could be with the pods that wait beside it."""
    members = set(turn.state.members)
    waiting = [pod for pod in candidates(turn) if pod.name not in members]
    there = len(members) + len(waiting) - turn.spec.spares
    return turn.spec.policy.at_most(min(limit(turn), there))


def wanted(turn: Turn) -> Wanted:
    """So many there should be; nobody takes a pod away because of it, only because of an action."""
    if turn.state.phase.over or turn.state.phase is Phase.SUSPENDED:
        return Wanted(dict.fromkeys((group.name for group in turn.spec.groups), 0))
    counts = shares(turn.spec.groups, limit(turn) or turn.spec.policy.least)
    for group in turn.spec.groups:
        counts[group.name] += group.spares
    return Wanted(counts, restarts.avoided(turn.state, turn.spec.policy, turn.now_s))


def shares(groups: Sequence[ReplicaGroup], size: int) -> dict[str, int]:
    """How many of so many replicas are whose: first what each spec begins with, then what it may grow to.

    With a greater size no spec has fewer of them.
    """
    counts, left = {}, size
    for group in groups:
        counts[group.name] = min(group.replicas, left)
        left -= counts[group.name]
    for group in groups:
        more = min(group.max_replicas - counts[group.name], left)
        counts[group.name] += more
        left -= more
    return counts


def surplus(turn: Turn) -> list[Pod]:
    """Pods that nobody wants: none with a rank, and of the others those that came last."""
    wants = wanted(turn).pods
    placed = {*turn.state.members, *turn.state.spares}
    found: list[Pod] = []
    first = turn.spec.groups[0].name
    for group, count in wants.items():
        here = [pod for pod in turn.present if (pod.group or first) == group]
        idle = [pod for pod in here if pod.name not in placed]
        found += idle[::-1][: max(0, len(here) - count)]
    return found
