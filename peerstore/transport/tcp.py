"""TCP transport: connections, listeners, limits before authentication, a thread per connection.

A connection is unauthenticated until its peer has proven a secret or a token. Unauthenticated connections share a small
budget and have little time. If the budget is used up, the transport closes the oldest connection of the address with
most of them. Idle connections therefore cannot lock out other peers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from peerstore import daemon_process
from peerstore.errors import PeerUnreachableError, RequestError
from peerstore.network_addresses import (
    AddressInfo,
    interface_address,
    interface_addresses,
    is_wildcard_host,
    join_address,
    outbound_address,
    resolve_host,
    split_address,
)
from peerstore.transport.authentication import TlsFiles
from peerstore.transport.base import MessageChannel
from peerstore.transport.connection_threads import ConnectionThreads
from peerstore.transport.framing import FramedChannel, SocketStream, close_on_error, set_tcp_options

log = logging.getLogger(__name__)

_BACKLOG = 128
_PAUSE_S = 0.1
_HANDSHAKE_S = 10.0


AUTHENTICATION_TIMEOUT_S = 20.0
"""Seconds until a connection must be authenticated; TLS and the handshake have half of it each."""


class TcpTransport:
    """TCP connections, bound to ``interface`` (its name or one of its addresses) or routed by the kernel.

    ``timeout_s`` is the number of seconds for which a peer may be silent in the middle of a message. ``most`` limits a
    listener's connections; further ones are refused. Connections without authentication after ``proof_s`` seconds are
    closed.
    """

    name = "tcp"

    def __init__(
        self,
        *,
        interface: str = "",
        tls: TlsFiles | None = None,
        timeout_s: float = 30.0,
        most: int = 1024,
        proof_s: float = AUTHENTICATION_TIMEOUT_S,
    ) -> None:
        self._interface = interface
        self._tls = tls
        self._timeout_s = timeout_s
        self._most = most
        self._proof_s = proof_s
        if interface:
            interface_addresses(interface)
        if tls is not None:
            tls.context(server=True)

    def listen(self, address: str, serve: Callable[[MessageChannel], None]) -> TcpListener:
        """Listen on ``host:port``; port 0 picks a free port.

        An empty host means the interface's address, or every address if no interface is set.
        """
        host, port = split_address(address)
        if is_wildcard_host(host) and self._interface:
            host = interface_addresses(self._interface)[0]
        if is_wildcard_host(host):
            both = host != "0.0.0.0" and socket.has_dualstack_ipv6()  # noqa: S104 - compared, not bound
            family = socket.AF_INET6 if both else socket.AF_INET
            sock = socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
            host = outbound_address()
        else:
            found = resolve_host(host, port, within_s=self._timeout_s)[0]
            sock = socket.create_server(found[4], family=found[0], backlog=_BACKLOG)
        serving = ConnectionThreads(partial(self._serve_after_handshake, serve), most=self._most)
        return TcpListener(sock, host, serving, self._wrap_accepted, self._proof_s)

    def connect(self, address: str, *, timeout_s: float = 5.0) -> MessageChannel:
        deadline = time.monotonic() + timeout_s
        host, port = split_address(address)
        failures = []
        for found in resolve_host(host, port, within_s=timeout_s):
            try:
                sock = self._connect_socket(found, max(0.001, deadline - time.monotonic()))
            except (OSError, RequestError) as error:
                failures.append(f"{found[4][0]}: {error}")
            else:
                return self._wrap_connected(sock, host, address, deadline)
        raise PeerUnreachableError(f"{address} cannot be reached: {'; '.join(failures)}")

    def close(self) -> None:
        """Do nothing: the transport has no shared resources."""

    def _connect_socket(self, found: AddressInfo, within_s: float) -> socket.socket:
        family, kind, protocol, _, where = found
        sock = socket.socket(family, kind, protocol)
        try:
            if self._interface:
                sock.bind((interface_address(self._interface, family), 0))
            sock.settimeout(within_s)
            sock.connect(where)
        except BaseException:
            sock.close()
            raise
        return sock

    def _wrap_connected(self, sock: socket.socket, host: str, address: str, deadline: float) -> MessageChannel:
        with close_on_error(sock):
            set_tcp_options(sock, self._timeout_s)
            if self._tls is None:
                return TcpChannel(sock, address, self._timeout_s)
            from peerstore.transport.tls import TlsChannel, TlsStream

            stream = TlsStream(sock, self._tls.context(server=False), server=False, name=host)
        channel = TlsChannel(stream, address, self._timeout_s)
        try:
            channel.handshake(deadline - time.monotonic())
        except BaseException:
            channel.close()
            raise
        return channel

    def _wrap_accepted(self, sock: socket.socket, peer: str) -> FramedChannel:
        with close_on_error(sock):
            set_tcp_options(sock, self._timeout_s)
            if self._tls is None:
                return TcpChannel(sock, peer, self._timeout_s)
            from peerstore.transport.tls import TlsChannel, TlsStream

            stream = TlsStream(sock, self._tls.context(server=True), server=True)
        return TlsChannel(stream, peer, self._timeout_s)

    def _serve_after_handshake(self, serve: Callable[[MessageChannel], None], channel: MessageChannel) -> None:
        """Perform the TLS handshake on the connection's thread, so that a slow peer delays no other one."""
        if self._tls is not None:
            from peerstore.transport.tls import TlsChannel

            if isinstance(channel, TlsChannel):
                channel.handshake(min(_HANDSHAKE_S, self._timeout_s))
        serve(channel)


