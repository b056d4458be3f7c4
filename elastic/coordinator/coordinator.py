"""The coordinator process: connections to all nodes, one event loop, the persisted epoch.

It keeps nothing that it cannot learn again from the supervisors. While it is away the ranks train on.

What has arrived is read when the kernel says that something has; a node that does not take what it is told hears only
the newest of it later, and is given up after a while.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import selectors
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import msgspec

from elastic.control.control_messages import (
    MAX_NODE_MESSAGE_BYTES,
    MAX_NODES,
    CoordinatorCodec,
    CoordinatorMessage,
    CoordinatorRequest,
    ElasticJobStatus,
    ExitReason,
    NodeDesired,
    NodeStatus,
    WorldSpec,
)
from elastic.control.coordinator_client import COORDINATOR_NODE
from elastic.control.leader_election import JOB_FINISHED, LeaderElector, LeaderRecordStore
from elastic.control.running_clock import RunningClock, since_boot
from elastic.coordinator import job_status
from elastic.coordinator.desired_state import node_desired, why_refused
from elastic.coordinator.job_status import WorldEventRecorder
from elastic.coordinator.node_reports import LastCommittedStep
from elastic.coordinator.world_reconciler import CoordinatorSettings, WorldReconciler
from elastic.errors import PolicyError
from elastic.world import world_state as act
from elastic.world import world_state as happen
from elastic.world.world_state import WorldState
from peerstore.errors import PeerStoreError, PeerUnreachableError, ProtocolError, RequestError
from peerstore.message_codec import decode_message
from peerstore.server.store_server import ensure_private_directory
from peerstore.transport.authentication import authenticate_client
from peerstore.transport.base import MessageChannel
from peerstore.transport.framing import FRAME_MAGIC, FRAME_PREFIX, FRAME_VERSION, parse_frame_prefix
from peerstore.transport.tcp import TcpChannel, TcpTransport
from tieredckpt.event_log import EventLog, NullEventLog

log = logging.getLogger(__name__)

_TURN_S = 0.1
_ABSENT_S = 1.0
"""Between two turns: what is longer, it did not run, or was busy, and is nobody else's silence."""
_REPORT_MISSING_S = 60.0
_SEND_S = 10.0
_GREETING_S = 10.0
_ANSWER_S = 20.0
_encode = msgspec.msgpack.Encoder().encode


