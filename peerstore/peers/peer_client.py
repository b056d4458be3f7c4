"""Client of one other node's agent: credentials, pooled connections, calls with a deadline."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from peerstore import deadlines, message_codec
from peerstore.errors import PeerStoreError, PeerUnreachableError, ProtocolError, error_from_wire
from peerstore.membership.topology import NodeId
from peerstore.peers.peer_messages import PeerRequest, PeerResponse
from peerstore.transport.authentication import HANDSHAKE_TIMEOUT_S, authenticate_to_server
from peerstore.transport.base import MessageChannel, Payload, ProgressCallback, Transport

_CONNECT_S = 5.0
_RESPONSE_S = 60.0
T = TypeVar("T")


class PeerCredentials:
    """Credentials for the agents of a job: the job's name, this node's id, and the job's secret."""

    def __init__(self, job: str, me: NodeId, secret: bytes) -> None:
        self.job = job
        self.node_id = me
        self.secret = secret

    def __repr__(self) -> str:
        return f"PeerCredentials(job={self.job!r}, me={self.node_id!r})"  # without the secret


class PeerConnection:
    """One connection, used by one thread at a time."""

    def __init__(self, channel: MessageChannel) -> None:
        self._channel = channel

    def send(self, op: str, body: object, payload: Payload = ()) -> None:
        """Send a message that has no response."""
        self._channel.send(_encode(op, body), payload)

    def call(
        self,
        op: str,
        body: object,
        result: type[T] | Any,
        *,
        payload: Payload = (),
        into: Sequence[memoryview] = (),
        timeout_s: float = _RESPONSE_S,
        until: float | None = None,
    ) -> Any:
        """Send a request and return the response as ``result``.

        The response's payload must fill the views ``into`` exactly. ``until`` is the monotonic time at which
        the call fails, even if a response has begun.
        """
        self.send(op, body, payload)
        return self.receive_response(op, result, into=into, timeout_s=timeout_s, until=until)

    def receive_response(
        self,
        op: str,
        result: type[T] | Any,
        *,
        into: Sequence[memoryview] = (),
        watch: Callable[[Any], ProgressCallback] | None = None,
        timeout_s: float = _RESPONSE_S,
        until: float | None = None,
    ) -> Any:
        """Return the response to the oldest unanswered request; responses arrive in request order.

        ``watch`` receives the decoded response and returns a callback for the progress of the payload.
        """
        incoming = self._channel.receive(idle_s=timeout_s, within_s=_remaining_s(until))
        if incoming is None:
            raise PeerUnreachableError(f"{self._channel.peer} closed the connection instead of answering {op!r}")
        answer = message_codec.decode_message(incoming.header, PeerResponse)
        if answer.error:
            self._channel.discard()
            raise error_from_wire(answer.error, message_codec.decode_message(answer.body, str))
        decoded = message_codec.decode_message(answer.body, result)
        if incoming.payload_bytes != sum(map(len, into)):
            raise ProtocolError(
                f"{self._channel.peer} answered {op!r} with {incoming.payload_bytes} bytes instead of the requested "
                f"{sum(map(len, into))} bytes"
            )
        self._channel.receive_into(into, watch(decoded) if watch is not None else None)
        return decoded

    def close(self) -> None:
        self._channel.close()


class PeerClient:
    """Client of one other node's agent. Thread-safe; connections are opened on demand and pooled."""

    def __init__(
        self,
        transport: Transport,
        address: str,
        credentials: PeerCredentials,
        *,
        connect_s: float = _CONNECT_S,
        greet: Callable[[PeerConnection, float | None], None] = lambda _line, _until: None,
    ) -> None:
        """Initialize; ``greet`` is called with each new connection and a deadline before its first request."""
        self.address = address
        self._transport = transport
        self._credentials = credentials
        self._connect_s = connect_s
        self._greet = greet
        self._idle: list[PeerConnection] = []
        self._busy: set[PeerConnection] = set()
        self._opening: set[MessageChannel] = set()
        self._lock = threading.Lock()
        self._closed = False

    def call(
        self,
        op: str,
        body: object,
        result: type[T] | Any,
        *,
        payload: Payload = (),
        into: Sequence[memoryview] = (),
        timeout_s: float = _RESPONSE_S,
        within_s: float | None = None,
    ) -> Any:
        """Send a request on a pooled connection and return the response.

        ``timeout_s`` limits the time until the response begins, ``within_s`` the whole call including connection setup.
        """
        limit_s = deadlines.remaining_s(math.inf if within_s is None else within_s)
        until = None if math.isinf(limit_s) else time.monotonic() + limit_s
        if self._idle:  # a pooled connection may lead to an agent that has restarted
            with contextlib.suppress(PeerUnreachableError), self.connection(until=until) as line:
                return line.call(op, body, result, payload=payload, into=into, timeout_s=timeout_s, until=until)
        with self.connection(fresh=True, until=until) as line:
            return line.call(op, body, result, payload=payload, into=into, timeout_s=timeout_s, until=until)

    @contextlib.contextmanager
    def connection(self, *, fresh: bool = False, until: float | None = None) -> Iterator[PeerConnection]:
        """Yield a connection for exclusive use; it is closed after a transport error."""
        with self._lock:
            line = self._idle.pop() if self._idle and not fresh else None
        line = line or self._open(until)
        with self._lock:
            self._busy.add(line)
            closed = self._closed
        if closed:
            line.close()
        try:
            yield line
        except (PeerUnreachableError, ProtocolError):
            line.close()
            raise
        except PeerStoreError:  # an error response: the connection is still usable
            self._return(line)
            raise
        except BaseException:
            line.close()
            raise
        else:
            self._return(line)
        finally:
            with self._lock:
                self._busy.discard(line)

    def _open(self, until: float | None) -> PeerConnection:
        if not self.address:
            raise PeerUnreachableError("this node's agent does not listen for others")
        if self._closed:
            raise PeerUnreachableError(f"cannot connect to {self.address}: this client was closed")
        left_s = _remaining_s(until)
        connect_s = self._connect_s if left_s is None else min(self._connect_s, left_s)
        channel = self._transport.connect(self.address, timeout_s=connect_s)
        with self._lock:
            self._opening.add(channel)
            closed = self._closed
        try:
            if closed:
                raise PeerUnreachableError(f"cannot connect to {self.address}: this client was closed")
            left_s = _remaining_s(until)
            within_s = HANDSHAKE_TIMEOUT_S if left_s is None else min(HANDSHAKE_TIMEOUT_S, left_s)
            authenticate_to_server(
                channel,
                job=self._credentials.job,
                me=self._credentials.node_id,
                secret=self._credentials.secret,
                within_s=within_s,
            )
            line = PeerConnection(channel)
            self._greet(line, until)
        except BaseException:
            channel.close()
            raise
        finally:
            with self._lock:
                self._opening.discard(channel)
        return line

    def _return(self, line: PeerConnection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(line)
                return
        line.close()

    def close(self) -> None:
        """Close all connections, also busy and opening ones."""
        with self._lock:
            self._closed = True
            ended: list[PeerConnection | MessageChannel] = [*self._idle, *self._busy, *self._opening]
            self._idle = []
        for one in ended:
            one.close()


def _remaining_s(until: float | None) -> float | None:
    if until is None:
        return None
    left_s = until - time.monotonic()
    if left_s <= 0:
        raise PeerUnreachableError("it did not answer in time")
    return left_s


def _encode(op: str, body: object) -> bytes:
    return message_codec.encode_message(PeerRequest(op, message_codec.encode_raw_message(body)))
