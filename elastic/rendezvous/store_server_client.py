"""Client of one store server: connections with timeouts, and whether the server answers."""

from __future__ import annotations

import contextlib
import enum
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from elastic.rendezvous.call_watchdog import Call, CallWatchdog
from peerstore.errors import PeerStoreError
from peerstore.network_addresses import resolve_host, split_address

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT = timedelta(seconds=10)
"""Timeout of a new client, including the lookup of the server's name."""
_LAST_PROBE_S = 1.0
"""Seconds for the last test of a server that took too long to connect."""

_NOT_SENT, _MAX_TRIES = "Broken pipe", 5
"""Torch's message for a request that was not sent because its connection was closed before."""

T = TypeVar("T")
SocketAddress = tuple[str, int]
"""Numeric IP address and port of a server."""
CloseConnections = Callable[[Collection[SocketAddress]], int]
"""Closes this process's connections to these addresses and returns their number."""


def resolve_store(host: str, port: int, *, within_s: float) -> frozenset[SocketAddress]:
    """Return the addresses of a host name.

    Call it when a world forms: during an abort the name service may not respond. Raise
    :class:`~peerstore.errors.PeerUnreachableError` if the name cannot be resolved within ``within_s`` seconds.
    """
    return frozenset((str(found[4][0]), port) for found in resolve_host(host, port, within_s=within_s))


@dataclass(frozen=True)
class StoreTimeouts:
    """Timeouts of requests to one server."""

    wait_slice_s: float = 20.0
    """Seconds to wait at one holder of a key, before the wait moves to its next holder in a cycle."""
    response_timeout_s: float = 20.0
    """Seconds that a request without a wait may take, on any network and load that a job survives."""
    connect_timeout_s: float = 30.0
    """Seconds that a new connection may take, including retries."""
    retry_after_s: float = 10.0
    """Seconds for which a server that did not respond is skipped, if the key has another holder."""


class StoreServerState(enum.Enum):
    """Availability of one store server."""

    ANSWERS = "answers"
    UNRESPONSIVE = "does not answer"
    """The server may be slow, stopped or unreachable. Whether it executed the request is unknown."""
    GONE = "is gone"
    """Its address refuses connections. The server never returns at this address."""


class StoreUnreachableError(Exception):
    """The request could not be sent, or no answer arrived."""


