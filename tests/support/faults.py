"""Faults between client and store: callables that handle an exchange instead of the proxy."""

from __future__ import annotations

import select
import socket
import threading
from dataclasses import dataclass

from tests.support.http_exchange import WAIT_S, Exchange, Hangup


@dataclass(frozen=True)
class ReplyWithStatus:
    """Read the request and reply without the server."""

    status: int
    code: str = ""
    retry_after: float | None = None

    def __call__(self, exchange: Exchange) -> None:
        for _ in exchange.request_body():
            pass
        document = f"<Error><Code>{self.code}</Code><Message>by the proxy</Message></Error>" if self.code else ""
        extra = f"Retry-After: {self.retry_after:g}\r\n" if self.retry_after is not None else ""
        head = f"HTTP/1.1 {self.status} Fault\r\nContent-Length: {len(document)}\r\n{extra}\r\n"
        exchange.reply(self.status, head.encode() + document.encode())


@dataclass(frozen=True)
class ReplyBeforeBody:
    """Reply and close the connection before reading the body."""

    status: int
    code: str

    def __call__(self, exchange: Exchange) -> None:
        document = f"<Error><Code>{self.code}</Code></Error>"
        head = f"HTTP/1.1 {self.status} Fault\r\nContent-Length: {len(document)}\r\nConnection: close\r\n\r\n"
        exchange.reply(self.status, head.encode() + document.encode())
        exchange.client.shutdown(socket.SHUT_WR)
        raise Hangup


class Hang:
    """Read the request and send nothing until the client closes the connection."""

    def __call__(self, exchange: Exchange) -> None:
        for _ in exchange.request_body():
            pass
        exchange.wait_for_client_close()
        raise Hangup


@dataclass(frozen=True)
class ResetRequest:
    """Reset the connection after ``after_bytes`` bytes of the request's body."""

    after_bytes: int

    def __call__(self, exchange: Exchange) -> None:
        got = 0
        for block in exchange.request_body():
            got += len(block)
            if got >= self.after_bytes:
                break
        exchange.reset()


@dataclass(frozen=True)
class DropResponse:
    """Let the server handle the request, then reset the connection without a response."""

    def __call__(self, exchange: Exchange) -> None:
        exchange.forward()
        for _ in exchange.response_body():
            pass
        exchange.reset()


@dataclass(frozen=True)
class CutResponse:
    """End the connection after ``after_bytes`` bytes of the response's body, with a reset or normally."""

    after_bytes: int
    reset: bool = False

    def __call__(self, exchange: Exchange) -> None:
        exchange.forward()
        exchange.send_head()
        left = self.after_bytes
        for block in exchange.response_body():
            exchange.client.sendall(block[:left])
            left -= len(block)
            if left <= 0:
                break
        if self.reset:
            exchange.reset()
        raise Hangup


@dataclass(frozen=True)
class FlipResponseBit:
    at_byte: int = 0

    def __call__(self, exchange: Exchange) -> None:
        exchange.forward()
        exchange.send_head()
        at = 0
        for block in exchange.response_body():
            exchange.client.sendall(_flipped(block, self.at_byte - at))
            at += len(block)


@dataclass(frozen=True)
class FlipRequestBit:
    at_byte: int = 0

    def __call__(self, exchange: Exchange) -> None:
        at = 0

        def change(block: bytes) -> bytes:
            nonlocal at
            changed = _flipped(block, self.at_byte - at)
            at += len(block)
            return changed

        exchange.forward(change)
        exchange.send_head()
        for block in exchange.response_body():
            exchange.client.sendall(block)


@dataclass(frozen=True)
class TrickleResponse:
    """Forward the response in small blocks with pauses."""

    block_bytes: int = 4096

    def __call__(self, exchange: Exchange) -> None:
        exchange.forward()
        exchange.send_head()
        for block in exchange.response_body():
            for at in range(0, len(block), self.block_bytes):
                exchange.client.sendall(block[at : at + self.block_bytes])
                select.select([], [], [], 0.002)


def _flipped(block: bytes, at: int) -> bytes:
    if not 0 <= at < len(block):
        return block
    changed = bytearray(block)
    changed[at] ^= 1
    return bytes(changed)


class Hold:
    """Hold the request until released or dropped; with ``done``, after the server handled it."""

    def __init__(self, *, done: bool = False) -> None:
        self.reached = threading.Event()
        self._decided = threading.Event()
        self._dropped = False
        self._done = done

    def release(self) -> None:
        self._decided.set()

    def drop(self) -> None:
        """Drop the request, so that it does not reach the server after its client is gone."""
        self._dropped = True
        self._decided.set()

    def __call__(self, exchange: Exchange) -> None:
        if self._done:
            exchange.forward()
        self.reached.set()
        self._decided.wait(WAIT_S)
        if self._dropped:
            raise Hangup
        if not self._done:
            exchange.forward()
        exchange.send_head()
        for block in exchange.response_body():
            exchange.client.sendall(block)
