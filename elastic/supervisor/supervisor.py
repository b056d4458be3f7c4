"""The supervisor process: its event loop, and faults injected from outside.

:class:`~elastic.supervisor.node_state.NodeState` makes all decisions. :class:`Supervisor` carries them out, in one loop
over one queue.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import random
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from elastic.control.child_processes import (
    LEAVE_STATUS,
    STACKS_SIGNAL,
    ChildProcess,
    ProcessLog,
    describe_exit,
    stack_location,
)
from elastic.control.control_messages import (
    ExitReason,
    NodeDesired,
    NodeStatus,
    RankDesired,
    RankStatus,
)
from elastic.control.coordinator_client import CoordinatorClient
from elastic.control.leader_election import (
    JOB_FINISHED,
    LeaderRecordStore,
    is_leader_url,
    leader_address,
    open_leader_record,
)
from elastic.control.oom_detector import OomDetector
from elastic.control.running_clock import RunningClock, since_boot
from elastic.errors import ControlPlaneUnavailableError
from elastic.fault_injection import fault_actions
from elastic.fault_injection.fault_actions import InjectionRecord, injected_here, log_injection
from elastic.fault_injection.fault_spec import FaultInjection, InjectionKind, RankLocation
from elastic.rendezvous.store_servers import CoordinatorKeeper, StoreProcess
from elastic.settings import SOCKET_VARIABLE, TOKEN_VARIABLE
from elastic.supervisor import node_messages, node_state
from elastic.supervisor.node_state import EndProcess, InjectFault, NodeState, OfferMemory, PartitionNode, StartProcess
from elastic.supervisor.rank_exits import describe_unjoined_exit, end_of_file
from elastic.supervisor.rank_server import RankConnection, RankServer
from peerstore.daemon_process import ensure_private_directory
from peerstore.errors import PeerStoreError
from peerstore.membership.topology import PeerNode, validate_node_id

log = logging.getLogger(__name__)

_SILENT_S = 10.0
"""Seconds of silence after which this node looks up the leader again, as another one may lead."""
_CANDIDATES = 8
"""Number of nodes that become candidates at the same time."""
_NEXT_CANDIDATES_S = 20.0
"""Seconds that each further group of candidates waits longer."""
_CANDIDATE_EXIT_S = 60.0
"""Seconds that this node's coordinator may take to exit after the end of the job."""
_REFUSALS = 20
"""Refusals in a row that end the supervisor if a leader record names the coordinator.

Before that, the node looks up the leader again: another job may use the address of a former leader."""
_EXIT_STATUS_S = 0.2
"""Seconds that the exit status of a process may take to arrive after its connection has closed."""

_STACKS_BYTES = 256 << 10
_JOB_ENDS = (ExitReason.FINISHED, ExitReason.STOPPED, ExitReason.JOB_FAILED, ExitReason.NEVER_JOINED)

SpawnProcess = Callable[..., Any]
"""Starts a process: :class:`~elastic.control.child_processes.ChildProcess`, or a double of it."""


@dataclass(frozen=True)
class SupervisorSettings:
    job: str
    node: str
    coordinator: str
    """``host:port``, or the URL of the leader record."""
    command: tuple[str, ...]
    """Command of a rank."""
    directory: Path
    """Private directory with the socket for the ranks."""
    logs: Path
    nproc: int = 1
    spares: int = 0
    host: str = "127.0.0.1"
    """Address at which other nodes reach this one."""
    grace_s: float = 30.0
    """Seconds to drain this node after a preemption signal."""
    exit_timeout_s: float = 10.0
    """Seconds that processes may take to exit at the end of the job, before they are killed."""
    heartbeat_s: float = 1.0
    coordinator_timeout_s: float = 600.0
    """Seconds that ranks may train without a coordinator."""
    environ: Mapping[str, str] = field(default_factory=dict)
    candidate: Callable[[int], Sequence[str]] | None = None
    """Returns the command of a coordinator that may lead.

    Only set if ``coordinator`` is the URL of a leader record. Its argument is a term in which
    the job had a leader already, or 0."""
    candidate_name: str = ""
    """Name of that coordinator in the leader record."""


