"""The coordinator process: connections to all nodes, one event loop, the persisted epoch.

All its state can be rebuilt from the supervisors' reports, and ranks continue to train while it is down.

Sockets are non-blocking. A node that reads slowly skips to the newest desired state, and its connection is closed if it
stalls.
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
from elastic.coordinator.job_snapshot import CoordinatorSettings, JobSnapshot
from elastic.coordinator.job_status import WorldEventRecorder
from elastic.coordinator.node_reports import LastCommittedStep
from elastic.coordinator.status_server import StatusServer
from elastic.coordinator.world_reconciler import WorldReconciler
from elastic.errors import PolicyError
from elastic.world import world_state as act
from elastic.world import world_state as happen
from elastic.world.world_state import WorldState
from peerstore.daemon_process import ensure_private_directory
from peerstore.errors import PeerStoreError, PeerUnreachableError, ProtocolError, RequestError
from peerstore.message_codec import decode_message
from peerstore.transport.authentication import authenticate_client
from peerstore.transport.base import MessageChannel
from peerstore.transport.framing import FRAME_PREFIX, encode_frame, parse_frame_prefix
from peerstore.transport.tcp import TcpChannel, TcpTransport
from tieredckpt.event_log import EventLog, NullEventLog

log = logging.getLogger(__name__)

_WAIT_S = 0.1
_ABSENT_S = 1.0
"""Seconds between two iterations beyond which the coordinator itself was paused.

