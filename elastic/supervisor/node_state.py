"""A supervisor's local ranks and spares: processes to start or end, messages to ranks and coordinator. Pure.

A node has ``nproc`` seats, one for each rank, and warm spares beside them. What ranks say and the coordinator orders
goes in; which processes are to be started and ended comes out, and :mod:`~elastic.supervisor.node_state` says who hears
what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from elastic.control.control_messages import (
    CommandKind,
    ExitReason,
    NodeCommand,
    NodeDesired,
    NodeStatus,
    PauseOrder,
    RankDesired,
    RankFailure,
    RankPhase,
    RankRequest,
    RankStatus,
    SizeRequest,
    WorldRecord,
    WorldSpec,
)
from elastic.control.control_plane import ControlNotice, NoticeKind, RankAssignment, RankProgress
from elastic.fault_injection.fault_spec import SUPERVISOR_KINDS, FaultInjection
from elastic.world.world_state import SealedStep
from peerstore.membership.topology import PeerNode

_SPARE_TRIES = 3
"""Spares that end before they are warm are started again so often."""
_SPARE_WAIT_S = 30.0
"""A spare that was used is replaced after so long at the latest."""
_MUTE_S = 10.0
"""A process that has said nothing for so long is stopped, or something in it keeps the interpreter's lock: it says
something every second from a thread of its own."""
EXIT_S = 1.0
"""Seconds that a process that is to be ended has for the stacks of its threads. Then it is killed, and counts as lost.
"""
_INJECTIONS = 100
"""So many are told to ranks, the newest ones."""


class StartProcess(NamedTuple):
    """A process is to be started."""

    token: str
    attempt: int
    local_rank: int | None


class EndProcess(NamedTuple):
    """A process is to be ended at once."""

    token: str
    why: str = ""
    """The reason to log; empty for none."""
    stacks: bool = False
    """Whether it is to write the stacks of its threads first."""


class PartitionNode(NamedTuple):
    """This node is to be cut off for a while, on purpose."""

    seconds: float


class OfferMemory(NamedTuple):
    """Make this node's agent accept replicas of the world that the node is not in."""


class InjectFault(NamedTuple):
    """A fault is to happen that a supervisor can bring about."""

    injection: FaultInjection


SupervisorEffect = StartProcess | EndProcess | PartitionNode | OfferMemory | InjectFault


@dataclass
class RankProcess:
    token: str
    attempt: int
    local_rank: int | None
    formed_epoch: int = -1
    """The newest world that was formed while it was in its seat."""
    assigned_epoch: int = -1
    """The newest world it was given a place in: that one, once the store is there."""
    status: RankStatus | None = None
    last_heartbeat: float | None = None
    connected: bool = False
    """Whether it has ever connected to the supervisor."""
    never_joined: bool = False
    """It exited by itself and never connected."""
    exit_description: str | None = None
    """Why it is no more."""
    ended_at: float | None = None
    """When, by the clock on the wall, where that is known."""
    end_reason: str = ""
    """Why the supervisor ends it; "" if it does not."""
    end_by: float | None = None
    """When it counts as lost, if it has not ended before."""
    requested: int = 0
    first_step: tuple[int, int] | None = None
    """The newest world it stepped in, and the least number of steps it said there."""
    stepped_epoch: int = -1
    """The newest world in which it completed a step."""

    @property
    def is_ready(self) -> bool:
        says = self.status
        return (
            self.exit_description is None
            and says is not None
            and says.phase is RankPhase.READY
            and says.epoch == self.formed_epoch
        )

    def silent_s(self, now: float) -> float:
        """Since when nothing was heard of it, where it was to say something."""
        return (
            0.0
            if self.last_heartbeat is None or self.exit_description is not None
            else max(0.0, now - self.last_heartbeat)
        )

    def is_mute(self, now: float) -> bool:
        return self.silent_s(now) > _MUTE_S

    def status_in(self, epoch: int) -> RankStatus | None:
        """What it says, where that is about this world."""
        return self.status if self.status is not None and self.status.epoch == epoch == self.assigned_epoch else None

    def note_steps(self, status: RankStatus) -> None:
        if status.progress is None or status.epoch != self.assigned_epoch:
            return
        step = status.progress.step
        if self.first_step is None or self.first_step[0] != status.epoch or step < self.first_step[1]:
            self.first_step = status.epoch, step
        elif step > self.first_step[1]:
            self.stepped_epoch = status.epoch

    @property
    def is_inside(self) -> bool:
        """Whether it is in a world, or on its way out of one."""
        if self.exit_description is not None or self.assigned_epoch < 0:
            return False
        return self.status_in(self.assigned_epoch) is not None and not self.is_ready

    def end_description(self, reason: str, location: str) -> str:
        """Why it was ended, with its stage of leaving and the location of its main thread."""
        stage = None if self.status is None else self.status.leave_stage
        known = "no stage reported" if stage is None else f"stage: {stage.value}"
        return f"{self.end_reason} ({known}{'; ' if location else ''}{location}): {reason}"

    def may_exit(self, *, broken: bool, stopping: bool) -> bool:
        """Whether it has nothing more to do, so that it may end."""
        says = self.status
        if says is None or broken:
            return False
        if says.phase is RankPhase.FINISHED and says.epoch == self.assigned_epoch:
            return True
        return stopping and says.sealed is not None


