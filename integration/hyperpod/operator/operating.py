"""The loop around ``decide``: look, store, do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from integration.hyperpod.operator.actions import Decision, Event, Release, Replace
from integration.hyperpod.operator.client import AgentClient
from integration.hyperpod.operator.decide import decide
from integration.hyperpod.operator.pods import Pods
from integration.hyperpod.operator.seen import Pod, Situation
from integration.hyperpod.operator.sim_place import Kept, SimPlace
from integration.hyperpod.operator.spec import JobSpec
from integration.hyperpod.operator.state import JobState

_BUSY_S = 0.1
"""Between two looks while something is going on: nobody waits for a job that runs."""


class Operating:
    """One job and its pods, from whatever was stored of it until it has ended."""

    def __init__(
        self,
        spec: JobSpec,
        pods: Pods,
        place: SimPlace,
        client: AgentClient,
        *,
        told: Callable[[float, Event], None],
        every_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._spec, self._pods, self._place, self._client = spec, pods, place, client
        self._told, self._every_s, self._clock = told, every_s, clock
        kept = place.kept()
        self.state = JobState() if kept is None else kept.state
        self._problems: dict[str, str] = {}

    def run(self, stop: threading.Event) -> bool:
        """Until the job has ended (true), or ``stop`` is set."""
        while not stop.is_set():
            decision = self.turn()
            if decision.finished:
                return True
            stop.wait(_BUSY_S if decision.actions else self._every_s)
        return False

    def turn(self) -> Decision:
        wishes = self._place.wishes()
        places = self._pods.places(wishes.bad_nodes)
        addresses = {one.name: one.address for one in places}
        heard = self._client.ask_all(addresses)
        pods = tuple(
            Pod(
                name=one.name, group=one.group, node=one.node, ip=one.ip, answer=heard[one.name].answer,
                node_fault=one.node_fault, leaving=one.leaving,
            )
            for one in places
        )  # fmt: skip
        seen = Situation(pods=pods, capacity=wishes.capacity, can_replace=self._pods.can_replace)
        now_s = self._clock()
        decision = decide(self._spec, self.state, seen, now_s)
        self._place.keep(Kept(self._spec, decision.state, seen, now_s))
        self.state = decision.state
        for event in (*self._pods.told(), *decision.events):
            self._told(now_s, event)
        self._do(decision, addresses)
        self._pods.keep(decision.wanted, wishes.bad_nodes)
        return decision

    def _do(self, decision: Decision, addresses: dict[str, str]) -> None:
        problems = self._client.tell_all(decision.actions, addresses)
        for pod, problem in problems.items():
            if self._problems.get(pod) != problem:
                self._told(self._clock(), Event("CallFailed", problem, warning=True))
        self._problems = problems
        for action in decision.actions:
            if isinstance(action, Replace):
                self._pods.replace(action.pod)
            elif isinstance(action, Release):
                self._pods.release(action.pod)
