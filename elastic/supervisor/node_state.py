"""A supervisor's local ranks and spares: processes to start or end, messages to send. Pure.

A node has ``nproc`` local ranks, and warm spares. :class:`NodeState` turns rank reports and
the coordinator's orders into effects: processes to start and to end. :func:`rank_desired` and :func:`node_status` build
the messages to a rank and to the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from elastic.control.control_messages import (
    CommandKind,
    ExitReason,
    NodeCommand,
    NodeDesired,
    RankPhase,
    RankRequest,
    RankStatus,
    SizeRequest,
    WorldRecord,
    WorldSpec,
)
from elastic.control.control_plane import NoticeKind
from elastic.control.epoch_state import EpochState
from elastic.fault_injection.fault_spec import SUPERVISOR_KINDS, FaultInjection
from elastic.world.world_state import SealedStep
from peerstore.membership.topology import PeerNode

replace = msgspec.structs.replace

_SPARE_TRIES = 3
"""Spares that may exit before they are warm. After that many, the node starts no more spares."""
_SPARE_WAIT_S = 30.0
"""Longest delay in seconds before a used spare is replaced."""
_MUTE_S = 10.0
"""Seconds without a report after which a process counts as mute.

A thread of each process reports every second, unless the process is stopped or native code in it holds the GIL."""
EXIT_S = 1.0
"""Seconds that a process may take to write its stacks. Then it is killed and counts as lost."""
_INJECTIONS = 100
"""Number of the newest injections that are sent to ranks."""


class StartProcess(NamedTuple):
    """Start a process; a spare if ``local_rank`` is ``None``."""

    token: str
    attempt: int
    local_rank: int | None


class EndProcess(NamedTuple):
    """End a process at once."""

    token: str
    why: str = ""
    """Reason to log, or "" to log nothing."""
    stacks: bool = False
    """Whether the process must write the stacks of its threads first."""


class PartitionNode(NamedTuple):
    """Disconnect this node from all others for ``seconds``, as an injected fault."""

    seconds: float


class OfferMemory(NamedTuple):
    """Let this node's agent accept replicas, although the node is outside the world."""


class InjectFault(NamedTuple):
    """Inject a fault from the supervisor."""

    injection: FaultInjection


SupervisorEffect = StartProcess | EndProcess | PartitionNode | OfferMemory | InjectFault