@dataclass
class NodeState:
    node: str
    nproc: int
    new_token: Callable[[], str]
    new_generation: Callable[[], int]
    wanted_spares: int = 0
    generation: int = 0
    effects: list[SupervisorEffect] = field(default_factory=list)
    processes: dict[str, RankProcess] = field(default_factory=dict)
    """Those in seats and the spares; who is to end is not among them any more."""
    spawn_count: int = 0
    attempts: int = 0
    wasted_spares: int = 0
    refill_by: float | None = None
    """By when the spares that were used are to be replaced."""
    world: WorldSpec | None = None
    newest_world: WorldRecord | None = None
    """The newest world of those that this node was not in."""
    broken_reason: str | None = None
    leave_world_by: float | None = None
    """When the ranks must have left the broken world."""
    leave_world_s: float = 0.0
    """Seconds that they had for it."""
    pause: PauseOrder | None = None
    pause_until: float | None = None
    pause_target: int | None = None
    size_request: SizeRequest | None = None
    exit: ExitReason | None = None
    reason: str = ""
    sealed_step: SealedStep | None = None
    """The step that the ranks sealed before the job stopped, or before this node was released."""
    leave_reason: str = ""
    drain_deadline: float | None = None
    drain_reason: str = ""
    coordinator: str = ""
    leader: tuple[int, str] = (0, "")
    """The latest term in which a coordinator was obeyed, and which one: in a term there is no other."""
    last_command: int = 0
    acknowledged: int = 0
    number: int = 0
    requests: list[tuple[int, RankRequest]] = field(default_factory=list)
    """What ranks asked for, with the number of the message that first said it."""
    requested: int = 0
    coordinator_unreachable: bool = False
    store: str = ""
    run_store: bool = False
    injections: tuple[FaultInjection, ...] = ()
    """Faults that are to happen in ranks."""
    partitions: int = 0
    """How often this node was cut off on purpose."""
    offers_memory: bool = False
    """Whether the agent was made to accept replicas of the job."""
    peer: PeerNode | None = None
    """The agent, if it accepts them."""
    standby: tuple[PeerNode, ...] = ()
    """Agents of nodes outside the world that accept replicas of its steps."""

    # -- from the machine ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Processes for every seat, and the spares."""
        self.generation = self.new_generation()
        for local_rank in range(self.nproc):
            self._fill_local_rank(local_rank)
        self._refill()

    def process_connected(self, token: str) -> None:
        if token in self.processes:
            self.processes[token].connected = True

    def never_joins(self, token: str, exit_status: int) -> bool:
        """Return whether a process that exited so never connected. A process that a signal killed may have been about
        to.
        """
        process = self.processes.get(token)
        is_unknown = process is not None and not process.connected and process.exit_description is None
        return is_unknown and exit_status >= 0 and self.exit is None

    def process_exited(
        self, token: str, reason: str, at: float | None = None, *, never_joined: bool = False, location: str = ""
    ) -> str:
        """Record the end of a process, wanted or not. ``location``: where its main thread was.

        Return why it is no more, or ``reason`` if that is known by now.
        """
        process = self.processes.get(token)
        if process is None or process.exit_description is not None:
            return reason
        if location and not process.end_reason:  # its own deadline has ended it
            process.end_reason = self._late(process)
        if process.end_reason:
            reason = process.end_description(reason, location)
        was_warm = process.is_ready
        process.exit_description, process.ended_at, process.never_joined = reason, at, never_joined
        if process.local_rank is None:
            del self.processes[token]
            self.wasted_spares += _SPARE_TRIES if never_joined else not was_warm
            self._refill()
        return reason

    def connection_closed(self, token: str, at: float | None = None) -> None:
        """A rank closed its connection, and its process may still be there."""
        process = self.processes.get(token)
        if process is None or process.exit_description is not None or self.exit is not None:
            return
        if not self.may_exit(process):
            self.effects.append(EndProcess(token))
            self.process_exited(token, "it closed its connection before it had finished", at)

    def may_exit(self, process: RankProcess) -> bool:
        stopping = self.pause is not None and self.pause.stop
        return process.may_exit(broken=self.broken_reason is not None, stopping=stopping)

    def drain(self, until: float, reason: str) -> None:
        """This machine goes away; of two deadlines the earlier one holds."""
        self.drain_deadline = until if self.drain_deadline is None else min(until, self.drain_deadline)
        self.drain_reason = self.drain_reason or reason

    def was_away(self, seconds: float) -> None:
        """Time that the clock here does not count: this machine goes when it was to all the same."""
        if self.drain_deadline is not None:
            self.drain_deadline -= seconds

    # -- from ranks ---------------------------------------------------------------------------------------------------

    def handle_rank_status(self, token: str, status: RankStatus, now: float) -> None:
        process = self.processes.get(token)
        if process is None or process.exit_description is not None:
            return
        process.status, process.last_heartbeat = status, now
        process.note_steps(status)
        for request in status.requests:
            if request.number > process.requested:
                process.requested = request.number
                self._request(request, now)

    def _request(self, request: RankRequest, now: float) -> None:
        if request.partition_s is not None:
            self.partition(request.partition_s)
        elif request.kind is NoticeKind.RESIZE and request.nodes is None and request.deadline_s is not None:
            self.drain(now + request.deadline_s, request.reason)
        else:
            self.requested += 1
            numbered = msgspec.structs.replace(request, number=self.requested)
            self.requests.append((self.number + 1, numbered))

    # -- from the coordinator -----------------------------------------------------------------------------------------

    def obeys(self, orders: NodeDesired) -> bool:
        """Whether who says this leads the job, as far as is known here. Else nothing of it counts."""
        leader = (orders.term, orders.coordinator)
        if orders.term < self.leader[0] or (orders.term == self.leader[0] > 0 and leader != self.leader):
            return False
        self.leader = leader
        return True

    def apply_desired(self, orders: NodeDesired, now: float) -> None:
        """What a coordinator says that is obeyed."""
        if orders.generation != self.generation:
            return
        if orders.coordinator != self.coordinator:
            self.coordinator, self.last_command = orders.coordinator, 0
        self.acknowledged = orders.acknowledged
        self.requests = [(number, one) for number, one in self.requests if number > orders.acknowledged]
        self.size_request = orders.size_request or self.size_request
        self.run_store = orders.run_store
        self.standby = orders.standby
        if orders.offer_memory and not self.offers_memory:
            self.offers_memory = True
            self.effects.append(OfferMemory())
        told, known = orders.newest_world, self.newest_world
        if told is not None and (known is None or told.epoch >= known.epoch):
            self.newest_world = told
        if orders.drain_within_s is not None and self.drain_deadline is None:
            self.drain(now + orders.drain_within_s, orders.reason)
        self._form(orders, now)
        for command in orders.commands:
            if command.number > self.last_command:
                self.last_command = command.number
                self._carry_out(command, now)
        if self.refill_by is None and self._lacking_spares() > 0:
            self.refill_by = now + _SPARE_WAIT_S
        if self.exit is None:
            self.sealed_step = orders.sealed_step
        if orders.exit is not None:
            self.finish(orders.exit, orders.reason)
        elif orders.release_reason is not None and self.exit is None:
            self._release(orders.release_reason, cut=orders.force)

    def begin_generation(self) -> None:
        """It was given up for lost: its ranks leave the world they are in, and come back with it as a new node."""
        self.generation = self.new_generation()
        self.spawn_count = sum(process.local_rank is not None for process in self.processes.values())
        if self.world is not None and self.broken_reason is None:
            self.broken_reason = "this node was given up for lost"
        self.pause = self.pause_until = self.pause_target = None
        self.coordinator, self.last_command = "", 0

    def _form(self, orders: NodeDesired, now: float) -> None:
        formed = orders.world
        if formed is not None and self.node in formed.ranked_nodes:
            known = self.world.epoch if self.world is not None else -1
            if formed.epoch > known:
                self.broken_reason = self.pause = self.pause_until = self.pause_target = self.leave_world_by = None
                for process in self.rank_processes():
                    process.formed_epoch = formed.epoch
            if formed.epoch >= known:
                self.world = formed
                self._give(formed)
        if self.world is None:
            return
        if orders.broken_reason is not None and formed is not None and formed.epoch == self.world.epoch:
            if self.broken_reason is None and orders.broken_s is not None:
                self.leave_world_by, self.leave_world_s = now + orders.broken_s, orders.broken_s
            self.broken_reason = orders.broken_reason
            for process in self.rank_processes():
                process.formed_epoch = process.assigned_epoch  # who still waited for the store was never in it
        if orders.pause is not None and orders.pause.epoch == self.world.epoch:
            self.pause, self.pause_until = orders.pause, now + orders.pause.within_s
        if formed is not None and formed.epoch == self.world.epoch and orders.pause_target is not None:
            self.pause_target = orders.pause_target

    def _give(self, formed: WorldSpec) -> None:
        if formed.store and self.broken_reason is None:
            for process in self.rank_processes():
                process.assigned_epoch = process.formed_epoch

    def _carry_out(self, command: NodeCommand, now: float) -> None:
        if self.exit is not None:
            return
        if command.injection is not None:
            self._inject(command.injection)
            return
        if command.kind is CommandKind.STRAGGLERS:
            for process in self.rank_processes():
                if not process.is_ready and process.local_rank is not None:
                    if process.exit_description is None:
                        why = (
                            f"local rank {process.local_rank} is not ready in time: its process is killed and replaced"
                        )
                        self.effects.append(EndProcess(process.token, why, stacks=True))
                        process.exit_description = why
                    self._fill_local_rank(process.local_rank)
        for local_rank in command.local_ranks:
            self._fill_local_rank(local_rank, self.warm_spares(now) if command.kind is CommandKind.PROMOTE else ())

    def _inject(self, injection: FaultInjection) -> None:
        if injection.is_immediate and injection.kind in SUPERVISOR_KINDS:
            self.effects.append(InjectFault(injection))
        else:
            self.injections = (*self.injections, injection)[-_INJECTIONS:]

    def partition(self, seconds: float) -> None:
        """Have this node cut off for a while."""
        self.partitions += 1
        self.effects.append(PartitionNode(seconds))

    def rank_of(self, local_rank: int) -> int:
        """Its place in the newest world that this node was told of, or -1."""
        return -1 if self.world is None else self.world.ranked_nodes.index(self.node) * self.nproc + local_rank

    def _release(self, reason: str, *, cut: bool) -> None:
        if cut:
            for token in list(self.processes):
                self._drop(token)
        self.leave(reason)

    def leave(self, reason: str) -> None:
        """Leave the job, which continues without this node if it can."""
        if self.exit is None:
            self.leave_reason = reason
            self.finish(ExitReason.DISMISSED, reason)

    def finish(self, over: ExitReason, reason: str) -> None:
        """Nothing further happens on this node."""
        if self.exit is None:
            self.exit, self.reason = over, reason

    # -- processes ----------------------------------------------------------------------------------------------------

    def rank_processes(self) -> list[RankProcess]:
        return [process for process in self.processes.values() if process.local_rank is not None]

    def spares(self) -> list[RankProcess]:
        return [process for process in self.processes.values() if process.local_rank is None]

    def warm_spares(self, now: float) -> list[RankProcess]:
        """Those that could take a seat at once: one that is stopped could not."""
        return [process for process in self.spares() if process.is_ready and not process.is_mute(now)]

    def _fill_local_rank(self, local_rank: int, warm_spares: Sequence[RankProcess] = ()) -> None:
        for process in [one for one in self.rank_processes() if one.local_rank == local_rank]:
            self._drop(process.token, stacks=self.broken_reason is not None and process.is_inside)
        self.spawn_count += 1
        if warm_spares:
            warm_spares[0].local_rank = local_rank
        else:
            self._start(local_rank)

    def _start(self, local_rank: int | None) -> None:
        self.attempts += 1
        token = self.new_token()
        self.processes[token] = RankProcess(token, self.attempts, local_rank)
        self.effects.append(StartProcess(token, self.attempts, local_rank))

    def _drop(self, token: str, *, stacks: bool = False) -> None:
        process = self.processes.pop(token)
        if process.exit_description is None:
            why = f"{self._named(process)} is replaced: {self.broken_reason}" if stacks else ""
            self.effects.append(EndProcess(token, why, stacks=stacks))

    def _refill(self) -> None:
        for _ in range(self._lacking_spares()):
            self._start(None)

    def _lacking_spares(self) -> int:
        given_up = self.exit is not None or self.wasted_spares >= _SPARE_TRIES
        return 0 if given_up else self.wanted_spares - len(self.spares())

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._end_late(now)
        self.refill_spares(now)

    def _end_late(self, now: float) -> None:
        """End processes that have not left the broken world in time, or that are silent in it."""
        if self.broken_reason is None or self.exit is not None:
            return
        is_over = self.leave_world_by is not None and now >= self.leave_world_by
        for process in self.rank_processes():
            if process.exit_description is not None:
                continue
            if process.end_by is not None:
                if now >= process.end_by:
                    self.process_exited(process.token, "it did not end by itself and was killed")
                continue
            if is_over and process.is_inside:
                process.end_reason = self._late(process)
            elif process.is_mute(now):
                silent_s = process.silent_s(now)
                named, epoch = self._named(process), process.assigned_epoch
                process.end_reason = f"{named} has not left broken epoch {epoch} and sent nothing for {silent_s:.0f} s"
            if process.end_reason:
                process.end_by = now + EXIT_S
                self.effects.append(EndProcess(process.token, process.end_reason, stacks=True))

    def _late(self, process: RankProcess) -> str:
        epoch, limit_s = process.assigned_epoch, self.leave_world_s
        return f"{self._named(process)} did not leave epoch {epoch} within {limit_s:.0f} s"

    def is_leaving(self, token: str) -> bool:
        """Return whether the process has a broken world to leave, and knows of it."""
        process = self.processes.get(token)
        if process is None or process.status is None or self.broken_reason is None:
            return False
        return process.is_inside and process.status.leave_stage is not None

    def _named(self, process: RankProcess) -> str:
        return f"rank {self.rank_of(process.local_rank or 0)}"

    def next_due(self) -> float | None:
        """When :meth:`tick` has something to do next, as far as that is known."""
        if self.broken_reason is None or self.exit is not None:
            return None
        alive = [one for one in self.rank_processes() if one.exit_description is None]
        times = [one.end_by for one in alive]
        if any(one.is_inside and not one.end_reason for one in alive):
            times.append(self.leave_world_by)
        return min((when for when in times if when is not None), default=None)

    def refill_spares(self, now: float) -> None:
        """A spare that was used is replaced once the ranks have gone on: until then they want the cores that starting
        and importing takes, and nobody could be warm before they are through.
        """
        if self.refill_by is not None and (now >= self.refill_by or self._are_under_way()):
            self.refill_by = None
            self._refill()

    def _are_under_way(self) -> bool:
        return self.world is not None and all(one.stepped_epoch == self.world.epoch for one in self.rank_processes())

    def take_effects(self) -> list[SupervisorEffect]:
        """What is to be done with processes, since this was last asked."""
        due, self.effects = self.effects, []
        return due


