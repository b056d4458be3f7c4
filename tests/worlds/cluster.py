"""A simulated cluster with failing machines and with messages that are late, reordered or duplicated.

:func:`elastic.world.next_world.next_world` makes all decisions, as in a coordinator.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from functools import partial

from elastic.world.next_world import initial_world, next_world
from elastic.world.rebuilt_world import rebuild_world
from elastic.world.scaling_policy import ScalingPolicy
from elastic.world.world_state import (
    BreakWorld,
    FormWorld,
    HangDetected,
    NodeLost,
    NodesPreempted,
    PauseWorld,
    RequestNodes,
    Tick,
    WorldAction,
    WorldEvent,
    WorldPhase,
)
from tests.worlds.judge import Judge
from tests.worlds.simulated_supervisor import RankState, SimulatedRank, SimulatedSupervisor, Violation

_DELAYS_S = (0.0, 0.0, 0.01, 0.01, 0.05, 0.2, 1.0, 3.0)
_AGAIN_S = (0.0, 0.5, 5.0, 60.0)
_MOST_MACHINES = 9
_MOST_EVENTS = 800


class SimulatedCluster:
    def __init__(
        self,
        seed: int,
        policy: ScalingPolicy,
        *,
        nodes: int,
        nproc: int,
        spares: int,
        log: Callable[[str], None] | None,
    ) -> None:
        self.rng = random.Random(seed)
        self.policy, self.nproc, self.spares = policy, nproc, spares
        self._log = log
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self.machines: dict[str, SimulatedSupervisor] = {}
        self.broken: set[str] = set()
        self.paused: dict[int, set[tuple[str, int]]] = {}
        self.formed: dict[int, FormWorld] = {}
        self.stops: set[int] = set()
        self.coordinator = self.decisions = 0
        self.tick_s: float | None = None
        self.calm = self.done = False
        self.world = initial_world(policy, nproc=nproc, now_s=0.0)
        self.judge = Judge(policy)
        for _ in range(nodes):
            self.boot()

    # -- time ---------------------------------------------------------------------------------------------------------

    def run_after(self, delay_s: float, what: Callable[[], None]) -> None:
        self.run_at(self.now_s + delay_s, what)

    def run_at(self, time_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (time_s, next(self._number), what))

    def run(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self._queue and self._queue[0][0] <= until_s:
            self.now_s, _, what = heapq.heappop(self._queue)
            what()
        self.now_s = until_s

    def run_until_rest(self) -> None:
        """Stop the faults, and run until no event is pending."""
        self.calm = True
        before = self.decisions
        while self._queue:
            if self.decisions > before + _MOST_EVENTS:
                raise Violation(f"the cluster does not come to rest: {self.world.phase} in epoch {self.world.epoch}")
            self.now_s, _, what = heapq.heappop(self._queue)
            what()

    def log(self, what: object) -> None:
        if self._log is not None:
            self._log(f"{self.now_s:9.2f} {what}")

    # -- delays -------------------------------------------------------------------------------------------------------

    def step_s(self) -> float:
        return self.rng.choice((0.1, 0.5) if self.calm else (0.1, 0.5, 0.5, 1.0, 2.0, 100.0))

    def leaving_s(self) -> float:
        return self.rng.choice((0.05, 0.1, 0.3, 1.0))

    def warming_s(self) -> float:
        return self.rng.choice((1.0, 2.0, 5.0, 20.0))

    def delay_s(self) -> float:
        return self.rng.choice(_DELAYS_S[:5] if self.calm else _DELAYS_S)

    # -- messages -----------------------------------------------------------------------------------------------------

    def post(self, event: WorldEvent) -> None:
        delay_s = self.delay_s()
        to = self.coordinator
        self.run_after(delay_s, lambda: self._receive(event, to))
        if self.rng.random() < 0.15:
            self.run_after(delay_s + self.rng.choice(_AGAIN_S), lambda: self._receive(event, to))

    def _receive(self, event: WorldEvent, to: int) -> None:
        """Deliver an event. After a coordinator restart, only live nodes repeat their earlier events."""
        sender = self.machines.get(getattr(event, "node", ""))
        is_live = sender is not None and sender.up and sender.life == getattr(event, "generation", -1)
        if to == self.coordinator or is_live or not hasattr(event, "generation"):
            self._deliver(event)

    def _deliver(self, event: WorldEvent) -> None:
        before = self.world
        self.decisions += 1
        self.world, actions = next_world(before, event, self.policy, self.now_s)
        if self._log is not None and not isinstance(event, Tick):
            self.log(event)
        self._apply_desired(actions, lambda: self.judge.actions_decided(before, event, self.world, actions, self.now_s))

    def _apply_desired(self, actions: tuple[WorldAction, ...], judge: Callable[[], None]) -> None:
        if self._log is not None:
            for action in actions:
                self.log(f"    {action}")
        judge()
        for action in actions:
            self._send(action)
        tick_s = self.world.next_tick_s
        if tick_s is not None and tick_s != self.tick_s:
            self.run_at(tick_s, lambda: self._tick(tick_s))
        self.tick_s = tick_s

    def _tick(self, tick_s: float) -> None:
        if self.world.next_tick_s == tick_s:
            self._deliver(Tick())

    def _send(self, action: WorldAction) -> None:
        if isinstance(action, RequestNodes) and self.rng.random() < 0.6 and len(self.machines) < _MOST_MACHINES:
            self.run_after(self.rng.choice((1.0, 10.0, 100.0)), self.boot)
        if isinstance(action, FormWorld):
            self.formed[action.epoch] = action
            self.paused.pop(action.epoch, None)
        if isinstance(action, PauseWorld) and action.stop:
            self.stops.add(action.epoch)
        for machine in self._address(action):
            at_s = max(machine.orders_until_s, self.now_s + self.delay_s())
            machine.orders_until_s = at_s
            self.run_at(at_s, partial(self._arrive, machine, action, self.coordinator))

    def _address(self, action: WorldAction) -> list[SimulatedSupervisor]:
        if isinstance(action, FormWorld):
            return [self.machines[node] for node in action.nodes if node in self.machines]
        if isinstance(action, (BreakWorld, PauseWorld)):
            return list(self.machines.values())
        machine = self.machines.get(getattr(action, "node", ""))
        return [machine] if machine is not None and machine.life == action.generation else []

    def _arrive(self, machine: SimulatedSupervisor, action: WorldAction, coordinator: int) -> None:
        if machine.up and self.machines.get(machine.node) is machine and coordinator == self.coordinator:
            machine.apply_desired(action)

    # -- machines -----------------------------------------------------------------------------------------------------

    def boot(self, node: str | None = None) -> None:
        """Start a new machine, or a returning machine with its next generation."""
        if self.world.phase.is_over:
            return
        node = node or f"n{len(self.machines)}"
        before = self.machines.get(node)
        if before is None or not before.up:
            self.judge.event_happened(fault=before is not None)
            self.machines[node] = SimulatedSupervisor(self, node, 1 if before is None else before.life + 1)

    def kill(self, machine: SimulatedSupervisor, *, noticed: bool = True) -> None:
        machine.die()
        if noticed:
            self.judge.event_happened()
            self.run_after(self.rng.choice((0.5, 2.0, 10.0)), lambda: self.post(self._lost(machine)))

    @staticmethod
    def _lost(machine: SimulatedSupervisor) -> NodeLost:
        return NodeLost(machine.node, machine.life, "no heartbeat")

    def report_wrong_loss(self, machine: SimulatedSupervisor) -> None:
        """Report a live machine as lost. It restarts later with a new generation."""
        self.judge.event_happened()
        self.post(self._lost(machine))
        self.run_after(self.rng.choice((4.0, 20.0)), lambda: self._restart_machine(machine))

    def _restart_machine(self, machine: SimulatedSupervisor) -> None:
        if machine.up and self.machines[machine.node] is machine:
            machine.die()
            self.boot(machine.node)

    def hang(self, machine: SimulatedSupervisor, rank: SimulatedRank) -> None:
        rank.state = RankState.HUNG
        self.judge.event_happened()
        self._detect_loss(machine, rank)

    def _detect_loss(self, machine: SimulatedSupervisor, rank: SimulatedRank) -> None:
        culprit = (machine.node, rank.number) if self.rng.random() < 0.6 else ("", -1)
        hang = HangDetected(machine.epoch, "no step for 10 s", *culprit)
        self.run_after(10.0, lambda: self.post(hang))

    def preempt(self, nodes: tuple[str, ...], seconds: float) -> None:
        """Preempt nodes, and kill them at the deadline."""
        deadline_s = self.now_s + seconds
        self.judge.event_happened()
        self.post(NodesPreempted(nodes, deadline_s, "a job of a higher priority"))
        for node in nodes:
            self.run_after(seconds + 0.001, lambda machine=self.machines[node]: self._preempted(machine, deadline_s))

    def _preempted(self, machine: SimulatedSupervisor, deadline_s: float) -> None:
        self.judge.node_preempted(machine.node, machine.life, deadline_s, self.world)
        if machine.up and self.machines[machine.node] is machine:
            self.kill(machine)

    def released(self, machine: SimulatedSupervisor) -> None:
        if not self.calm and self.rng.random() < 0.3:
            self.run_after(30.0, lambda: self.boot(machine.node))

    def restart_coordinator(self) -> None:
        """Replace the coordinator, with its undelivered actions lost."""
        if self.world.phase.is_over:
            return
        self.coordinator += 1
        reports = [machine.report() for machine in self.machines.values() if machine.up]
        self.judge.event_happened(1 + len(self.machines))
        self.judge.coordinator_restarted(reports)
        self.world, actions = rebuild_world(reports, self.policy, nproc=self.nproc, now_s=self.now_s)
        self.log("    the coordinator restarts")
        self._apply_desired(actions, lambda: self.judge.rebuilt(self.world, actions, self.now_s))
        for machine in self.machines.values():
            for rank in machine.ranks if machine.up else ():
                if rank.state is RankState.HUNG:  # the new coordinator detects the hang again
                    self._detect_loss(machine, rank)

    def all_finish(self) -> None:
        """Finish the training of all nodes in a world."""
        self.done = True
        for machine in self.machines.values():
            if machine.up:
                machine.finish()

    # -- pausing at a step --------------------------------------------------------------------------------------------

    def pause_rank(self, machine: SimulatedSupervisor, rank: SimulatedRank) -> None:
        epoch = machine.epoch
        paused = self.paused.setdefault(epoch, set())
        paused.add((machine.node, rank.number))
        if len(paused) == len(self.formed[epoch].nodes) * self.nproc:
            for node in self.formed[epoch].nodes:
                self.run_after(self.leaving_s(), lambda one=self.machines[node]: self._seal(one, epoch))

    def _seal(self, machine: SimulatedSupervisor, epoch: int) -> None:
        if machine.up and machine.epoch == epoch:
            machine.seal(stop=epoch in self.stops)

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        self.run_until_rest()
        if self.done:
            self.all_finish()
            self.run_until_rest()
        world = self.world
        if world.phase.is_over:
            return
        if world.epoch < 0:
            self.judge.check_no_world_needed(world)
            return
        if world.phase is not WorldPhase.RUNNING:
            raise Violation(f"no event is pending, but the job is {world.phase.value}: {world.reason}")
        for node in world.ranked_nodes:
            states = [rank.state for rank in self.machines[node].ranks]
            if states != [RankState.TRAINING] * self.nproc or self.machines[node].epoch != world.epoch:
                raise Violation(
                    f"{node} should train in epoch {world.epoch}, but is in epoch {self.machines[node].epoch} with "
                    f"ranks {[state.value for state in states]}"
                )
        self.judge.check_at_rest(world, self.now_s)
