"""A simulated coordinator and its nodes, without sockets, processes or clocks: tests deliver messages.

Every message carries the sender's full state, so messages may be late, dropped or repeated.
"""

from __future__ import annotations

import itertools

from elastic.control.control_messages import (
    ExitReason,
    RankDesired,
    RankPhase,
    RankStatus,
    ResizeRequest,
    StopJobRequest,
)
from elastic.control.control_plane import NoticeKind, RankAssignment, RankProgress
from elastic.control.hang_detector import HangTimeouts
from elastic.coordinator.desired_state import node_desired, why_refused
from elastic.coordinator.job_snapshot import CoordinatorSettings
from elastic.coordinator.world_reconciler import WorldReconciler
from elastic.supervisor import node_messages
from elastic.supervisor.node_state import EndProcess, InjectFault, NodeState, PartitionNode, StartProcess
from elastic.world.scaling_policy import ScalingPolicy
from elastic.world.world_state import NO_STEP_HOLDERS, RequestedStep, SealedStep, StepHolders

HEARTBEAT_S = 1.0
STORE_TURNS = 3
"""Turns that a store takes to start."""


class SimulatedRank:
    """A rank's control client and recovery loop, simulated."""

    def __init__(self, table: ControlSimulation, node: str, token: str) -> None:
        self.table, self.node, self.token = table, node, token
        self.token = token
        self.stand, self.epoch, self.step = RankPhase.READY, -1, 0
        self.entered_at = 0
        self.has_sealed = False
        self.newest_sealed = -1
        self.base_step: int | None = None
        """Step that the newest world resumed from."""
        self.paused: int | None = None
        self.sealed: int | None = None
        self.ignores = False
        self.is_stopped = False
        """Whether its process is suspended."""
        self.number = 0

    def status(self) -> RankStatus:
        self.number += 1
        checkpoint = None if self.sealed is None else SealedStep("job", self.sealed, self.epoch + 1)
        stepped = self.stand is RankPhase.IN_WORLD and self.step > self.entered_at
        base_step = self.base_step if self.has_sealed else None
        progress = RankProgress(
            self.step if stepped else -1, self.newest_sealed, has_sealed=self.has_sealed, job="job", base_step=base_step
        )
        return RankStatus(
            self.number, self.stand, self.epoch, self.paused, self.sealed, checkpoint=checkpoint, progress=progress
        )

    def apply_desired(self, hears: RankDesired) -> None:
        place, state = hears.assignment, hears.epoch_state.received(0.0)
        notice = state.notice(0.0)
        if hears.exit is not None:
            self.table.process_exited(self, "exit ordered")
        elif self.stand is RankPhase.READY:
            if place is not None and place.epoch > self.epoch:
                self.epoch, self.paused, self.sealed = place.epoch, None, None
                self.entered_at, self.has_sealed = self.step, False
                if notice is None or notice.kind is not NoticeKind.RESTART:
                    self.stand = RankPhase.IN_WORLD
                    self.table.world_entered(self, place)
        elif self.ignores:
            pass
        elif (place is not None and place.epoch > self.epoch) or (notice and notice.kind is NoticeKind.RESTART):
            self.stand = RankPhase.READY
        elif notice is not None:
            if self.paused is None:
                self.paused = self.step
            if state.target is not None:
                self.step = self.sealed = state.target
                self.stand = RankPhase.READY
                self.table.stopped_at_step(self)


class SimulatedNode:
    def __init__(self, table: ControlSimulation, name: str, nproc: int, spares: int) -> None:
        self.table, self.name = table, name
        self.seats = NodeState(name, nproc, table.new_token, table.new_generation, spares)
        self.ranks: dict[str, SimulatedRank] = {}
        self.linked = True
        self.kept = 0
        self.injected: list[PartitionNode | InjectFault] = []
        self.seats.start()
        self.apply_effects()

    def apply_effects(self) -> None:
        for effect in self.seats.take_effects():
            if isinstance(effect, StartProcess):
                self.ranks[effect.token] = SimulatedRank(self.table, self.name, effect.token)
            elif isinstance(effect, EndProcess):
                self.ranks.pop(effect.token, None)
            else:
                self.injected.append(effect)

    def run_turn(self) -> None:
        """Exchange one report and one reply with each rank, and let each rank take a step."""
        now = self.table.now
        self.kept = self.kept + 1 if self.seats.run_store else 0
        self.seats.store = f"{self.name}:1" if self.kept > STORE_TURNS else ""
        for token, rank in list(self.ranks.items()):
            if not rank.is_stopped:
                self.seats.handle_rank_status(token, rank.status(), now)
        self.seats.tick(now)
        self.apply_effects()
        for token, rank in [(token, rank) for token, rank in self.ranks.items() if not rank.is_stopped]:
            if rank.stand is RankPhase.IN_WORLD and rank.paused is None:
                rank.step += 1
                self.table.reached[rank.epoch] = max(rank.step, self.table.reached.get(rank.epoch, 0))
            rank.apply_desired(node_messages.rank_desired(self.seats, token, now))
        if self.seats.sealed_step is not None:
            self.table.stopped_at.add(self.seats.sealed_step)
        if self.seats.exit is not None and not self.ranks:
            self.table.node_left(self)

    def report(self, *, alone: bool = True) -> None:
        report = node_messages.node_status(self.seats, self.table.now)
        self.seats.number = report.number
        assert self.table.desk.record_status(report, self.table.now) == ""
        if alone:
            self.table.desk.reconcile(self.table.now)