replace = msgspec.structs.replace


def rank_desired(state: NodeState, token: str, now: float) -> RankDesired:
    """What the process with this token is to know."""
    hears = _for_rank(state, token, now)
    if not state.injections and not state.partitions:
        return hears
    return replace(hears, injections=state.injections, partitions=state.partitions)


def _for_rank(state: NodeState, token: str, now: float) -> RankDesired:
    process = state.processes.get(token)
    if process is None:
        return RankDesired(exit=ExitReason.REFUSED, reason="another process has this rank's seat")
    heard = process.status.number if process.status is not None else 0
    if state.exit is not None:
        return RankDesired(
            heard, exit=state.exit, reason=state.reason, coordinator_unreachable=state.coordinator_unreachable
        )
    formed, local_rank = state.world, process.local_rank
    if formed is None or local_rank is None or process.assigned_epoch < formed.epoch:
        return RankDesired(heard, coordinator_unreachable=state.coordinator_unreachable)
    place = formed.ranked_nodes.index(state.node)
    assignment = RankAssignment(
        epoch=formed.epoch,
        rank=place * state.nproc + local_rank,
        world_size=len(formed.ranked_nodes) * state.nproc,
        local_rank=local_rank,
        local_world_size=state.nproc,
        node_rank=place,
        node_count=len(formed.ranked_nodes),
        store=formed.store,
        restarts=formed.restarts,
        reason=formed.reason,
        stores=formed.stores,
        hang_s=formed.hang_s,
        resume_from=formed.resume_from,
        requested_step=formed.requested_step,
        incarnation_epoch=formed.incarnation_epoch,
    )
    return RankDesired(
        heard,
        assignment,
        _notice(state, formed.epoch, now),
        state.pause_target,
        coordinator_unreachable=state.coordinator_unreachable,
        standby=state.standby,
    )


