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
    WorldSpec,
)
from elastic.control.hang_detector import HangDetector, HangTimeouts, StepTimes
from elastic.coordinator import node_reports
from elastic.coordinator.node_reports import LastCommittedStep, WorldProgress
from elastic.fault_injection.fault_spec import SUPERVISOR_KINDS, FaultInjection
from elastic.rendezvous.store_servers import ROOTLESS, store_nodes
from elastic.world import world_state
from elastic.world.next_world import initial_world, next_world, rebuild_world
from elastic.world.scaling_policy import ScalingPolicy
from elastic.world.world_state import WorldPhase, WorldState
from peerstore.shard_records import MAX_EPOCH_LEAD

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
    dead_after_s: float = 10.0
    """How long a node may be silent."""
    return_s: float = 2.0
    """How long a supervisor whose connection has ended may take to come back."""
    gather_s: float = 5.0
    """How long a coordinator that starts again waits for other nodes, from the first one on that it hears of."""
    hang: HangTimeouts = field(default_factory=HangTimeouts)


@dataclass
class NodeRecord:
    """A node as it was last heard of."""

    says: NodeStatus
    heard_at: float
    connected: bool = True
    commands: list[NodeCommand] = field(default_factory=list)
    requested: int = 0
    leave_by: float | None = None
    leave_reason: str = ""
    ended: bool = False
    """Its supervisor was seen to end: when its connection has, too, it is not waited for."""


