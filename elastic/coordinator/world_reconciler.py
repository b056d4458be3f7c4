"""Node reports become events, next_world decides, its actions become each node's desired state. No I/O.

All state here can be derived from node reports: a restarted coordinator collects the reports of all nodes before it
decides anything.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from elastic.control.control_messages import (
    CommandKind,
    CoordinatorRequest,
    DrainRequest,
    ExitReason,
    InjectRequest,
    NodeCommand,
    NodeStatus,
    PauseOrder,
    ResizeRequest,
    SizeRequest,
    StopJobRequest,
    SupervisorExited,
    WorldRecord,
    WorldSpec,
)
from elastic.control.hang_detector import HangDetector, HangTimeouts, StepTimes
from elastic.coordinator import node_reports
from elastic.coordinator.node_reports import LastCommittedStep, WorldProgress
from elastic.fault_injection.fault_spec import SUPERVISOR_KINDS, FaultInjection
from elastic.rendezvous.store_servers import ROOTLESS, store_nodes
from elastic.world import world_state
from elastic.world.action_text import describe_action
from elastic.world.next_world import initial_world, next_world, rebuild_world
from elastic.world.scaling_policy import ScalingPolicy
from elastic.world.world_state import RequestedStep, WorldPhase, WorldState
from peerstore.membership.topology import PeerNode
from peerstore.shard_records import EPOCHS_PER_WORLD, MAX_EPOCH_LEAD, clock_ms, next_epoch

log = logging.getLogger(__name__)
replace = msgspec.structs.replace
DecisionObserver = Callable[
    ["WorldReconciler", WorldState, world_state.WorldEvent, Sequence[world_state.WorldAction], float], None
]


@dataclass(frozen=True)
class CoordinatorSettings:
    job: str
    policy: ScalingPolicy
    nproc: int
    store: str = ""
    """Address of an existing store, "" for a store on one node, ``rootless`` for a store on every node."""
    heartbeat_timeout_s: float = 10.0
    """Seconds without a report after which a connected node is lost."""
    reconnect_timeout_s: float = 2.0
    """Seconds that a disconnected supervisor has to reconnect."""
    rejoin_timeout_s: float = 5.0
    """Seconds that a restarted coordinator waits for further nodes after the first report."""
    hang: HangTimeouts = field(default_factory=HangTimeouts)
    local_nodes: int = 0
    """Number of nodes that the launcher starts. While fewer have joined, no message asks for more."""
    join_command: str = ""
    """Command line that starts another node, for messages."""
    requested_step: RequestedStep | None = None
    """The step that the first world restores."""
    holders: tuple[str, ...] = ()
    """Nodes whose agents hold the newest step of an earlier run. The first world waits for one of them."""


@dataclass
class NodeRecord:
    """Newest report of a node, with its connection, pending commands and drain deadline."""

    status: NodeStatus
    last_heartbeat: float
    connected: bool = True
    commands: list[NodeCommand] = field(default_factory=list)
    requested: int = 0
    drain_deadline: float | None = None
    drain_reason: str = ""
    ended: bool = False
    """Whether the launcher reported the supervisor's exit. Once disconnected, the node is lost without a wait."""