def _notice(state: NodeState, epoch: int, now: float) -> ControlNotice | None:
    if state.broken_reason is not None:
        by = state.leave_world_by
        return ControlNotice(epoch, NoticeKind.RESTART, state.broken_reason, None if by is None else max(0.0, by - now))
    pausing = _pausing(state, now)
    if pausing is None:
        return None
    return ControlNotice(
        epoch, NoticeKind.STOP if pausing.stop else NoticeKind.RESIZE, pausing.reason, pausing.within_s
    )


def _pausing(state: NodeState, now: float) -> PauseOrder | None:
    if state.pause is None or state.pause_until is None:
        return None
    return replace(state.pause, within_s=max(0.0, state.pause_until - now))


def node_status(state: NodeState, now: float) -> NodeStatus:
    """All there is to say of this node; who sends it counts :attr:`NodeState.number` up."""
    ordered = sorted(state.rank_processes(), key=lambda process: process.local_rank or 0)
    assigned = ordered if state.exit is None else []
    epoch = state.world.epoch if state.world is not None else -1
    said = [process.status_in(epoch) for process in assigned]
    here = [one for one in said if one is not None]
    inside = [one for one in here if one.phase is not RankPhase.FINISHED]
    whole = bool(assigned) and len(here) == len(assigned)
    return NodeStatus(
        number=state.number + 1,
        node=state.node,
        generation=state.generation,
        local_ranks=state.nproc,
        spawn_count=state.spawn_count,
        spares=len(state.warm_spares(now)),
        world=state.world,
        newest_world=_later(state.newest_world, state.world),
        broken_reason=state.broken_reason,
        pause=_pausing(state, now),
        size_request=state.size_request,
        ready=bool(assigned) and all(process.is_ready for process in assigned),
        paused=_greatest(one.paused for one in inside) if whole else None,
        sealed=_greatest(one.sealed for one in inside) if whole else None,
        checkpoint=_same(one.checkpoint for one in inside) if whole else None,
        finished=whole and not inside,
        lagging_ranks=tuple(
            process.local_rank or 0
            for process, one in zip(assigned, said, strict=True)
            if state.pause is not None and (one is None or _is_behind(one, agreed=state.pause_target is not None))
        ),
        exited_ranks=tuple(
            RankFailure(
                process.local_rank or 0,
                process.exit_description,
                never_joined=process.never_joined,
                ended_at=process.ended_at,
            )
            for process in assigned
            if process.exit_description is not None and not state.may_exit(process)
        ),
        faulty_ranks=tuple(
            RankFailure(process.local_rank or 0, fault, final=one.final, position=one.position)
            for process, one in zip(assigned, said, strict=True)
            if one is not None and (fault := _fault(one, broken=state.broken_reason is not None)) is not None
        ),
        rank_progress=tuple(process.status.progress if process.status is not None else None for process in ordered),
        silent_s=tuple(process.silent_s(now) for process in assigned),
        requests=tuple(request for _, request in state.requests),
        drain_within_s=None if state.drain_deadline is None else max(0.0, state.drain_deadline - now),
        drain_reason=state.drain_reason,
        leave_reason=state.leave_reason,
        coordinator=state.coordinator,
        last_command=state.last_command,
        store=state.store,
        term=state.leader[0],
        leader=state.leader[1],
        peer=state.peer,
    )


