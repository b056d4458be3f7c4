"""Fake HyperPod agents that implement only AWS's published state tables.

Responses may be late or missing. Tests make processes fail, finish or hang.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from integration.hyperpod.operator import (
    AgentState,
    AgentStatus,
    JobSpec,
    JobState,
    ObservedJob,
    ObservedPod,
    OperatorAction,
    OperatorDecision,
    ReleasePod,
    ReplacePod,
    RestartMode,
    ShutdownAgent,
    StartAgent,
    StopAgent,
    UpdateAgent,
    decide_job,
)
from integration.hyperpod.operator.observed_pods import CheckpointProgress

INIT, READY, RUNNING = AgentState.INIT, AgentState.READY, AgentState.RUNNING
COMPLETED, FAULTED, STOPPING = AgentState.COMPLETED, AgentState.FAULTED, AgentState.STOPPING
SHUTDOWN = AgentState.SHUTDOWN

PROCESS_LEVEL: dict[AgentState, set[AgentState]] = {
    INIT: {READY, SHUTDOWN},
    READY: {RUNNING, SHUTDOWN},
    RUNNING: {COMPLETED, FAULTED, STOPPING, SHUTDOWN},
    FAULTED: {STOPPING, SHUTDOWN},
    STOPPING: {READY},
    COMPLETED: {SHUTDOWN, STOPPING},
    SHUTDOWN: set(),
}
"""AWS's table for process-level restart."""

IN_PROCESS: dict[AgentState, set[AgentState]] = {
    INIT: {READY, SHUTDOWN, FAULTED},
    READY: {INIT, RUNNING, SHUTDOWN, FAULTED},
    RUNNING: {INIT, COMPLETED, FAULTED, STOPPING, SHUTDOWN},
    FAULTED: {INIT, STOPPING, SHUTDOWN},
    STOPPING: {READY, INIT},
    COMPLETED: {SHUTDOWN, STOPPING},
    SHUTDOWN: set(),
}
"""AWS's table for in-process restart."""


@dataclass
class FakeHyperPodAgent:
    name: str
    in_process: bool = False
    state: AgentState = INIT
    reason: str = ""
    rank: int | None = None
    nnodes: int = 0
    version: str | None = None
    fault_count: int | None = None
    updates: list[Any] = field(default_factory=list)
    asks: RestartMode | None = None
    gone: bool = False
    """Whether its pod is gone."""
    silent: bool = False
    node_fault: str = ""
    leaving: bool = False
    stuck: bool = False
    """Whether it stays in ``STOPPING`` forever."""
    spare: bool = True
    """For in-process restart: whether it is a spare, its initial role."""
    ranked: bool = False
    """For in-process restart: whether its processes know their ranks."""
    step: int | None = None
    starts: list[Any] = field(default_factory=list)
    stops: list[Any] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    """Requested transitions that its table does not allow."""

    def transition_to(self, state: AgentState) -> bool:
        table = IN_PROCESS if self.in_process else PROCESS_LEVEL
        if state not in table[self.state]:
            self.ignored.append(f"{self.state.value} -> {state.value}")
            return False
        self.state, self.reason = state, ""
        return True

    def fail(self, reason: str = "WorkerCrash") -> bool:
        """Make its processes fail; return false if none run."""
        if self.state is not RUNNING:
            return False
        self.transition_to(FAULTED)
        self.reason = reason
        return True

    def complete(self) -> None:
        if self.state is RUNNING:
            self.transition_to(COMPLETED)

    def restart(self) -> None:
        """Restart the agent's own process."""
        self.state, self.rank, self.version, self.ranked, self.asks = INIT, None, None, False, None
        self.spare = True

    def advance(self) -> None:
        """Make the transitions that need no request."""
        if self.state is INIT and (self.ranked or not self.in_process):
            self.transition_to(READY)
        elif self.state is STOPPING and not self.stuck:
            new = self.in_process and self.asks is RestartMode.PROCESS
            self.transition_to(INIT if new else READY)
            self.asks = None
            if new:
                self.version, self.ranked = None, False

    def handle_action(self, action: OperatorAction) -> None:
        """Handle a request as the agent's server does: it ignores an invalid transition without an error."""
        if isinstance(action, StartAgent):
            self.starts.append((self.state, action.body))
            self.transition_to(RUNNING)
            self._store_assignment(action.body)
        elif isinstance(action, UpdateAgent):
            self.updates.append((self.state, action.body))
            self._store_assignment(action.body)
        elif isinstance(action, StopAgent):
            self.stops.append((self.state, action.body))
            if action.body.restart_mode == RestartMode.PROCESS.value:
                self.asks = RestartMode.PROCESS
            self.transition_to(STOPPING)
        elif isinstance(action, ShutdownAgent):
            self.gone = self.transition_to(SHUTDOWN) or self.gone

    def _store_assignment(self, body: Any) -> None:
        self.rank, self.nnodes, self.version = body.rank, body.nnodes, body.version
        self.fault_count, self.ranked, self.spare = body.fault_count, True, body.spare

    def answer(self) -> AgentStatus | None:
        if self.silent or self.gone:
            return None
        capability = RestartMode.IN_PROCESS if self.in_process else RestartMode.PROCESS
        asked = self.asks if self.state is FAULTED and self.asks is not None else capability
        progress = {} if self.step is None else {"s3://b": CheckpointProgress(f"s3://b/{self.step}", self.step)}
        return AgentStatus(
            state=self.state, reason=self.reason, restart_mode=asked, version=self.version, rank=self.rank,
            progress=progress, spare=self.spare or not self.in_process,
        )  # fmt: skip


