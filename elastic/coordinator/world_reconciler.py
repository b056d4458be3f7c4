"""Control loop: node reports become events, decisions become each node's desired state. No I/O.

All state here can be derived from node reports: a restarted coordinator collects the reports of all nodes before it
decides anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from elastic.control.control_messages import (
    CoordinatorRequest,
    DrainRequest,
    InjectRequest,
    NodeStatus,
    ResizeRequest,
    SizeRequest,
    StatusRequest,
    StopJobRequest,
    SupervisorExited,
    WorldSpec,
)
from elastic.control.hang_detector import HangDetector, StepTimes
from elastic.coordinator import node_reports
from elastic.coordinator.formed_world import FormedWorld, StorePlacement
from elastic.coordinator.job_snapshot import CoordinatorSettings, JobOutcome, JobSnapshot
from elastic.coordinator.node_commands import CommandAction, NodeCommands
from elastic.coordinator.node_liveness import NodeLiveness, NodeRecord, is_member, is_superseded_generation
from elastic.coordinator.node_reports import LastCommittedStep
from elastic.coordinator.rejoin import CollectedReports, HolderWait, Rejoin
from elastic.coordinator.repeated_steps import RepeatedSteps
from elastic.world import world_state
from elastic.world.action_text import describe_action
from elastic.world.next_world import initial_world, next_world
from elastic.world.rebuilt_world import rebuild_world
from elastic.world.world_state import WorldPhase, WorldState
from peerstore.membership.topology import PeerNode
from peerstore.shard_records import EPOCHS_PER_WORLD, MAX_EPOCH_LEAD, clock_ms, next_epoch

log = logging.getLogger(__name__)
replace = msgspec.structs.replace
DecisionObserver = Callable[
    [JobSnapshot, WorldState, world_state.WorldEvent, Sequence[world_state.WorldAction], float], None
]


class WorldReconciler:
    """State of a job: node reports in, desired state out.

    ``min_epoch`` is the greatest recorded number of a world; a new world needs a greater one. A restarted coordinator
    without such an epoch numbers its first world by ``epoch_clock``. A silent node may be in a world with any earlier
    number. ``observer`` receives every decision and the world before it.
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
        policy = settings.policy
        self._settings, self._incarnation, self._observer = settings, incarnation, observer
        self._epoch_clock, self._min_epoch, self._term = epoch_clock, min_epoch, 0
        self._newest_epoch = newest_epoch
        """Greatest epoch of an incarnation that this coordinator has allocated or read in a report."""
        self._world = initial_world(policy, nproc=settings.nproc, now_s=now, requested_step=settings.requested_step)
        self._nodes = NodeLiveness(settings.heartbeat_timeout_s, settings.reconnect_timeout_s)
        self._rejoin = Rejoin(policy, settings.rejoin_timeout_s, is_active=not fresh)
        self._holder_wait = HolderWait(settings.holders, policy.lost_state_timeout_s)
        self._formed = FormedWorld()
        self._repeated_steps = RepeatedSteps()
        self._store = StorePlacement(settings.store)
        self._commands = NodeCommands()
        self._outcome = JobOutcome()
        self._size_request: SizeRequest | None = None
        self._requested_nodes = 0
        self._standby_peers: tuple[PeerNode, ...] = ()
        self._released: dict[str, world_state.ReleaseNode] = {}
        self._changed: set[str] = set()
        """Nodes whose desired state may have changed."""
        self._pending_events: list[world_state.WorldEvent] = []
        self._pending_nodes: set[str] = set()
        self._is_reconciled = True
        self._reported: WorldSpec | None = None
        self._step_times = StepTimes()
        self._hang_detector = HangDetector(pace=self._step_times)
        self._last_committed_step = LastCommittedStep()

    def snapshot(self) -> JobSnapshot:
        """Return the state of the job for readers."""
        formed = self._formed
        return JobSnapshot(
            settings=self._settings,
            incarnation=self._incarnation,
            term=self._term,
            is_rejoining=self._rejoin.is_active,
            world=self._world,
            nodes=MappingProxyType(self._nodes.records),
            world_spec=formed.spec,
            world_record=formed.record,
            ranked=formed.ranked,
            epoch_state=formed.epoch_state,
            size_request=self._size_request,
            requested_nodes=self._requested_nodes,
            standby_peers=self._standby_peers,
            released=MappingProxyType(self._released),
            store_node=self._store.node,
            is_rootless=self._store.is_rootless,
            outcome=self._outcome,
            last_committed_step=self._last_committed_step,
        )

    # -- reports and requests ------------------------------------------------------------------------------------------

    def record_status(self, status: NodeStatus, now: float) -> str:
        """Record a node's report and return why it is refused, or "".

        :meth:`reconcile` decides once on all reports that arrived together.
        """
        epoch = -1 if status.world is None else status.world.epoch
        if epoch > max(self._world.epoch, 0) + MAX_EPOCH_LEAD:
            return f"it refers to world {epoch}, and this job is in world {self._world.epoch}"
        known = self._nodes.records.get(status.node)
        if known is not None and known.status.generation > status.generation:
            return f"a newer supervisor runs as node {status.node}"
        self._learn_epoch(node_reports.newest_known_epoch(status))
        if status.node in self._pending_nodes:
            self.reconcile(now)
        record, before = self._nodes.record(status, now)
        if status.coordinator == self._incarnation:
            record.acknowledge(status.last_command)
        self._changed.add(status.node)
        self._is_reconciled = False
        if self._rejoin.is_active:
            return ""
        if status.peer != (None if before is None else before.peer):
            self._update_standby()
        if self._holder_wait.holds_back(status.node, self._nodes.records, self._world.epoch, now):
            return ""
        if self._formed.progress is not None:
            self._formed.progress.update(status)
        self._observe_repeated_steps(status)
        if not is_superseded_generation(self._world, status):
            self._raise_epoch(epoch, now)
            events = list(node_reports.events_between(before if is_member(self._world, status) else None, status, now))
            if events:
                self._pending_events += events
                self._pending_nodes.add(status.node)
            self._count_spares(record)
            self._handle_rank_requests(record, now)
        self._hang_detector.observe(before, status, now)
        return ""

    def reconcile(self, now: float) -> None:
        """Decide on the reports since the last call."""
        if self._is_reconciled:
            return
        self._is_reconciled = True
        if self._rejoin.is_active:
            self._collect_reports(now)
            return
        self._decide_pending(now)
        self._admit_held_back(now)
        self._place_store(now)
        self._set_pause_target()
        if self._formed.progress is not None:
            self._last_committed_step.observe(self._formed.progress)

    def interned(self, formed: WorldSpec) -> WorldSpec:
        """Return one shared object for equal worlds: all nodes report the same one to a restarted coordinator."""
        if self._formed.spec is not None and formed == self._formed.spec:
            return self._formed.spec
        if self._reported != formed:
            self._reported = formed
        return self._reported

    def later_generation(self, status: NodeStatus, now: float) -> int:
        """Return the greater generation of a disconnected supervisor of this node, or 0."""
        return self._nodes.later_generation(status, now)

    def connection_lost(self, node: str, generation: int, now: float) -> None:
        """Record that a node's connection has ended. The node may reconnect."""
        self._nodes.disconnect(node, generation, now)

    def handle_request(self, request: CoordinatorRequest, now: float) -> None:
        """Carry out a request that :func:`elastic.coordinator.desired_state.why_refused` accepts."""
        _REQUESTS[type(request)](self, request, now)

    def leads(self, term: int, min_epoch: int, newest_epoch: int) -> None:
        """Start to lead, before any decision. World numbers exceed ``min_epoch``, epochs ``newest_epoch``."""
        self._term, self._min_epoch = term, max(min_epoch, self._min_epoch)
        self._newest_epoch = max(newest_epoch, self._newest_epoch)

    def was_away(self, seconds: float, now: float) -> None:
        """Move drain deadlines by the seconds that this clock skipped: preemption does not wait for it."""
        if seconds <= 0:
            return
        self._nodes.advance_drains(seconds)
        leaving = {
            name: replace(member, drain_deadline_s=member.drain_deadline_s - seconds)
            for name, member in self._world.members.items()
            if member.drain_deadline_s is not None
        }
        if leaving:
            self._world = replace(self._world, members={**self._world.members, **leaving}, next_tick_s=now)

    def tick(self, now: float) -> None:
        """Decide on lost nodes, hangs and deadlines."""
        if self._rejoin.is_active:
            self._collect_reports(now)
            return
        self._admit_held_back(now)
        events: list[world_state.WorldEvent] = [*self._nodes.lost_nodes(self._world.members, now)]
        spec, hang = self._formed.spec, self._settings.hang
        runs = self._world.phase is WorldPhase.RUNNING
        if spec is not None and runs and self._hang_detector.is_check_due(hang, now):
            reports = {node: record.status for node, record in self._nodes.records.items()}
            events += self._hang_detector.find_hangs(spec, reports, hang, now)
        tick_s = self._world.next_tick_s
        if events or (tick_s is not None and tick_s <= now) or self._late_ranks(now):
            self._decide([*events, world_state.Tick()], now)
        self._place_store(now)
        for node in self._nodes.forget_departed(self._world.members, now):
            if self._formed.progress is not None:
                self._formed.progress.forget(node)

    def nodes_to_notify(self) -> list[str]:
        """Return the nodes whose desired state changed since the last call. Empty while reports are collected."""
        if self._rejoin.is_active:
            return []
        due, self._changed = sorted(self._changed & self._nodes.records.keys()), set()
        return due

    def _resize(self, request: ResizeRequest | world_state.ResizeRequested, now: float) -> None:
        number = 1 if self._size_request is None else self._size_request.number + 1
        self._size_request = SizeRequest(number, request.reason, request.nodes)
        before = self._formed.epoch_state.pause
        self._decide([world_state.ResizeRequested(request.nodes, request.reason)], now)
        if self._formed.epoch_state.pause is not before:
            self._formed.name_requester(request.reason)
        self._notify_all()

    def _inject(self, request: InjectRequest, now: float) -> None:
        self._commands.inject(request.injection, self._nodes.records, self._formed.spec, self._world.nproc)
        self._notify_all()

    def _stop(self, request: StopJobRequest, now: float) -> None:
        until = None if request.deadline_s is None else now + request.deadline_s
        self._decide([world_state.JobStopRequested(request.reason, until)], now)

    def _supervisor_exited(self, request: SupervisorExited, now: float) -> None:
        if request.node in self._nodes.records:
            self._nodes.records[request.node].ended = True

    def _drain(self, request: DrainRequest, now: float) -> None:
        until = now + request.deadline_s
        self._nodes.drain(request.nodes, until, request.reason)
        self._decide([world_state.NodesPreempted(request.nodes, until, request.reason)], now)

    def _report_only(self, request: StatusRequest, now: float) -> None:
        pass

    def _observe_repeated_steps(self, status: NodeStatus) -> None:
        if self._formed.spec is not None:
            self._repeated_steps.observe(status, self._formed.spec)

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _notify_all(self) -> None:
        self._changed.update(self._nodes.records)

    def _late_ranks(self, now: float) -> list[world_state.RankLost]:
        return self._formed.late_ranks(self._nodes, now)

    def _decide_pending(self, now: float) -> None:
        events, self._pending_events = self._pending_events, []
        self._pending_nodes.clear()
        self._decide(events, now)

    def _decide(self, events: Sequence[world_state.WorldEvent], now: float) -> None:
        events = [*self._formed.sealed_events(self._world), *self._late_ranks(now), *events]
        if not events or self._outcome.exit is not None:
            return
        event = events[0] if len(events) == 1 else world_state.EventBatch(tuple(events))
        before = self._world
        self._world, actions = next_world(before, event, self._settings.policy, now)
        requested_step_is_sealed = before.requested_step is not None and self._world.requested_step is None
        if requested_step_is_sealed and self._formed.forget_requested_step():
            self._notify_all()
        if self._world.members is not before.members or self._world.epoch != before.epoch:
            self._update_standby()
        self._apply(actions, now)
        if self._observer is not None:
            self._observer(self.snapshot(), before, event, actions, now)

    def _apply(self, actions: Sequence[world_state.WorldAction], now: float) -> None:
        for action in actions:
            log.info("%s", describe_action(action, now))
            _ACTIONS[type(action)](self, action, now)
        if actions:
            self._notify_all()

    def _form(self, form: world_state.FormWorld, now: float) -> None:
        self._newest_epoch = next_epoch(self._newest_epoch, self._epoch_clock(), reserved=EPOCHS_PER_WORLD)
        self._hang_detector = HangDetector(now, self._step_times)
        spec = WorldSpec(
            form.epoch,
            form.nodes,
            form.restarts,
            form.reason,
            hang_s=self._settings.hang.longest_s(self._step_times),
            resume_from=form.resume_from,
            requested_step=form.requested_step,
            incarnation_epoch=self._newest_epoch,
            reached=self._formed.reached,
        )
        self._store.place(self._nodes, self._world, spec.ranked_nodes, now)  # the node of the last one may be released
        spec = self._store.with_stores(spec, self._nodes.records)
        self._formed.form(spec, self._nodes.reports_of(spec))
        self._requested_nodes = 0

    def _break(self, action: world_state.BreakWorld, now: float) -> None:
        self._formed.break_up(action.epoch, action.reason, now + action.within_s)

    def _begin_pause(self, action: world_state.PauseWorld, now: float) -> None:
        self._formed.pause(action)

    def _command(self, action: CommandAction, now: float) -> None:
        self._commands.add(action, self._nodes.records)

    def _release(self, action: world_state.ReleaseNode, now: float) -> None:
        self._released[action.node] = action

    def _request_nodes(self, action: world_state.RequestNodes, now: float) -> None:
        self._requested_nodes = action.nodes

    def _end(self, action: world_state.FinishJob | world_state.StopJob | world_state.FailJob, now: float) -> None:
        self._outcome = JobOutcome.of(action)

    def _update_standby(self) -> None:
        def peer_of(node: str) -> PeerNode | None:
            record = self._nodes.records.get(node)
            return None if record is None else record.status.peer

        before, self._standby_peers = self._standby_peers, node_reports.standby_peers(self._world, peer_of)
        if self._standby_peers != before:
            self._changed.update(self._world.ranked_nodes)

    def _learn_epoch(self, epoch: int) -> None:
        if epoch <= max(self._newest_epoch, self._epoch_clock()) + MAX_EPOCH_LEAD:
            self._newest_epoch = max(self._newest_epoch, epoch)

    def _raise_epoch(self, epoch: int, now: float) -> None:
        """Raise the world's number to ``epoch``. A current world with a lower number breaks."""
        if epoch <= self._world.epoch:
            return
        self._decide_pending(now)
        placed = next((member for member in self._world.members.values() if member.has_ranks), None)
        if self._world.phase.is_running and placed is not None:
            why = "there has been a newer world"
            self._decide([world_state.RankFault(placed.node, placed.generation, self._world.epoch, 0, why)], now)
        wait_until_s = self._world.replacement_deadline_s or now + self._settings.policy.scaling_timeout_s
        self._world = replace(self._world, epoch=epoch, replacement_deadline_s=wait_until_s, next_tick_s=now)

    def _admit_held_back(self, now: float) -> None:
        """Let nodes join that waited for the newest step."""
        admitted = self._holder_wait.admitted(self._nodes.records, self._world.epoch, now)
        if admitted:
            self._decide([event for one in admitted for event in node_reports.events_between(None, one, now)], now)

    def _count_spares(self, record: NodeRecord) -> None:
        """Record the number of a node's spares. Spares become ready during a world too, and need no decision."""
        member = self._world.members.get(record.status.node)
        if member is not None and member.spares != record.status.spares and not record.commands:
            member = replace(member, spares=record.status.spares)
            self._world = replace(self._world, members={**self._world.members, member.node: member})

    def _handle_rank_requests(self, record: NodeRecord, now: float) -> None:
        for request in record.status.requests:
            if request.number > record.requested:
                self._decide_pending(now)
                record.requested = request.number
                event = node_reports.requested_event(request, record.status, now)
                if isinstance(event, world_state.ResizeRequested):
                    self._resize(event, now)
                else:
                    self._decide([event], now)

    def _set_pause_target(self) -> None:
        if self._formed.agree_on_target():
            self._notify_all()

    def _place_store(self, now: float) -> None:
        """Choose the node of the store, and complete a world whose ranks wait for the store's address."""
        if self._store.place(self._nodes, self._world, self._formed.ranked, now):
            self._notify_all()
        spec = self._formed.spec
        if spec is not None and not spec.store and (spec := self._store.with_stores(spec, self._nodes.records)).store:
            self._formed.spec = spec
            self._notify_all()

    # -- a restarted coordinator ---------------------------------------------------------------------------------------

    def _collect_reports(self, now: float) -> None:
        """Resume once all nodes of the newest world have reported, or their time to do so has passed."""
        collected = self._rejoin.collect(self._nodes.reports(), now)
        if collected is not None:
            self._resume(collected, now)

    def _resume(self, collected: CollectedReports, now: float) -> None:
        min_next_epoch = 0 if self._min_epoch >= 0 else self._epoch_clock()
        reports, newest, lost_world = collected.reports, collected.newest, collected.lost_world
        if lost_world is not None:
            self._min_epoch = max(self._min_epoch, lost_world.epoch)
        known = lost_world or newest
        if newest is not None:
            self._formed.form(newest, self._nodes.reports_of(newest))
        self._world, actions = rebuild_world(
            [node_reports.rejoin_report(one) for one in reports],
            self._settings.policy,
            nproc=self._settings.nproc,
            now_s=now,
            requested_step=self._settings.requested_step if known is None else known.requested_step,
            resume_from=None if newest is None else node_reports.named_step(newest, reports),
            min_next_epoch=min_next_epoch,
        )
        self._hang_detector = HangDetector(now, self._step_times)
        self._update_standby()
        self._apply(actions, now)
        self._raise_epoch(self._min_epoch, now)
        self._world = self._formed.resume_pause(collected.inside(), self._world, now)
        wishes = [one.size_request for one in reports if one.size_request is not None]
        if wishes:
            self._size_request = max(wishes, key=lambda wish: wish.number)
            self._decide([world_state.ResizeRequested(self._size_request.nodes, self._size_request.reason)], now)
        self._decide(collected.faults(), now)
        self._place_store(now)
        self._decide(collected.events(now), now)
        for status in reports:
            self._observe_repeated_steps(status)
        self._set_pause_target()
        self._notify_all()


_REQUESTS: dict[type, Callable[[WorldReconciler, Any, float], None]] = {
    ResizeRequest: WorldReconciler._resize,
    InjectRequest: WorldReconciler._inject,
    StopJobRequest: WorldReconciler._stop,
    SupervisorExited: WorldReconciler._supervisor_exited,
    DrainRequest: WorldReconciler._drain,
    StatusRequest: WorldReconciler._report_only,
}

_ACTIONS: dict[type, Callable[[WorldReconciler, Any, float], None]] = {
    world_state.FormWorld: WorldReconciler._form,
    world_state.BreakWorld: WorldReconciler._break,
    world_state.PauseWorld: WorldReconciler._begin_pause,
    world_state.RespawnRanks: WorldReconciler._command,
    world_state.PromoteSpare: WorldReconciler._command,
    world_state.RespawnStragglers: WorldReconciler._command,
    world_state.ReleaseNode: WorldReconciler._release,
    world_state.RequestNodes: WorldReconciler._request_nodes,
    world_state.FinishJob: WorldReconciler._end,
    world_state.StopJob: WorldReconciler._end,
    world_state.FailJob: WorldReconciler._end,
}
