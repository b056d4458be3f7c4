"""The supervisor process: one event loop, the Unix-socket server for its ranks, faults injected from outside.

All that is decided here is in :class:`~elastic.supervisor.node_state.NodeState`; this is its shell, one loop over one
queue.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import random
import secrets
import signal
import socket
import struct
import sys
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
    last_line,
    stack_location,
)
from elastic.control.control_messages import (
    MAX_RANK_MESSAGE_BYTES,
    RANK_PROTOCOL,
    ExitReason,
    NodeDesired,
    NodeStatus,
    RankDesired,
    RankHello,
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
from elastic.supervisor import node_state
from elastic.supervisor.node_state import EndProcess, InjectFault, NodeState, OfferMemory, PartitionNode, StartProcess
from peerstore import message_codec
from peerstore.daemon_process import peer_credentials
from peerstore.errors import PeerStoreError, ProtocolError
from peerstore.membership.topology import PeerNode, validate_node_id
from peerstore.server.store_server import ensure_private_directory

log = logging.getLogger(__name__)

_SILENT_S = 10.0
"""Another coordinator may lead by then: where one may, who says nothing for so long is looked for anew."""
_CANDIDATES = 8
_NEXT_CANDIDATES_S = 20.0
_FAREWELL_S = 60.0
_REFUSALS = 20
"""In a row, where it is noted who leads: another job may have come to the address of one that leads no longer."""
_REASON_S = 0.2
"""How long the kernel may take to say how a process ended whose connection has closed."""

_TAIL_BYTES = 4096
_STACKS_BYTES = 256 << 10
_JOB_ENDS = (ExitReason.FINISHED, ExitReason.STOPPED, ExitReason.JOB_FAILED, ExitReason.NEVER_JOINED)

SpawnProcess = Callable[..., Any]
"""Starts a process: :class:`~elastic.control.child_processes.ChildProcess`, or a double of it."""


@dataclass(frozen=True)
class SupervisorSettings:
    job: str
    node: str
    coordinator: str
    """``host:port``, or a URL of where it is noted who leads."""
    command: tuple[str, ...]
    """What a rank is."""
    directory: Path
    """Private; the socket for the ranks is in it."""
    logs: Path
    nproc: int = 1
    spares: int = 0
    host: str = "127.0.0.1"
    """Where other nodes reach this one."""
    grace_s: float = 30.0
    """How long a node that is preempted by a signal has."""
    exit_timeout_s: float = 10.0
    """How long processes that were told to end may take, before they are ended."""
    heartbeat_s: float = 1.0
    coordinator_timeout_s: float = 600.0
    """How long ranks go on without a coordinator."""
    environ: Mapping[str, str] = field(default_factory=dict)
    candidate: Callable[[int], Sequence[str]] | None = None
    """Where ``coordinator`` is a URL of where it is noted who leads: the command of a coordinator that may, if it is to
    know that the job was led in that term already."""
    candidate_name: str = ""
    """That one's name in the record."""


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
            new_generation=self._new_life,
            wanted_spares=settings.spares,
        )
        self._spawn, self._terminal, self._cutting = spawn, terminal, partition_agent
        self._offer_memory = offer_memory
        self._clock = RunningClock(2 * settings.heartbeat_s, clock)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: dict[str, Any] = {}
        self._lines: dict[str, RankConnection] = {}
        self._told: dict[str, RankDesired] = {}
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._reported: NodeStatus | None = None
        self._beat = 0.0
        self._alone_since: float | None = None
        self._fading_since: float | None = None
        self._last_life = 0
        self._leadership: LeaderRecordStore | None = None
        self._is_unknown = False
        """Who leads cannot be asked at the moment."""
        self._holder = ""
        """Who leads, as was read last."""
        self._over: tuple[ExitReason, str] | None = None
        """How the job has ended, as is noted where it is noted who leads."""
        self._heard_at: float | None = None
        """When the coordinator that is connected said something last; ``None`` while none is."""
        self._candidacy_s = 0.0
        """So long after it was cut off this node may lead."""
        self._kills = OomDetector()
        ensure_private_directory(settings.directory)
        post = self._post
        self._store = StoreProcess(settings.host, lambda address: post(partial(self._keeps, address)), spawn=spawn)
        self._door = RankServer(
            settings.directory / "rank.sock",
            on_connect=self._came,
            on_status=lambda token, says: post(partial(self._said, token, says)),
            on_disconnect=lambda token, line: post(partial(self._left, token, line)),
        )
        self._coordinator = None if settings.candidate is None else CoordinatorKeeper(settings.candidate, spawn=spawn)
        self._link = CoordinatorClient(
            self._where,
            job=settings.job,
            node=validate_node_id(settings.node),
            secret=secret,
            refusals=_REFUSALS if is_leader_url(settings.coordinator) else 1,
            on_desired=lambda orders: post(partial(self._ordered, orders)),
            on_connected=lambda: post(self._reached),
            on_unreachable=lambda why: post(partial(self._cut_off, why)),
            on_refused=lambda why: post(partial(self.state.finish, ExitReason.REFUSED, why)),
        )

    # -- from any thread ----------------------------------------------------------------------------------------------

    def drain(self, reason: str, grace_s: float | None = None) -> None:
        """This machine goes away: its ranks stop with all others, and the supervisor ends."""
        within_s = self.settings.grace_s if grace_s is None else grace_s
        self._post(lambda: self.state.drain(self._clock() + within_s, reason))

    def leave(self, reason: str) -> None:
        """Leave the job: this node cannot run ranks."""
        log.warning("node %s leaves the job: %s", self.settings.node, reason)
        self._post(partial(self.state.leave, reason))

    def kill(self, reason: str, over: ExitReason = ExitReason.STOPPED) -> None:
        """End at once."""
        self._post(partial(self._kill_all, reason, over))

    @property
    def alone_s(self) -> float:
        """For how long the coordinator has not been reached."""
        since = self._alone_since
        return 0.0 if since is None else self._clock() - since

    def _post(self, call: Callable[[], None]) -> None:
        self._inbox.put(call)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> tuple[ExitReason, str]:
        """Until there is nothing more to do here; why."""
        try:
            self._link.start()
            self.state.start()
            while not self._is_done():
                self._turn()
            assert self.state.exit is not None  # noqa: S101 - that is what done means
            return self.state.exit, self.state.reason
        finally:
            self._end_all()
            self._link.close()
            self._door.close()
            if self._coordinator is not None:
                is_told = self.state.exit in _JOB_ENDS
                self._coordinator.close(within_s=_FAREWELL_S if is_told else 0.0)

    def _turn(self) -> None:
        self._act()
        self._tell_ranks()
        self._report()
        call = self._next(self._patience_s())
        self._clock()
        self.state.was_away(self._clock.skipped())
        while call is not None:
            call()
            call = self._next(0.0)
        now = self._clock()
        due = [call for when, call in self._timers if when <= now]
        self._timers = [(when, call) for when, call in self._timers if when > now]
        for call in due:
            call()
        self._watch(now)

    def _next(self, within_s: float) -> Callable[[], None] | None:
        try:
            return self._inbox.get(block=within_s > 0, timeout=within_s or None)
        except queue.Empty:
            return None

    def _patience_s(self) -> float:
        now = self._clock()
        nearest = [self._beat + self.settings.heartbeat_s, *(when for when, _ in self._timers)]
        state = self.state
        nearest += [when for when in (state.drain_deadline, state.refill_by, state.next_due()) if when is not None]
        if self._fading_since is not None:
            nearest.append(self._fading_since + self.settings.exit_timeout_s)
        return max(0.005, min(nearest) - now)

    def _watch(self, now: float) -> None:
        """What time alone brings about."""
        state, settings = self.state, self.settings
        state.tick(now)
        if state.drain_deadline is not None and now >= state.drain_deadline and state.exit is None:
            state.leave_reason = f"{state.drain_reason}, and its time is up"
            self._kill_all(state.leave_reason, over=ExitReason.DISMISSED)
        if self._is_unknown and self._alone_since is not None:
            self._alone_since = now  # a coordinator may be there, and who could tell is not
        if self._heard_at is not None and now - self._heard_at > _SILENT_S and is_leader_url(settings.coordinator):
            self._heard_at = None
            log.warning("node %s: the coordinator has said nothing for %g s", settings.node, _SILENT_S)
            self._link.drop()
        if self._coordinator is not None:
            alone_s = 0.0 if self._alone_since is None else now - self._alone_since
            wanted = self._alone_since is not None and state.exit is None and alone_s >= self._candidacy_s
            self._coordinator.keep(wanted=wanted and not self._is_unknown, term=state.leader[0], now=now)
        if self._alone_since is not None and now - self._alone_since > settings.coordinator_timeout_s:
            state.finish(
                ExitReason.JOB_FAILED, f"the coordinator has not answered for {settings.coordinator_timeout_s:g} s"
            )
        if state.exit is None:
            self._fading_since = None
        elif self._fading_since is None:
            self._fading_since = now
        elif now - self._fading_since > settings.exit_timeout_s:
            for running in self._running.values():
                running.signal(signal.SIGKILL)
        self._store.ensure(wanted=state.run_store and state.exit is None)

    def _is_done(self) -> bool:
        return self.state.exit is not None and not self._running

    def _end_all(self) -> None:
        """However this came about, no process stays."""
        self._store.close()
        for running in list(self._running.values()):
            running.signal(signal.SIGKILL)
        for running in list(self._running.values()):
            running.join()
        if self.state.leave_reason or self.state.exit is not None:
            self._send(node_state.node_status(self.state, self._clock()))

    # -- doing --------------------------------------------------------------------------------------------------------

    def _act(self) -> None:
        for effect in self.state.take_effects():
            if isinstance(effect, StartProcess):
                self._start(effect)
            elif isinstance(effect, EndProcess) and effect.token in self._running:
                self._end(effect)
            elif isinstance(effect, PartitionNode):
                self._link.disconnect_for(effect.seconds)
                threading.Thread(target=self._cutting, args=(effect.seconds,), name="elastic-cut", daemon=True).start()
            elif isinstance(effect, OfferMemory):
                offered = (lambda peer: self._post(partial(self._offered, peer)),)
                threading.Thread(target=self._offer_memory, args=offered, name="elastic-offer", daemon=True).start()
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
            self._timers.append((self._clock() + _REASON_S, partial(self._inject, injection)))

    def _start(self, start: StartProcess) -> None:
        settings = self.settings
        label = "spare" if start.local_rank is None else str(start.local_rank)
        name = (
            f"spare.{start.attempt}.log" if start.local_rank is None else f"rank-{start.local_rank}.{start.attempt}.log"
        )
        printed = ProcessLog(settings.logs / settings.node / name, f"[{settings.node}/{label}] ", self._terminal)

        def ended(status: int) -> None:
            printed.close()
            self._post(partial(self._ended, start.token, status, printed.path, time.time()))

        try:
            with contextlib.suppress(PeerStoreError):  # the socket in it was made while it was private
                ensure_private_directory(settings.directory)
            self._running[start.token] = self._spawn(
                settings.command, environ=self._environ(start), on_line=printed.write_line, on_exit=ended, name=label
            )
        except OSError as error:
            printed.close()
            self.state.process_exited(start.token, f"it could not be started: {error}")

    def _environ(self, start: StartProcess) -> dict[str, str]:
        settings = self.settings
        mine = {
            SOCKET_VARIABLE: str(self._door.path),
            TOKEN_VARIABLE: start.token,
            "ELASTIC_JOB": settings.job,
            "ELASTIC_NODE": settings.node,
            "LOCAL_WORLD_SIZE": str(settings.nproc),
        }
        local_rank = {} if start.local_rank is None else {"LOCAL_RANK": str(start.local_rank)}
        return {**os.environ, **settings.environ, **mine, **local_rank}

    def _kill_all(self, reason: str, over: ExitReason = ExitReason.STOPPED) -> None:
        self.state.finish(over, reason)
        for running in self._running.values():
            running.signal(signal.SIGKILL)

    def _new_life(self) -> int:
        """Later than any before it, also one of an earlier supervisor of this node."""
        self._last_life = max(self._last_life + 1, time.time_ns() // 1_000_000)
        return self._last_life

    # -- what happens -------------------------------------------------------------------------------------------------

    def _came(self, token: str, line: RankConnection) -> str:
        """On the connection's thread: whether this is a process that was started here, and the only one of it."""
        if token not in self.state.processes:
            return "this process was not started by this supervisor, or another one has taken its seat"
        if self._lines.setdefault(token, line) is not line:
            return "another process is connected with this token"
        self._post(partial(self.state.process_connected, token))
        return ""

    def _said(self, token: str, status: RankStatus) -> None:
        self.state.handle_rank_status(token, status, self._clock())

    def _left(self, token: str, line: RankConnection) -> None:
        if self._lines.get(token) is line:
            del self._lines[token]
            self._told.pop(token, None)
        self._timers.append((self._clock() + _REASON_S, partial(self.state.connection_closed, token, time.time())))

    def _ended(self, token: str, status: int, path: Path, at: float) -> None:
        del self._running[token]
        if self.state.never_joins(token, status):
            why = describe_unjoined_exit(self.settings.command, status, path)
            self.state.process_exited(token, why, at, never_joined=True)
            return
        memory = self._kills.new_kills() if status == -signal.SIGKILL else ""
        why = f"{describe_exit(status)}{', ' if memory else ''}{memory} (see {path})"
        has_stacks = status == -STACKS_SIGNAL or (status == LEAVE_STATUS and self.state.is_leaving(token))
        location = stack_location(end_of_file(path, _STACKS_BYTES)) if has_stacks else ""
        known = self.state.process_exited(token, why, at, location=location)
        if location:
            said = f"its main thread was in {location}: {why}" if known == why else known
            log.warning("node %s: %s", self.settings.node, said)

    def _where(self) -> str:
        """Where the coordinator is; on the link's thread."""
        if not is_leader_url(self.settings.coordinator):
            return self.settings.coordinator
        try:
            if self._leadership is None:
                self._leadership = open_leader_record(self.settings.coordinator)
            record = self._leadership.read()
        except ControlPlaneUnavailableError:
            self._is_unknown = True
            raise
        except Exception as error:
            self._is_unknown = True
            log.exception("who leads the job cannot be asked")
            raise ControlPlaneUnavailableError(f"who leads the job cannot be asked: {error}") from error
        self._is_unknown = False
        self._holder = "" if record is None else record.holder
        led = self.state.leader[0]
        if record is not None and record.over and (record.term >= led > 0 or record.over == JOB_FINISHED):
            self._over = ExitReason(record.over), record.reason
            if not record.holder:
                raise ControlPlaneUnavailableError(f"the job is over: {record.reason}")
        return leader_address(record)

    def _reached(self) -> None:
        self._heard_at = self._clock()

    def _ordered(self, orders: NodeDesired) -> None:
        if not self.state.obeys(orders):
            log.warning("node %s: a coordinator of term %d leads no longer", self.settings.node, orders.term)
            self._link.drop()
            return
        self._heard_at = self._clock()
        if (
            self._coordinator is not None
            and self._alone_since is not None
            and self._holder != self.settings.candidate_name
        ):
            self._coordinator.dismiss()
        self._alone_since, self.state.coordinator_unreachable = None, False
        if orders.superseded and orders.generation == self.state.generation and self.state.exit is None:
            self._last_life = max(self._last_life, orders.min_generation)
            self.state.begin_generation()
        else:
            self.state.apply_desired(orders, self._clock())

    def _cut_off(self, why: str) -> None:
        self._heard_at = None
        if self._over is not None and self.state.exit is None:
            self.state.finish(*self._over)
            if not self.state.leader[0]:
                where = self.settings.coordinator
                log.warning("job %s has finished; to run it again, delete the record of %s", self.settings.job, where)
        if self._alone_since is None:
            self._alone_since = self._clock()
            self._candidacy_s = self._turn_to_lead_s()
            log.warning("node %s: the coordinator cannot be reached: %s", self.settings.node, why)
        self.state.coordinator_unreachable = True

    def _turn_to_lead_s(self) -> float:
        """Few nodes of a large job are candidates at once: others only where none of those is there."""
        formed = self.state.world
        if formed is None or self.state.node not in formed.ranked_nodes:
            return random.uniform(0.0, 1.0)
        return formed.ranked_nodes.index(self.state.node) // _CANDIDATES * _NEXT_CANDIDATES_S

    def _keeps(self, address: str) -> None:
        self.state.store = address

    def _offered(self, peer: PeerNode) -> None:
        self.state.peer = peer

    # -- telling ------------------------------------------------------------------------------------------------------

    def _tell_ranks(self) -> None:
        now = self._clock()
        for token, line in list(self._lines.items()):
            hears = node_state.rank_desired(self.state, token, now)
            if node_state.comparable_rank_desired(hears) != self._told.get(token):
                self._told[token] = node_state.comparable_rank_desired(hears)
                line.send(hears)

    def _report(self) -> None:
        now = self._clock()
        report = node_state.node_status(self.state, now)
        if node_state.comparable_node_status(report) != self._reported or now - self._beat >= self.settings.heartbeat_s:
            self._send(report)

    def _send(self, report: NodeStatus) -> None:
        self._reported, self._beat = node_state.comparable_node_status(report), self._clock()
        self.state.number = report.number
        self._link.send_status(report)


_MOST = 1024
_GREETING_S = 10.0
_FRAME_S = 30.0
_LENGTH = struct.Struct(">I")


class RankConnection:
    """One rank's connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()

    def send(self, hears: RankDesired) -> None:
        """Never waits: a rank that does not read so many small messages does not hear them any more."""
        body = message_codec.encode_message(hears)
        data = _LENGTH.pack(len(body)) + body
        with self._sending:
            try:
                sent = self._sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError:
                sent = 0
            if sent != len(data):
                self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


class RankServer:
    """``on_connect(token, line)`` says why a process is refused; the other two follow, from its threads."""

    def __init__(
        self,
        path: Path,
        *,
        on_connect: Callable[[str, RankConnection], str],
        on_status: Callable[[str, RankStatus], None],
        on_disconnect: Callable[[str, RankConnection], None],
    ) -> None:
        self.path = path
        self._came, self._said, self._left = on_connect, on_status, on_disconnect
        self._lock = threading.Lock()
        self._lines: dict[threading.Thread, socket.socket] = {}
        self._stopping = False
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            self._listener.bind(str(path))
        except OSError:
            self._listener.close()
            raise
        finally:
            os.umask(before)
        self._listener.listen(128)
        self._thread = threading.Thread(target=self._accept, name="elastic-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._stopping = True
            lines = dict(self._lines)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for sock in lines.values():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in lines:
            thread.join()
        with contextlib.suppress(OSError):  # a directory that lets nobody in
            self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._stopping:
                    return
                continue
            thread = threading.Thread(target=self._serve, args=(sock,), name="elastic-line", daemon=True)
            with self._lock:
                if self._stopping or len(self._lines) >= _MOST:
                    sock.close()
                    continue
                self._lines[thread] = sock
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        line, token = RankConnection(sock), ""
        try:
            token = self._admitted(sock, line)
            while token and (says := self._next(sock)) is not None:
                self._said(token, says)
        except (PeerStoreError, OSError) as error:
            log.info("a rank's connection ended: %s", error)
        finally:
            if token:
                self._left(token, line)
            sock.close()
            with self._lock:
                del self._lines[threading.current_thread()]

    def _admitted(self, sock: socket.socket, line: RankConnection) -> str:
        _, uid = peer_credentials(sock)
        if uid not in (os.getuid(), 0):
            raise ProtocolError(f"user {uid} may not be a rank of user {os.getuid()}")
        sock.settimeout(_GREETING_S)
        greeting = message_codec.receive_frame(
            sock, RankHello, limit_bytes=message_codec.MAX_AGENT_HELLO_BYTES, within_s=_GREETING_S
        )
        if greeting is None:
            return ""
        if greeting.protocol != RANK_PROTOCOL:
            refused = f"protocol {greeting.protocol} is not spoken here, this is {RANK_PROTOCOL}"
        else:
            refused = self._came(greeting.token, line)
        if refused:
            line.send(RankDesired(exit=ExitReason.REFUSED, reason=refused))
            raise ProtocolError(refused)
        return greeting.token

    def _next(self, sock: socket.socket) -> RankStatus | None:
        sock.settimeout(None)
        return message_codec.receive_frame(sock, RankStatus, limit_bytes=MAX_RANK_MESSAGE_BYTES, within_s=_FRAME_S)


def inject_from_supervisor(
    injection: FaultInjection, state: NodeState, running: Mapping[str, Any], *, run: Path, environ: Mapping[str, str]
) -> bool:
    """Have it happen to the rank of this node that it is meant for. False while that one is just being replaced."""
    for process in state.rank_processes():
        local_rank = process.local_rank or 0
        place = RankLocation(state.rank_of(local_rank), state.node, local_rank)
        if not injection.matches(place) or process.token not in running:
            continue
        happens = injected_here(injection, place)
        if not InjectionRecord(run).claim(happens):
            return True
        log.warning("injected from outside at rank %d: %s", place.rank, injection)
        log_injection(happens)
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


def describe_unjoined_exit(command: Sequence[str], status: int, printed: Path) -> str:
    """Describe the exit of a script that never called ``elastic.run``, with the last line that it printed if it failed.

    ``command`` starts the script, and ``printed`` is the log file of the process.
    """
    script = Path(script_name(command)).name
    if status == 0:
        return (
            f"{script} exited without calling elastic.run / @elastic.recoverable; not retried. "
            "To run an unmodified script use torchrun"
        )
    last = last_printed_line(printed)
    return (
        f"{script} exited with status {status} before it called elastic.run / @elastic.recoverable; not retried"
        f"{': ' if last else ''}{last} (see {printed})"
    )


def script_name(command: Sequence[str]) -> str:
    """Return the script, module or program of a rank's command."""
    words = [word for word in command[1:] if word not in ("-u", "-m")] if command[0] == sys.executable else command
    return next(iter(words), command[0])


def last_printed_line(printed: Path) -> str:
    """Return the last line of a log file that is not blank, or "" if there is none."""
    return last_line(end_of_file(printed, _TAIL_BYTES))


def end_of_file(path: Path, size: int) -> str:
    """Return the last ``size`` bytes of a file as text, or "" if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