class StoreServerClient:
    """Client of one store server. Any thread may call it; each concurrent call has its own connection."""

    def __init__(
        self, address: str, *, close_connections: CloseConnections, guard: CallWatchdog, timeouts: StoreTimeouts
    ) -> None:
        self.address = address
        self.host, self.port = split_address(address)
        self.state = StoreServerState.ANSWERS
        self._close_sockets, self._watchdog, self._timeouts = close_connections, guard, timeouts
        self._idle: list[dist.TCPStore] = []
        self._lock = threading.Lock()
        self._closed = False
        self._retry_at = 0.0
        self._addresses: frozenset[SocketAddress] = frozenset()
        """Resolved addresses; empty before the first connection."""

    @property
    def connected(self) -> bool:
        return bool(self._addresses)

    @property
    def is_backing_off(self) -> bool:
        """Whether the server did not respond within the last ``retry_after_s`` seconds."""
        return self.state is StoreServerState.UNRESPONSIVE and time.monotonic() < self._retry_at

    def call(self, work: Callable[[dist.TCPStore], T], *, within_s: float = 0.0, again: bool = True) -> T:
        """Return the result of ``work``. Raise :class:`StoreUnreachableError` if the result is unknown.

        ``within_s`` is the number of seconds that the server may wait before it answers. ``again`` allows a second
        request after an idle connection broke.
        """
        limit_s = within_s + self._timeouts.response_timeout_s
        for _ in range(_MAX_TRIES):
            client, is_fresh = self._get_client()
            until = time.monotonic() + limit_s
            try:
                with self._watchdog.limit(limit_s, self.close_connections) as call:
                    result = work(client)
            except dist.DistNetworkError as error:
                self._handle_broken(str(error), late=time.monotonic() >= until)
                if self.state is StoreServerState.ANSWERS and _NOT_SENT in str(error):
                    continue  # another call's limit closed the connection before this request was sent
                if self.state is StoreServerState.ANSWERS and again and not is_fresh:
                    again = False
                    continue
                raise StoreUnreachableError(f"the connection to {self.address} broke") from error
            except dist.DistStoreError:  # the wait timed out, and the server answered that
                self._put_back(client, call)
                raise
            self._put_back(client, call)
            return result
        raise StoreUnreachableError(f"each connection to {self.address} was cut as soon as it was made")

    def close_connections(self) -> int:
        """Close this process's connections to the server; pending requests fail. Return their number."""
        return self._close_sockets(self._addresses) if self._addresses else 0

    def abort(self) -> int:
        """Close the connections for good: pending requests fail and are not retried. Return their number."""
        self.close()
        return self.close_connections()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._idle.clear()

    def _get_client(self) -> tuple[dist.TCPStore, bool]:
        """Return an unused connection and whether it is new."""
        with self._lock:
            if self._idle:
                return self._idle.pop(), False
        until = time.monotonic() + self._timeouts.connect_timeout_s
        while not self._closed and self.state is not StoreServerState.GONE:
            self._probe(self._timeouts.connect_timeout_s)
            try:
                with self._watchdog.limit(self._timeouts.connect_timeout_s, self.close_connections) as call:
                    client = self._connected()
                reason = "it took too long to connect"
                if not call.was_ended:
                    self.state = StoreServerState.ANSWERS
                    if not self._closed:  # otherwise abort() ran before this connection existed
                        return client, True
            except dist.DistError as error:
                reason = str(error)
            if not self._closed and time.monotonic() > until:
                self._probe(_LAST_PROBE_S)  # it may have gone during a slow attempt
                self._mark_unresponsive(reason)
                break
        raise StoreUnreachableError(f"the store on {self.address} {self.state.value}")

    def _connected(self) -> dist.TCPStore:
        return dist.TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=_CONNECT_TIMEOUT)

    def _put_back(self, client: dist.TCPStore, call: Call | None = None) -> None:
        """Return a connection to the pool, unless all connections were closed during ``call``."""
        with self._lock:
            if call is not None and call.was_ended:
                self._idle.clear()
            elif not self._closed:
                self._idle.append(client)

    def _handle_broken(self, reason: str, *, late: bool) -> None:
        """Drop the idle connections after one broke, and test the server with a new connection."""
        with self._lock:
            self._idle.clear()
        if late:
            self._mark_unresponsive(reason)
        elif not self._closed:
            with contextlib.suppress(StoreUnreachableError):
                self._put_back(self._get_client()[0])

    def _probe(self, within_s: float) -> None:
        """Detect a server that is gone at once, because a new ``TCPStore`` retries for long.

        Also stores the server's addresses. Raise :class:`StoreUnreachableError` if it cannot be reached.
        """
        try:
            addresses = resolve_store(self.host, self.port, within_s=within_s)
            socket.create_connection((self.host, self.port), within_s).close()
            self._addresses = addresses
        except ConnectionRefusedError as error:
            if self.state is not StoreServerState.GONE:
                log.warning("the store on %s is gone: its keys are read from the next holder", self.address)
            self.state = StoreServerState.GONE
            raise StoreUnreachableError(f"{self.address} {self.state.value}") from error
        except (OSError, PeerStoreError) as error:
            self._mark_unresponsive(str(error))
            raise StoreUnreachableError(f"{self.address} {self.state.value}") from error

    def _mark_unresponsive(self, reason: str) -> None:
        log.warning(
            "the store on %s does not answer: %s", self.address, reason.splitlines()[0] if reason else "no reason"
        )
        self.state = StoreServerState.UNRESPONSIVE
        self._retry_at = time.monotonic() + self._timeouts.retry_after_s