class ControlSimulation:
    def __init__(
        self,
        nodes: int,
        *,
        nproc: int = 2,
        spares: int = 0,
        most: int = 6,
        hang: HangTimeouts | None = None,
        requested_step: RequestedStep | None = None,
        holders: StepHolders = NO_STEP_HOLDERS,
    ) -> None:
        self.now = 1000.0
        self.requested_step = requested_step
        self.holders = holders
        self.clock_offset_s = 0.0
        self.hang = hang or HangTimeouts()
        self.assignments: list[RankAssignment] = []
        self.policy = ScalingPolicy(
            min_replicas=1,
            max_replicas=most,
            scaling_timeout_s=5.0,
            faulty_scale_down_timeout_s=5.0,
            graceful_shutdown_timeout_s=20.0,
            restart_timeout_s=30.0,
            num_restart_before_full_job_restart=None,
            max_num_repeat_offenders_to_avoid=0,
        )
        self.nproc, self.spares = nproc, spares
        self._lives, self._tokens, self._names = itertools.count(1), itertools.count(1), itertools.count(0)
        self.places: dict[tuple[int, int], str] = {}
        """Token of the process that held each (epoch, rank)."""
        self.sizes: dict[int, int] = {}
        self.targets: dict[int, int] = {}
        self.reached: dict[int, int] = {}
        """Highest step that any rank reached, by epoch."""
        self.stopped_at: set[SealedStep] = set()
        """Steps that supervisors recorded as sealed at a stop."""
        self.desks = 0
        self.desk = self._new_reconciler(fresh=True)
        self.nodes: dict[str, SimulatedNode] = {}
        for _ in range(nodes):
            self.add()

    def new_generation(self) -> int:
        return next(self._lives)

    def new_token(self) -> str:
        return f"t{next(self._tokens)}"

    @property
    def clock_ms(self) -> int:
        """Wall clock of the coordinator's machine, in milliseconds."""
        return int((self.now + self.clock_offset_s) * 1000)

    def _new_reconciler(self, *, fresh: bool, remembers: bool = True) -> WorldReconciler:
        self.desks += 1
        settings = CoordinatorSettings(
            *("job", self.policy, self.nproc),
            rejoin_timeout_s=3.0,
            hang=self.hang,
            requested_step=self.requested_step,
            holders=self.holders,
        )
        floor = -1 if fresh or not remembers else max(self.desk._min_epoch, self.desk.snapshot().world.epoch)
        return WorldReconciler(
            settings,
            incarnation=f"c{self.desks}",
            now=self.now,
            fresh=fresh,
            min_epoch=floor,
            epoch_clock=lambda: self.clock_ms,
        )

    def seal(self, step: int = -1, base_step: int | None = None) -> None:
        """Mark every rank of the newest world as having sealed ``step``, or an unknown step, in it.

        The world resumed from ``base_step``.
        """
        for node in self.nodes.values():
            for rank in node.ranks.values():
                if rank.stand is RankPhase.IN_WORLD and rank.epoch == self.desk.snapshot().world.epoch:
                    rank.has_sealed, rank.newest_sealed, rank.base_step = True, step, base_step

    # -- faults and requests ------------------------------------------------------------------------------------------

    def add(self) -> None:
        name = f"n{next(self._names)}"
        self.nodes[name] = SimulatedNode(self, name, self.nproc, self.spares)

    def restart_coordinator(self, *, remembers: bool = True) -> None:
        """Replace the coordinator; ``remembers`` says whether its predecessor's epoch file survived."""
        self.desk = self._new_reconciler(fresh=False, remembers=remembers)

    def lose_node(self, number: int) -> None:
        if self.nodes:
            node = self._node_at(number)
            del self.nodes[node.name]
            self.desk.connection_lost(node.name, node.seats.generation, self.now)

    def lose_rank(self, number: int) -> None:
        if self.nodes and (node := self._node_at(number)).ranks:
            ranks = list(node.ranks)
            self.process_exited(node.ranks[ranks[number % len(ranks)]], "it was killed")

    def disconnect_node(self, number: int) -> None:
        if self.nodes:
            node = self._node_at(number)
            node.linked = False
            self.desk.connection_lost(node.name, node.seats.generation, self.now)

    def heal_all(self) -> None:
        for node in self.nodes.values():
            node.linked = True
            for rank in node.ranks.values():
                rank.ignores = False

    def ignore_orders(self, number: int) -> None:
        if self.nodes and (node := self._node_at(number)).ranks:
            next(iter(node.ranks.values())).ignores = True

    def preempt_node(self, number: int) -> None:
        if len(self.nodes) > 1:
            self._node_at(number).seats.drain(self.now + 10.0, "preempted")

    def resize(self, nodes: int) -> None:
        question = ResizeRequest(nodes, "resized")
        if not why_refused(self.desk.snapshot(), question):
            self.desk.handle_request(question, self.now)

    def stop(self) -> None:
        question = StopJobRequest("stopped")
        if not why_refused(self.desk.snapshot(), question):
            self.desk.handle_request(question, self.now)

    def fault(self, number: int) -> None:
        """Make all ranks of a node leave their world without an order."""
        if self.nodes:
            for rank in self._node_at(number).ranks.values():
                if rank.stand is RankPhase.IN_WORLD:
                    rank.stand = RankPhase.READY

    def exchange_node(self, number: int) -> None:
        """Run one node's turn and exchange its report for the coordinator's reply."""
        if self.nodes:
            self._exchange(self._node_at(number))

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.desk.tick(self.now)

    def run_without_faults(self, turns: int = 300) -> None:
        """Heal all nodes and run ``turns`` heartbeats without faults."""
        self.heal_all()
        for _ in range(turns):
            for node in list(self.nodes.values()):
                self._exchange(node)
            self.advance(HEARTBEAT_S)

    def exchange_all(self) -> None:
        """Run each node's turn; the coordinator decides once all reports have arrived."""
        for node in list(self.nodes.values()):
            node.run_turn()
            if node.linked and node.name in self.nodes:
                node.report(alone=False)
        self.desk.reconcile(self.now)
        for node in list(self.nodes.values()):
            if node.linked and not self.desk.snapshot().is_rejoining and node.name in self.desk.snapshot().nodes:
                self._apply_desired(node)

    def _exchange(self, node: SimulatedNode) -> None:
        node.run_turn()
        if node.linked and node.name in self.nodes:
            node.report()
            if not self.desk.snapshot().is_rejoining:
                self._apply_desired(node)
            node.run_turn()

    def _apply_desired(self, node: SimulatedNode) -> None:
        self.desk.nodes_to_notify()
        orders = node_desired(self.desk.snapshot(), node.name, self.now)
        if orders.superseded and node.seats.exit is None:
            node.seats.begin_generation()
        else:
            node.seats.apply_desired(orders, self.now)
        node.apply_effects()

    def _node_at(self, number: int) -> SimulatedNode:
        names = sorted(self.nodes)
        return self.nodes[names[number % len(names)]]

    # -- rank events --------------------------------------------------------------------------------------------------

    def process_exited(self, rank: SimulatedRank, reason: str) -> None:
        node = self.nodes.get(rank.node)
        if node is not None and node.ranks.pop(rank.token, None) is not None:
            node.seats.process_exited(rank.token, reason)
            node.apply_effects()

    def node_left(self, node: SimulatedNode) -> None:
        if self.nodes.pop(node.name, None) is not None:
            if node.linked:
                node.report()
            self.desk.connection_lost(node.name, node.seats.generation, self.now)

    def world_entered(self, rank: SimulatedRank, place: RankAssignment) -> None:
        self.assignments.append(place)
        before = self.places.setdefault((place.epoch, place.rank), rank.token)
        assert before == rank.token, f"rank {place.rank} of epoch {place.epoch} was given twice"
        assert self.sizes.setdefault(place.epoch, place.world_size) == place.world_size
        assert 0 <= place.rank < place.world_size

    def stopped_at_step(self, rank: SimulatedRank) -> None:
        target = self.targets.setdefault(rank.epoch, rank.step)
        assert target == rank.step, f"epoch {rank.epoch} stopped at {target} and at {rank.step}"
        assert rank.paused is not None
        assert rank.paused <= target

    # -- invariants ---------------------------------------------------------------------------------------------------

    def check_one_world(self) -> None:
        """Check that the newest world has its full size; the other ranks are spares."""
        desk = self.desk
        if desk.snapshot().outcome.exit is not None:
            assert desk.snapshot().outcome.exit in (ExitReason.STOPPED, ExitReason.JOB_FAILED)
            return
        size = self.policy.largest_size_within(
            min(len(self.nodes), desk.snapshot().world.max_nodes or self.policy.max_replicas)
        )
        if size == 0:
            return
        inside = [
            rank
            for node in self.nodes.values()
            for rank in node.ranks.values()
            if rank.stand is RankPhase.IN_WORLD and rank.epoch == desk.snapshot().world.epoch
        ]
        assert len(inside) == size * self.nproc, f"{desk.snapshot().world}"
