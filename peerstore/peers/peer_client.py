"""Client of one other node's agent: credentials, pooled connections, calls with a deadline."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from peerstore import deadlines
from peerstore.errors import PeerUnreachableError
from peerstore.membership.topology import NodeId
from peerstore.rpc import RESPONSE_S, Connection, ConnectionPool, remaining_until
from peerstore.transport.authentication import HANDSHAKE_TIMEOUT_S, authenticate_to_server
from peerstore.transport.base import MessageChannel, Payload, Transport

_CONNECT_S = 5.0
T = TypeVar("T")


class PeerCredentials:
    """Credentials for the agents of a job: the job's name, this node's id, and the job's secret."""

    def __init__(self, job: str, me: NodeId, secret: bytes) -> None:
        self.job = job
        self.node_id = me
        self.secret = secret

    def __repr__(self) -> str:
        return f"PeerCredentials(job={self.job!r}, me={self.node_id!r})"  # without the secret


PeerConnection = Connection[MessageChannel]


class PeerClient:
    """Client of one other node's agent. Thread-safe."""

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
        self._first_request = greet
        self._pool: ConnectionPool[MessageChannel] = ConnectionPool(self._connect, self._greet, address)

    def call(
        self,
        op: str,
        body: object,
        result: type[T] | Any,
        *,
        payload: Payload = (),
        into: Sequence[memoryview] = (),
        timeout_s: float = RESPONSE_S,
        within_s: float | None = None,
    ) -> Any:
        """Send a request on a pooled connection and return the response.

        ``timeout_s`` limits the time until the response begins, ``within_s`` the whole call including connection setup.
        """
        limit_s = deadlines.remaining_s(math.inf if within_s is None else within_s)
        until = None if math.isinf(limit_s) else time.monotonic() + limit_s
        if self._pool.has_idle:  # a pooled connection may lead to an agent that has restarted
            with contextlib.suppress(PeerUnreachableError), self.connection(until=until) as line:
                return line.call(op, body, result, payload=payload, into=into, timeout_s=timeout_s, until=until)
        with self.connection(fresh=True, until=until) as line:
            return line.call(op, body, result, payload=payload, into=into, timeout_s=timeout_s, until=until)

    def connection(
        self, *, fresh: bool = False, until: float | None = None
    ) -> contextlib.AbstractContextManager[PeerConnection]:
        """Yield a connection for exclusive use; it is closed after a transport error."""
        return self._pool.connection(fresh=fresh, until=until)

    def close(self) -> None:
        """Close all connections, also those in use or being opened."""
        self._pool.close(busy=True)

    def _connect(self, until: float | None) -> MessageChannel:
        if not self.address:
            raise PeerUnreachableError("this node's agent does not listen for others")
        left_s = remaining_until(until)
        connect_s = self._connect_s if left_s is None else min(self._connect_s, left_s)
        return self._transport.connect(self.address, timeout_s=connect_s)

    def _greet(self, line: PeerConnection, until: float | None) -> None:
        left_s = remaining_until(until)
        within_s = HANDSHAKE_TIMEOUT_S if left_s is None else min(HANDSHAKE_TIMEOUT_S, left_s)
        authenticate_to_server(
            line.channel,
            job=self._credentials.job,
            me=self._credentials.node_id,
            secret=self._credentials.secret,
            within_s=within_s,
        )
        self._first_request(line, until)
