"""A proxy in front of a real server that injects faults and records every request.

::

    proxy.add_rule("PUT", query="partNumber=3").fail(ReplyWithStatus(503, "SlowDown", retry_after=1))
    held = proxy.add_rule("PUT", query="partNumber=3").hold()
    held.reached.wait(200)

A rule counts the requests that match it and applies to ``times`` of them, starting with the ``nth``.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass

from typing_extensions import Self

from tests.support.faults import Hold
from tests.support.http_exchange import Exchange, Hangup, MessageReader, SeenRequest, relay

Fault = Callable[["Exchange"], None]


@dataclass
class Rule:
    method: str
    path: str
    query: str
    nth: int
    times: int
    fault: Fault | None = None
    met: int = 0

    def fail(self, fault: Fault) -> Rule:
        self.fault = fault
        return self

    def hold(self, *, done: bool = False) -> Hold:
        self.fault = held = Hold(done=done)
        return held

    def matches(self, seen: SeenRequest) -> bool:
        if seen.method != self.method or not re.search(self.path, seen.path) or not re.search(self.query, seen.query):
            return False
        self.met += 1
        return self.fault is not None and self.nth <= self.met < self.nth + self.times


class FaultProxy:
    def __init__(self, port: int, *, tls: ssl.SSLContext | None = None) -> None:
        self._upstream = port
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.endpoint = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self._lock = threading.Condition()
        self._rules: list[Rule] = []
        self._seen: list[SeenRequest] = []
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept, name="fault-proxy")

    def __enter__(self) -> Self:
        self._acceptor.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        self.drop_held()
        with self._lock:
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def add_rule(self, method: str, path: str = "", *, query: str = "", nth: int = 1, times: int = 1) -> Rule:
        rule = Rule(method, path, query, nth, times)
        with self._lock:
            self._rules.append(rule)
        return rule

    def clear(self) -> None:
        """Forget rules and requests."""
        with self._lock:
            self._rules.clear()
            self._seen.clear()

    def drop_held(self) -> None:
        with self._lock:
            for rule in self._rules:
                if isinstance(rule.fault, Hold):
                    rule.fault.drop()

    def requests(self, method: str = "", path: str = "", *, query: str = "") -> list[SeenRequest]:
        with self._lock:
            return [
                each
                for each in self._seen
                if each.method.startswith(method) and re.search(path, each.path) and re.search(query, each.query)
            ]

    def parts_sent(self) -> list[int]:
        """Return the sorted numbers of the parts whose upload began."""
        return sorted(each.part for each in self.requests("PUT", query="partNumber="))

    def wait_for(self, condition: Callable[[FaultProxy], bool], timeout_s: float = 30.0) -> None:
        """Wait until ``condition`` holds; check it whenever a request ends."""
        with self._lock:
            if not self._lock.wait_for(lambda: condition(self), timeout_s):
                raise TimeoutError(f"not within {timeout_s} s; seen: {self._seen}")

    # -- inside ---------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,), name="fault-proxy-connection")
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(client.close)
            try:
                if self._tls:
                    client = self._tls.wrap_socket(client, server_side=True)
                    undo.callback(client.close)
                server = socket.create_connection(("127.0.0.1", self._upstream))
                undo.callback(server.close)
                with self._lock:
                    self._sockets |= {client, server}
                undo.callback(self._forget, client, server)
                self._exchanges(client, server)
            except (OSError, Hangup):
                pass

    def _exchanges(self, client: socket.socket, server: socket.socket) -> None:
        from_client, from_server = MessageReader(client), MessageReader(server)
        while True:
            head = from_client.head()
            if head is None:
                return
            exchange = Exchange(client, server, from_client, from_server, head)
            with self._lock:
                self._seen.append(exchange.seen)
                due = [rule.fault for rule in self._rules if rule.matches(exchange.seen)]
            if exchange.seen.method == "CONNECT":
                client.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
                relay(client, server)
                return
            try:
                (due[0] if due else Exchange.forward_unchanged)(exchange)
            finally:
                with self._lock:
                    self._lock.notify_all()
            if exchange.closes_connection:
                client.shutdown(socket.SHUT_WR)
                exchange.wait_for_client_close()
                return

    def _forget(self, *sockets: socket.socket) -> None:
        with self._lock:
            self._sockets -= set(sockets)