The nodes were not silent then.
"""
_REPORT_MISSING_S = 60.0
_PUBLISH_EVERY_S = 0.5
_SEND_S = 10.0
_GREETING_S = 10.0
_ANSWER_S = 20.0
_encode = msgspec.msgpack.Encoder().encode


class Coordinator:
    """Coordinator of one job. The constructor starts to listen.

    :meth:`run` returns after the end of the job, when the nodes have disconnected.
    """

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
        status_server: StatusServer | None = None,
        clock: Callable[[], float] = since_boot,
    ) -> None:
        """With ``leadership``, lead only while that record names ``candidate`` as the leader.

        With ``stands_by``, wait while another candidate leads. See
        :class:`~elastic.control.leader_election.LeaderElector`. ``status_server`` serves the status while
        this coordinator leads.
        """
        if settings.policy.max_replicas > MAX_NODES:
            raise PolicyError(
                f"max_replicas is {settings.policy.max_replicas}: a job has {MAX_NODES} nodes at the most"
            )
        floor, incarnation_epoch = (-1, 0) if fresh else _read_epochs(epoch_file)
        self._clock = RunningClock(_ABSENT_S, clock)
        self._event_log = event_log or NullEventLog()
        self._recorder = (
            None if leadership is not None else WorldEventRecorder(self._event_log, settings.job, again=not fresh)
        )
        self._incarnation = secrets.token_hex(8)
        self.reconciler = WorldReconciler(
            settings,
            incarnation=self._incarnation,
            now=self._clock(),
            fresh=fresh,
            min_epoch=floor,
            newest_epoch=incarnation_epoch,
            observer=self._observe_decision,
        )
        self._epoch_file, self._epoch, self._epoch_write_failed = epoch_file, floor, False
        self._job, self._secret, self._farewell_s = settings.job, secret, farewell_s
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._connections = NodeConnections()
        self._nodes: dict[str, NodeConnection] = {}
        """Newest connection of each node."""
        self._delayed: set[str] = set()
        """Nodes with a new desired state that have not yet read the one before."""
        self._encoded_world: tuple[WorldSpec, msgspec.Raw] | None = None
        self._report_missing_s = 0.0
        """Time of the next message about nodes that the first world waits for."""
        self._status_server = status_server
        self._publish_s = 0.0
        """Time of the next status for that page."""
        self._ending = threading.Event()
        self._listener = TcpTransport(timeout_s=_SEND_S, most=MAX_NODES).listen(listen, self._serve)
        self.address = self._listener.address
        self._elector: LeaderElector | None = None
        self._stands_by, self._since_term = stands_by, since_term
        if leadership is not None:
            self._elector = LeaderElector(
                leadership, candidate, self.address, since_term=since_term, changed=lambda: self._post(_wake)
            )

    def run(self) -> tuple[ExitReason, str]:
        """Run until the end of the job and return its reason.

        ``DISMISSED`` means that another coordinator leads.
        """
        over_at: float | None = None
        if self._elector is not None:
            self._elector.start()
        while not self._ending.is_set():
            if self._elector is not None and not self._elector.acts:
                if (end := self._why_never_leader(self._elector)) is not None:
                    self.close()
                    return end
                if self._status_server is not None:
                    self._status_server.publish(None)
                self._ending.wait(_WAIT_S)
                continue
            self._run_once()
            if self.snapshot.outcome.exit is not None:
                over_at = self._clock() if over_at is None else over_at
                if not self._nodes or self._clock() - over_at > self._farewell_s:
                    break
        self.close()
        outcome = self.snapshot.outcome
        over = outcome.exit or ExitReason.STOPPED
        reason = outcome.reason if outcome.exit is not None else "the coordinator was told to end"
        if self._recorder is not None:
            step = str(self.last_committed_step) if over in (ExitReason.STOPPED, ExitReason.JOB_FAILED) else ""
            self._recorder.record_end(over, f"{reason} ({step})" if step else reason)
        return over, reason

    def _observe_decision(
        self,
        snapshot: JobSnapshot,
        before: WorldState,
        event: happen.WorldEvent,
        actions: Sequence[act.WorldAction],
        now: float,
    ) -> None:
        if self._recorder is not None:
            self._recorder.record_decision(snapshot, before, event, actions, now)

    def _why_never_leader(self, elector: LeaderElector) -> tuple[ExitReason, str] | None:
        """Return why this candidate can never lead, or ``None`` while it may. Connected nodes wait meanwhile."""
        term, (over, reason) = self.snapshot.term, elector.finished
        if elector.lost:
            return ExitReason.DISMISSED, f"this coordinator leads no longer: {elector.lost}"
        if term == 0 and over == JOB_FINISHED:
            return ExitReason.FINISHED, f"{reason}; delete the record of who leads to run the job again"
        if term == 0 and over and (elector.follows or self._since_term):
            return ExitReason(over), reason
        if term == 0 and elector.follows and not self._stands_by:
            return ExitReason.DISMISSED, f"{elector.follows} leads"
        return None

    @property
    def snapshot(self) -> JobSnapshot:
        """State of the job after the last decision."""
        return self.reconciler.snapshot()

    @property
    def last_committed_step(self) -> LastCommittedStep:
        """Newest step that all ranks reported as sealed. The nodes' agents may have a newer one."""
        return self.snapshot.last_committed_step

    def request_stop(self) -> None:
        """Make :meth:`run` return at once, in any state of the job. Thread-safe."""
        self._ending.set()
        self._post(_wake)

    def close(self) -> None:
        self._ending.set()
        self._listener.close()
        self._run_inbox()
        self._connections.close(self._clock())
        self._nodes.clear()
        if self._status_server is not None:
            self._status_server.close()
        if self._elector is not None:
            self._elector.close()

    def _run_once(self) -> None:
        """Run one iteration: read what has arrived, decide once, send new desired states."""
        if self._elector is not None and self.snapshot.term == 0:
            self.reconciler.leads(self._elector.term, self._elector.epoch, self._elector.incarnation_epoch)
            self._recorder = WorldEventRecorder(self._event_log, self._job, again=self._elector.epoch >= 0)
        ready = self._connections.wait(_WAIT_S)
        now = self._clock()
        self.reconciler.was_away(self._clock.skipped(), now)
        self._run_inbox()
        for connection, is_readable in ready:
            self._serve_ready(connection, now, reads=is_readable)
        for connection in self._connections.stalled(now):
            log.info("connection to %s has stalled for %g s", connection.peer, STALL_TIMEOUT_S)
            self._drop(connection)
        self.reconciler.reconcile(now)
        self.reconciler.tick(now)
        self._report_missing_nodes(now)
        self._publish_status(now)
        if not self._persist_epoch():
            return
        self._send_desired({*self.reconciler.nodes_to_notify(), *self._delayed}, now)

    def _report_missing_nodes(self, now: float) -> None:
        missing = job_status.missing_nodes(self.snapshot)
        if missing and now >= self._report_missing_s:
            self._report_missing_s = now + _REPORT_MISSING_S
            log.warning("%s", missing)

    def _publish_status(self, now: float) -> None:
        if self._status_server is not None and now >= self._publish_s:
            self._publish_s = now + _PUBLISH_EVERY_S
            self._status_server.publish(job_status.elastic_job_status(self.snapshot, now))

    def _send_desired(self, nodes: Iterable[str], now: float) -> None:
        self._delayed, snapshot = set(), self.snapshot
        for node in sorted(nodes):
            connection = self._nodes.get(node)
            if connection is None or node not in snapshot.nodes:
                continue
            if connection.is_sending:
                self._delayed.add(node)
            else:
                self._send(connection, node_desired(snapshot, node, now), now)

    def _send(self, connection: NodeConnection, desired: NodeDesired, now: float) -> None:
        try:
            connection.send(desired, now)
        except PeerStoreError as error:
            log.info("a node did not take a message: %s", error)
            self._drop(connection)
        except Exception:  # the node must notice and reconnect, rather than wait for a desired state
            log.exception("a message to a node could not be sent")
            self._drop(connection)
        self._connections.update_interest(connection)

    def _post(self, call: Callable[[], None]) -> None:
        self._inbox.put(call)
        self._connections.wake()

    def _run_inbox(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get_nowait()()

    def _persist_epoch(self) -> bool:
        """Persist the newest world's number and return whether that succeeded.

        No node learns of the world before, so no two worlds share a number even if every process is lost.
        """
        snapshot = self.snapshot
        epoch, outcome = snapshot.world.epoch, snapshot.outcome
        if self._elector is not None:
            over = "" if outcome.exit is None else outcome.exit.value
            return self._elector.noted(epoch, snapshot.allocated_epoch, over=over, reason=outcome.reason)
        if self._epoch_file is not None and epoch > self._epoch:
            try:
                _write_epochs(self._epoch_file, epoch, snapshot.allocated_epoch)
            except OSError as error:  # for example too many open files: nodes train on until the write succeeds
                if not self._epoch_write_failed:
                    log.error("the world's number cannot be written to %s, so nodes wait: %s", self._epoch_file, error)
                self._epoch_write_failed = True
                return False
            self._epoch, self._epoch_write_failed = epoch, False
        return True

    # -- on a connection's own thread -----------------------------------------------------------------------------

    def _serve(self, channel: MessageChannel) -> None:
        who = authenticate_client(
            channel, me=COORDINATOR_NODE, secret_of=lambda named: self._secret if named == self._job else None
        )
        channel.max_header_bytes, channel.max_payload_bytes = MAX_NODE_MESSAGE_BYTES, 0
        incoming = channel.receive(within_s=_GREETING_S)
        if incoming is None:
            return
        message: CoordinatorMessage = decode_message(incoming.header, CoordinatorMessage)  # type: ignore[arg-type]  # a union is a type to msgspec
        if isinstance(message, NodeStatus):
            self._adopt_connection(channel, who.node, message)
        else:
            channel.send(_encode(self._answer_request(message)))
            channel.receive(within_s=_GREETING_S)  # until the other side has read it and closes

    def _answer_request(self, request: CoordinatorRequest) -> ElasticJobStatus:
        future: Future[ElasticJobStatus] = Future()

        def answer() -> None:
            now, refused = self._clock(), why_refused(self.snapshot, request)
            if not refused:
                self.reconciler.handle_request(request, now)
            future.set_result(job_status.elastic_job_status(self.snapshot, now, refused=refused))

        self._post(answer)
        return future.result(_ANSWER_S)

    def _adopt_connection(self, channel: MessageChannel, node: str, status: NodeStatus) -> None:
        """Move a node's connection from its handshake thread to the coordinator's thread."""
        if status.node != node:
            raise ProtocolError(f"node {node} reports as {status.node}")
        if not isinstance(channel, TcpChannel):
            raise RequestError(f"{channel.peer} did not connect over TCP: the coordinator cannot poll it")
        sock = channel.detach()
        self._post(partial(self._add_node, sock, channel.peer, status))

    # -- on the coordinator's thread ------------------------------------------------------------------------------

    def _add_node(self, sock: socket.socket, peer: str, status: NodeStatus) -> None:
        if self._ending.is_set() or len(self._connections) >= MAX_NODES:
            sock.close()
            return
        connection = NodeConnection(
            sock, peer, status.node, CoordinatorCodec(status, self._encode_world, self.reconciler.interned)
        )
        self._connections.add(connection)
        now = self._clock()
        self._record_report(connection, connection.codec.status, now)
        self._serve_ready(connection, now, reads=True)  # bytes that arrived with the first report

    def _serve_ready(self, connection: NodeConnection, now: float, *, reads: bool) -> None:
        try:
            if not reads:
                connection.flush(now)
            for status in connection.read(now) if reads else ():
                if status.node != connection.node:
                    raise ProtocolError(f"node {connection.node} reports as {status.node}")
                self._record_report(connection, status, now)
            self._connections.update_interest(connection)
        except PeerStoreError as error:
            log.info("the connection of node %s ended: %s", connection.node, error)
            self._drop(connection)

    def _record_report(self, connection: NodeConnection, status: NodeStatus, now: float) -> None:
        if self._elector is not None and self._is_of_another(status):
            log.warning("node %s has obeyed another coordinator, in term %d", status.node, status.term)
            self._elector.heard(status.term)
            return
        refused = self.reconciler.record_status(status, now)
        if refused and (above := self.reconciler.later_generation(status, now)):
            log.info("the clock of node %s was set back: its supervisor must begin a later generation", status.node)
            self._send(
                connection,
                NodeDesired(self._incarnation, status.generation, superseded=True, min_generation=above),
                now,
            )
            return
        if refused:
            log.warning("a supervisor was refused: %s", refused)
            desired = NodeDesired(self._incarnation, status.generation, exit=ExitReason.REFUSED, reason=refused)
            self._send(connection, desired, now)
            return
        before = self._nodes.get(status.node)
        if before is not None and before is not connection and before.generation != status.generation:
            reason = f"a newer supervisor runs as node {status.node}"
            self._send(
                before,
                NodeDesired(self._incarnation, before.generation, exit=ExitReason.REFUSED, reason=reason),
                now,
            )
        connection.generation = status.generation
        self._nodes[status.node] = connection

    def _is_of_another(self, status: NodeStatus) -> bool:
        """Whether the node obeyed another coordinator in this term or a later one."""
        mine, its = self.snapshot.term, status.term
        return its > mine or (its == mine > 0 and status.leader != self._incarnation)

    def _drop(self, connection: NodeConnection) -> None:
        self._connections.remove(connection)
        if self._nodes.get(connection.node) is connection:
            del self._nodes[connection.node]
            self.reconciler.connection_lost(connection.node, connection.generation, self._clock())

    def _encode_world(self, formed: WorldSpec) -> msgspec.Raw:
        """Return the encoded world, which is the same for all nodes and encoded once."""
        if self._encoded_world is None or self._encoded_world[0] is not formed:
            self._encoded_world = formed, msgspec.Raw(_encode(formed))
        return self._encoded_world[1]


def _wake() -> None:
    """Do nothing: the call only wakes the coordinator's thread."""


def _write_epochs(file: Path, epoch: int, incarnation_epoch: int) -> None:
    """Write both numbers in place with a fixed length, so that a full disk cannot fail a later write."""
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, f"{epoch:020d} {incarnation_epoch:020d}".encode(), 0)
    finally:
        os.close(fd)