def _greatest(steps: Iterable[int | None]) -> int | None:
    """The greatest step, once all have said one."""
    said = list(steps)
    known = [step for step in said if step is not None]
    return max(known) if said and len(known) == len(said) else None


def _later(record: WorldRecord | None, own: WorldSpec | None) -> WorldRecord | None:
    return None if record is None or (own is not None and record.epoch <= own.epoch) else record


def _same(checkpoints: Iterable[SealedStep | None]) -> SealedStep | None:
    """The one that all name."""
    named = set(checkpoints)
    return named.pop() if len(named) == 1 else None


def _is_behind(status: RankStatus, *, agreed: bool) -> bool:
    if status.phase is RankPhase.FINISHED:
        return False
    return (status.sealed if agreed else status.paused) is None


def _fault(status: RankStatus, *, broken: bool) -> str | None:
    if status.fault is None and not broken and status.phase is RankPhase.READY and status.sealed is None:
        return "it came back without being asked"
    return status.fault


def comparable_rank_desired(hears: RankDesired) -> RankDesired:
    """Without what changes by itself: two that are equal say the same."""
    if hears.notice is None or hears.notice.deadline_s is None:
        return hears
    return replace(hears, notice=replace(hears.notice, deadline_s=0.0))


def comparable_node_status(status: NodeStatus) -> NodeStatus:
    """The same of what the coordinator is told."""
    return replace(
        status,
        number=0,
        rank_progress=tuple(
            RankProgress(-1, has_sealed=one is not None and one.has_sealed) for one in status.rank_progress
        ),
        silent_s=(),
        drain_within_s=None if status.drain_within_s is None else 0.0,
        pause=None if status.pause is None else replace(status.pause, within_s=0.0),
    )