class WorldReconciler:
    """``floor`` is an epoch that no world may have any more, as far as is known from before.

    ``witness`` is told of every decision, with the world before it.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        *,
        incarnation: str,
        now: float,
        fresh: bool,
        floor: int = -1,
        witness: DecisionObserver | None = None,
    ) -> None:
        self.settings = settings
        self._witness = witness
        self.incarnation = incarnation
        self.world: WorldState = initial_world(settings.policy, nproc=settings.nproc, now_s=now)
        self.floor = floor
        self.term = 0
        """In which its coordinator leads, where any machine's may."""
        self.nodes: dict[str, NodeRecord] = {}
        self.formed: WorldSpec | None = None
        self.broken: str | None = None
        self.leave_until = 0.0
        """When the ranks of the broken world must have left it."""
        self.pause: world_state.PauseWorld | None = None
        self.target: int | None = None
        self.over: ExitReason | None = None
        self.reason = ""
        self.wish: SizeRequest | None = None
        self.wanted = 0
        self.released: dict[str, world_state.ReleaseNode] = {}
        self.keeper = ""
        self.gathering = not fresh
        self._gather_by: float | None = None
        self._due: set[str] = set()
        self._numbers = 0
        self.state: WorldProgress | None = None
        """What the nodes of :attr:`formed` have said in all."""
        self._undecided: list[world_state.WorldEvent] = []
        self._undecided_of: set[str] = set()
        self._is_concluded = True
        self._reported: WorldSpec | None = None
        self._connected: OrderedDict[str, None] = OrderedDict()
        """Nodes whose connection is there, who was heard of longest ago first."""
        self._cut_off: set[str] = set()
        """The others."""
        self.pace = StepTimes()
        self.movement = HangDetector(pace=self.pace)
        self.whole = LastCommittedStep()

    # -- what comes in ------------------------------------------------------------------------------------------------

    def said(self, says: NodeStatus, now: float) -> str:
        """A node's report, and what follows from it. The answer is why it is refused, or ""."""
        refused = self.hear(says, now)
        self.conclude(now)
        return refused

    def hear(self, says: NodeStatus, now: float) -> str:
        """A node's report; what came in together is decided on together, by ``conclude``."""
        if self._epoch_of(says) > max(self.world.epoch, 0) + MAX_EPOCH_LEAD:
            return f"it speaks of world {self._epoch_of(says)}, and this job is in world {self.world.epoch}"
        seen = self.nodes.get(says.node)
        if seen is not None and seen.says.life > says.life:
            return f"a newer supervisor runs as node {says.node}"
        if says.node in self._undecided_of:
            self.conclude(now)
        before = seen.says if seen is not None and seen.says.life == says.life else None
        if seen is None or before is None:
            seen = self.nodes[says.node] = _begun_again(seen, says, now)
        seen.says, seen.heard_at, seen.connected = says, now, True
        self._connected[says.node] = None
        self._connected.move_to_end(says.node)
        self._cut_off.discard(says.node)
        if says.coordinator == self.incarnation and seen.commands:
            seen.commands = [command for command in seen.commands if command.number > says.done]
        self._due.add(says.node)
        self._is_concluded = False
        if self.gathering:
            return ""
        if self.state is not None:
            self.state.said(says)
        if not self.is_past(says):
            self._surpass(self._epoch_of(says), now)
            events = list(node_reports.events_between(before if self._is_member(says) else None, says, now))
            if events:
                self._undecided += events
                self._undecided_of.add(says.node)
            self._count_spares(seen)
            self._hear_requests(seen, now)
        self.movement.said(before, says, now)
        return ""

    def conclude(self, now: float) -> None:
        """Decide on what was heard since the last time."""
        if self._is_concluded:
            return
        self._is_concluded = True
        if self.gathering:
            self._gather(now)
            return
        self._settle_undecided(now)
        self._keep_store(now)
        self._agree()
        if self.state is not None:
            self.whole.said(self.state)

    def shared(self, formed: WorldSpec) -> WorldSpec:
        """The one to keep of equal worlds: a coordinator that starts again hears the same one from all its nodes."""
        if self.formed is not None and formed == self.formed:
            return self.formed
        if self._reported != formed:
            self._reported = formed
        return self._reported

    def life_before(self, says: NodeStatus, now: float) -> int:
        """The later life, by the clock it had, of a supervisor that has gone; 0 where there is none, or it is there."""
        seen = self.nodes.get(says.node)
        if seen is None or seen.says.life <= says.life:
            return 0
        is_there = seen.connected and now - seen.heard_at <= self.settings.return_s
        return 0 if is_there else seen.says.life

    def gone(self, node: str, life: int, now: float) -> None:
        """A node's connection has ended; it may come back."""
        seen = self.nodes.get(node)
        if seen is not None and seen.says.life == life:
            seen.connected, seen.heard_at = False, now
            self._connected.pop(node, None)
            self._cut_off.add(node)

    def asked(self, question: CoordinatorRequest, now: float) -> None:
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
                self.nodes[node].leave_by, self.nodes[node].leave_reason = until, question.reason
            self._take([world_state.NodesPreempted(question.nodes, until, question.reason)], now)

    def leads(self, term: int, floor: int) -> None:
        """From now on, and nothing has been decided yet: no world may have a number up to ``floor``."""
        self.term, self.floor = term, max(floor, self.floor)

    def was_away(self, seconds: float, now: float) -> None:
        """Time that the clock here does not count: a machine that is asked back goes when it was to all the same."""
        if seconds <= 0:
            return
        for seen in self.nodes.values():
            if seen.leave_by is not None:
                seen.leave_by -= seconds
        leaving = {
            name: replace(member, leave_by_s=member.leave_by_s - seconds)
            for name, member in self.world.members.items()
            if member.leave_by_s is not None
        }
        if leaving:
            self.world = replace(self.world, members={**self.world.members, **leaving}, tick_s=now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self.gathering:
            self._gather(now)
            return
        events: list[world_state.WorldEvent] = [self._lost(seen, now) for seen in self._silent(now)]
        runs = self.formed is not None and self.world.phase is WorldPhase.RUNNING
        if self.formed is not None and runs and self.movement.is_to_be_looked_at(self.settings.hang, now):
            reports = {node: seen.says for node, seen in self.nodes.items()}
            events += self.movement.hangs(self.formed, reports, self.settings.hang, now)
        tick_s = self.world.tick_s
        if events or (tick_s is not None and tick_s <= now) or self._late(now):
            self._take([*events, world_state.Tick()], now)
        self._keep_store(now)
        for node in [node for node in self._cut_off if self._is_forgotten(self.nodes[node], now)]:
            del self.nodes[node]
            self._cut_off.remove(node)
            if self.state is not None:
                self.state.forget(node)

    def _settle_undecided(self, now: float) -> None:
        events, self._undecided = self._undecided, []
        self._undecided_of.clear()
        self._take(events, now)

    # -- what follows -------------------------------------------------------------------------------------------------

    def _take(self, events: list[world_state.WorldEvent], now: float) -> None:
        events = [*self._late(now), *events]
        if not events or self.over is not None:
            return
        event = events[0] if len(events) == 1 else world_state.EventBatch(tuple(events))
        before = self.world
        self.world, actions = next_world(before, event, self.settings.policy, now)
        self._do(actions, now)
        if self._witness is not None:
            self._witness(self, before, event, actions, now)

    def _do(self, actions: Sequence[world_state.WorldAction], now: float) -> None:
        for action in actions:
            log.info("%s", action)
            if isinstance(action, world_state.FormWorld):
                self._form(action, now)
            elif isinstance(action, world_state.BreakWorld):
                self.broken, self.pause, self.target = action.reason, None, None
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
                self.wanted = action.nodes
            elif isinstance(action, world_state.FinishJob):
                self.over, self.reason = ExitReason.FINISHED, "all ranks have finished"
            elif isinstance(action, world_state.StopJob):
                self.over, self.reason = ExitReason.STOPPED, action.reason
            else:
                self.over, self.reason = ExitReason.GAVE_UP, action.reason
        if actions:
            self._due.update(self.nodes)

    def _form(self, form: world_state.FormWorld, now: float) -> None:
        self.movement = HangDetector(now, self.pace)
        hang_s = self.settings.hang.longest_s(self.pace)
        self.formed = self._met(WorldSpec(form.epoch, form.nodes, form.restarts, form.reason, hang_s=hang_s))
        self._count_reports()
        self.broken = self.pause = self.target = None
        self.wanted = 0

    def _count_reports(self) -> None:
        """Of a world that is new here, from what was heard so far."""
        if self.formed is not None:
            self.state = WorldProgress(self.formed)
            for node in self.formed.places:
                if (seen := self.nodes.get(node)) is not None:
                    self.state.said(seen.says)

    def _count_spares(self, seen: NodeRecord) -> None:
        """Spares get warm while a world runs, too, and nothing follows from that but what they are good for."""
        member = self.world.members.get(seen.says.node)
        if member is not None and member.spares != seen.says.spares and not seen.commands:
            member = replace(member, spares=seen.says.spares)
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
        if injection.is_at_once and injection.kind in SUPERVISOR_KINDS:
            node, local_rank = injection.node, injection.local_rank
            if injection.rank is not None and self.formed is not None:
                place, local_rank = divmod(injection.rank, self.world.nproc)
                node = self.formed.places[place]
            injection = replace(injection, rank=None, node=node, local_rank=local_rank)
            nodes = {node: self.nodes[node]} if node in self.nodes else {}
        for seen in nodes.values():
            seen.commands.append(NodeCommand(self._numbers, CommandKind.INJECT, injection=injection))
        self._due.update(self.nodes)

    def _hear_requests(self, seen: NodeRecord, now: float) -> None:
        for request in seen.says.requests:
            if request.number > seen.requested:
                self._settle_undecided(now)
                seen.requested = request.number
                event = node_reports.requested_event(request, seen.says, now)
                if isinstance(event, world_state.ResizeRequested):
                    self._resize(event.nodes, event.reason, now)
                else:
                    self._take([event], now)

    def _resize(self, nodes: int | None, reason: str, now: float) -> None:
        self.wish = SizeRequest(1 if self.wish is None else self.wish.number + 1, reason, nodes)
        before = self.pause
        self._take([world_state.ResizeRequested(nodes, reason)], now)
        if self.pause is not None and self.pause is not before:
            self.pause = replace(self.pause, reason=f"{reason}: {self.pause.reason}")
        self._due.update(self.nodes)

    # -- a step for all -----------------------------------------------------------------------------------------------

    def _agree(self) -> None:
        """The greatest step that any rank said, once all have said one."""
        if self.pause is None or self.target is not None or self.state is None:
            return
        self.target = self.state.target
        if self.target is not None:
            log.info("epoch %d: all stop after step %d", self.state.epoch, self.target)
            self._due.update(self.nodes)

    def _said_in(self, formed: WorldSpec) -> list[NodeStatus]:
        """What the nodes of this world say that know of it."""
        said = [seen.says for node in formed.places if (seen := self.nodes.get(node)) is not None]
        return [says for says in said if says.formed is not None and says.formed.epoch == formed.epoch]

    def _late(self, now: float) -> list[world_state.WorldEvent]:
        """Ranks that are behind when time is up are lost; those that only waited for them are not."""
        if self.pause is None or self.formed is None or now < self.pause.deadline_s:
            return []
        said = self._said_in(self.formed)
        return [
            world_state.RankLost(says.node, says.life, says.births, local_rank, "it did not stop in time")
            for says in said
            for local_rank in says.behind
        ]

    # -- who is not there ---------------------------------------------------------------------------------------------

    def is_past(self, says: NodeStatus) -> bool:
        """Whether its life is over: it was given up, or is in a world that this coordinator never heard of."""
        if self.world.gone.get(says.node, -1) >= says.life:
            return True
        inside = says.formed is not None and says.broken is None
        return inside and not self._is_member(says) and not self.gathering

    def _is_member(self, says: NodeStatus) -> bool:
        member = self.world.members.get(says.node)
        return member is not None and member.life == says.life

    @staticmethod
    def _epoch_of(says: NodeStatus) -> int:
        return -1 if says.formed is None else says.formed.epoch

    def _surpass(self, epoch: int, now: float) -> None:
        """Worlds have numbers above this one: a world that was thought to be the newest is not."""
        if epoch <= self.world.epoch:
            return
        self._settle_undecided(now)
        placed = next((member for member in self.world.members.values() if member.placed), None)
        if self.world.phase.alive and placed is not None:
            why = "there has been a newer world"
            self._take([world_state.RankFault(placed.node, placed.life, self.world.epoch, 0, why)], now)
        wait_until_s = self.world.wait_until_s or now + self.settings.policy.scaling_timeout_s
        self.world = replace(self.world, epoch=epoch, wait_until_s=wait_until_s, tick_s=now)

    def _is_forgotten(self, seen: NodeRecord, now: float) -> bool:
        """It is gone, and not expected back."""
        return not seen.connected and seen.says.node not in self.world.members and not _is_to_leave(seen, now)

    def _silent(self, now: float) -> list[NodeRecord]:
        """Only those are looked at that can be: who was heard of last is behind who was heard of before."""
        found = []
        for node in self._connected:
            seen = self.nodes[node]
            if now - seen.heard_at <= self.settings.dead_after_s:
                break
            found.append(seen)
        found += [self.nodes[node] for node in self._cut_off]
        return [seen for seen in found if self._is_silent(seen, now)]

    def _is_silent(self, seen: NodeRecord, now: float) -> bool:
        if seen.says.node not in self.world.members:
            return False
        if seen.ended and not seen.connected:
            return True
        limit_s = self.settings.dead_after_s if seen.connected else self.settings.return_s
        return now - seen.heard_at > limit_s

    def _lost(self, seen: NodeRecord, now: float) -> world_state.NodeLost:
        if seen.ended and not seen.connected:
            return world_state.NodeLost(seen.says.node, seen.says.life, "its supervisor has ended")
        how = "has been silent" if seen.connected else "has been cut off"
        return world_state.NodeLost(seen.says.node, seen.says.life, f"{how} for {now - seen.heard_at:.1f} s")

    # -- the store ----------------------------------------------------------------------------------------------------

    @property
    def is_rootless(self) -> bool:
        return self.settings.store == ROOTLESS

    def _met(self, formed: WorldSpec) -> WorldSpec:
        """With the stores that its ranks meet at, as soon as they are known."""
        if not self.is_rootless:
            return replace(formed, store=self._store())
        members = [self.nodes.get(node) for node in store_nodes(formed.epoch, formed.places)]
        stores = tuple(seen.says.store if seen is not None and seen.connected else "" for seen in members)
        return replace(formed, store=stores[0], stores=stores) if all(stores) else formed

    def _store(self) -> str:
        if self.settings.store:
            return self.settings.store
        keeper = self.nodes.get(self.keeper)
        return keeper.says.store if keeper is not None and keeper.connected else ""

    def _keep_store(self, now: float) -> None:
        """Some node keeps it; the ranks of a world that was formed while there was none are waiting for it."""
        if self.settings.store == "" and (keeper := self._best_keeper(now)) != self.keeper:
            self.keeper = keeper
            self._due.update(self.nodes)
        if self.formed is not None and not self.formed.store and (formed := self._met(self.formed)).store:
            self.formed = formed
            self._due.update(self.nodes)

    def _best_keeper(self, now: float) -> str:
        """The one there is, as long as it has a store, or is about to and nobody else has one."""
        keeper = self.nodes.get(self.keeper)
        is_there = keeper is not None and not self.is_past(keeper.says) and not self._is_silent(keeper, now)
        if is_there and keeper is not None and keeper.says.store:
            return self.keeper
        here = [node for node, seen in self.nodes.items() if seen.connected and not self.is_past(seen.says)]
        having = [node for node in here if self.nodes[node].says.store]
        if is_there and not having:
            return self.keeper
        placed = [node for node in here if self.state is not None and node in self.state.places]
        return next(iter((*having, *placed, *here)), "")

    # -- a coordinator that starts again ------------------------------------------------------------------------------

    def _gather(self, now: float) -> None:
        """Decide nothing before all nodes of the newest world have reported, or have had time to."""
        says = [seen.says for seen in self.nodes.values() if seen.connected]
        newest = max((one.formed for one in says if one.formed is not None), key=lambda one: one.epoch, default=None)
        here = {one.node for one in says}
        expected = set() if newest is None else set(newest.places)
        complete = here >= expected and (newest is not None or len(here) >= self.settings.policy.max_replicas)
        if says and self._gather_by is None:
            self._gather_by = now + self.settings.gather_s
        if complete or (self._gather_by is not None and now >= self._gather_by):
            self.gathering = False
            self._resume(says, newest, now)

    def _resume(self, says: list[NodeStatus], newest: WorldSpec | None, now: float) -> None:
        policy = self.settings.policy
        reports = [node_reports.rejoin_report(one) for one in says]
        self.formed = newest
        self._count_reports()
        self.world, actions = rebuild_world(reports, policy, nproc=self.settings.nproc, now_s=now)
        self.movement = HangDetector(now, self.pace)
        self._do(actions, now)
        self._surpass(self.floor, now)
        inside = [] if newest is None else [one for one in says if self._epoch_of(one) == newest.epoch]
        self._resume_pause([one.pausing for one in inside if one.pausing is not None], now)
        wishes = [one.wish for one in says if one.wish is not None]
        if wishes:
            self.wish = max(wishes, key=lambda wish: wish.number)
            self._take([world_state.ResizeRequested(self.wish.nodes, self.wish.reason)], now)
        broken = [(one, one.broken) for one in inside if one.broken is not None]
        self._take([world_state.RankFault(one.node, one.life, self._epoch_of(one), 0, why) for one, why in broken], now)
        self._keep_store(now)
        events: list[world_state.WorldEvent] = []
        for one in says:  # it has joined already
            said_before = replace(one, sealed=None, finished=False, ready=False, leaving_s=None, lost=(), faults=())
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
            phase=WorldPhase.CHANGING,
            reason=asked.reason,
            pause_until_s=until,
            stopping=asked.stop,
            tick_s=until if self.world.tick_s is None else min(until, self.world.tick_s),
        )

    # -- what goes out ------------------------------------------------------------------------------------------------

    def due(self) -> list[str]:
        """Nodes that are to be told something, since this was last asked; nobody while this desk is still listening."""
        if self.gathering:
            return []
        due, self._due = sorted(self._due & self.nodes.keys()), set()
        return due


def _begun_again(before: NodeRecord | None, says: NodeStatus, now: float) -> NodeRecord:
    """A life's first report. A node that was asked back and was lost before it left is asked back still."""
    seen = NodeRecord(says, now)
    if before is not None and _is_to_leave(before, now):
        seen.leave_by, seen.leave_reason = before.leave_by, before.leave_reason
    return seen


def _is_to_leave(seen: NodeRecord, now: float) -> bool:
    """It was asked back, and has not said goodbye."""
    return seen.leave_by is not None and now < seen.leave_by and not seen.says.goodbye