class Supervisor:
    def __init__(
        self,
        settings: SupervisorSettings,
        secret: bytes,
        *,
        spawn: SpawnProcess = ChildProcess,
        terminal: IO[bytes] | None = None,
        partition_agent: Callable[[float], None] = lambda _seconds: None,
        offer_memory: Callable[[Callable[[PeerNode], None]], None] = lambda _on_offered: None,
        clock: Callable[[], float] = since_boot,
    ) -> None:
        self.settings = settings
        self.state = NodeState(
            settings.node,
            settings.nproc,
            new_token=partial(secrets.token_hex, 16),
            new_generation=self._new_generation,
            wanted_spares=settings.spares,
        )
        self._spawn, self._terminal, self._partition_agent = spawn, terminal, partition_agent
        self._offer_memory = offer_memory
        self._clock = RunningClock(2 * settings.heartbeat_s, clock)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: dict[str, Any] = {}
        self._connections: dict[str, RankConnection] = {}
        self._sent: dict[str, RankDesired] = {}
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._reported: NodeStatus | None = None
        self._reported_at = 0.0
        self._unreachable_since: float | None = None
        self._ending_since: float | None = None
        self._last_generation = 0
        self._leader_records: LeaderRecordStore | None = None
        self._is_leader_unknown = False
        """Whether the leader record cannot be read at the moment."""
        self._leader_name = ""
        """Leader according to the last read of the leader record, or ""."""
        self._job_end: tuple[ExitReason, str] | None = None
        """End of the job according to the leader record."""
        self._last_contact: float | None = None
        """Time of the last message of the connected coordinator; ``None`` without a connection."""
        self._candidacy_s = 0.0
        """Seconds without a coordinator after which this node may lead."""
        self._oom_detector = OomDetector()
        ensure_private_directory(settings.directory)
        post = self._post
        self._store = StoreProcess(
            settings.host, lambda address: post(partial(self._store_started, address)), spawn=spawn
        )
        self._server = RankServer(
            settings.directory / "rank.sock",
            on_connect=self._accept_rank,
            on_status=lambda token, status: post(partial(self._record_status, token, status)),
            on_disconnect=lambda token, connection: post(partial(self._connection_lost, token, connection)),
        )
        self._candidate = None if settings.candidate is None else CoordinatorKeeper(settings.candidate, spawn=spawn)
        self._client = CoordinatorClient(
            self._coordinator_address,
            job=settings.job,
            node=validate_node_id(settings.node),
            secret=secret,
            refusals=_REFUSALS if is_leader_url(settings.coordinator) else 1,
            on_desired=lambda orders: post(partial(self._apply_orders, orders)),
            on_connected=lambda: post(self._coordinator_connected),
            on_unreachable=lambda why: post(partial(self._coordinator_lost, why)),
            on_refused=lambda why: post(partial(self.state.finish, ExitReason.REFUSED, why)),
        )

    # -- from any thread ----------------------------------------------------------------------------------------------

    def drain(self, reason: str, grace_s: float | None = None) -> None:
        """Drain this node within ``grace_s`` seconds (default: ``settings.grace_s``), because of ``reason``."""
        within_s = self.settings.grace_s if grace_s is None else grace_s
        self._post(lambda: self.state.drain(self._clock() + within_s, reason))

    def leave(self, reason: str) -> None:
        """Leave the job: this node cannot run ranks."""
        log.warning("node %s leaves the job: %s", self.settings.node, reason)
        self._post(partial(self.state.leave, reason))

    def kill(self, reason: str, over: ExitReason = ExitReason.STOPPED) -> None:
        """Kill all local processes and end the loop."""
        self._post(partial(self._kill_all, reason, over))

    @property
    def alone_s(self) -> float:
        """Seconds since the coordinator became unreachable; 0 while it is connected."""
        since = self._unreachable_since
        return 0.0 if since is None else self._clock() - since

    def _post(self, call: Callable[[], None]) -> None:
        self._inbox.put(call)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> tuple[ExitReason, str]:
        """Run until the job is over for this node and all its processes have exited. Return why."""
        try:
            self._client.start()
            self.state.start()
            while not self._is_done():
                self._run_once()
            assert self.state.exit is not None  # noqa: S101 - that is what done means
            return self.state.exit, self.state.reason
        finally:
            self._shut_down()
            self._client.close()
            self._server.close()
            if self._candidate is not None:
                is_job_over = self.state.exit in _JOB_ENDS
                self._candidate.close(within_s=_CANDIDATE_EXIT_S if is_job_over else 0.0)

    def _run_once(self) -> None:
        self._run_effects()
        self._send_desired()
        self._report_status()
        call = self._next_call(self._wait_s())
        self._clock()
        self.state.was_away(self._clock.skipped())
        while call is not None:
            call()
            call = self._next_call(0.0)
        now = self._clock()
        due = [call for when, call in self._timers if when <= now]
        self._timers = [(when, call) for when, call in self._timers if when > now]
        for call in due:
            call()
        self._check_deadlines(now)

    def _next_call(self, within_s: float) -> Callable[[], None] | None:
        try:
            return self._inbox.get(block=within_s > 0, timeout=within_s or None)
        except queue.Empty:
            return None

    def _wait_s(self) -> float:
        now = self._clock()
        nearest = [self._reported_at + self.settings.heartbeat_s, *(when for when, _ in self._timers)]
        state = self.state
        nearest += [when for when in (state.drain_deadline, state.refill_by, state.next_due()) if when is not None]
        if self._ending_since is not None:
            nearest.append(self._ending_since + self.settings.exit_timeout_s)
        return max(0.005, min(nearest) - now)

    def _check_deadlines(self, now: float) -> None:
        """Carry out what the passage of time requires: deadlines, silence, candidacy."""
        state, settings = self.state, self.settings
        state.tick(now)
        if state.drain_deadline is not None and now >= state.drain_deadline and state.exit is None:
            state.leave_reason = f"{state.drain_reason}, and its time is up"
            self._kill_all(state.leave_reason, over=ExitReason.DISMISSED)
        if self._is_leader_unknown and self._unreachable_since is not None:
            self._unreachable_since = now  # a coordinator may lead, but the record cannot be read
        if (
            self._last_contact is not None
            and now - self._last_contact > _SILENT_S
            and is_leader_url(settings.coordinator)
        ):
            self._last_contact = None
            log.warning("node %s: the coordinator has sent nothing for %g s", settings.node, _SILENT_S)
            self._client.drop()
        if self._candidate is not None:
            unreachable_s = 0.0 if self._unreachable_since is None else now - self._unreachable_since
            wanted = self._unreachable_since is not None and state.exit is None and unreachable_s >= self._candidacy_s
            self._candidate.keep(wanted=wanted and not self._is_leader_unknown, term=state.leader[0], now=now)
        if self._unreachable_since is not None and now - self._unreachable_since > settings.coordinator_timeout_s:
            state.finish(
                ExitReason.JOB_FAILED, f"the coordinator has not answered for {settings.coordinator_timeout_s:g} s"
            )
        if state.exit is None:
            self._ending_since = None
        elif self._ending_since is None:
            self._ending_since = now
        elif now - self._ending_since > settings.exit_timeout_s:
            for running in self._running.values():
                running.signal(signal.SIGKILL)
        self._store.ensure(wanted=state.run_store and state.exit is None)

    def _is_done(self) -> bool:
        return self.state.exit is not None and not self._running

    def _shut_down(self) -> None:
        """Kill all remaining processes, and send the last report."""
        self._store.close()
        for running in list(self._running.values()):
            running.signal(signal.SIGKILL)
        for running in list(self._running.values()):
            running.join()
        if self.state.leave_reason or self.state.exit is not None:
            self._send(node_messages.node_status(self.state, self._clock()))

    # -- effects ------------------------------------------------------------------------------------------------------

    def _run_effects(self) -> None:
        for effect in self.state.take_effects():
            if isinstance(effect, StartProcess):
                self._start(effect)
            elif isinstance(effect, EndProcess) and effect.token in self._running:
                self._end(effect)
            elif isinstance(effect, PartitionNode):
                self._client.disconnect_for(effect.seconds)
                threading.Thread(
                    target=self._partition_agent, args=(effect.seconds,), name="elastic-cut", daemon=True
                ).start()
            elif isinstance(effect, OfferMemory):
                callback = (lambda peer: self._post(partial(self._memory_offered, peer)),)
                threading.Thread(target=self._offer_memory, args=callback, name="elastic-offer", daemon=True).start()
            elif isinstance(effect, InjectFault):
                self._inject(effect.injection)

    def _end(self, end: EndProcess) -> None:
        if end.why:
            log.warning("node %s: %s; its process is ended", self.settings.node, end.why)
        if end.stacks:
            self._running[end.token].end_with_stacks()
            self._timers.append((self._clock() + node_state.EXIT_S, partial(self._kill, end.token)))
        else:
            self._kill(end.token)

    def _kill(self, token: str) -> None:
        if token in self._running:
            self._running[token].signal(signal.SIGKILL)

    def _inject(self, injection: FaultInjection) -> None:
        settings = self.settings
        environ = {**os.environ, **settings.environ}
        if not inject_from_supervisor(
            injection, self.state, self._running, run=settings.directory.parent, environ=environ
        ):
            self._timers.append((self._clock() + _EXIT_STATUS_S, partial(self._inject, injection)))

    def _start(self, start: StartProcess) -> None:
        settings = self.settings
        label = "spare" if start.local_rank is None else str(start.local_rank)
        name = (
            f"spare.{start.attempt}.log" if start.local_rank is None else f"rank-{start.local_rank}.{start.attempt}.log"
        )
        process_log = ProcessLog(settings.logs / settings.node / name, f"[{settings.node}/{label}] ", self._terminal)

        def exited(status: int) -> None:
            process_log.close()
            self._post(partial(self._process_exited, start.token, status, process_log.path, time.time()))

        try:
            with contextlib.suppress(PeerStoreError):  # the socket was created while the directory was private
                ensure_private_directory(settings.directory)
            self._running[start.token] = self._spawn(
                settings.command,
                environ=self._environ(start),
                on_line=process_log.write_line,
                on_exit=exited,
                name=label,
            )
        except OSError as error:
            process_log.close()
            self.state.process_exited(start.token, f"it could not be started: {error}")

    def _environ(self, start: StartProcess) -> dict[str, str]:
        settings = self.settings
        own = {
            SOCKET_VARIABLE: str(self._server.path),
            TOKEN_VARIABLE: start.token,
            "ELASTIC_JOB": settings.job,
            "ELASTIC_NODE": settings.node,
            "LOCAL_WORLD_SIZE": str(settings.nproc),
        }
        local_rank = {} if start.local_rank is None else {"LOCAL_RANK": str(start.local_rank)}
        return {**os.environ, **settings.environ, **own, **local_rank}

    def _kill_all(self, reason: str, over: ExitReason = ExitReason.STOPPED) -> None:
        self.state.finish(over, reason)
        for running in self._running.values():
            running.signal(signal.SIGKILL)

    def _new_generation(self) -> int:
        """Return a generation above all earlier ones of this node, including those of earlier supervisors."""
        self._last_generation = max(self._last_generation + 1, time.time_ns() // 1_000_000)
        return self._last_generation

    # -- callbacks ----------------------------------------------------------------------------------------------------

    def _accept_rank(self, token: str, connection: RankConnection) -> str:
        """Return why a process may not connect, or "" if it may. Called on the connection's thread.

        The process must be a child of this supervisor, and its only one with this token.
        """
        if token not in self.state.processes:
            return "this process was not started by this supervisor, or another one has taken its seat"
        if self._connections.setdefault(token, connection) is not connection:
            return "another process is connected with this token"
        self._post(partial(self.state.process_connected, token))
        return ""

    def _record_status(self, token: str, status: RankStatus) -> None:
        self.state.handle_rank_status(token, status, self._clock())

    def _connection_lost(self, token: str, connection: RankConnection) -> None:
        if self._connections.get(token) is connection:
            del self._connections[token]
            self._sent.pop(token, None)
        self._timers.append((self._clock() + _EXIT_STATUS_S, partial(self.state.connection_closed, token, time.time())))

    def _process_exited(self, token: str, status: int, path: Path, at: float) -> None:
        del self._running[token]
        if self.state.never_joins(token, status):
            reason = describe_unjoined_exit(self.settings.command, status, path)
            self.state.process_exited(token, reason, at, never_joined=True)
            return
        oom_kill = self._oom_detector.new_kills() if status == -signal.SIGKILL else ""
        reason = f"{describe_exit(status)}{', ' if oom_kill else ''}{oom_kill} (see {path})"
        has_stacks = status == -STACKS_SIGNAL or (status == LEAVE_STATUS and self.state.is_leaving(token))
        location = stack_location(end_of_file(path, _STACKS_BYTES)) if has_stacks else ""
        recorded = self.state.process_exited(token, reason, at, location=location)
        if location:
            message = f"its main thread was in {location}: {reason}" if recorded == reason else recorded
            log.warning("node %s: %s", self.settings.node, message)

    def _coordinator_address(self) -> str:
        """Return the coordinator's address. Called on a thread of the coordinator client.

        Raise :class:`~elastic.errors.ControlPlaneUnavailableError` if the leader record has none or cannot be read.
        """
        if not is_leader_url(self.settings.coordinator):
            return self.settings.coordinator
        try:
            if self._leader_records is None:
                self._leader_records = open_leader_record(self.settings.coordinator)
            record = self._leader_records.read()
        except ControlPlaneUnavailableError:
            self._is_leader_unknown = True
            raise
        except Exception as error:
            self._is_leader_unknown = True
            log.exception("cannot read the leader record")
            raise ControlPlaneUnavailableError(f"cannot read the leader record: {error}") from error
        self._is_leader_unknown = False
        self._leader_name = "" if record is None else record.holder
        term = self.state.leader[0]
        if record is not None and record.over and (record.term >= term > 0 or record.over == JOB_FINISHED):
            self._job_end = ExitReason(record.over), record.reason
            if not record.holder:
                raise ControlPlaneUnavailableError(f"the job is over: {record.reason}")
        return leader_address(record)

    def _coordinator_connected(self) -> None:
        self._last_contact = self._clock()

    def _apply_orders(self, orders: NodeDesired) -> None:
        if not self.state.obeys(orders):
            log.warning("node %s: a coordinator of term %d leads no longer", self.settings.node, orders.term)
            self._client.drop()
            return
        self._last_contact = self._clock()
        if (
            self._candidate is not None
            and self._unreachable_since is not None
            and self._leader_name != self.settings.candidate_name
        ):
            self._candidate.dismiss()
        self._unreachable_since, self.state.coordinator_unreachable = None, False
        if orders.superseded and orders.generation == self.state.generation and self.state.exit is None:
            self._last_generation = max(self._last_generation, orders.min_generation)
            self.state.begin_generation()
        else:
            self.state.apply_desired(orders, self._clock())

    def _coordinator_lost(self, why: str) -> None:
        self._last_contact = None
        if self._job_end is not None and self.state.exit is None:
            self.state.finish(*self._job_end)
            if not self.state.leader[0]:
                record_url = self.settings.coordinator
                log.warning(
                    "job %s has finished; to run it again, delete the record of %s", self.settings.job, record_url
                )
        if self._unreachable_since is None:
            self._unreachable_since = self._clock()
            self._candidacy_s = self._candidacy_delay_s()
            log.warning("node %s: the coordinator cannot be reached: %s", self.settings.node, why)
        self.state.coordinator_unreachable = True

    def _candidacy_delay_s(self) -> float:
        """Return the seconds without a coordinator after which this node may lead.

        The nodes of a large job become candidates in groups, so that few of them compete. A node outside the world
        waits at most a second.
        """
        world = self.state.world
        if world is None or self.state.node not in world.ranked_nodes:
            return random.uniform(0.0, 1.0)
        return world.ranked_nodes.index(self.state.node) // _CANDIDATES * _NEXT_CANDIDATES_S

    def _store_started(self, address: str) -> None:
        self.state.store = address

    def _memory_offered(self, peer: PeerNode) -> None:
        self.state.peer = peer

    # -- messages -----------------------------------------------------------------------------------------------------

    def _send_desired(self) -> None:
        now = self._clock()
        for token, connection in list(self._connections.items()):
            desired = node_messages.rank_desired(self.state, token, now)
            if node_messages.comparable_rank_desired(desired) != self._sent.get(token):
                self._sent[token] = node_messages.comparable_rank_desired(desired)
                connection.send(desired)

    def _report_status(self) -> None:
        now = self._clock()
        report = node_messages.node_status(self.state, now)
        if (
            node_messages.comparable_node_status(report) != self._reported
            or now - self._reported_at >= self.settings.heartbeat_s
        ):
            self._send(report)

    def _send(self, report: NodeStatus) -> None:
        self._reported, self._reported_at = node_messages.comparable_node_status(report), self._clock()
        self.state.number = report.number
        self._client.send_status(report)


def inject_from_supervisor(
    injection: FaultInjection, state: NodeState, running: Mapping[str, Any], *, run: Path, environ: Mapping[str, str]
) -> bool:
    """Inject a fault into the first rank of this node that it matches.

    Return False if no such rank runs at the moment, because it is being replaced: the caller must retry. A fault that
    another process has claimed is not injected again.
    """
    for process in state.rank_processes():
        local_rank = process.local_rank or 0
        location = RankLocation(state.rank_of(local_rank), state.node, local_rank)
        if not injection.matches(location) or process.token not in running:
            continue
        actual = injected_here(injection, location)
        if not InjectionRecord(run).claim(actual):
            return True
        log.warning("injected from outside at rank %d: %s", location.rank, injection)
        log_injection(actual)
        if injection.kind is InjectionKind.PARTITION:
            state.partition(injection.duration_s)
        elif injection.kind is InjectionKind.NODE:
            fault_actions.kill_node(os.getpid(), environ)
        elif injection.kind is InjectionKind.AGENT:
            fault_actions.kill_agent(environ)
        else:
            running[process.token].signal(getattr(signal, injection.kind.name))
        return True
    return False
