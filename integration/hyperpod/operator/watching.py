"""What is remembered of what is seen, and what of it is a fault."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import NamedTuple

import msgspec

from elastic.world.consequences import names_another
from integration.hyperpod.operator.seen import AgentState, Pod, Progress
from integration.hyperpod.operator.state import Cause, Fault, Phase
from integration.hyperpod.operator.turn import Turn, state_of

_STALE_S = 5.0
"""An agent says that it runs a moment before it says which version: so long that is believed."""
_REASON_S = 3.0
"""So long whoever has the reason may take to say so, when others have only seen its end."""
_OF_MACHINES = {"PodLost", "NodeFault", "AgentUnreachable"}
_AS_ASKED = "ElasticWorld"
"""Ranks of ours that were told to end by others (:mod:`integration.hyperpod.agent.in_process`)."""
_UNKNOWN = "An unknown fault occurred"
"""Of HyperPod's agent, where it knows no more; ``WorkerReportedFault`` is its word for a worker that gave no reason."""
_RANKED = {Phase.ARRANGED, Phase.STARTING, Phase.RUNNING}


def remember(turn: Turn) -> None:
    """Who is silent, who runs something old, who is gone, and what every member has whole."""
    state = turn.state
    waits = turn.seen.capacity == 0 or turn.spec.suspend
    turn.set(
        admitted_s=None if waits else turn.now_s if state.admitted_s is None else state.admitted_s,
        silent_since_s=_since(turn, state.silent_since_s, [pod for pod in turn.seen.pods if state_of(pod) is None]),
        stale_since_s=_since(turn, state.stale_since_s, [pod for pod in turn.members if turn.is_stale(pod)]),
        replaced=tuple(name for name in state.replaced if name in turn.pods),
        progress={**state.progress, **whole(turn.members, len(state.members))},
    )


def _since(turn: Turn, before: Mapping[str, float], now: Iterable[Pod]) -> dict[str, float]:
    return {pod.name: before.get(pod.name, turn.now_s) for pod in now}


def whole(members: Iterable[Pod], count: int) -> dict[str, Progress]:
    """Under each prefix the newest step that all of ``count`` members have.

    One that lags behind has not yet what the others have, and of one that says nothing nobody knows what it has.
    """
    reports = [pod.answer.progress for pod in members if pod.answer is not None]
    if len(reports) < count or not reports:
        return {}
    prefixes = set(reports[0]).intersection(*reports[1:])
    return {
        prefix: min((report[prefix] for report in reports), key=lambda one: one.progress_count)
        for prefix in sorted(prefixes)
    }


_MACHINE, _OWN, _ANOTHERS, _NONE = range(4)
"""Whose words are quoted: a machine's, those of one that failed by itself, or saw another's end, or has none."""


class _Found(NamedTuple):
    order: tuple[int, float, int]
    """By weight, then by when it happened: what breaks first takes others with it."""
    pod: str
    node: str
    rank: int
    reason: str
    message: str


def fault(turn: Turn) -> Fault | None:
    """What is wrong with the world, if anything; quoted is who has the reason, and of these the first to break.

    Where nobody has one yet, and somebody may, ``turn.waits`` is set for a while instead.
    """
    found = sorted(_faults(turn))
    if not found or _may_be_explained(turn, found):
        return None
    first = found[0]
    return Fault(
        reason=first.reason,
        message=first.message,
        pods=tuple(one.pod for one in found),
        ranks=tuple(one.rank for one in found if one.rank >= 0),
        nodes=(first.node,) if first.node else (),
        at_s=turn.now_s,
    )


def _may_be_explained(turn: Turn, found: list[_Found]) -> bool:
    """Who is stopped says no more why it failed: all but the faulted are left alone for a moment."""
    state = turn.state
    mute = {pod.name for pod in turn.members} - {one.pod for one in found}
    if found[0].order[0] < _ANOTHERS or not mute or state.phase is not Phase.RUNNING:
        return False
    since = turn.now_s if state.unexplained_since_s is None else state.unexplained_since_s
    turn.set(unexplained_since_s=since)
    turn.waits = turn.now_s - since < _REASON_S
    return turn.waits