class WorldReconciler:
    """State of a job: node reports in, desired state out.

    ``min_epoch`` is the greatest recorded number of a world; a new world needs a greater one. A restarted coordinator
    without such an epoch numbers its first world by ``epoch_clock``, because a silent node may be in a world with any
    earlier number. ``observer`` receives every decision and the world before it.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        *,
        incarnation: str,
        now: float,
        fresh: bool,
        min_epoch: int = -1,
        newest_epoch: int = 0,
        observer: DecisionObserver | None = None,
        epoch_clock: Callable[[], int] = clock_ms,
    ) -> None:
        self.settings = settings
        self._epoch_clock = epoch_clock
        self.newest_epoch = newest_epoch
        """Greatest epoch of an incarnation that this coordinator has allocated or read in a report."""
        self._observer = observer
        self.incarnation = incarnation
        self.world: WorldState = initial_world(
            settings.policy, nproc=settings.nproc, now_s=now, requested_step=settings.requested_step
        )
        self.min_epoch = min_epoch
        self.term = 0
        """Term in which this coordinator leads, 0 without an election."""
        self.nodes: dict[str, NodeRecord] = {}
        self.world_spec: WorldSpec | None = None
        self.world_record: WorldRecord | None = None
        """Record of :attr:`world_spec` for nodes outside the world."""
        self.broken_reason: str | None = None
        self.leave_until = 0.0
        """Time by which the ranks of the broken world must have left it."""
        self.pause: world_state.PauseWorld | None = None
        self.pause_target: int | None = None
        self.exit: ExitReason | None = None
        self.reason = ""
        self.sealed_step: world_state.SealedStep | None = None
        """The step that the ranks sealed before the job was stopped."""
        self.failure: world_state.FailJob | None = None
        """Why the job cannot continue."""
        self.size_request: SizeRequest | None = None
        self.requested_nodes = 0
        self.standby_peers: tuple[PeerNode, ...] = ()
        """Agents of nodes outside the world that accept replicas."""
        self.released: dict[str, world_state.ReleaseNode] = {}
        self.store_node = ""
        self.is_rejoining = not fresh
        self._gather_deadline: float | None = None
        self._held_back: set[str] = set()
        """Nodes that have joined, and that the first world does not use before a holder of the newest step is ready."""
        self._holders_deadline: float | None = None
        self._is_holder_missed = False
        self._warned_of: WorldRecord | None = None
        self._changed: set[str] = set()
        self._last_command = 0
        self.progress: WorldProgress | None = None
        """Totals over the reports of the nodes of :attr:`world_spec`."""
        self._pending_events: list[world_state.WorldEvent] = []
        self._pending_nodes: set[str] = set()
        self._is_reconciled = True
        self._reported: WorldSpec | None = None
        self._connected: OrderedDict[str, None] = OrderedDict()
        """Connected nodes, the one with the oldest report first."""
        self._disconnected: set[str] = set()
        """Disconnected nodes."""
        self.step_times = StepTimes()
        self.hang_detector = HangDetector(pace=self.step_times)
        self.last_committed_step = LastCommittedStep()

    # -- reports and requests ------------------------------------------------------------------------------------------

    def record_status(self, status: NodeStatus, now: float) -> str:
        """Record a node's report and return why it is refused, or "".

        :meth:`reconcile` decides once on all reports that arrived together.
        """
        if self._epoch_of(status) > max(self.world.epoch, 0) + MAX_EPOCH_LEAD:
            return f"it speaks of world {self._epoch_of(status)}, and this job is in world {self.world.epoch}"
        record = self.nodes.get(status.node)
        if record is not None and record.status.generation > status.generation:
            return f"a newer supervisor runs as node {status.node}"
        self._learn_epoch(node_reports.newest_known_epoch(status))
        if status.node in self._pending_nodes:
            self.reconcile(now)
        before = record.status if record is not None and record.status.generation == status.generation else None
        if record is None or before is None:
            record = self.nodes[status.node] = _first_record(record, status, now)
        record.status, record.last_heartbeat, record.connected = status, now, True
        self._connected[status.node] = None
        self._connected.move_to_end(status.node)
        has_other_peer = status.peer != (None if before is None else before.peer)
        self._disconnected.discard(status.node)
        if status.coordinator == self.incarnation and record.commands:
            record.commands = [command for command in record.commands if command.number > status.last_command]
        self._changed.add(status.node)
        self._is_reconciled = False
        if self.is_rejoining:
            return ""
        if has_other_peer:
            self._update_standby()
        if status.node not in self.settings.holders and self._waits_for_holder(now):
            self._held_back.add(status.node)
            return ""
        if self.progress is not None:
            self.progress.update(status)
        if not self.is_superseded(status):
            self._raise_epoch(self._epoch_of(status), now)
            events = list(node_reports.events_between(before if self._is_member(status) else None, status, now))
            if events:
                self._pending_events += events
                self._pending_nodes.add(status.node)
            self._count_spares(record)
            self._handle_rank_requests(record, now)
        self.hang_detector.observe(before, status, now)
        return ""

    def reconcile(self, now: float) -> None:
        """Decide on the reports since the last call."""
        if self._is_reconciled:
            return
        self._is_reconciled = True
        if self.is_rejoining:
            self._gather_reports(now)
            return
        self._decide_pending(now)
        self._admit_held_back(now)
        self._place_store(now)
        self._set_pause_target()
        if self.progress is not None:
            self.last_committed_step.observe(self.progress)

    def interned(self, formed: WorldSpec) -> WorldSpec:
        """Return one shared object for equal worlds: all nodes report the same one to a restarted coordinator."""
        if self.world_spec is not None and formed == self.world_spec:
            return self.world_spec
        if self._reported != formed:
            self._reported = formed
        return self._reported

    def later_generation(self, status: NodeStatus, now: float) -> int:
        """Return the greater generation of a disconnected supervisor of this node, or 0.

        Generations carry the node's clock. If that clock went back, a new supervisor has a smaller one.
        """
        record = self.nodes.get(status.node)
        if record is None or record.status.generation <= status.generation:
            return 0
        is_there = record.connected and now - record.last_heartbeat <= self.settings.reconnect_timeout_s
        return 0 if is_there else record.status.generation

    def connection_lost(self, node: str, generation: int, now: float) -> None:
        """Record that a node's connection has ended. The node may reconnect."""
        record = self.nodes.get(node)
        if record is not None and record.status.generation == generation:
            record.connected, record.last_heartbeat = False, now
            self._connected.pop(node, None)
            self._disconnected.add(node)

    def handle_request(self, request: CoordinatorRequest, now: float) -> None:
        """Carry out a request that :func:`elastic.coordinator.desired_state.why_refused` accepts."""
        if isinstance(request, ResizeRequest):
            self._resize(request.nodes, request.reason, now)
        elif isinstance(request, InjectRequest):
            self._inject(request.injection)
        elif isinstance(request, StopJobRequest):
            until = None if request.deadline_s is None else now + request.deadline_s
            self._decide([world_state.JobStopRequested(request.reason, until)], now)
        elif isinstance(request, SupervisorExited):
            if request.node in self.nodes:
                self.nodes[request.node].ended = True
        elif isinstance(request, DrainRequest):
            until = now + request.deadline_s
            for node in request.nodes:
                self.nodes[node].drain_deadline, self.nodes[node].drain_reason = until, request.reason
            self._decide([world_state.NodesPreempted(request.nodes, until, request.reason)], now)

    @property
    def allocated_epoch(self) -> int:
        """Epoch allocated for the incarnations of the newest world, 0 for none."""
        return 0 if self.world_record is None else self.world_record.incarnation_epoch

    def leads(self, term: int, min_epoch: int, newest_epoch: int) -> None:
        """Start to lead, before any decision. World numbers exceed ``min_epoch``, epochs ``newest_epoch``."""
        self.term, self.min_epoch = term, max(min_epoch, self.min_epoch)
        self.newest_epoch = max(newest_epoch, self.newest_epoch)

    def was_away(self, seconds: float, now: float) -> None:
        """Move drain deadlines by the seconds that this clock skipped, since machines are preempted on time anyway."""
        if seconds <= 0:
            return
        for record in self.nodes.values():
            if record.drain_deadline is not None:
                record.drain_deadline -= seconds
        leaving = {
            name: replace(member, drain_deadline_s=member.drain_deadline_s - seconds)
            for name, member in self.world.members.items()
            if member.drain_deadline_s is not None
        }
        if leaving:
            self.world = replace(self.world, members={**self.world.members, **leaving}, next_tick_s=now)

    def tick(self, now: float) -> None:
        """Decide on lost nodes, hangs and deadlines."""
        if self.is_rejoining:
            self._gather_reports(now)
            return
        self._admit_held_back(now)
        events: list[world_state.WorldEvent] = [self._lost(record, now) for record in self._silent(now)]
        runs = self.world_spec is not None and self.world.phase is WorldPhase.RUNNING
        if self.world_spec is not None and runs and self.hang_detector.is_check_due(self.settings.hang, now):
            reports = {node: record.status for node, record in self.nodes.items()}
            events += self.hang_detector.find_hangs(self.world_spec, reports, self.settings.hang, now)
        tick_s = self.world.next_tick_s
        if events or (tick_s is not None and tick_s <= now) or self._late(now):
            self._decide([*events, world_state.Tick()], now)
        self._place_store(now)
        for node in [node for node in self._disconnected if self._is_forgotten(self.nodes[node], now)]:
            del self.nodes[node]
            self._disconnected.remove(node)
            if self.progress is not None:
                self.progress.forget(node)

    def _waits_for_holder(self, now: float) -> bool:
        """Whether the first world waits for a holder of the newest step. Logs the start and the failure of the wait."""
        holders, wait_s = self.settings.holders, self.settings.policy.lost_state_timeout_s
        if self.world.epoch >= 0 or not holders or self._is_holder_missed:
            return False
        if any(one in self.nodes and self.nodes[one].status.ready for one in holders):
            return False
        if self._holders_deadline is None:
            self._holders_deadline = now + wait_s
            log.warning(
                "the first world waits up to %g s for %s, which may have the newest step",
                wait_s,
                shortened(holders),
            )
        if now < self._holders_deadline:
            return True
        self._is_holder_missed = True
        log.error(
            "no node with the newest step (%s) was ready in %g s: the job starts without it, and repeats steps",
            *(shortened(holders), wait_s),
        )
        return False

    def _admit_held_back(self, now: float) -> None:
        """Let nodes join that waited for a holder of the newest step, after the holder's own events."""
        if not self._held_back or self._waits_for_holder(now):
            return
        admitted, self._held_back = sorted(self._held_back), set()
        reports = [self.nodes[node].status for node in admitted if node in self.nodes]
        self._decide([event for one in reports for event in node_reports.events_between(None, one, now)], now)

    def _decide_pending(self, now: float) -> None:
        events, self._pending_events = self._pending_events, []
        self._pending_nodes.clear()
        self._decide(events, now)

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _decide(self, events: list[world_state.WorldEvent], now: float) -> None:
        events = [*self._first_sealed_step(), *self._late(now), *events]
        if not events or self.exit is not None:
            return
        event = events[0] if len(events) == 1 else world_state.EventBatch(tuple(events))
        before = self.world
        self.world, actions = next_world(before, event, self.settings.policy, now)
        if before.requested_step is not None and self.world.requested_step is None:
            self._forget_requested_step()
        if self.world.members is not before.members or self.world.epoch != before.epoch:
            self._update_standby()
        self._apply(actions, now)
        if self._observer is not None:
            self._observer(self, before, event, actions, now)

    def _update_standby(self) -> None:
        def peer_of(node: str) -> PeerNode | None:
            record = self.nodes.get(node)
            return None if record is None else record.status.peer

        before, self.standby_peers = self.standby_peers, node_reports.standby_peers(self.world, peer_of)
        if self.standby_peers != before:
            self._changed.update(self.world.ranked_nodes)

    def _first_sealed_step(self) -> list[world_state.WorldEvent]:
        """Return an event for the first step that a world of this run sealed after the requested one was restored."""
        if self.world.requested_step is None or self.progress is None or not self.progress.has_sealed_step:
            return []
        return [world_state.StepSealed(self.progress.epoch)]

    def _forget_requested_step(self) -> None:
        """Remove the requested step from the nodes' record: a restarted coordinator must not restore it again."""
        if self.world_spec is not None and self.world_spec.requested_step is not None:
            self.world_spec = replace(self.world_spec, requested_step=None)
            self._record_world()
            self._changed.update(self.nodes)

    def _apply(self, actions: Sequence[world_state.WorldAction], now: float) -> None:
        for action in actions:
            log.info("%s", describe_action(action, now))
            if isinstance(action, world_state.FormWorld):
                self._form(action, now)
            elif isinstance(action, world_state.BreakWorld):
                if self.world_spec is None or action.epoch != self.world_spec.epoch:
                    continue  # an older world: its nodes learn that it is over
                self.broken_reason, self.pause, self.pause_target = action.reason, None, None
                self.leave_until = now + action.within_s
            elif isinstance(action, world_state.PauseWorld):
                self.pause = action
            elif isinstance(action, world_state.RespawnRanks):
                self._command(action.node, CommandKind.RESPAWN, action.local_ranks)
            elif isinstance(action, world_state.PromoteSpare):
                self._command(action.node, CommandKind.PROMOTE, (action.local_rank,))
            elif isinstance(action, world_state.RespawnStragglers):
                self._command(action.node, CommandKind.STRAGGLERS)
            elif isinstance(action, world_state.ReleaseNode):
                self.released[action.node] = action
            elif isinstance(action, world_state.RequestNodes):
                self.requested_nodes = action.nodes
            elif isinstance(action, world_state.FinishJob):
                self.exit, self.reason = ExitReason.FINISHED, "all ranks have finished"
            elif isinstance(action, world_state.StopJob):
                self.exit, self.reason = ExitReason.STOPPED, action.reason
                self.sealed_step = action.sealed_step
            else:
                self.failure = action
                self.exit = ExitReason.NEVER_JOINED if action.never_joined else ExitReason.JOB_FAILED
                self.reason = action.reason if action.never_joined else f"{action.reason} ({action.attempts})"
        if actions:
            self._changed.update(self.nodes)

    def _learn_epoch(self, epoch: int) -> None:
        if epoch <= max(self.newest_epoch, self._epoch_clock()) + MAX_EPOCH_LEAD:
            self.newest_epoch = max(self.newest_epoch, epoch)

    def _form(self, form: world_state.FormWorld, now: float) -> None:
        self.newest_epoch = next_epoch(self.newest_epoch, self._epoch_clock(), reserved=EPOCHS_PER_WORLD)
        self.hang_detector = HangDetector(now, self.step_times)
        hang_s = self.settings.hang.longest_s(self.step_times)
        spec = WorldSpec(
            form.epoch,
            form.nodes,
            form.restarts,
            form.reason,
            hang_s=hang_s,
            resume_from=form.resume_from,
            requested_step=form.requested_step,
            incarnation_epoch=self.newest_epoch,
        )
        self.world_spec = self._with_stores(spec)
        self._record_world()
        self._count_reports()
        self.broken_reason = self.pause = self.pause_target = None
        self.requested_nodes = 0

    def _record_world(self) -> None:
        if self.world_spec is not None:
            spec = self.world_spec
            self.world_record = WorldRecord(spec.epoch, spec.ranked_nodes, spec.requested_step, spec.incarnation_epoch)

    def _count_reports(self) -> None:
        """Count the existing reports of a world that is new to this coordinator."""
        if self.world_spec is not None:
            self.progress = WorldProgress(self.world_spec)
            for node in self.world_spec.ranked_nodes:
                if (record := self.nodes.get(node)) is not None:
                    self.progress.update(record.status)

    def _count_spares(self, record: NodeRecord) -> None:
        """Record the number of a node's spares. Spares become ready during a world too, and need no decision."""
        member = self.world.members.get(record.status.node)
        if member is not None and member.spares != record.status.spares and not record.commands:
            member = replace(member, spares=record.status.spares)
            self.world = replace(self.world, members={**self.world.members, member.node: member})

    def _command(self, node: str, do: CommandKind, local_ranks: tuple[int, ...] = ()) -> None:
        self._last_command += 1
        if node in self.nodes:
            self.nodes[node].commands.append(NodeCommand(self._last_command, do, local_ranks))

    def _inject(self, injection: FaultInjection) -> None:
        """Send a fault to all nodes, because the node of its rank may change until the fault happens.

        An immediate fault of a supervisor goes only to the node that has the rank now.
        """
        self._last_command += 1
        nodes = self.nodes
        if injection.is_immediate and injection.kind in SUPERVISOR_KINDS:
            node, local_rank = injection.node, injection.local_rank
            if injection.rank is not None and self.world_spec is not None:
                place, local_rank = divmod(injection.rank, self.world.nproc)
                node = self.world_spec.ranked_nodes[place]
            injection = replace(injection, rank=None, node=node, local_rank=local_rank)
            nodes = {node: self.nodes[node]} if node in self.nodes else {}
        for record in nodes.values():
            record.commands.append(NodeCommand(self._last_command, CommandKind.INJECT, injection=injection))
        self._changed.update(self.nodes)

    def _handle_rank_requests(self, record: NodeRecord, now: float) -> None:
        for request in record.status.requests:
            if request.number > record.requested:
                self._decide_pending(now)
                record.requested = request.number
                event = node_reports.requested_event(request, record.status, now)
                if isinstance(event, world_state.ResizeRequested):
                    self._resize(event.nodes, event.reason, now)
                else:
                    self._decide([event], now)

    def _resize(self, nodes: int | None, reason: str, now: float) -> None:
        self.size_request = SizeRequest(1 if self.size_request is None else self.size_request.number + 1, reason, nodes)
        before = self.pause
        self._decide([world_state.ResizeRequested(nodes, reason)], now)
        if self.pause is not None and self.pause is not before:
            self.pause = replace(self.pause, reason=f"{reason}: {self.pause.reason}")
        self._changed.update(self.nodes)

    # -- the step to pause at ------------------------------------------------------------------------------------------

    def _set_pause_target(self) -> None:
        """Set the step to pause at: the greatest that any rank reported, once all have reported one."""
        if self.pause is None or self.pause_target is not None or self.progress is None:
            return
        self.pause_target = self.progress.pause_target
        if self.pause_target is not None:
            log.info("epoch %d: all stop after step %d", self.progress.epoch, self.pause_target)
            self._changed.update(self.nodes)

    def _reports_in(self, formed: WorldSpec) -> list[NodeStatus]:
        """Return the reports of the nodes that know this world."""
        reports = [record.status for node in formed.ranked_nodes if (record := self.nodes.get(node)) is not None]
        return [one for one in reports if one.world is not None and one.world.epoch == formed.epoch]

    def _late(self, now: float) -> list[world_state.WorldEvent]:
        """Return the loss of each rank that has not reached the pause step by the deadline.

        Ranks that only waited for those are not lost.
        """
        if self.pause is None or self.world_spec is None or now < self.pause.deadline_s:
            return []
        return [
            world_state.RankLost(one.node, one.generation, one.spawn_count, local_rank, "it did not stop in time")
            for one in self._reports_in(self.world_spec)
            for local_rank in one.lagging_ranks
        ]

    # -- lost nodes ----------------------------------------------------------------------------------------------------

    def is_superseded(self, status: NodeStatus) -> bool:
        """Whether this generation of a supervisor is over: it was lost, or its world is not one of this job."""
        if self.world.departed.get(status.node, -1) >= status.generation:
            return True
        inside = status.world is not None and status.broken_reason is None
        return inside and not self._is_member(status) and not self.is_rejoining

    def _is_member(self, status: NodeStatus) -> bool:
        member = self.world.members.get(status.node)
        return member is not None and member.generation == status.generation

    @staticmethod
    def _epoch_of(status: NodeStatus) -> int:
        return -1 if status.world is None else status.world.epoch

    def _raise_epoch(self, epoch: int, now: float) -> None:
        """Raise the world's number to ``epoch``. If it was lower, the current world is not the newest and breaks."""
        if epoch <= self.world.epoch:
            return
        self._decide_pending(now)
        placed = next((member for member in self.world.members.values() if member.has_ranks), None)
        if self.world.phase.is_running and placed is not None:
            why = "there has been a newer world"
            self._decide([world_state.RankFault(placed.node, placed.generation, self.world.epoch, 0, why)], now)
        wait_until_s = self.world.replacement_deadline_s or now + self.settings.policy.scaling_timeout_s
        self.world = replace(self.world, epoch=epoch, replacement_deadline_s=wait_until_s, next_tick_s=now)

    def _is_forgotten(self, record: NodeRecord, now: float) -> bool:
        """Whether the node's record can go: the node is disconnected, no member, and not expected to return."""
        return not record.connected and record.status.node not in self.world.members and not _is_draining(record, now)

    def _silent(self, now: float) -> list[NodeRecord]:
        """Return the silent members. Connected nodes are in the order of their reports, so the scan stops early."""
        found = []
        for node in self._connected:
            record = self.nodes[node]
            if now - record.last_heartbeat <= self.settings.heartbeat_timeout_s:
                break
            found.append(record)
        found += [self.nodes[node] for node in self._disconnected]
        return [record for record in found if self._is_silent(record, now)]

    def _is_silent(self, record: NodeRecord, now: float) -> bool:
        if record.status.node not in self.world.members:
            return False
        if record.ended and not record.connected:
            return True
        limit_s = self.settings.heartbeat_timeout_s if record.connected else self.settings.reconnect_timeout_s
        return now - record.last_heartbeat > limit_s

    def _lost(self, record: NodeRecord, now: float) -> world_state.NodeLost:
        if record.ended and not record.connected:
            return world_state.NodeLost(record.status.node, record.status.generation, "its supervisor has ended")
        how = "has been silent" if record.connected else "has been cut off"
        return world_state.NodeLost(
            record.status.node, record.status.generation, f"{how} for {now - record.last_heartbeat:.1f} s"
        )

    # -- the store -----------------------------------------------------------------------------------------------------

    @property
    def is_rootless(self) -> bool:
        return self.settings.store == ROOTLESS

    def _with_stores(self, formed: WorldSpec) -> WorldSpec:
        """Return the world with the addresses of its stores, if they are known."""
        if not self.is_rootless:
            return replace(formed, store=self._store())
        members = [self.nodes.get(node) for node in store_nodes(formed.epoch, formed.ranked_nodes)]
        stores = tuple(record.status.store if record is not None and record.connected else "" for record in members)
        return replace(formed, store=stores[0], stores=stores) if all(stores) else formed

    def _store(self) -> str:
        if self.settings.store:
            return self.settings.store
        store_node_record = self.nodes.get(self.store_node)
        return store_node_record.status.store if store_node_record is not None and store_node_record.connected else ""

    def _place_store(self, now: float) -> None:
        """Choose the node of the store, and complete a world whose ranks wait for the store's address."""
        if self.settings.store == "" and (store_node_record := self._best_store_node(now)) != self.store_node:
            self.store_node = store_node_record
            self._changed.update(self.nodes)
        if (
            self.world_spec is not None
            and not self.world_spec.store
            and (formed := self._with_stores(self.world_spec)).store
        ):
            self.world_spec = formed
            self._changed.update(self.nodes)

    def _best_store_node(self, now: float) -> str:
        """Return the node of the store: the current one while it has a store or no other node has one."""
        store_node_record = self.nodes.get(self.store_node)
        is_there = (
            store_node_record is not None
            and not self.is_superseded(store_node_record.status)
            and not self._is_silent(store_node_record, now)
        )
        if is_there and store_node_record is not None and store_node_record.status.store:
            return self.store_node
        here = [
            node for node, record in self.nodes.items() if record.connected and not self.is_superseded(record.status)
        ]
        having = [node for node in here if self.nodes[node].status.store]
        if is_there and not having:
            return self.store_node
        placed = [node for node in here if self.progress is not None and node in self.progress.places]
        return next(iter((*having, *placed, *here)), "")

    # -- a restarted coordinator ---------------------------------------------------------------------------------------

    def _gather_reports(self, now: float) -> None:
        """Resume once all nodes of the newest world have reported, or their time to do so has passed."""
        reports = [node.status for node in self.nodes.values() if node.connected]
        newest = max((one.world for one in reports if one.world is not None), key=lambda one: one.epoch, default=None)
        here = {one.node for one in reports}
        records = [one.newest_world for one in reports if one.newest_world is not None]
        lost_world = max(records, key=lambda one: one.epoch, default=None)
        if lost_world is not None and newest is not None and lost_world.epoch <= newest.epoch:
            lost_world = None
        expected = set(() if newest is None else newest.ranked_nodes) | set(
            () if lost_world is None else lost_world.nodes
        )
        complete = here >= expected and (newest is not None or len(here) >= self.settings.policy.max_replicas)
        if reports and self._gather_deadline is None:
            self._gather_deadline = now + self.settings.rejoin_timeout_s
        gather_by = self._gather_deadline
        if lost_world is not None and gather_by is not None and here.isdisjoint(lost_world.nodes):
            gather_by += max(0.0, self.settings.policy.lost_state_timeout_s - self.settings.rejoin_timeout_s)
            self._warn_state_lost(lost_world, gather_by - now)
        if complete or (gather_by is not None and now >= gather_by):
            self.is_rejoining = False
            min_next_epoch = 0 if self.min_epoch >= 0 else self._epoch_clock()
            if lost_world is not None:
                self.min_epoch = max(self.min_epoch, lost_world.epoch)
            requested = self.settings.requested_step
            if (known := lost_world or newest) is not None:
                requested = known.requested_step
            self._resume(reports, newest, requested, min_next_epoch, now)

    def _warn_state_lost(self, record: WorldRecord, left_s: float) -> None:
        """Log that no node of the newest world has reported: first the wait, then the steps that are abandoned."""
        names = shortened(record.nodes)
        if left_s <= 0:
            log.error(
                "no node of the newest world (epoch %d: %s) has answered in %g s: the job continues with what the "
                "other nodes have, and repeats the steps that only those nodes have",
                *(record.epoch, names, self.settings.policy.lost_state_timeout_s),
            )
        elif self._warned_of != record:
            self._warned_of = record
            log.warning(
                "no node of the newest world (epoch %d: %s) answers: waiting for one of them for %.0f s "
                "(lost_state_timeout_s), because the job would go back to an older step without them",
                *(record.epoch, names, left_s),
            )

    def _resume(
        self,
        status: list[NodeStatus],
        newest: WorldSpec | None,
        requested: RequestedStep | None,
        min_next_epoch: int,
        now: float,
    ) -> None:
        policy = self.settings.policy
        reports = [node_reports.rejoin_report(one) for one in status]
        self.world_spec = newest
        self._record_world()
        self._count_reports()
        self.world, actions = rebuild_world(
            reports,
            policy,
            nproc=self.settings.nproc,
            now_s=now,
            requested_step=requested,
            resume_from=None if newest is None else node_reports.named_step(newest, status),
            min_next_epoch=min_next_epoch,
        )
        self.hang_detector = HangDetector(now, self.step_times)
        self._update_standby()
        self._apply(actions, now)
        self._raise_epoch(self.min_epoch, now)
        inside = [] if newest is None else [one for one in status if self._epoch_of(one) == newest.epoch]
        self._resume_pause([one.pause for one in inside if one.pause is not None], now)
        wishes = [one.size_request for one in status if one.size_request is not None]
        if wishes:
            self.size_request = max(wishes, key=lambda wish: wish.number)
            self._decide([world_state.ResizeRequested(self.size_request.nodes, self.size_request.reason)], now)
        broken = [(one, one.broken_reason) for one in inside if one.broken_reason is not None]
        self._decide(
            [world_state.RankFault(one.node, one.generation, self._epoch_of(one), 0, why) for one, why in broken], now
        )
        self._place_store(now)
        events: list[world_state.WorldEvent] = []
        for one in status:  # the node has joined already
            said_before = replace(
                one,
                sealed=None,
                checkpoint=None,
                finished=False,
                ready=False,
                drain_within_s=None,
                exited_ranks=(),
                faulty_ranks=(),
            )
            events += node_reports.events_between(said_before, one, now)
        self._decide(events, now)
        self._set_pause_target()
        self._changed.update(self.nodes)

    def _resume_pause(self, pausing: list[PauseOrder], now: float) -> None:
        """Continue the pause that some ranks have received, for all ranks."""
        if not pausing or self.world.phase is not WorldPhase.RUNNING:
            return
        asked = min(pausing, key=lambda one: (not one.stop, one.within_s))
        until = now + asked.within_s
        self.pause = world_state.PauseWorld(self.world.epoch, asked.reason, until, asked.stop)
        self.world = replace(
            self.world,
            phase=WorldPhase.PAUSING,
            reason=asked.reason,
            pause_deadline_s=until,
            stopping=asked.stop,
            next_tick_s=until if self.world.next_tick_s is None else min(until, self.world.next_tick_s),
        )

    # -- desired state -------------------------------------------------------------------------------------------------

    def nodes_to_notify(self) -> list[str]:
        """Return the nodes whose desired state changed since the last call. Empty while reports are collected."""
        if self.is_rejoining:
            return []
        due, self._changed = sorted(self._changed & self.nodes.keys()), set()
        return due


_NAMED = 4


def shortened(names: Sequence[str]) -> str:
    """Return the first few names and the number of the others."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _first_record(before: NodeRecord | None, status: NodeStatus, now: float) -> NodeRecord:
    """Return a record for the first report of a generation. A pending drain of the node stays in force."""
    record = NodeRecord(status, now)
    if before is not None and _is_draining(before, now):
        record.drain_deadline, record.drain_reason = before.drain_deadline, before.drain_reason
    return record


def _is_draining(record: NodeRecord, now: float) -> bool:
    """Whether the node is draining and has not left yet."""
    return record.drain_deadline is not None and now < record.drain_deadline and not record.status.leave_reason
