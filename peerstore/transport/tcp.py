"""Messages over TCP, with or without TLS: the transport that works everywhere."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from peerstore.errors import PeerUnreachableError, RequestError
from peerstore.transport.addresses import (
    AddressInfo,
    address_for,
    addresses_of,
    is_any,
    join_address,
    outward_address,
    resolve,
    split_address,
)
from peerstore.transport.admission import WITHIN_S, Admission
from peerstore.transport.certificates import TlsFiles
from peerstore.transport.framing import FramedChannel
from peerstore.transport.seam import Channel
from peerstore.transport.serving import Serving
from peerstore.transport.sockets import TcpStream, closed_unless_used, tune

log = logging.getLogger(__name__)

_BACKLOG = 128
_PAUSE_S = 0.1
_HANDSHAKE_S = 10.0


class TcpTransport:
    """Connections are bound to ``interface`` (its name or one of its addresses), or go where the kernel sends them.

    ``timeout_s`` is how long a peer may be silent in the middle of a message. ``most`` bounds how many connections a
    listener has at a time; more are turned away. Those that have proven nothing within ``proof_s`` are ended.
    """

    name = "tcp"

    def __init__(
        self,
        *,
        interface: str = "",
        tls: TlsFiles | None = None,
        timeout_s: float = 30.0,
        most: int = 1024,
        proof_s: float = WITHIN_S,
    ) -> None:
        self._interface = interface
        self._tls = tls
        self._timeout_s = timeout_s
        self._most = most
        self._proof_s = proof_s
        if interface:
            addresses_of(interface)
        if tls is not None:
            tls.context(server=True)

    def listen(self, address: str, serve: Callable[[Channel], None]) -> TcpListener:
        """``address`` is ``host:port``; port 0 is any free one, and no host is the interface's (or every) address."""
        host, port = split_address(address)
        if is_any(host) and self._interface:
            host = addresses_of(self._interface)[0]
        if is_any(host):
            both = host != "0.0.0.0" and socket.has_dualstack_ipv6()  # noqa: S104 - compared, not bound
            family = socket.AF_INET6 if both else socket.AF_INET
            sock = socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
            host = outward_address()
        else:
            found = resolve(host, port, within_s=self._timeout_s)[0]
            sock = socket.create_server(found[4], family=found[0], backlog=_BACKLOG)
        serving = Serving(partial(self._welcome, serve), most=self._most)
        return TcpListener(sock, host, serving, self._accepted, self._proof_s)

    def connect(self, address: str, *, timeout_s: float = 5.0) -> Channel:
        deadline = time.monotonic() + timeout_s
        host, port = split_address(address)
        failures = []
        for found in resolve(host, port, within_s=timeout_s):
            try:
                sock = self._dial(found, max(0.001, deadline - time.monotonic()))
            except (OSError, RequestError) as error:
                failures.append(f"{found[4][0]}: {error}")
            else:
                return self._connected(sock, host, address, deadline)
        raise PeerUnreachableError(f"{address} cannot be reached: {'; '.join(failures)}")

    def close(self) -> None:
        """Nothing is held beside the channels."""

    def _dial(self, found: AddressInfo, within_s: float) -> socket.socket:
        family, kind, protocol, _, where = found
        sock = socket.socket(family, kind, protocol)
        try:
            if self._interface:
                sock.bind((address_for(self._interface, family), 0))
            sock.settimeout(within_s)
            sock.connect(where)
        except BaseException:
            sock.close()
            raise
        return sock

    def _connected(self, sock: socket.socket, host: str, address: str, deadline: float) -> Channel:
        with closed_unless_used(sock):
            tune(sock, self._timeout_s)
            if self._tls is None:
                return TcpChannel(sock, address, self._timeout_s)
            from peerstore.transport.tls import TlsChannel, TlsStream

            stream = TlsStream(sock, self._tls.context(server=False), server=False, name=host)
        channel = TlsChannel(stream, address, self._timeout_s)
        try:
            channel.shake_hands(deadline - time.monotonic())
        except BaseException:
            channel.close()
            raise
        return channel

    def _accepted(self, sock: socket.socket, peer: str) -> FramedChannel:
        with closed_unless_used(sock):
            tune(sock, self._timeout_s)
            if self._tls is None:
                return TcpChannel(sock, peer, self._timeout_s)
            from peerstore.transport.tls import TlsChannel, TlsStream

            stream = TlsStream(sock, self._tls.context(server=True), server=True)
        return TlsChannel(stream, peer, self._timeout_s)

    def _welcome(self, serve: Callable[[Channel], None], channel: Channel) -> None:
        """On the connection's own thread: who is slow to show a certificate keeps nobody else waiting."""
        if self._tls is not None:
            from peerstore.transport.tls import TlsChannel

            if isinstance(channel, TlsChannel):
                channel.shake_hands(min(_HANDSHAKE_S, self._timeout_s))
        serve(channel)


class TcpChannel(FramedChannel):
    """A channel with nothing between it and its socket."""

    def __init__(self, sock: socket.socket, peer: str, timeout_s: float) -> None:
        super().__init__(TcpStream(sock), peer, timeout_s)
        self._sock = sock

    def detach(self) -> socket.socket:
        """The socket, between two messages: for somebody who waits for many at once. The channel is over."""
        with self._closing, self._sending, self._receiving:
            self._check()
            self._closed, self._over = True, "somebody else has its socket"
            return self._sock


class TcpListener:
    def __init__(
        self,
        sock: socket.socket,
        host: str,
        serving: Serving,
        accepted: Callable[[socket.socket, str], FramedChannel],
        proof_s: float,
    ) -> None:
        self.address = join_address(host, sock.getsockname()[1])
        self._sock = sock
        self._serving = serving
        self._accepted = accepted
        self._admission = Admission(f"the listener on {self.address}", within_s=proof_s)
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
        self._serving.end()

    def _accept_loop(self) -> None:
        coming = select.poll()
        coming.register(self._sock, select.POLLIN)
        while not self._stopping.is_set():
            again_s = self._admission.sweep()
            if not coming.poll(None if again_s is None else again_s * 1000):
                continue
            try:
                sock, where = self._sock.accept()
            except OSError as error:  # too many open files, most likely: they become fewer
                if not self._stopping.wait(_PAUSE_S):
                    self._admission.turned_away(f"it could not be accepted: {error}")
                continue
            peer = join_address(where[0], where[1])
            stranger = self._admission.enter(sock, where[0])
            if stranger is None:
                sock.close()
            elif not self._serving.take(partial(self._accepted, sock, peer), peer, stranger):
                self._admission.turned_away("there are too many connections", where[0])
                stranger.leave()
                sock.close()
