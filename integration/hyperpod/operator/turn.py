"""One decision while it is made: what is known, and what has been decided so far."""

from __future__ import annotations

from typing import Any

import msgspec

from integration.hyperpod.operator.actions import Action, Event
from integration.hyperpod.operator.seen import AgentState, Pod, Situation
from integration.hyperpod.operator.spec import JobSpec
from integration.hyperpod.operator.state import Condition, JobState, Phase


class Turn:
    """Lives within one call of ``decide``."""

    def __init__(self, spec: JobSpec, state: JobState, seen: Situation, now_s: float) -> None:
        self.spec, self.state, self.seen, self.now_s = spec, state, seen, now_s
        self.pods = {pod.name: pod for pod in seen.pods}
        self.actions: list[Action] = []
        self.events: list[Event] = []
        self.waits = False
        """For who has a reason to say it; nothing is done meanwhile."""

    def set(self, **fields: Any) -> None:
        self.state = msgspec.structs.replace(self.state, **fields)

    def enter(self, phase: Phase, **fields: Any) -> None:
        self.set(phase=phase, since_s=self.now_s, **fields)

    def do(self, *actions: Action) -> None:
        self.actions += actions

    def tell(self, reason: str, message: str, *, warning: bool = False) -> None:
        self.events.append(Event(reason, message, warning))

    def condition(self, kind: str, status: bool, reason: str, message: str = "") -> None:
        """Its time is when its status last changed, as everywhere in Kubernetes."""
        old = next((one for one in self.state.conditions if one.type == kind), None)
        at_s = old.at_s if old is not None and old.status is status else self.now_s
        new = Condition(kind, status, reason, message, at_s)
        if old is None:
            self.set(conditions=(*self.state.conditions, new))
        elif old != new:
            self.set(conditions=tuple(new if one is old else one for one in self.state.conditions))

    # -- pods ---------------------------------------------------------------------------------------------------------

    @property
    def members(self) -> list[Pod]:
        """Those that are there yet."""
        return [self.pods[name] for name in self.state.members if name in self.pods]

    @property
    def present(self) -> list[Pod]:
        """Pods that are not on their way out."""
        return [pod for pod in self.seen.pods if pod.name not in self.state.replaced and not pod.leaving]

    def silent_for(self, pod: Pod) -> float:
        since = self.state.silent_since_s.get(pod.name)
        return 0.0 if since is None else self.now_s - since

    def is_lost(self, pod: Pod) -> bool:
        return self.silent_for(pod) >= self.spec.silent_s

    def is_stale(self, pod: Pod) -> bool:
        """It runs, but what another world's ``/start`` said."""
        answer = pod.answer
        running = answer is not None and answer.state in {AgentState.RUNNING, AgentState.COMPLETED}
        return running and answer is not None and answer.version not in {None, self.state.version}

    @property
    def in_phase_s(self) -> float:
        return self.now_s - self.state.since_s


def state_of(pod: Pod) -> AgentState | None:
    """Nothing for one that does not answer, or is about to end."""
    if pod.answer is None or pod.answer.state is AgentState.SHUTDOWN:
        return None
    return pod.answer.state