class Coordinator:
    """Listens as soon as it is made; ``run`` returns when the job is over and its nodes have gone."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        secret: bytes,
        *,
        listen: str = "127.0.0.1:0",
        fresh: bool = True,
        epoch_file: Path | None = None,
        farewell_s: float = 60.0,
        event_log: EventLog | None = None,
        leadership: LeaderRecordStore | None = None,
        candidate: str = "",
        since_term: int = 0,
        stands_by: bool = False,
        clock: Callable[[], float] = since_boot,
    ) -> None:
        """``leadership``: it begins to lead when the record there says that it does, as ``candidate``; see
        :class:`~elastic.control.leader_election.LeaderElector`. ``stands_by``: it waits also while another one leads.
        """
        if settings.policy.max_replicas > MAX_NODES:
            raise PolicyError(
                f"max_replicas is {settings.policy.max_replicas}: a job has {MAX_NODES} nodes at the most"
            )
        floor, incarnation_epoch = (-1, 0) if fresh else _epochs_in(epoch_file)
        self._clock = RunningClock(_ABSENT_S, clock)
        self._event_log = event_log or NullEventLog()
        self._recorder = (
            None if leadership is not None else WorldEventRecorder(self._event_log, settings.job, again=not fresh)
        )
        self.reconciler = WorldReconciler(
            settings,
            incarnation=secrets.token_hex(8),
            now=self._clock(),
            fresh=fresh,
            min_epoch=floor,
            newest_epoch=incarnation_epoch,
            observer=self._saw,
        )
        self._epoch_file, self._epoch, self._silent = epoch_file, floor, False
        self._secret, self._farewell_s = secret, farewell_s
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._connections = NodeConnections()
        self._nodes: dict[str, NodeConnection] = {}
        """The newest connection of each."""
        self._untold: set[str] = set()
        """Nodes for which there is something, but that have not taken yet what they were told before."""
        self._packed: tuple[WorldSpec, msgspec.Raw] | None = None
        self._report_missing_s = 0.0
        """When nodes that the first world waits for are to be reported again."""
        self._ending = threading.Event()
        self._listener = TcpTransport(timeout_s=_SEND_S, most=MAX_NODES).listen(listen, self._serve)
        self.address = self._listener.address
        self._elector: LeaderElector | None = None
        self._stands_by, self._since_term = stands_by, since_term
        if leadership is not None:
            self._elector = LeaderElector(
                leadership, candidate, self.address, since_term=since_term, changed=lambda: self._post(_nothing)
            )

    def run(self) -> tuple[ExitReason, str]:
        """Until the job is over, and how; ``DISMISSED``: another coordinator leads it."""
        over_at: float | None = None
        if self._elector is not None:
            self._elector.start()
        while not self._ending.is_set():
            if self._elector is not None and not self._elector.acts:
                if (end := self._may_not_lead(self._elector)) is not None:
                    self.close()
                    return end
                self._ending.wait(_TURN_S)
                continue
            self._turn()
            if self.reconciler.exit is not None:
                over_at = self._clock() if over_at is None else over_at
                if not self._nodes or self._clock() - over_at > self._farewell_s:
                    break
        self.close()
        over = self.reconciler.exit or ExitReason.STOPPED
        reason = self.reconciler.reason if self.reconciler.exit is not None else "the coordinator was told to end"
        if self._recorder is not None:
            step = str(self.last_committed_step) if over in (ExitReason.STOPPED, ExitReason.JOB_FAILED) else ""
            self._recorder.record_end(over, f"{reason} ({step})" if step else reason)
        return over, reason

    def _saw(
        self,
        reconciler: WorldReconciler,
        before: WorldState,
        event: happen.WorldEvent,
        actions: Sequence[act.WorldAction],
        now: float,
    ) -> None:
        if self._recorder is not None:
            self._recorder.record_decision(reconciler, before, event, actions, now)

    def _may_not_lead(self, elector: LeaderElector) -> tuple[ExitReason, str] | None:
        """Why it never will (again). Until that is known, whoever is connected waits."""
        over, reason = elector.finished
        if elector.lost:
            return ExitReason.DISMISSED, f"this coordinator leads no longer: {elector.lost}"
        if self.reconciler.term == 0 and over == JOB_FINISHED:
            return ExitReason.FINISHED, f"{reason}; delete the record of who leads to run the job again"
        if self.reconciler.term == 0 and over and (elector.follows or self._since_term):
            return ExitReason(over), reason
        if self.reconciler.term == 0 and elector.follows and not self._stands_by:
            return ExitReason.DISMISSED, f"{elector.follows} leads"
        return None

    @property
    def last_committed_step(self) -> LastCommittedStep:
        """As ranks have said so far; what was sealed since, the nodes' agents know."""
        return self.reconciler.last_committed_step

    def request_stop(self) -> None:
        """Have ``run`` return at once, whatever becomes of the job; from any thread."""
        self._ending.set()
        self._post(_nothing)

    def close(self) -> None:
        self._ending.set()
        self._listener.close()
        self._drain()
        self._connections.close(self._clock())
        self._nodes.clear()
        if self._elector is not None:
            self._elector.close()

    def _turn(self) -> None:
        """Whatever has arrived by now is heard, then decided on together, then everybody is told."""
        if self._elector is not None and self.reconciler.term == 0:
            self.reconciler.leads(self._elector.term, self._elector.epoch, self._elector.incarnation_epoch)
            self._recorder = WorldEventRecorder(
                self._event_log, self.reconciler.settings.job, again=self._elector.epoch >= 0
            )
        ready = self._connections.wait(_TURN_S)
        now = self._clock()
        self.reconciler.was_away(self._clock.skipped(), now)
        self._drain()
        for connection, has_said in ready:
            self._serve_ready(connection, now, reads=has_said)
        for connection in self._connections.stalled(now):
            log.info("%s has not gone on for %g s", connection.peer, STALL_TIMEOUT_S)
            self._gone(connection)
        self.reconciler.reconcile(now)
        self.reconciler.tick(now)
        self._report_missing_nodes(now)
        if not self._epoch_is_noted():
            return
        self._tell({*self.reconciler.nodes_to_notify(), *self._untold}, now)

    def _report_missing_nodes(self, now: float) -> None:
        missing = job_status.missing_nodes(self.reconciler)
        if missing and now >= self._report_missing_s:
            self._report_missing_s = now + _REPORT_MISSING_S
            log.warning("%s", missing)

    def _tell(self, nodes: Iterable[str], now: float) -> None:
        self._untold = set()
        for node in sorted(nodes):
            connection = self._nodes.get(node)
            if connection is None or node not in self.reconciler.nodes:
                continue
            if connection.is_sending:
                self._untold.add(node)
            else:
                self._say(connection, node_desired(self.reconciler, node, now), now)

    def _say(self, connection: NodeConnection, hears: NodeDesired, now: float) -> None:
        try:
            connection.send(hears, now)
        except PeerStoreError as error:
            log.info("a node did not take a message: %s", error)
            self._gone(connection)
        except Exception:  # who is told nothing any more is to know it, and comes again
            log.exception("a message to a node could not be sent")
            self._gone(connection)
        self._connections.update_interest(connection)

    def _post(self, call: Callable[[], None]) -> None:
        self._inbox.put(call)
        self._connections.wake()

    def _drain(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get_nowait()()

    def _epoch_is_noted(self) -> bool:
        """Before anybody hears of it: whatever happens to everybody, no two worlds have the same number."""
        if self._elector is not None:
            over = "" if self.reconciler.exit is None else self.reconciler.exit.value
            reconciler = self.reconciler
            return self._elector.noted(
                reconciler.world.epoch, reconciler.allocated_epoch, over=over, reason=reconciler.reason
            )
        if self._epoch_file is not None and self.reconciler.world.epoch > self._epoch:
            try:
                _note_epochs(self._epoch_file, self.reconciler.world.epoch, self.reconciler.allocated_epoch)
            except OSError as error:  # too many open files, say: nodes train on, and hear of it once it is there
                if not self._silent:
                    log.error("the world's number cannot be written to %s, so nodes wait: %s", self._epoch_file, error)
                self._silent = True
                return False
            self._epoch, self._silent = self.reconciler.world.epoch, False
        return True

    # -- on a connection's own thread -----------------------------------------------------------------------------

    def _serve(self, channel: MessageChannel) -> None:
        job = self.reconciler.settings.job
        who = authenticate_client(
            channel, me=COORDINATOR_NODE, secret_of=lambda named: self._secret if named == job else None
        )
        channel.max_header_bytes, channel.max_payload_bytes = MAX_NODE_MESSAGE_BYTES, 0
        incoming = channel.receive(within_s=_GREETING_S)
        if incoming is None:
            return
        said: CoordinatorMessage = decode_message(incoming.header, CoordinatorMessage)  # type: ignore[arg-type]  # a union is a type to msgspec
        if isinstance(said, NodeStatus):
            self._hand_over(channel, who.node, said)
        else:
            channel.send(_encode(self._answer(said)))
            channel.receive(within_s=_GREETING_S)  # until the other side has read it and closes

    def _answer(self, question: CoordinatorRequest) -> ElasticJobStatus:
        future: Future[ElasticJobStatus] = Future()

        def answer() -> None:
            now, refused = self._clock(), why_refused(self.reconciler, question)
            if not refused:
                self.reconciler.handle_request(question, now)
            future.set_result(job_status.elastic_job_status(self.reconciler, now, refused=refused))

        self._post(answer)
        return future.result(_ANSWER_S)

    def _hand_over(self, channel: MessageChannel, node: str, status: NodeStatus) -> None:
        """From here on the coordinator's thread hears this node."""
        if status.node != node:
            raise ProtocolError(f"node {node} reports as {status.node}")
        if not isinstance(channel, TcpChannel):
            raise RequestError(f"{channel.peer} came over something that many cannot be waited for on")
        sock = channel.detach()
        self._post(partial(self._came, sock, channel.peer, status))

    # -- on the coordinator's thread ------------------------------------------------------------------------------

    def _came(self, sock: socket.socket, peer: str, status: NodeStatus) -> None:
        if self._ending.is_set() or len(self._connections) >= MAX_NODES:
            sock.close()
            return
        connection = NodeConnection(
            sock, peer, status.node, CoordinatorCodec(status, self._pack, self.reconciler.interned)
        )
        self._connections.add(connection)
        now = self._clock()
        self._said(connection, connection.codec.status, now)
        self._serve_ready(connection, now, reads=True)  # what came right behind it

    def _serve_ready(self, connection: NodeConnection, now: float, *, reads: bool) -> None:
        try:
            if not reads:
                connection.flush(now)
            for said in connection.read(now) if reads else ():
                if said.node != connection.node:
                    raise ProtocolError(f"node {connection.node} reports as {said.node}")
                self._said(connection, said, now)
            self._connections.update_interest(connection)
        except PeerStoreError as error:
            log.info("the connection of node %s ended: %s", connection.node, error)
            self._gone(connection)

    def _said(self, connection: NodeConnection, status: NodeStatus, now: float) -> None:
        if self._elector is not None and self._is_of_another(status):
            log.warning("node %s has obeyed another coordinator, in term %d", status.node, status.term)
            self._elector.heard(status.term)
            return
        refused = self.reconciler.record_status(status, now)
        if refused and (above := self.reconciler.later_generation(status, now)):
            log.info("the clock of node %s has gone back: it is told to begin after its last supervisor", status.node)
            self._say(
                connection,
                NodeDesired(self.reconciler.incarnation, status.generation, superseded=True, min_generation=above),
                now,
            )
            return
        if refused:
            log.warning("a supervisor was refused: %s", refused)
            hears = NodeDesired(self.reconciler.incarnation, status.generation, exit=ExitReason.REFUSED, reason=refused)
            self._say(connection, hears, now)
            return
        before = self._nodes.get(status.node)
        if before is not None and before is not connection and before.generation != status.generation:
            reason = f"a newer supervisor runs as node {status.node}"
            self._say(
                before,
                NodeDesired(self.reconciler.incarnation, before.generation, exit=ExitReason.REFUSED, reason=reason),
                now,
            )
        connection.generation = status.generation
        self._nodes[status.node] = connection

    def _is_of_another(self, status: NodeStatus) -> bool:
        """Whether another one leads, or has led, in this term or a later one."""
        mine, its = self.reconciler.term, status.term
        return its > mine or (its == mine > 0 and status.leader != self.reconciler.incarnation)

    def _gone(self, connection: NodeConnection) -> None:
        self._connections.remove(connection)
        if self._nodes.get(connection.node) is connection:
            del self._nodes[connection.node]
            self.reconciler.connection_lost(connection.node, connection.generation, self._clock())

    def _pack(self, formed: WorldSpec) -> msgspec.Raw:
        """The newest world goes to all nodes, and is encoded once."""
        if self._packed is None or self._packed[0] is not formed:
            self._packed = formed, msgspec.Raw(_encode(formed))
        return self._packed[1]


def _nothing() -> None:
    """Only wakes who waits."""


def _note_epochs(file: Path, epoch: int, incarnation_epoch: int) -> None:
    """In place and always as long: where it is there once, this takes no more room on a disk that is full by now."""
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, f"{epoch:020d} {incarnation_epoch:020d}".encode(), 0)
    finally:
        os.close(fd)


