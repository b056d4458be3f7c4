"""Clients of the coordinator: a supervisor's reconnecting one, and the command line's one-request one."""

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
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_CONNECT_S = 5.0
_SEND_S = 10.0
_FLUSH_S = 1.0
_encode = msgspec.msgpack.Encoder().encode


def connect_to_coordinator(address: str, *, job: str, me: NodeId, secret: bytes) -> MessageChannel:
    """A connection to the coordinator; both have proven that they know the job's secret."""
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
    """One question of a command line, and its answer. ``address``: also a URL of where it is noted who leads."""
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
    """A node's connection to the coordinator, made again when it breaks.

    ``where`` returns the coordinator's address before every attempt, or raises :class:`ControlPlaneUnavailableError`.
    ``on_desired`` gets its orders. ``on_connected`` and ``on_unreachable`` say whether it can be reached, and
    ``on_refused`` that it has refused this node several times in a row. All are called from threads of this client.
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
        self._where, self._job, self._node, self._secret = where, job, node, secret
        self._heard, self._came, self._cut_off, self._refused = on_desired, on_connected, on_unreachable, on_refused
        self._refusals = refusals
        self._changed = threading.Condition()
        self._latest: NodeStatus | None = None
        self._sent = 0
        """Number of the newest message that went out on this connection."""
        self._channel: MessageChannel | None = None
        self._end = NodeCodec()
        """Of this connection."""
        self._stopping = False
        self._cut_until = 0.0
        self._threads = [
            threading.Thread(target=self._talk, name="elastic-link", daemon=True),
            threading.Thread(target=self._write, name="elastic-link-write", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def send_status(self, status: NodeStatus) -> None:
        with self._changed:
            self._latest = status
            self._changed.notify_all()

    def disconnect_for(self, seconds: float) -> None:
        """Let go of the coordinator, and do not come back for so long."""
        with self._changed:
            self._cut_until = time.monotonic() + seconds
        self.drop()

    def drop(self) -> None:
        """Let go of this coordinator, and look again where it is."""
        with self._changed:
            channel = self._channel
        if channel is not None:
            channel.close()

    def close(self) -> None:
        """What was said last goes out first, where it can."""
        with self._changed:
            self._changed.wait_for(lambda: self._channel is None or not self._is_due, _FLUSH_S)
            self._stopping = True
            channel = self._channel
            self._changed.notify_all()
        if channel is not None:
            channel.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    @property
    def _is_due(self) -> bool:
        return self._latest is not None and self._latest.number > self._sent

    def _talk(self) -> None:
        pause_s, refused = _FIRST_PAUSE_S, 0
        while self._may_connect():
            try:
                channel = connect_to_coordinator(self._where(), job=self._job, me=self._node, secret=self._secret)
            except (PeerStoreError, ControlPlaneUnavailableError) as error:
                refused = refused + 1 if isinstance(error, PeerRefusedError) else 0
                if refused >= self._refusals:
                    self._refused(str(error))
                    return
                self._cut_off(str(error))
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping, pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            pause_s, refused = _FIRST_PAUSE_S, 0
            if not self._takes(channel):
                channel.close()
                return
            self._came()
            try:
                while (incoming := channel.receive()) is not None:
                    self._heard(self._end.decode(incoming.header))
                why = "the coordinator closed the connection"
            except PeerStoreError as error:
                why = str(error)
            with self._changed:
                self._channel = None
                self._changed.notify_all()
            channel.close()
            if not self._stopping:
                self._cut_off(why)

    def _may_connect(self) -> bool:
        """Whether this link is still wanted, once it is not cut on purpose any more."""
        with self._changed:
            while not self._stopping and (left_s := self._cut_until - time.monotonic()) > 0:
                self._changed.wait(left_s)
            return not self._stopping

    def _takes(self, channel: MessageChannel) -> bool:
        """Whether this is the connection from now on: not when the link was closed while it was made."""
        with self._changed:
            if not self._stopping:
                self._channel, self._end, self._sent = channel, NodeCodec(), 0
                self._changed.notify_all()
            return not self._stopping

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or (self._channel is not None and self._is_due))
                if self._stopping:
                    return
                says, channel, end = self._latest, self._channel, self._end
                assert says is not None  # noqa: S101 - what was waited for
                assert channel is not None  # noqa: S101
            try:
                channel.send(end.encode(says))
            except PeerStoreError as error:
                log.info("the coordinator did not take a message: %s", error)
                channel.close()
            with self._changed:
                if self._channel is channel:
                    self._sent = says.number
                    self._changed.notify_all()