def can_write_epoch(file: Path) -> bool:
    """Whether the newest world's number can be written to the file. Reserves the space for later writes."""
    try:
        if not file.exists():
            ensure_private_directory(file.parent)
        _write_epochs(file, *_read_epochs(file))
    except (OSError, PeerStoreError) as error:
        log.warning("a coordinator that is started after this one learns the world's number from its nodes: %s", error)
        return False
    return True


def _read_epochs(file: Path | None) -> tuple[int, int]:
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
"""Seconds without progress after which a half-read message or a half-sent report counts as stalled."""
_READ_BYTES = 256 << 10


class NodeConnection:
    """Non-blocking connection of one node, from the node's first report on."""

    def __init__(self, sock: socket.socket, peer: str, node: str, end: CoordinatorCodec) -> None:
        self.peer, self.node, self.codec = peer, node, end
        self.generation = end.status.generation
        self.sock = sock
        self._received = bytearray()
        self._unsent = memoryview(b"")
        self._send_stalled_since: float | None = None
        """Time of the last progress of an unfinished send, ``None`` without one."""
        self._read_stalled_since: float | None = None
        """Time of the last progress of an unfinished report, ``None`` without one."""
        sock.setblocking(False)

    @property
    def is_sending(self) -> bool:
        return len(self._unsent) > 0

    def send(self, desired: NodeDesired, now: float) -> None:
        """Start to send a desired state; :meth:`flush` sends the rest.

        The caller checks :attr:`is_sending` first.
        """
        self._unsent = memoryview(encode_frame(self.codec.encode(desired)))
        self._send_stalled_since = now
        self.flush(now)

    def flush(self, now: float) -> None:
        sent = -1
        with contextlib.suppress(BlockingIOError):
            sent = self._attempt()
        if sent >= 0:
            self._unsent = self._unsent[sent:]
            self._send_stalled_since = now if self.is_sending else None

    def read(self, now: float) -> Iterator[NodeStatus]:
        """Yield the complete reports received so far.

        Raise :class:`PeerUnreachableError` if the connection has ended.
        """
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerUnreachableError(f"{self.peer}: {error}") from error
        if not data:
            raise PeerUnreachableError(f"{self.peer} closed the connection")
        self._received += data
        while (body := self._next()) is not None:
            yield self.codec.decode(body)
        self._read_stalled_since = now if self._received else None

    @property
    def is_idle(self) -> bool:
        """Whether no message is incomplete in either direction."""
        return self._send_stalled_since is None and self._read_stalled_since is None

    def is_stalled(self, now: float) -> bool:
        since = [one for one in (self._send_stalled_since, self._read_stalled_since) if one is not None]
        return any(now - one > STALL_TIMEOUT_S for one in since)

    def _attempt(self) -> int:
        try:
            return self.sock.send(self._unsent, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            raise
        except OSError as error:
            raise PeerUnreachableError(f"{self.peer}: {error}") from error

    def _next(self) -> bytes | None:
        if len(self._received) < FRAME_PREFIX.size:
            return None
        size, _ = parse_frame_prefix(
            self._received[: FRAME_PREFIX.size], self.peer, max_header_bytes=MAX_NODE_MESSAGE_BYTES, max_payload_bytes=0
        )
        end = FRAME_PREFIX.size + size
        if len(self._received) < end:
            return None
        body = bytes(self._received[FRAME_PREFIX.size : end])
        del self._received[:end]
        return body


class NodeConnections:
    """All node connections, in one selector with a socket that wakes its wait."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_sender, self._wake_receiver = socket.socketpair()
        for one in (self._wake_sender, self._wake_receiver):
            one.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._all: set[NodeConnection] = set()
        self._incomplete: set[NodeConnection] = set()

    def __len__(self) -> int:
        return len(self._all)

    def wake(self) -> None:
        """Wake :meth:`wait`. Safe in any thread and in a signal handler."""
        with contextlib.suppress(OSError):  # full, so the wait ends anyway; or closed
            self._wake_sender.send(b"!")

    def add(self, connection: NodeConnection) -> None:
        self._all.add(connection)
        self._selector.register(connection.sock, selectors.EVENT_READ, connection)

    def wait(self, within_s: float) -> list[tuple[NodeConnection, bool]]:
        """Return connections with data to read (``True``) or room to send (``False``)."""
        ready = []
        for key, events in self._selector.select(within_s):
            connection: NodeConnection | None = key.data
            if connection is None:
                with contextlib.suppress(BlockingIOError):
                    self._wake_receiver.recv(4096)
                continue
            if events & selectors.EVENT_WRITE:
                ready.append((connection, False))
            if events & selectors.EVENT_READ:
                ready.append((connection, True))
        return ready

    def update_interest(self, connection: NodeConnection) -> None:
        """Update the events to wait for, after a send or a read."""
        if connection not in self._all:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.is_sending else 0)
        if self._selector.get_key(connection.sock).events != events:
            self._selector.modify(connection.sock, events, connection)
        if connection.is_idle:
            self._incomplete.discard(connection)
        else:
            self._incomplete.add(connection)

    def stalled(self, now: float) -> list[NodeConnection]:
        return [connection for connection in self._incomplete if connection.is_stalled(now)]

    def remove(self, connection: NodeConnection) -> None:
        if connection in self._all:
            self._all.remove(connection)
            self._incomplete.discard(connection)
            self._selector.unregister(connection.sock)
            connection.sock.close()

    def close(self, now: float) -> None:
        """Send what the sockets accept at once, then close all connections."""
        for connection in list(self._all):
            with contextlib.suppress(PeerStoreError):
                connection.flush(now)
            self.remove(connection)
        self._selector.close()
        self._wake_sender.close()
        self._wake_receiver.close()