class TcpChannel(FramedChannel):
    """A channel directly on a socket."""

    def __init__(self, sock: socket.socket, peer: str, timeout_s: float) -> None:
        super().__init__(SocketStream(sock), peer, timeout_s)
        self._sock = sock

    def detach(self) -> socket.socket:
        """Return the socket, between two messages, for use with a selector.

        The channel is unusable afterwards.
        """
        with self._closing, self._sending, self._receiving:
            self._check_usable()
            self._closed, self._closed_reason = True, "its socket was detached"
            return self._sock


class TcpListener:
    def __init__(
        self,
        sock: socket.socket,
        host: str,
        serving: ConnectionThreads,
        accepted: Callable[[socket.socket, str], FramedChannel],
        proof_s: float,
    ) -> None:
        self.address = join_address(host, sock.getsockname()[1])
        self._sock = sock
        self._serving = serving
        self._wrap_accepted = accepted
        self._admission = ConnectionAdmission(f"the listener on {self.address}", within_s=proof_s)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._accept_loop, name="peerstore-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._admission.close()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._sock.close()
        self._serving.close()

    def _accept_loop(self) -> None:
        coming = select.poll()
        coming.register(self._sock, select.POLLIN)
        while not self._stopping.is_set():
            again_s = self._admission.sweep()
            if not coming.poll(None if again_s is None else again_s * 1000):
                continue
            try:
                sock, where = self._sock.accept()
            except OSError as error:  # most likely too many open files, which is transient
                if not self._stopping.wait(_PAUSE_S):
                    self._admission.record_rejected(f"it could not be accepted: {error}")
                continue
            peer = join_address(where[0], where[1])
            stranger = self._admission.admit(sock, where[0])
            if stranger is None:
                sock.close()
            elif not self._serving.serve(partial(self._wrap_accepted, sock, peer), peer, stranger):
                self._admission.record_rejected("there are too many connections", where[0])
                stranger.leave()
                sock.close()


MAX_UNAUTHENTICATED = 64
MAX_UNAUTHENTICATED_PER_HOST = 8
"""Limit per address.

More are admitted for a moment, because many nodes behind one address may start together.
"""
_SHARE = 8
"""Unauthenticated connections use at most 1/8 of the process's open-file limit."""
_GRACE_S = 1.0
"""Minimum age in seconds of an evicted connection; an honest peer authenticates within milliseconds."""
_LOG_INTERVAL_S = 60.0