def explain(turn: Turn) -> Fault | None:
    """While all are being stopped: the fault, where somebody has a better reason now than the one that is quoted."""
    quoted = turn.state.fault
    if quoted is None or turn.state.phase is not Phase.STOPPING or turn.state.cause is not Cause.FAULT:
        return None
    found = []
    for rank, name in enumerate(turn.state.members):
        pod = turn.pods.get(name)
        outside = None if pod is None else _of_machine(turn, pod)
        if pod is not None and outside is not None:
            found.append(_Found((_MACHINE, 0.0, rank), name, pod.node, rank, *outside))
        elif pod is not None and state_of(pod) is AgentState.FAULTED:
            found.append(_said(pod, rank))
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


def _faults(turn: Turn) -> Iterable[_Found]:
    state = turn.state
    if state.phase is Phase.FORMING:
        for pod in turn.present:
            if state_of(pod) is AgentState.FAULTED:
                yield _said(pod, -1)
    if state.phase not in _RANKED:
        return
    for rank, name in enumerate(state.members):
        if name not in turn.pods:
            yield _Found((_MACHINE, 0.0, rank), name, "", rank, "PodLost", f"pod {name} is gone")
            continue
        pod = turn.pods[name]
        outside = _of_machine(turn, pod)
        if outside is not None:
            yield _Found((_MACHINE, 0.0, rank), name, pod.node, rank, *outside)
        elif state_of(pod) is AgentState.FAULTED:
            yield _said(pod, rank)
        else:
            wrong = _of_agent(turn, pod)
            if wrong is not None:
                yield _Found((_OWN, turn.now_s, rank), name, pod.node, rank, *wrong)


def _of_machine(turn: Turn, pod: Pod) -> tuple[str, str] | None:
    if pod.node_fault:
        return "NodeFault", f"node {pod.node or '(unknown)'} of pod {pod.name} is {pod.node_fault}"
    if turn.is_lost(pod):
        return "AgentUnreachable", f"the agent of pod {pod.name} has not answered for {turn.silent_for(pod):.0f} s"
    return None


def _of_agent(turn: Turn, pod: Pod) -> tuple[str, str] | None:
    """Agents that are not where they were brought."""
    now, phase = state_of(pod), turn.state.phase
    idle = now in {AgentState.INIT, AgentState.READY}
    if phase is Phase.RUNNING and idle:
        return "AgentRestarted", f"the agent of pod {pod.name} runs nothing any more"
    since = turn.state.stale_since_s.get(pod.name)
    if phase is not Phase.ARRANGED and since is not None and turn.now_s - since >= _STALE_S:
        return "StaleStart", f"the agent of pod {pod.name} runs what an earlier start said"
    if phase is Phase.STARTING and idle and turn.in_phase_s >= turn.spec.start_s:
        return "StartTimeout", f"the agent of pod {pod.name} did not start within {turn.spec.start_s:g} s"
    return None


def _said(pod: Pod, rank: int) -> _Found:
    """In the agent's own words."""
    since = {} if pod.answer is None else pod.answer.since
    reason, message = ("", "") if pod.answer is None else (pod.answer.reason, pod.answer.message)
    order = (_weight(reason, message), _seconds(since.get("FAULTED", "")), rank)
    return _Found(order, pod.name, pod.node, rank, reason or "WorkerFault", message)


def _weight(reason: str, message: str) -> int:
    if reason in _OF_MACHINES:
        return _MACHINE
    if not (reason or message) or reason == "WorkerReportedFault" or message.startswith(_UNKNOWN):
        return _NONE
    return _ANOTHERS if reason == _AS_ASKED or names_another(message) else _OWN


def _seconds(moment: str) -> float:
    try:
        return datetime.fromisoformat(moment).timestamp()
    except (ValueError, OverflowError, OSError):
        return float("inf")