def can_write_epoch(file: Path) -> bool:
    """Whether the newest world's number can be noted there, from here on also where the disk is full by then."""
    try:
        if not file.exists():
            ensure_private_directory(file.parent)
        _note_epochs(file, *_epochs_in(file))
    except (OSError, PeerStoreError) as error:
        log.warning("a coordinator that is started after this one learns the world's number from its nodes: %s", error)
        return False
    return True


def _epochs_in(file: Path | None) -> tuple[int, int]:
    """Return the newest world's number and the epoch of its incarnations; (-1, 0) without a record."""
    try:
        if file is None:
            return -1, 0
        with file.open("rb") as found:
            epoch, incarnation_epoch = map(int, found.read(64).split())
            return epoch, incarnation_epoch
    except (OSError, ValueError):
        return -1, 0


STALL_TIMEOUT_S = 10.0
"""How long a node may take no byte of what it is told, or send no byte of a report that it has begun."""
_READ_BYTES = 256 << 10


class NodeConnection:
    """One node's, from its first report on."""

    def __init__(self, sock: socket.socket, peer: str, node: str, end: CoordinatorCodec) -> None:
        self.peer, self.node, self.codec = peer, node, end
        self.generation = end.status.generation
        self.sock = sock
        self._arrived = bytearray()
        self._unsent = memoryview(b"")
        self._untaken_since: float | None = None
        """Since when the other side has taken nothing of what it is told."""
        self._begun_since: float | None = None
        """Since when it has sent nothing more of a report that it has begun."""
        sock.setblocking(False)

    @property
    def is_sending(self) -> bool:
        return len(self._unsent) > 0

    def send(self, hears: NodeDesired, now: float) -> None:
        """Only when it is not sending: what is not taken at once is sent by ``flush``."""
        body = self.codec.encode(hears)
        self._unsent = memoryview(FRAME_PREFIX.pack(FRAME_MAGIC, FRAME_VERSION, len(body), 0) + body)
        self._untaken_since = now
        self.flush(now)

    def flush(self, now: float) -> None:
        sent = -1
        with contextlib.suppress(BlockingIOError):
            sent = self._attempt()
        if sent >= 0:
            self._unsent = self._unsent[sent:]
            self._untaken_since = now if self.is_sending else None

    def read(self, now: float) -> Iterator[NodeStatus]:
        """The reports that are complete by now; :class:`PeerUnreachableError` when there will be no more."""
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerUnreachableError(f"{self.peer}: {error}") from error
        if not data:
            raise PeerUnreachableError(f"{self.peer} closed the connection")
        self._arrived += data
        while (body := self._next()) is not None:
            yield self.codec.decode(body)
        self._begun_since = now if self._arrived else None

    @property
    def is_idle(self) -> bool:
        """Nothing is under way, in neither direction."""
        return self._untaken_since is None and self._begun_since is None

    def is_stalled(self, now: float) -> bool:
        since = [one for one in (self._untaken_since, self._begun_since) if one is not None]
        return any(now - one > STALL_TIMEOUT_S for one in since)

    def _attempt(self) -> int:
        try:
            return self.sock.send(self._unsent, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            raise
        except OSError as error:
            raise PeerUnreachableError(f"{self.peer}: {error}") from error

    def _next(self) -> bytes | None:
        if len(self._arrived) < FRAME_PREFIX.size:
            return None
        size, _ = parse_frame_prefix(
            self._arrived[: FRAME_PREFIX.size], self.peer, max_header_bytes=MAX_NODE_MESSAGE_BYTES, max_payload_bytes=0
        )
        end = FRAME_PREFIX.size + size
        if len(self._arrived) < end:
            return None
        body = bytes(self._arrived[FRAME_PREFIX.size : end])
        del self._arrived[:end]
        return body


class NodeConnections:
    """All of them, and what wakes who waits for them."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._alarm, self._alarmed = socket.socketpair()
        for one in (self._alarm, self._alarmed):
            one.setblocking(False)
        self._selector.register(self._alarmed, selectors.EVENT_READ)
        self._all: set[NodeConnection] = set()
        self._unfinished: set[NodeConnection] = set()

    def __len__(self) -> int:
        return len(self._all)

    def wake(self) -> None:
        """From any thread, and from a signal's handler."""
        with contextlib.suppress(OSError):  # it is full, so who waits is woken anyway; or it is closed
            self._alarm.send(b"!")

    def add(self, connection: NodeConnection) -> None:
        self._all.add(connection)
        self._selector.register(connection.sock, selectors.EVENT_READ, connection)

    def wait(self, within_s: float) -> list[tuple[NodeConnection, bool]]:
        """Who has something to read (``True``), or takes more of what it is told."""
        ready = []
        for key, events in self._selector.select(within_s):
            connection: NodeConnection | None = key.data
            if connection is None:
                with contextlib.suppress(BlockingIOError):
                    self._alarmed.recv(4096)
                continue
            if events & selectors.EVENT_WRITE:
                ready.append((connection, False))
            if events & selectors.EVENT_READ:
                ready.append((connection, True))
        return ready

    def update_interest(self, connection: NodeConnection) -> None:
        """After something was sent or read: what to wait for from now on."""
        if connection not in self._all:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.is_sending else 0)
        if self._selector.get_key(connection.sock).events != events:
            self._selector.modify(connection.sock, events, connection)
        if connection.is_idle:
            self._unfinished.discard(connection)
        else:
            self._unfinished.add(connection)

    def stalled(self, now: float) -> list[NodeConnection]:
        return [connection for connection in self._unfinished if connection.is_stalled(now)]

    def remove(self, connection: NodeConnection) -> None:
        if connection in self._all:
            self._all.remove(connection)
            self._unfinished.discard(connection)
            self._selector.unregister(connection.sock)
            connection.sock.close()

    def close(self, now: float) -> None:
        """What can be sent at once is sent."""
        for connection in list(self._all):
            with contextlib.suppress(PeerStoreError):
                connection.flush(now)
            self.remove(connection)
        self._selector.close()
        self._alarm.close()
        self._alarmed.close()