@dataclass
class RankProcess:
    token: str
    attempt: int
    local_rank: int | None
    formed_epoch: int = -1
    """Epoch of the newest world that was formed while the process had its local rank, or -1."""
    assigned_epoch: int = -1
    """Epoch of the newest world of the process, or -1. Set once the store of that world is known."""
    status: RankStatus | None = None
    last_heartbeat: float | None = None
    connected: bool = False
    """Whether the process has ever connected to the supervisor."""
    never_joined: bool = False
    """Whether the process exited without a signal and had never connected."""
    exit_description: str | None = None
    """Why the process ended, or ``None`` while it runs."""
    ended_at: float | None = None
    """Wall-clock time of the exit, or ``None`` if unknown."""
    end_reason: str = ""
    """Why the supervisor ends the process, or ""."""
    end_by: float | None = None
    """Time at which a process that the supervisor ends counts as lost, or ``None``."""
    requested: int = 0
    first_step: tuple[int, int] | None = None
    """Epoch of the newest world with a progress report, and the least step reported in it."""
    stepped_epoch: int = -1
    """Epoch of the newest world in which the process completed a step, or -1."""

    @property
    def is_ready(self) -> bool:
        status = self.status
        return (
            self.exit_description is None
            and status is not None
            and status.phase is RankPhase.READY
            and status.epoch == self.formed_epoch
        )

    def silent_s(self, now: float) -> float:
        """Return the seconds since the last report of a running process, or 0 before its first one."""
        return (
            0.0
            if self.last_heartbeat is None or self.exit_description is not None
            else max(0.0, now - self.last_heartbeat)
        )

    def is_mute(self, now: float) -> bool:
        return self.silent_s(now) > _MUTE_S

    def status_in(self, epoch: int) -> RankStatus | None:
        """Return the process's report if it is about the world of ``epoch``, its assigned one."""
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
        """Whether the process is in a world, or is leaving one."""
        if self.exit_description is not None or self.assigned_epoch < 0:
            return False
        return self.status_in(self.assigned_epoch) is not None and not self.is_ready

    def end_description(self, reason: str, location: str) -> str:
        """Return why the process was ended, with its stage of leaving and the location of its main thread."""
        stage = None if self.status is None else self.status.leave_stage
        reported = "no stage reported" if stage is None else f"stage: {stage.value}"
        return f"{self.end_reason} ({reported}{'; ' if location else ''}{location}): {reason}"

    def may_exit(self, *, broken: bool, stopping: bool) -> bool:
        """Return whether the process has no work left, so that it may exit."""
        status = self.status
        if status is None or broken:
            return False
        if status.phase is RankPhase.FINISHED and status.epoch == self.assigned_epoch:
            return True
        return stopping and status.sealed is not None


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
    """Ranks and spares by token, without replaced processes."""
    spawn_count: int = 0
    attempts: int = 0
    wasted_spares: int = 0
    refill_by: float | None = None
    """Time by which used spares must be replaced, or ``None``."""
    world: WorldSpec | None = None
    newest_world: WorldRecord | None = None
    """The newest known world without this node."""
    epoch_state: EpochState = field(default_factory=EpochState)
    """State of the epoch of :attr:`world`."""
    leave_world_s: float = 0.0
    """Seconds that the ranks may take to leave the broken world, for messages."""
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
    """Term and name of the newest coordinator that this node obeyed. A term has one coordinator."""
    last_command: int = 0
    acknowledged: int = 0
    number: int = 0
    requests: list[tuple[int, RankRequest]] = field(default_factory=list)
    """Requests of ranks, each with the number of the first message that carries it."""
    requested: int = 0
    coordinator_unreachable: bool = False
    store: str = ""
    run_store: bool = False
    injections: tuple[FaultInjection, ...] = ()
    """Faults to inject in ranks."""
    partitions: int = 0
    """Number of injected partitions of this node."""
    offers_memory: bool = False
    """Whether an :class:`OfferMemory` effect was emitted."""
    peer: PeerNode | None = None
    """This node's agent, if it accepts replicas of the job."""
    standby: tuple[PeerNode, ...] = ()
    """Agents of nodes outside the world that accept replicas of its steps."""

    # -- from the machine ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a process for every local rank, and the spares."""
        self.generation = self.new_generation()
        for local_rank in range(self.nproc):
            self._fill_local_rank(local_rank)
        self._start_spares()

    def process_connected(self, token: str) -> None:
        if token in self.processes:
            self.processes[token].connected = True

    def never_joins(self, token: str, exit_status: int) -> bool:
        """Return whether a process that exited with ``exit_status`` never joined the job.

        A process that a signal killed does not count: it may have been about to connect.
        """
        process = self.processes.get(token)
        is_unknown = process is not None and not process.connected and process.exit_description is None
        return is_unknown and exit_status >= 0 and self.exit is None

    def process_exited(
        self, token: str, reason: str, at: float | None = None, *, never_joined: bool = False, location: str = ""
    ) -> str:
        """Record the exit of a process, and return the reason as recorded.

        ``location`` is where its main thread was, or "". If the exit is recorded already or the process was replaced,
        return ``reason`` unchanged.
        """
        process = self.processes.get(token)
        if process is None or process.exit_description is not None:
            return reason
        if location and not process.end_reason:  # the process reached the deadline first and ended itself
            process.end_reason = self._late_reason(process)
        if process.end_reason:
            reason = process.end_description(reason, location)
        was_warm = process.is_ready
        process.exit_description, process.ended_at, process.never_joined = reason, at, never_joined
        if process.local_rank is None:
            del self.processes[token]
            self.wasted_spares += _SPARE_TRIES if never_joined else not was_warm
            self._start_spares()
        return reason

    def connection_closed(self, token: str, at: float | None = None) -> None:
        """End the process of a closed connection, if it still runs and has work left."""
        process = self.processes.get(token)
        if process is None or process.exit_description is not None or self.exit is not None:
            return
        if not self.may_exit(process):
            self.effects.append(EndProcess(token))
            self.process_exited(token, "it closed its connection before it had finished", at)

    def may_exit(self, process: RankProcess) -> bool:
        return process.may_exit(broken=self.epoch_state.is_broken, stopping=self.epoch_state.is_stopping)

    def drain(self, until: float, reason: str) -> None:
        """Drain this node until ``until``. Of two deadlines, the earlier one holds."""
        self.drain_deadline = until if self.drain_deadline is None else min(until, self.drain_deadline)
        self.drain_reason = self.drain_reason or reason

    def was_away(self, seconds: float) -> None:
        """Move the drain deadline by ``seconds`` that the clock skipped: the machine's deadline is fixed."""
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
                self._add_request(request, now)

    def _add_request(self, request: RankRequest, now: float) -> None:
        if request.partition_s is not None:
            self.partition(request.partition_s)
        elif request.kind is NoticeKind.RESIZE and request.nodes is None and request.deadline_s is not None:
            self.drain(now + request.deadline_s, request.reason)
        else:
            self.requested += 1
            numbered = replace(request, number=self.requested)
            self.requests.append((self.number + 1, numbered))

    # -- from the coordinator -----------------------------------------------------------------------------------------

    def obeys(self, orders: NodeDesired) -> bool:
        """Return whether the sender of ``orders`` leads the job as far as this node knows, and remember it.

        The caller must discard orders that this rejects.
        """
        leader = (orders.term, orders.coordinator)
        if orders.term < self.leader[0] or (orders.term == self.leader[0] > 0 and leader != self.leader):
            return False
        self.leader = leader
        return True

    def apply_desired(self, orders: NodeDesired, now: float) -> None:
        """Apply orders that :meth:`obeys` accepted, unless they are for another generation."""
        if orders.generation != self.generation:
            return
        if orders.coordinator != self.coordinator:
            self.coordinator, self.last_command = orders.coordinator, 0
        self.acknowledged = orders.acknowledged
        self.requests = [(number, request) for number, request in self.requests if number > orders.acknowledged]
        self.size_request = orders.size_request or self.size_request
        self.run_store = orders.run_store
        self.standby = orders.standby
        if orders.offer_memory and not self.offers_memory:
            self.offers_memory = True
            self.effects.append(OfferMemory())
        newest, known = orders.newest_world, self.newest_world
        if newest is not None and (known is None or newest.epoch >= known.epoch):
            self.newest_world = newest
        if orders.drain_within_s is not None and self.drain_deadline is None:
            self.drain(now + orders.drain_within_s, orders.reason)
        self._form(orders, now)
        for command in orders.commands:
            if command.number > self.last_command:
                self.last_command = command.number
                self._run_command(command, now)
        if self.refill_by is None and self._missing_spares() > 0:
            self.refill_by = now + _SPARE_WAIT_S
        if self.exit is None:
            self.sealed_step = orders.sealed_step
        if orders.exit is not None:
            self.finish(orders.exit, orders.reason)
        elif orders.release_reason is not None and self.exit is None:
            self._release(orders.release_reason, cut=orders.force)

    def begin_generation(self) -> None:
        """Begin a new generation, after the coordinator counted this node as lost.

        The ranks leave their world, and the node joins the job as a new one.
        """
        self.generation = self.new_generation()
        self.spawn_count = sum(process.local_rank is not None for process in self.processes.values())
        if self.world is not None:
            self.epoch_state = self.epoch_state.change(NoticeKind.RESTART, "this node was given up for lost")
        self.epoch_state = self.epoch_state.without_pause()
        self.coordinator, self.last_command = "", 0

    def _form(self, orders: NodeDesired, now: float) -> None:
        formed = orders.world
        if formed is not None and self.node in formed.ranked_nodes:
            known = self.world.epoch if self.world is not None else -1
            if formed.epoch > known:
                self.epoch_state = EpochState(formed.epoch)
                for process in self.rank_processes():
                    process.formed_epoch = formed.epoch
            if formed.epoch >= known:
                self.world = formed
                self._assign_ranks(formed)
        if self.world is None:
            return
        if formed is not None and formed.epoch == self.world.epoch:
            self._apply_change(orders, now)

    def _apply_change(self, orders: NodeDesired, now: float) -> None:
        """Apply the coordinator's change of this node's epoch."""
        broken, ordered = orders.epoch_state.broken, orders.epoch_state.received(now)
        if broken is not None:
            if not self.epoch_state.is_broken:
                self.leave_world_s = broken.within_s or 0.0
            self.epoch_state = self.epoch_state.change(NoticeKind.RESTART, broken.reason, broken.received(now).until)
            for process in self.rank_processes():
                process.formed_epoch = process.assigned_epoch  # ranks that still wait for the store never entered it
        if ordered.pause is not None and ordered.epoch == self.epoch_state.epoch:
            self.epoch_state = replace(self.epoch_state, pause=ordered.pause)
        if ordered.target is not None:
            self.epoch_state = replace(self.epoch_state, target=ordered.target)

    def _assign_ranks(self, formed: WorldSpec) -> None:
        if formed.store and not self.epoch_state.is_broken:
            for process in self.rank_processes():
                process.assigned_epoch = process.formed_epoch

    def _run_command(self, command: NodeCommand, now: float) -> None:
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
        """Disconnect this node from all others for ``seconds``."""
        self.partitions += 1
        self.effects.append(PartitionNode(seconds))

    def rank_of(self, local_rank: int) -> int:
        """Return the rank of ``local_rank`` in the newest world of this node, or -1 without a world."""
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
        """Record that the job is over for this node. The first call wins."""
        if self.exit is None:
            self.exit, self.reason = over, reason

    # -- processes ----------------------------------------------------------------------------------------------------

    def rank_processes(self) -> list[RankProcess]:
        return [process for process in self.processes.values() if process.local_rank is not None]

    def spares(self) -> list[RankProcess]:
        return [process for process in self.processes.values() if process.local_rank is None]

    def warm_spares(self, now: float) -> list[RankProcess]:
        """Return the spares that can become a local rank at once. Mute ones cannot."""
        return [process for process in self.spares() if process.is_ready and not process.is_mute(now)]

    def _fill_local_rank(self, local_rank: int, warm_spares: Sequence[RankProcess] = ()) -> None:
        for process in [process for process in self.rank_processes() if process.local_rank == local_rank]:
            self._drop(process.token, stacks=self.epoch_state.is_broken and process.is_inside)
        self.spawn_count += 1
        if warm_spares:
            warm_spares[0].local_rank = local_rank
        else:
            self._start_process(local_rank)

    def _start_process(self, local_rank: int | None) -> None:
        self.attempts += 1
        token = self.new_token()
        self.processes[token] = RankProcess(token, self.attempts, local_rank)
        self.effects.append(StartProcess(token, self.attempts, local_rank))

    def _drop(self, token: str, *, stacks: bool = False) -> None:
        process = self.processes.pop(token)
        if process.exit_description is None:
            why = f"{self._rank_name(process)} is replaced: {self.epoch_state.reason}" if stacks else ""
            self.effects.append(EndProcess(token, why, stacks=stacks))

    def _start_spares(self) -> None:
        for _ in range(self._missing_spares()):
            self._start_process(None)

    def _missing_spares(self) -> int:
        starts_none = self.exit is not None or self.wasted_spares >= _SPARE_TRIES
        return 0 if starts_none else self.wanted_spares - len(self.spares())

    def tick(self, now: float) -> None:
        """End processes that are late, and replace used spares that are due."""
        self._end_late_processes(now)
        self.refill_spares(now)

    def _end_late_processes(self, now: float) -> None:
        """End processes that have not left the broken world in time, or that are mute in it."""
        broken = self.epoch_state.broken
        if broken is None or self.exit is not None:
            return
        is_over = broken.until is not None and now >= broken.until
        for process in self.rank_processes():
            if process.exit_description is not None:
                continue
            if process.end_by is not None:
                if now >= process.end_by:
                    self.process_exited(process.token, "it did not end by itself and was killed")
                continue
            if is_over and process.is_inside:
                process.end_reason = self._late_reason(process)
            elif process.is_mute(now):
                silent_s = process.silent_s(now)
                named, epoch = self._rank_name(process), process.assigned_epoch
                process.end_reason = f"{named} has not left broken world {epoch} and sent nothing for {silent_s:.0f} s"
            if process.end_reason:
                process.end_by = now + EXIT_S
                self.effects.append(EndProcess(process.token, process.end_reason, stacks=True))

    def _late_reason(self, process: RankProcess) -> str:
        epoch, limit_s = process.assigned_epoch, self.leave_world_s
        return f"{self._rank_name(process)} did not leave world {epoch} within {limit_s:.0f} s"

    def is_leaving(self, token: str) -> bool:
        """Return whether the process is leaving a broken world, by its own report."""
        process = self.processes.get(token)
        if process is None or process.status is None or not self.epoch_state.is_broken:
            return False
        return process.is_inside and process.status.leave_stage is not None

    def _rank_name(self, process: RankProcess) -> str:
        return f"rank {self.rank_of(process.local_rank or 0)}"

    def next_due(self) -> float | None:
        """Return when :meth:`tick` must next end a process, or ``None`` if no such time is known."""
        broken = self.epoch_state.broken
        if broken is None or self.exit is not None:
            return None
        alive = [process for process in self.rank_processes() if process.exit_description is None]
        times = [process.end_by for process in alive]
        if any(process.is_inside and not process.end_reason for process in alive):
            times.append(broken.until)
        return min((when for when in times if when is not None), default=None)

    def refill_spares(self, now: float) -> None:
        """Replace used spares once all ranks have completed a step in the world, or at ``refill_by``.

        Until then the ranks need the cores that a starting process would use for its imports.
        """
        if self.refill_by is not None and (now >= self.refill_by or self._all_ranks_stepped()):
            self.refill_by = None
            self._start_spares()

    def _all_ranks_stepped(self) -> bool:
        return self.world is not None and all(
            process.stepped_epoch == self.world.epoch for process in self.rank_processes()
        )

    def take_effects(self) -> list[SupervisorEffect]:
        """Return the effects to carry out, and clear them."""
        effects, self.effects = self.effects, []
        return effects
