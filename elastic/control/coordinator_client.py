"""Clients of the coordinator: one for supervisors that reconnects, one for single requests."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

import msgspec

from elastic.control.control_messages import (
    MAX_NODE_MESSAGE_BYTES,
    CoordinatorRequest,
    ElasticJobStatus,
    NodeCodec,
    NodeDesired,
    NodeStatus,
)
from elastic.control.leader_election import is_leader_url, leader_address, open_leader_record
from elastic.errors import ControlPlaneRefusedError, ControlPlaneUnavailableError
from peerstore.errors import PeerRefusedError, PeerStoreError
from peerstore.membership.topology import NodeId
from peerstore.message_codec import decode_message
from peerstore.transport.authentication import authenticate_to_server
from peerstore.transport.base import MessageChannel
from peerstore.transport.tcp import TcpTransport

log = logging.getLogger(__name__)

COORDINATOR_NODE = NodeId("coordinator")
COMMAND_NODE = NodeId("command")
_MIN_RETRY_S = 0.05
_MAX_RETRY_S = 1.0
_CONNECT_S = 5.0
_SEND_S = 10.0
_FLUSH_S = 1.0
_encode = msgspec.msgpack.Encoder().encode


def connect_to_coordinator(address: str, *, job: str, me: NodeId, secret: bytes) -> MessageChannel:
    """Return a connection to the coordinator after mutual authentication with the job's secret."""
    channel = TcpTransport(timeout_s=_SEND_S).connect(address, timeout_s=_CONNECT_S)
    try:
        authenticate_to_server(channel, job=job, me=me, secret=secret, expect=COORDINATOR_NODE)
    except BaseException:
        channel.close()
        raise
    channel.max_header_bytes, channel.max_payload_bytes = MAX_NODE_MESSAGE_BYTES, 0
    return channel


def call_coordinator(
    address: str, question: CoordinatorRequest, *, job: str, secret: bytes, timeout_s: float = 30.0
) -> ElasticJobStatus:
    """Send one request of the command line and return the answer.

    ``address`` is the coordinator's address or the URL of a leader record. Raise
    :class:`~elastic.errors.ControlPlaneRefusedError` if the coordinator refuses the request.
    """
    if is_leader_url(address):
        with contextlib.closing(open_leader_record(address)) as leadership:
            address = leader_address(leadership.read())
    try:
        channel = connect_to_coordinator(address, job=job, me=COMMAND_NODE, secret=secret)
        try:
            channel.send(_encode(question))
            incoming = channel.receive(within_s=timeout_s)
        finally:
            channel.close()
    except PeerRefusedError as error:
        raise ControlPlaneRefusedError(f"the coordinator of job {job} refused: {error}") from error
    except PeerStoreError as error:
        raise ControlPlaneUnavailableError(
            f"the coordinator of job {job} on {address} does not answer: {error}"
        ) from error
    if incoming is None:
        raise ControlPlaneUnavailableError(f"the coordinator of job {job} closed the connection without an answer")
    answer = decode_message(incoming.header, ElasticJobStatus)
    if answer.refused:
        raise ControlPlaneRefusedError(answer.refused)
    return answer


