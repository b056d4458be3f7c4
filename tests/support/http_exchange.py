"""HTTP between an S3 client and a server: one request and its response, open to faults."""

from __future__ import annotations

import contextlib
import re
import select
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

_BLOCK = 64 << 10
WAIT_S = 60.0


class Hangup(Exception):
    """Signal to close both connections at once."""


@dataclass
class SeenRequest:
    """One request, as far as it was received."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body_bytes: int = 0
    """Bytes received from the client."""
    status: int = 0
    """Status of the response sent to the client, 0 for none."""

    @property
    def part(self) -> int:
        return int(parse_qs(self.query).get("partNumber", ["0"])[0])


@dataclass
class MessageHead:
    raw: bytes
    first: str
    headers: dict[str, str] = field(default_factory=dict)


class MessageReader:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._rest = b""

    def head(self) -> MessageHead | None:
        while b"\r\n\r\n" not in self._rest:
            block = self._sock.recv(_BLOCK)
            if not block:
                return None
            self._rest += block
        raw, _, self._rest = self._rest.partition(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return MessageHead(raw + b"\r\n\r\n", first, headers)

    def body(self, head: MessageHead) -> Iterator[bytes]:
        """Yield the body as on the wire, chunk headers included."""
        if head.headers.get("transfer-encoding", "").lower() == "chunked":
            yield from self._chunks()
        else:
            yield from self.exactly(int(head.headers.get("content-length", "0")))

    def exactly(self, count: int) -> Iterator[bytes]:
        while count:
            block = self._rest[:count] if self._rest else self._sock.recv(min(count, _BLOCK))
            if not block:
                raise Hangup
            self._rest = self._rest[len(block) :]
            count -= len(block)
            yield block

    def _chunks(self) -> Iterator[bytes]:
        size = -1
        while size != 0:
            while b"\r\n" not in self._rest:
                block = self._sock.recv(_BLOCK)
                if not block:
                    raise Hangup
                self._rest += block
            line, _, self._rest = self._rest.partition(b"\r\n")
            size = int(line.split(b";")[0], 16)
            yield line + b"\r\n"
            yield from self.exactly(size + 2)


class Exchange:
    """One request and its response, which a fault can change."""

    def __init__(
        self,
        client: socket.socket,
        server: socket.socket,
        from_client: MessageReader,
        from_server: MessageReader,
        head: MessageHead,
    ) -> None:
        self.client = client
        self._server = server
        self._from_client = from_client
        self._from_server = from_server
        self._head = head
        self._answer: MessageHead | None = None
        method, target, _ = head.first.split(" ", 2)
        parts = urlsplit(target if method != "CONNECT" else f"//{target}")
        self.seen = SeenRequest(method, unquote(parts.path), parts.query, head.headers)

    @property
    def closes_connection(self) -> bool:
        answer = self._answer.headers.get("connection", "") if self._answer else ""
        return "close" in (answer.lower(), self._head.headers.get("connection", "").lower())

    def request_body(self) -> Iterator[bytes]:
        if self._head.headers.get("expect"):
            self.client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        for block in self._from_client.body(self._head):
            self.seen.body_bytes += len(block)
            yield block

    def forward(self, change: Callable[[bytes], bytes] = lambda block: block) -> None:
        """Send the request to the server and read the head of its response."""
        raw = re.sub(rb"(?i)\r\nexpect:[^\r]*", b"", self._head.raw)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may answer before it has read everything
            self._server.sendall(raw)
            for block in self.request_body():
                self._server.sendall(change(block))
        self._answer = self._from_server.head()
        if self._answer is None:
            raise Hangup

    def forward_unchanged(self) -> None:
        """Relay the request and the response unchanged."""
        self.forward()
        self.send_head()
        for block in self.response_body():
            self.client.sendall(block)

    def send_head(self) -> None:
        self.seen.status = int(self._answer.first.split(" ")[1])
        self.client.sendall(self._answer.raw)

    def response_body(self) -> Iterator[bytes]:
        status = int(self._answer.first.split(" ")[1])
        if self.seen.method == "HEAD" or status in (204, 304):
            return
        yield from self._from_server.body(self._answer)

    def reply(self, status: int, raw: bytes) -> None:
        self.seen.status = status
        self.client.sendall(raw)

    def reset(self) -> None:
        """Close the client's connection with RST instead of FIN."""
        self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        raise Hangup

    def wait_for_client_close(self) -> None:
        with contextlib.suppress(OSError):
            self.client.settimeout(WAIT_S)
            while self.client.recv(_BLOCK):
                pass


def relay(one: socket.socket, other: socket.socket) -> None:
    """Relay bytes in both directions until one side closes."""
    while True:
        for sock in select.select([one, other], [], [])[0]:
            block = sock.recv(_BLOCK)
            if not block:
                return
            (other if sock is one else one).sendall(block)