class FakeHyperPodCluster:
    """A job's agents, its operator and a clock."""

    def __init__(self, spec: JobSpec, *, in_process: bool = False, can_replace: bool = True) -> None:
        self.spec, self.in_process, self.can_replace = spec, in_process, can_replace
        self.now_s = 1_800_000_000.0
        self.state = JobState()
        self.agents: dict[str, FakeHyperPodAgent] = {}
        self.capacity: int | None = None
        self.room: int | None = None
        """Maximum number of pods; ``None`` for no limit."""
        self.held: list[OperatorAction] = []
        """Requests sent but not yet delivered."""
        self.decision: OperatorDecision | None = None
        self.events: list[str] = []
        self._born = 0

    def decide(self) -> OperatorDecision:
        """Observe the job and return the operator's decision, without acting on it."""
        pods = tuple(
            ObservedPod(
                name=one.name, group=self.spec.groups[0].name, node=f"node-{one.name}", ip="10.0.0.1",
                agent_status=one.answer(), node_health_problem=one.node_fault, terminating=one.leaving,
            )
            for one in self.agents.values()
            if not one.gone
        )  # fmt: skip
        seen = ObservedJob(pods=pods, capacity=self.capacity, can_replace=self.can_replace)
        self.decision = decide_job(self.spec, self.state, seen, self.now_s)
        self.events += [event.reason for event in self.decision.events]
        return self.decision

    def run_cycle(self, *, late: bool = False, seconds: float = 1.0) -> OperatorDecision:
        """Decide, store the state and act; with ``late`` requests arrive one cycle later."""
        decision = self.decide()
        self.state = decision.state
        arriving, self.held = (self.held, list(decision.actions)) if late else ([*self.held, *decision.actions], [])
        for action in arriving:
            self._apply_action(action)
        self._replace_pods(decision)
        for one in self.agents.values():
            one.advance()
        self.now_s += seconds
        return decision

    def run_cycles(self, count: int, **how: Any) -> None:
        for _ in range(count):
            self.run_cycle(**how)

    def run_until(self, ready: Any, turns: int = 400) -> None:
        for _ in range(turns):
            if ready():
                return
            self.run_cycle()
        raise AssertionError(f"it did not happen in {turns} turns: {self.state}\n{self.agents}")

    def _apply_action(self, action: OperatorAction) -> None:
        one = self.agents.get(action.pod)
        if one is None or one.gone:
            return
        if isinstance(action, (ReplacePod, ReleasePod)):
            one.gone = True
        elif not one.silent:
            one.handle_action(action)

    def _replace_pods(self, decision: OperatorDecision) -> None:
        """Create the missing pods, up to the limit ``room``."""
        want = sum(decision.wanted.pods.values())
        if self.room is not None:
            want = min(want, self.room)
        while sum(not one.gone and not one.leaving for one in self.agents.values()) < want:
            name = f"p{self._born}"
            self._born += 1
            self.agents[name] = FakeHyperPodAgent(name, self.in_process)

    # -- views -------------------------------------------------------------------------------------------------------

    @property
    def live_agents(self) -> list[FakeHyperPodAgent]:
        return [one for one in self.agents.values() if not one.gone]

    @property
    def members(self) -> list[FakeHyperPodAgent]:
        return [self.agents[name] for name in self.state.members]

    def is_running(self, size: int) -> bool:
        """Return whether a world of ``size`` runs with ordered ranks and one version."""
        ranks = [one.rank for one in self.members if one.state is RUNNING and one.version == self.state.world.version]
        return self.state.phase.value == "Running" and ranks == list(range(size)) == list(range(len(self.members)))