class UnauthenticatedConnection:
    """One connection that has not authenticated."""

    def __init__(self, admission: ConnectionAdmission, sock: socket.socket, host: str, now: float) -> None:
        self.host = host
        self.since = now
        self._admission = admission
        # A duplicate: the serving thread may close its descriptor, whose number could then be reused.
        self._sock = socket.socket(fileno=os.dup(sock.fileno()))

    def mark_authenticated(self) -> None:
        """End its deadline and free its place; idempotent."""
        self._admission._remove(self)

    leave = mark_authenticated

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class ConnectionAdmission:
    """The unauthenticated connections of one listener.

    Only the accepting thread calls ``admit`` and ``sweep``; other methods are thread-safe.
    """

    def __init__(
        self,
        name: str,
        *,
        strangers: int = MAX_UNAUTHENTICATED,
        of_one: int = MAX_UNAUTHENTICATED_PER_HOST,
        within_s: float = AUTHENTICATION_TIMEOUT_S,
        limit: Callable[[], int] = daemon_process.open_file_limit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._most = max(2, min(strangers, limit() // _SHARE))
        self._of_one = of_one
        self._within_s = within_s
        self._clock = clock
        self._changed = threading.Condition()
        self._strangers: dict[UnauthenticatedConnection, None] = {}
        """In order of arrival."""
        self._closed = False
        self._rejected: Counter[str] = Counter()
        self._logged_at = float("-inf")

    def admit(self, sock: socket.socket, host: str) -> UnauthenticatedConnection | None:
        """Wait for a free place and admit the connection; return ``None`` while the listener closes."""
        with self._changed:
            while not self._closed:
                left_s = self._make_room(host)
                if left_s <= 0:
                    try:
                        found = UnauthenticatedConnection(self, sock, host, self._clock())
                    except OSError as error:  # no file descriptor is available
                        self._log_rejected(host, str(error))
                        return None
                    self._strangers[found] = None
                    return found
                self._changed.wait(left_s)
            return None

    def sweep(self) -> float | None:
        """Close connections after their deadline; return the seconds to the next one, ``None`` without any."""
        with self._changed:
            now = self._clock()
            for one in [one for one in self._strangers if now - one.since >= self._within_s]:
                self._evict(one, f"nothing was proven within {self._within_s:g} s")
            return next((max(0.01, one.since + self._within_s - now) for one in self._strangers), None)

    def close(self) -> None:
        """Close all unauthenticated connections."""
        with self._changed:
            self._closed = True
            for one in list(self._strangers):
                self._drop(one)

    def record_rejected(self, why: str, host: str = "") -> None:
        """Log a connection that the listener refused for another reason."""
        with self._changed:
            self._log_rejected(host, why)

    def __len__(self) -> int:
        with self._changed:
            return len(self._strangers)

    # -- callers hold the lock ----------------------------------------------------------------------------------------

    def _make_room(self, host: str) -> float:
        """Return 0 if another connection of this address fits, else the seconds until an eviction may help."""
        now, counted = self._clock(), Counter(one.host for one in self._strangers)
        if counted[host] >= self._of_one:
            own_oldest = next(one for one in self._strangers if one.host == host)
            if now - own_oldest.since >= _GRACE_S:
                self._evict(own_oldest, "its address has too many connections that prove nothing")
        if len(self._strangers) < self._most:
            return 0.0
        busiest, count = counted.most_common(1)[0]
        oldest = next(one for one in self._strangers if one.host == busiest)
        over_limit = busiest != host and count > self._of_one
        if over_limit or now - oldest.since >= _GRACE_S:
            self._evict(oldest, "too many connections prove nothing")
            return 0.0
        return oldest.since + _GRACE_S - now

    def _evict(self, one: UnauthenticatedConnection, why: str) -> None:
        self._drop(one)
        self._log_rejected(one.host, why)

    def _drop(self, one: UnauthenticatedConnection) -> None:
        del self._strangers[one]
        one._end()
        self._changed.notify_all()

    def _remove(self, one: UnauthenticatedConnection) -> None:
        with self._changed:
            if one in self._strangers:
                del self._strangers[one]
                one._sock.close()
                self._changed.notify_all()

    def _log_rejected(self, host: str, why: str) -> None:
        """Log at most one line a minute, so that unauthenticated peers cannot fill the log."""
        self._rejected[host] += 1
        now = self._clock()
        if now - self._logged_at < _LOG_INTERVAL_S:
            return
        most, of_most = self._rejected.most_common(1)[0]
        log.warning(
            "%s: %d connections were turned away or ended, %d of them from %s; the last one: %s",
            self._name,
            self._rejected.total(),
            of_most,
            most or "nobody knows where",
            why,
        )
        self._logged_at = now
        self._rejected.clear()