class CoordinatorClient:
    """A node's connection to the coordinator, with reconnects.

    ``where`` returns the coordinator's address before every attempt, or raises :class:`ControlPlaneUnavailableError`.
    ``on_desired`` receives the coordinator's orders. ``on_connected`` and ``on_unreachable`` report the state of the
    connection. ``on_refused`` runs after ``refusals`` refusals in a row, and ends the attempts. All are called from
    threads of this client.
    """

    def __init__(
        self,
        where: Callable[[], str],
        *,
        job: str,
        node: NodeId,
        secret: bytes,
        refusals: int,
        on_desired: Callable[[NodeDesired], None],
        on_connected: Callable[[], None],
        on_unreachable: Callable[[str], None],
        on_refused: Callable[[str], None],
    ) -> None:
        self._find_address, self._job, self._node, self._secret = where, job, node, secret
        self._on_desired, self._on_connected, self._on_unreachable, self._on_refused = (
            on_desired,
            on_connected,
            on_unreachable,
            on_refused,
        )
        self._refusals = refusals
        self._changed = threading.Condition()
        self._latest: NodeStatus | None = None
        self._sent = 0
        """Number of the newest status that was sent on this connection."""
        self._channel: MessageChannel | None = None
        self._codec = NodeCodec()
        self._stopping = False
        self._disconnected_until = 0.0
        self._threads = [
            threading.Thread(target=self._run_connections, name="elastic-link", daemon=True),
            threading.Thread(target=self._send_loop, name="elastic-link-write", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def send_status(self, status: NodeStatus) -> None:
        with self._changed:
            self._latest = status
            self._changed.notify_all()

    def disconnect_for(self, seconds: float) -> None:
        """Disconnect, and do not reconnect for ``seconds``."""
        with self._changed:
            self._disconnected_until = time.monotonic() + seconds
        self.drop()

    def drop(self) -> None:
        """Close the connection. The client looks up the address and reconnects."""
        with self._changed:
            channel = self._channel
        if channel is not None:
            channel.close()

    def close(self) -> None:
        """Send the newest status if that is possible within a second, then disconnect for good."""
        with self._changed:
            self._changed.wait_for(lambda: self._channel is None or not self._has_unsent, _FLUSH_S)
            self._stopping = True
            channel = self._channel
            self._changed.notify_all()
        if channel is not None:
            channel.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    @property
    def _has_unsent(self) -> bool:
        return self._latest is not None and self._latest.number > self._sent

    def _run_connections(self) -> None:
        retry_s, refused = _MIN_RETRY_S, 0
        while self._may_connect():
            try:
                channel = connect_to_coordinator(
                    self._find_address(), job=self._job, me=self._node, secret=self._secret
                )
            except (PeerStoreError, ControlPlaneUnavailableError) as error:
                refused = refused + 1 if isinstance(error, PeerRefusedError) else 0
                if refused >= self._refusals:
                    self._on_refused(str(error))
                    return
                self._on_unreachable(str(error))
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping, retry_s)
                retry_s = min(2 * retry_s, _MAX_RETRY_S)
                continue
            retry_s, refused = _MIN_RETRY_S, 0
            if not self._adopt(channel):
                channel.close()
                return
            self._on_connected()
            try:
                while (incoming := channel.receive()) is not None:
                    self._on_desired(self._codec.decode(incoming.header))
                reason = "the coordinator closed the connection"
            except PeerStoreError as error:
                reason = str(error)
            with self._changed:
                self._channel = None
                self._changed.notify_all()
            channel.close()
            if not self._stopping:
                self._on_unreachable(reason)

    def _may_connect(self) -> bool:
        """Wait for the end of a :meth:`disconnect_for`, and return whether the client is still open."""
        with self._changed:
            while not self._stopping and (left_s := self._disconnected_until - time.monotonic()) > 0:
                self._changed.wait(left_s)
            return not self._stopping

    def _adopt(self, channel: MessageChannel) -> bool:
        """Use ``channel`` from now on. Return False if the client was closed in the meantime."""
        with self._changed:
            if not self._stopping:
                self._channel, self._codec, self._sent = channel, NodeCodec(), 0
                self._changed.notify_all()
            return not self._stopping

    def _send_loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or (self._channel is not None and self._has_unsent))
                if self._stopping:
                    return
                status, channel, codec = self._latest, self._channel, self._codec
                assert status is not None  # noqa: S101 - what was waited for
                assert channel is not None  # noqa: S101
            try:
                channel.send(codec.encode(status))
            except PeerStoreError as error:
                log.info("the coordinator did not take a message: %s", error)
                channel.close()
            with self._changed:
                if self._channel is channel:
                    self._sent = status.number
                    self._changed.notify_all()
