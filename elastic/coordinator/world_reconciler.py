"""Node reports become events, next_world decides, its actions become each node's desired state. No I/O.

What nodes say becomes events; :func:`elastic.world.next_world.next_world` says what follows; its actions become what
each node is to hear. All of it is derived: a desk that is opened while the job runs hears every node before it decides
anything.
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
    """A store that is there already; "" where a node is to keep one; ``rootless`` where every node is to."""
    heartbeat_timeout_s: float = 10.0
    """How long a node may be silent."""
    reconnect_timeout_s: float = 2.0
    """How long a supervisor whose connection has ended may take to come back."""
    rejoin_timeout_s: float = 5.0
    """How long a coordinator that starts again waits for other nodes, from the first one on that it hears of."""
    hang: HangTimeouts = field(default_factory=HangTimeouts)
    local_nodes: int = 0
    """Nodes that join without a person; fewer are no reason to tell anybody."""
    join_command: str = ""
    """How the other nodes of the job are started, for people."""
    requested_step: RequestedStep | None = None
    """The step that the first world restores."""


@dataclass
class NodeRecord:
    """A node as it was last heard of."""

    status: NodeStatus
    last_heartbeat: float
    connected: bool = True
    commands: list[NodeCommand] = field(default_factory=list)
    requested: int = 0
    drain_deadline: float | None = None
    drain_reason: str = ""
    ended: bool = False
    """Its supervisor was seen to end: when its connection has, too, it is not waited for."""


class WorldReconciler:
    """``min_epoch`` is the greatest recorded number of a world; a new world needs a greater one.

    A restarted coordinator without such an epoch numbers its first world by ``epoch_clock``: a silent node may be in a
    world with any earlier number. ``observer`` receives every decision and the world before it.
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
        """The greatest epoch of an incarnation that this coordinator has allocated, or heard of."""
        self._witness = observer
        self.incarnation = incarnation
        self.world: WorldState = initial_world(
            settings.policy, nproc=settings.nproc, now_s=now, requested_step=settings.requested_step
        )
        self.min_epoch = min_epoch
        self.term = 0
        """In which its coordinator leads, where any machine's may."""
        self.nodes: dict[str, NodeRecord] = {}
        self.world_spec: WorldSpec | None = None
        self.world_record: WorldRecord | None = None
        """The same, for nodes that are not in it."""
        self.broken_reason: str | None = None
        self.leave_until = 0.0
        """When the ranks of the broken world must have left it."""
        self.pause: world_state.PauseWorld | None = None
        self.pause_target: int | None = None
        self.exit: ExitReason | None = None
        self.reason = ""
        self.sealed_step: world_state.SealedStep | None = None
        """The step that the ranks sealed before the job was stopped."""
        self.failure: world_state.FailJob | None = None
        """Why the job cannot go on."""
        self.size_request: SizeRequest | None = None
        self.requested_nodes = 0
        self.standby_peers: tuple[PeerNode, ...] = ()
        """Agents of nodes outside the world that accept replicas."""
        self.released: dict[str, world_state.ReleaseNode] = {}
        self.store_node = ""
        self.is_rejoining = not fresh
        self._gather_by: float | None = None
        self._awaited: WorldRecord | None = None
        self._due: set[str] = set()
        self._numbers = 0
        self.progress: WorldProgress | None = None
        """What the nodes of :attr:`world_spec` have said in all."""
        self._undecided: list[world_state.WorldEvent] = []
        self._undecided_of: set[str] = set()
        self._is_concluded = True
        self._reported: WorldSpec | None = None
        self._connected: OrderedDict[str, None] = OrderedDict()
        """Nodes whose connection is there, who was heard of longest ago first."""
        self._cut_off: set[str] = set()
        """The others."""
        self.step_times = StepTimes()
        self.hang_detector = HangDetector(pace=self.step_times)
        self.last_committed_step = LastCommittedStep()

    # -- what comes in ------------------------------------------------------------------------------------------------

    def record_status(self, status: NodeStatus, now: float) -> str:
        """A node's report; what came in together is decided on together, by ``reconcile``. The answer is why it is
        refused, or "".
        """
        if self._epoch_of(status) > max(self.world.epoch, 0) + MAX_EPOCH_LEAD:
            return f"it speaks of world {self._epoch_of(status)}, and this job is in world {self.world.epoch}"
        seen = self.nodes.get(status.node)
        if seen is not None and seen.status.generation > status.generation:
            return f"a newer supervisor runs as node {status.node}"
        self._learn_epoch(node_reports.newest_known_epoch(status))
        if status.node in self._undecided_of:
            self.reconcile(now)
        before = seen.status if seen is not None and seen.status.generation == status.generation else None
        if seen is None or before is None:
            seen = self.nodes[status.node] = _begun_again(seen, status, now)
        seen.status, seen.last_heartbeat, seen.connected = status, now, True
        self._connected[status.node] = None
        self._connected.move_to_end(status.node)
        has_other_peer = status.peer != (None if before is None else before.peer)
        self._cut_off.discard(status.node)
        if status.coordinator == self.incarnation and seen.commands:
            seen.commands = [command for command in seen.commands if command.number > status.last_command]
        self._due.add(status.node)
        self._is_concluded = False
        if self.is_rejoining:
            return ""
        if has_other_peer:
            self._update_standby()
        if self.progress is not None:
            self.progress.update(status)
        if not self.is_superseded(status):
            self._surpass(self._epoch_of(status), now)
            events = list(node_reports.events_between(before if self._is_member(status) else None, status, now))
            if events:
                self._undecided += events
                self._undecided_of.add(status.node)
            self._count_spares(seen)
            self._hear_requests(seen, now)
        self.hang_detector.observe(before, status, now)
        return ""

    def reconcile(self, now: float) -> None:
        """Decide on what was heard since the last time."""
        if self._is_concluded:
            return
        self._is_concluded = True
        if self.is_rejoining:
            self._gather(now)
            return
        self._settle_undecided(now)
        self._keep_store(now)
        self._agree()
        if self.progress is not None:
            self.last_committed_step.observe(self.progress)

    def interned(self, formed: WorldSpec) -> WorldSpec:
        """The one to keep of equal worlds: a coordinator that starts again hears the same one from all its nodes."""
        if self.world_spec is not None and formed == self.world_spec:
            return self.world_spec
        if self._reported != formed:
            self._reported = formed
        return self._reported

    def later_generation(self, status: NodeStatus, now: float) -> int:
        """The later life, by the clock it had, of a supervisor that has gone; 0 where there is none, or it is there."""
        seen = self.nodes.get(status.node)
        if seen is None or seen.status.generation <= status.generation:
            return 0
        is_there = seen.connected and now - seen.last_heartbeat <= self.settings.reconnect_timeout_s
        return 0 if is_there else seen.status.generation

    def connection_lost(self, node: str, life: int, now: float) -> None:
        """A node's connection has ended; it may come back."""
        seen = self.nodes.get(node)
        if seen is not None and seen.status.generation == life:
            seen.connected, seen.last_heartbeat = False, now
            self._connected.pop(node, None)
            self._cut_off.add(node)

    def handle_request(self, question: CoordinatorRequest, now: float) -> None:
        """What a person wants, and :func:`elastic.coordinator.desired_state.why_refused` has nothing against."""
        if isinstance(question, ResizeRequest):
            self._resize(question.nodes, question.reason, now)
        elif isinstance(question, InjectRequest):
            self._inject(question.injection)
        elif isinstance(question, StopJobRequest):
            until = None if question.deadline_s is None else now + question.deadline_s
            self._take([world_state.JobStopRequested(question.reason, until)], now)
        elif isinstance(question, SupervisorExited):
            if question.node in self.nodes:
                self.nodes[question.node].ended = True
        elif isinstance(question, DrainRequest):
            until = now + question.deadline_s
            for node in question.nodes:
                self.nodes[node].drain_deadline, self.nodes[node].drain_reason = until, question.reason
            self._take([world_state.NodesPreempted(question.nodes, until, question.reason)], now)

    @property
    def allocated_epoch(self) -> int:
        """The epoch that was allocated for the incarnations of the newest world; 0 for none."""
        return 0 if self.world_record is None else self.world_record.incarnation_epoch

    def leads(self, term: int, min_epoch: int, newest_epoch: int) -> None:
        """Begin to lead, before any decision; world numbers exceed ``min_epoch``, epochs ``newest_epoch``."""
        self.term, self.min_epoch = term, max(min_epoch, self.min_epoch)
        self.newest_epoch = max(newest_epoch, self.newest_epoch)

    def was_away(self, seconds: float, now: float) -> None:
        """Time that the clock here does not count: a machine that is preempted goes when it was to all the same."""
        if seconds <= 0:
            return
        for seen in self.nodes.values():
            if seen.drain_deadline is not None:
                seen.drain_deadline -= seconds
        leaving = {
            name: replace(member, drain_deadline_s=member.drain_deadline_s - seconds)
            for name, member in self.world.members.items()
            if member.drain_deadline_s is not None
        }
        if leaving:
            self.world = replace(self.world, members={**self.world.members, **leaving}, next_tick_s=now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self.is_rejoining:
            self._gather(now)
            return
        events: list[world_state.WorldEvent] = [self._lost(seen, now) for seen in self._silent(now)]
        runs = self.world_spec is not None and self.world.phase is WorldPhase.RUNNING
        if self.world_spec is not None and runs and self.hang_detector.is_check_due(self.settings.hang, now):
            reports = {node: seen.status for node, seen in self.nodes.items()}
            events += self.hang_detector.find_hangs(self.world_spec, reports, self.settings.hang, now)
        tick_s = self.world.next_tick_s
        if events or (tick_s is not None and tick_s <= now) or self._late(now):
            self._take([*events, world_state.Tick()], now)
        self._keep_store(now)
        for node in [node for node in self._cut_off if self._is_forgotten(self.nodes[node], now)]:
            del self.nodes[node]
            self._cut_off.remove(node)
            if self.progress is not None:
                self.progress.forget(node)

    def _settle_undecided(self, now: float) -> None:
        events, self._undecided = self._undecided, []
        self._undecided_of.clear()
        self._take(events, now)

    # -- what follows -------------------------------------------------------------------------------------------------

    def _take(self, events: list[world_state.WorldEvent], now: float) -> None:
        events = [*self._first_sealed(), *self._late(now), *events]
        if not events or self.exit is not None:
            return
        event = events[0] if len(events) == 1 else world_state.EventBatch(tuple(events))
        before = self.world
        self.world, actions = next_world(before, event, self.settings.policy, now)
        if before.requested_step is not None and self.world.requested_step is None:
            self._forget_requested_step()
        if self.world.members is not before.members or self.world.epoch != before.epoch:
            self._update_standby()
        self._do(actions, now)
        if self._witness is not None:
            self._witness(self, before, event, actions, now)

    def _update_standby(self) -> None:
        def peer_of(node: str) -> PeerNode | None:
            seen = self.nodes.get(node)
            return None if seen is None else seen.status.peer

        before, self.standby_peers = self.standby_peers, node_reports.standby_peers(self.world, peer_of)
        if self.standby_peers != before:
            self._due.update(self.world.ranked_nodes)

    def _first_sealed(self) -> list[world_state.WorldEvent]:
        """The first step that a world of this run has sealed, while the requested one is still to be restored."""
        if self.world.requested_step is None or self.progress is None or not self.progress.has_sealed_step:
            return []
        return [world_state.StepSealed(self.progress.epoch)]

    def _forget_requested_step(self) -> None:
        """Have all nodes forget it too, for a coordinator that starts again."""
        if self.world_spec is not None and self.world_spec.requested_step is not None:
            self.world_spec = replace(self.world_spec, requested_step=None)
            self._record_world()
            self._due.update(self.nodes)

    def _do(self, actions: Sequence[world_state.WorldAction], now: float) -> None:
        for action in actions:
            log.info("%s", describe_action(action, now))
            if isinstance(action, world_state.FormWorld):
                self._form(action, now)
            elif isinstance(action, world_state.BreakWorld):
                if self.world_spec is None or action.epoch != self.world_spec.epoch:
                    continue  # an older world: its nodes are told that it is over
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
            self._due.update(self.nodes)

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
        self.world_spec = self._met(spec)
        self._record_world()
        self._count_reports()
        self.broken_reason = self.pause = self.pause_target = None
        self.requested_nodes = 0

    def _record_world(self) -> None:
        if self.world_spec is not None:
            spec = self.world_spec
            self.world_record = WorldRecord(spec.epoch, spec.ranked_nodes, spec.requested_step, spec.incarnation_epoch)

    def _count_reports(self) -> None:
        """Of a world that is new here, from what was heard so far."""
        if self.world_spec is not None:
            self.progress = WorldProgress(self.world_spec)
            for node in self.world_spec.ranked_nodes:
                if (seen := self.nodes.get(node)) is not None:
                    self.progress.update(seen.status)

    def _count_spares(self, seen: NodeRecord) -> None:
        """Spares get warm while a world runs, too, and nothing follows from that but what they are good for."""
        member = self.world.members.get(seen.status.node)
        if member is not None and member.spares != seen.status.spares and not seen.commands:
            member = replace(member, spares=seen.status.spares)
            self.world = replace(self.world, members={**self.world.members, member.node: member})

    def _command(self, node: str, do: CommandKind, local_ranks: tuple[int, ...] = ()) -> None:
        self._numbers += 1
        if node in self.nodes:
            self.nodes[node].commands.append(NodeCommand(self._numbers, do, local_ranks))

    def _inject(self, injection: FaultInjection) -> None:
        """Every node hears of it: who has the rank that it is meant for may change until it happens.

        What a supervisor is to do at once is for the one that has the rank now, as only this desk knows.
        """
        self._numbers += 1
        nodes = self.nodes
        if injection.is_immediate and injection.kind in SUPERVISOR_KINDS:
            node, local_rank = injection.node, injection.local_rank
            if injection.rank is not None and self.world_spec is not None:
                place, local_rank = divmod(injection.rank, self.world.nproc)
                node = self.world_spec.ranked_nodes[place]
            injection = replace(injection, rank=None, node=node, local_rank=local_rank)
            nodes = {node: self.nodes[node]} if node in self.nodes else {}
        for seen in nodes.values():
            seen.commands.append(NodeCommand(self._numbers, CommandKind.INJECT, injection=injection))
        self._due.update(self.nodes)

    def _hear_requests(self, seen: NodeRecord, now: float) -> None:
        for request in seen.status.requests:
            if request.number > seen.requested:
                self._settle_undecided(now)
                seen.requested = request.number
                event = node_reports.requested_event(request, seen.status, now)
                if isinstance(event, world_state.ResizeRequested):
                    self._resize(event.nodes, event.reason, now)
                else:
                    self._take([event], now)

    def _resize(self, nodes: int | None, reason: str, now: float) -> None:
        self.size_request = SizeRequest(1 if self.size_request is None else self.size_request.number + 1, reason, nodes)
        before = self.pause
        self._take([world_state.ResizeRequested(nodes, reason)], now)
        if self.pause is not None and self.pause is not before:
            self.pause = replace(self.pause, reason=f"{reason}: {self.pause.reason}")
        self._due.update(self.nodes)

    # -- a step for all -----------------------------------------------------------------------------------------------

    def _agree(self) -> None:
        """The greatest step that any rank said, once all have said one."""
        if self.pause is None or self.pause_target is not None or self.progress is None:
            return
        self.pause_target = self.progress.pause_target
        if self.pause_target is not None:
            log.info("epoch %d: all stop after step %d", self.progress.epoch, self.pause_target)
            self._due.update(self.nodes)

    def _said_in(self, formed: WorldSpec) -> list[NodeStatus]:
        """What the nodes of this world say that know of it."""
        said = [seen.status for node in formed.ranked_nodes if (seen := self.nodes.get(node)) is not None]
        return [says for says in said if says.world is not None and says.world.epoch == formed.epoch]

    def _late(self, now: float) -> list[world_state.WorldEvent]:
        """Ranks that are behind when time is up are lost; those that only waited for them are not."""
        if self.pause is None or self.world_spec is None or now < self.pause.deadline_s:
            return []
        said = self._said_in(self.world_spec)
        return [
            world_state.RankLost(says.node, says.generation, says.spawn_count, local_rank, "it did not stop in time")
            for says in said
            for local_rank in says.lagging_ranks
        ]

    # -- who is not there ---------------------------------------------------------------------------------------------

    def is_superseded(self, status: NodeStatus) -> bool:
        """Whether its life is over: it was given up, or is in a world that this coordinator never heard of."""
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

    def _surpass(self, epoch: int, now: float) -> None:
        """Worlds have numbers above this one: a world that was thought to be the newest is not."""
        if epoch <= self.world.epoch:
            return
        self._settle_undecided(now)
        placed = next((member for member in self.world.members.values() if member.has_ranks), None)
        if self.world.phase.is_running and placed is not None:
            why = "there has been a newer world"
            self._take([world_state.RankFault(placed.node, placed.generation, self.world.epoch, 0, why)], now)
        wait_until_s = self.world.replacement_deadline_s or now + self.settings.policy.scaling_timeout_s
        self.world = replace(self.world, epoch=epoch, replacement_deadline_s=wait_until_s, next_tick_s=now)

    def _is_forgotten(self, seen: NodeRecord, now: float) -> bool:
        """It is gone, and not expected back."""
        return not seen.connected and seen.status.node not in self.world.members and not _is_to_leave(seen, now)

    def _silent(self, now: float) -> list[NodeRecord]:
        """Only those are looked at that can be: who was heard of last is behind who was heard of before."""
        found = []
        for node in self._connected:
            seen = self.nodes[node]
            if now - seen.last_heartbeat <= self.settings.heartbeat_timeout_s:
                break
            found.append(seen)
        found += [self.nodes[node] for node in self._cut_off]
        return [seen for seen in found if self._is_silent(seen, now)]

    def _is_silent(self, seen: NodeRecord, now: float) -> bool:
        if seen.status.node not in self.world.members:
            return False
        if seen.ended and not seen.connected:
            return True
        limit_s = self.settings.heartbeat_timeout_s if seen.connected else self.settings.reconnect_timeout_s
        return now - seen.last_heartbeat > limit_s

    def _lost(self, seen: NodeRecord, now: float) -> world_state.NodeLost:
        if seen.ended and not seen.connected:
            return world_state.NodeLost(seen.status.node, seen.status.generation, "its supervisor has ended")
        how = "has been silent" if seen.connected else "has been cut off"
        return world_state.NodeLost(
            seen.status.node, seen.status.generation, f"{how} for {now - seen.last_heartbeat:.1f} s"
        )

    # -- the store ----------------------------------------------------------------------------------------------------

    @property
    def is_rootless(self) -> bool:
        return self.settings.store == ROOTLESS

    def _met(self, formed: WorldSpec) -> WorldSpec:
        """With the stores that its ranks meet at, as soon as they are known."""
        if not self.is_rootless:
            return replace(formed, store=self._store())
        members = [self.nodes.get(node) for node in store_nodes(formed.epoch, formed.ranked_nodes)]
        stores = tuple(seen.status.store if seen is not None and seen.connected else "" for seen in members)
        return replace(formed, store=stores[0], stores=stores) if all(stores) else formed

    def _store(self) -> str:
        if self.settings.store:
            return self.settings.store
        keeper = self.nodes.get(self.store_node)
        return keeper.status.store if keeper is not None and keeper.connected else ""

    def _keep_store(self, now: float) -> None:
        """Some node keeps it; the ranks of a world that was formed while there was none are waiting for it."""
        if self.settings.store == "" and (keeper := self._best_keeper(now)) != self.store_node:
            self.store_node = keeper
            self._due.update(self.nodes)
        if self.world_spec is not None and not self.world_spec.store and (formed := self._met(self.world_spec)).store:
            self.world_spec = formed
            self._due.update(self.nodes)

    def _best_keeper(self, now: float) -> str:
        """The one there is, as long as it has a store, or is about to and nobody else has one."""
        keeper = self.nodes.get(self.store_node)
        is_there = keeper is not None and not self.is_superseded(keeper.status) and not self._is_silent(keeper, now)
        if is_there and keeper is not None and keeper.status.store:
            return self.store_node
        here = [node for node, seen in self.nodes.items() if seen.connected and not self.is_superseded(seen.status)]
        having = [node for node in here if self.nodes[node].status.store]
        if is_there and not having:
            return self.store_node
        placed = [node for node in here if self.progress is not None and node in self.progress.places]
        return next(iter((*having, *placed, *here)), "")

    # -- a coordinator that starts again ------------------------------------------------------------------------------

    def _gather(self, now: float) -> None:
        """Decide nothing before all nodes of the newest world have reported, or have had time to."""
        says = [seen.status for seen in self.nodes.values() if seen.connected]
        newest = max((one.world for one in says if one.world is not None), key=lambda one: one.epoch, default=None)
        here = {one.node for one in says}
        records = [one.newest_world for one in says if one.newest_world is not None]
        record = max(records, key=lambda one: one.epoch, default=None)
        if record is not None and newest is not None and record.epoch <= newest.epoch:
            record = None
        expected = set(() if newest is None else newest.ranked_nodes) | set(() if record is None else record.nodes)
        complete = here >= expected and (newest is not None or len(here) >= self.settings.policy.max_replicas)
        if says and self._gather_by is None:
            self._gather_by = now + self.settings.rejoin_timeout_s
        gather_by = self._gather_by
        if record is not None and gather_by is not None and here.isdisjoint(record.nodes):
            gather_by += max(0.0, self.settings.policy.lost_state_timeout_s - self.settings.rejoin_timeout_s)
            self._warn_state_lost(record, gather_by - now)
        if complete or (gather_by is not None and now >= gather_by):
            self.is_rejoining = False
            min_next_epoch = 0 if self.min_epoch >= 0 else self._epoch_clock()
            if record is not None:
                self.min_epoch = max(self.min_epoch, record.epoch)
            requested = self.settings.requested_step
            if (known := record or newest) is not None:
                requested = known.requested_step
            self._resume(says, newest, requested, min_next_epoch, now)

    def _warn_state_lost(self, record: WorldRecord, left_s: float) -> None:
        """Nobody who is here was in the newest world: say what is waited for, and in the end what is left behind."""
        names = shortened(record.nodes)
        if left_s <= 0:
            log.error(
                "no node of the newest world (epoch %d: %s) has answered in %g s: the job continues with what the "
                "other nodes have, and repeats the steps that only those nodes have",
                *(record.epoch, names, self.settings.policy.lost_state_timeout_s),
            )
        elif self._awaited != record:
            self._awaited = record
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
        self._do(actions, now)
        self._surpass(self.min_epoch, now)
        inside = [] if newest is None else [one for one in status if self._epoch_of(one) == newest.epoch]
        self._resume_pause([one.pause for one in inside if one.pause is not None], now)
        wishes = [one.size_request for one in status if one.size_request is not None]
        if wishes:
            self.size_request = max(wishes, key=lambda wish: wish.number)
            self._take([world_state.ResizeRequested(self.size_request.nodes, self.size_request.reason)], now)
        broken = [(one, one.broken_reason) for one in inside if one.broken_reason is not None]
        self._take(
            [world_state.RankFault(one.node, one.generation, self._epoch_of(one), 0, why) for one, why in broken], now
        )
        self._keep_store(now)
        events: list[world_state.WorldEvent] = []
        for one in status:  # it has joined already
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
        self._take(events, now)
        self._agree()
        self._due.update(self.nodes)

    def _resume_pause(self, pausing: list[PauseOrder], now: float) -> None:
        """What the ranks were told already still holds, also for those that were not told."""
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

    # -- what goes out ------------------------------------------------------------------------------------------------

    def nodes_to_notify(self) -> list[str]:
        """Nodes that are to be told something, since this was last asked; nobody while this desk is still listening."""
        if self.is_rejoining:
            return []
        due, self._due = sorted(self._due & self.nodes.keys()), set()
        return due


_NAMED = 4


def shortened(names: Sequence[str]) -> str:
    """The first few of many names."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _begun_again(before: NodeRecord | None, status: NodeStatus, now: float) -> NodeRecord:
    """A life's first report. A node that was preempted and was lost before it left is preempted still."""
    seen = NodeRecord(status, now)
    if before is not None and _is_to_leave(before, now):
        seen.drain_deadline, seen.drain_reason = before.drain_deadline, before.drain_reason
    return seen


def _is_to_leave(seen: NodeRecord, now: float) -> bool:
    """It was preempted, and has not said goodbye."""
    return seen.drain_deadline is not None and now < seen.drain_deadline and not seen.status.leave_reason
