"""Requests and responses on a channel, the table of operations, and the pool of connections.

A connection starts with a greeting (:mod:`peerstore.transport.authentication`). Then the client sends requests, and the
server answers them in order. A request carries the time that is left for it, so that work for it ends in time.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from peerstore import deadlines
from peerstore.errors import (
    PeerStoreError,
    PeerUnreachableError,
    ProtocolError,
    RequestError,
    UnavailableError,
    error_from_wire,
)
from peerstore.message_codec import decode_message, encode_message, encode_raw_message
from peerstore.transport.base import IncomingMessage, MessageChannel, Payload, ProgressCallback

log = logging.getLogger(__name__)

RESPONSE_S = 60.0
"""Default time in seconds until a response begins."""
T = TypeVar("T")
RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")
C = TypeVar("C", bound=MessageChannel)


class Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    op: str
    body: msgspec.Raw
    remaining_s: float = math.inf
    """Seconds that the client waits for the response."""


class Response(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    error: str
    """Class name of the error, or "" for a result."""
    body: msgspec.Raw


def encode_error(error: Exception) -> bytes:
    """Return the response that names ``error``."""
    message = str(error).encode(errors="backslashreplace").decode()  # it may name a file that is not UTF-8
    return encode_message(Response(type(error).__name__, encode_raw_message(message)))


# -- the server --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """A response with bytes or an open file, or with work to do after it."""

    result: object
    payload: Payload = ()
    fd: int | None = None
    error: Exception | None = None
    done: Callable[[bool], object] = lambda _sent: None
    """Called once afterwards, with whether the response was sent."""


@dataclass(frozen=True)
class Operation:
    """Types and handler of a request; the handler returns a ``result`` or a :class:`Reply`.

    The handler also gets the context of the connection, such as the client's identity.
    """

    args: Any
    result: Any
    answer: Callable[..., Any]
    takes_payload: bool = False
    """Whether the handler also gets the size of a payload, in bytes, to receive from the channel."""
    is_one_way: bool = False
    """Whether there is no response, so that an error ends the connection."""


@dataclass(frozen=True)
class Method(Generic[RequestT, ResultT]):
    """Name and types of an operation, for its client and its server."""

    name: str
    request: type[RequestT]
    result: Any
    """Type of the result, for the decoder."""
    summary: str = ""
    """Its purpose, for the documentation."""

    def serve(self, answer: Callable[[RequestT, Any], ResultT | Reply]) -> tuple[str, Operation]:
        """Return the entry of a server's table; ``answer`` also gets the context of the connection."""
        return self.name, Operation(self.request, self.result, answer)


class Dispatcher:
    """The operations of a server, by name."""

    def __init__(
        self,
        operations: Mapping[str, Operation],
        *,
        version: str = "",
        errors: tuple[type[Exception], ...] = (),
        unknown: Callable[[str], PeerStoreError] | None = None,
    ) -> None:
        """``errors`` are sent by name, in addition to those of this package.

        ``unknown`` returns the error for an operation that is not in the table.
        """
        self._operations = operations
        self._version = version
        self._errors: tuple[type[Exception], ...] = (PeerStoreError, *errors)
        self._unknown = unknown or self._no_operation

    def serve(self, channel: MessageChannel, context: object) -> None:
        """Answer requests until the client disconnects."""
        while (incoming := channel.receive()) is not None:
            self.handle(channel, incoming, context)

    def handle(self, channel: MessageChannel, incoming: IncomingMessage, context: object) -> None:
        """Answer one request; raise :class:`ProtocolError` for a message that is none."""
        try:
            request = decode_message(incoming.header, Request)
        except ProtocolError as error:
            channel.send(encode_error(error))
            raise
        operation = self._operations.get(request.op)
        with deadlines.timeout_scope(request.remaining_s):
            if operation is not None and operation.is_one_way:
                self._call(operation, request, incoming.payload_bytes, context)
                return
            reply = self._answer(operation, request, incoming.payload_bytes, context)
        sent = False
        try:
            if incoming.payload_bytes:
                channel.discard()  # the rest of the payload
            sent = self._send(channel, request.op, reply)
        finally:
            reply.done(sent)

    def _send(self, channel: MessageChannel, op: str, reply: Reply) -> bool:
        """Send the reply and return True, or send an error in place of a result that cannot be sent."""
        if reply.error is not None:
            channel.send(encode_error(reply.error))
            return True
        try:
            header = encode_message(Response("", encode_raw_message(reply.result)))
        except Exception as error:  # noqa: BLE001 - it is answered
            channel.send(encode_error(self._nameable_error(op, error)))
            return False
        try:
            if reply.fd is not None:
                channel.send(header, fd=reply.fd)  # type: ignore[call-arg]  # an operation of a Unix channel
            else:
                channel.send(header, reply.payload)
        except ProtocolError as error:  # the response is too large, and none of it was sent
            channel.send(encode_error(PeerStoreError(str(error))))
            return False
        return True

    def _answer(self, operation: Operation | None, request: Request, payload_bytes: int, context: object) -> Reply:
        try:
            if operation is None:
                raise self._unknown(request.op)
            result = self._call(operation, request, payload_bytes, context)
            return result if isinstance(result, Reply) else Reply(result)
        except Exception as error:  # noqa: BLE001 - each is answered
            return Reply(None, error=self._nameable_error(request.op, error))

    def _call(self, operation: Operation, request: Request, payload_bytes: int, context: object) -> Any:
        args = decode_message(request.body, operation.args)
        if operation.takes_payload:
            return operation.answer(args, context, payload_bytes)
        if payload_bytes:
            raise ProtocolError(f"{request.op!r} came with {payload_bytes} bytes that belong to nothing")
        return operation.answer(args, context)

    def _nameable_error(self, op: str, error: Exception) -> Exception:
        """Return an error that the client knows, in place of one that it does not."""
        if isinstance(error, self._errors):
            return error
        if isinstance(error, UnicodeDecodeError):
            return RequestError(str(error))
        if isinstance(error, (OSError, MemoryError)):  # the machine failed, not the requested object
            log.warning("operation %s failed: %s", op, error)
            return UnavailableError(f"{op}: {type(error).__name__}: {error}")
        log.error("operation %s failed", op, exc_info=error)
        return PeerStoreError(f"internal error: {type(error).__name__}: {error}")

    def _no_operation(self, op: str) -> PeerStoreError:
        return RequestError(f"this agent ({self._version or 'unknown version'}) has no operation {op!r}")


# -- the client --------------------------------------------------------------------------------------------------------


class Connection(Generic[C]):
    """Requests on one channel, used by one thread at a time."""

    def __init__(self, channel: C) -> None:
        self.channel = channel

    def send(self, op: str, body: object, payload: Payload = (), *, remaining_s: float = math.inf) -> None:
        """Send a request; also one that has no response."""
        request = Request(op, encode_raw_message(body), deadlines.remaining_s(remaining_s))
        self.channel.send(encode_message(request), payload)

    def call(
        self,
        op: str,
        body: object,
        result: type[T] | Any,
        *,
        payload: Payload = (),
        into: Sequence[memoryview] = (),
        timeout_s: float = RESPONSE_S,
        until: float | None = None,
    ) -> Any:
        """Send a request and return the response as ``result``.

        The response's payload must fill the views ``into`` exactly. ``until`` is the monotonic time at which
        the call fails, even if a response has begun.
        """
        left_s = remaining_until(until)
        self.send(op, body, payload, remaining_s=timeout_s if left_s is None else min(timeout_s, left_s))
        return self.receive_response(op, result, into=into, timeout_s=timeout_s, until=until)

    def receive_response(
        self,
        op: str,
        result: type[T] | Any,
        *,
        into: Sequence[memoryview] = (),
        watch: Callable[[Any], ProgressCallback] | None = None,
        timeout_s: float = RESPONSE_S,
        until: float | None = None,
    ) -> Any:
        """Return the response to the oldest unanswered request; responses arrive in request order.

        ``watch`` receives the decoded response and returns a callback for the progress of the payload.
        """
        incoming = self.receive(op, timeout_s=timeout_s, until=until)
        response = decode_message(incoming.header, Response)
        if response.error:
            self.channel.discard()
        decoded = decode_result(response, result)
        if incoming.payload_bytes != sum(map(len, into)):
            raise ProtocolError(
                f"{self.channel.peer} answered {op!r} with {incoming.payload_bytes} bytes instead of the requested "
                f"{sum(map(len, into))} bytes"
            )
        self.channel.receive_into(into, watch(decoded) if watch is not None else None)
        return decoded

    def receive(self, op: str, *, timeout_s: float, until: float | None = None) -> IncomingMessage:
        """Return the next message, which answers ``op``."""
        incoming = self.channel.receive(idle_s=timeout_s, within_s=remaining_until(until))
        if incoming is None:
            raise PeerUnreachableError(f"{self.channel.peer} closed the connection instead of answering {op!r}")
        return incoming

    def close(self) -> None:
        self.channel.close()


def decode_result(
    response: Response, result: type[T] | Any, errors: Mapping[str, type[Exception]] | None = None
) -> Any:
    """Return the response's result, or raise its error; ``errors`` are those of the server's own, by name."""
    if not response.error:
        return decode_message(response.body, result)
    message = decode_message(response.body, str)
    kind = (errors or {}).get(response.error)
    raise kind(message) if kind is not None else error_from_wire(response.error, message)


def remaining_until(until: float | None) -> float | None:
    """Return the seconds until the monotonic time ``until``.

    Raise :class:`PeerUnreachableError` if it has passed.
    """
    if until is None:
        return None
    left_s = until - time.monotonic()
    if left_s <= 0:
        raise PeerUnreachableError("it did not answer in time")
    return left_s


class ConnectionPool(Generic[C]):
    """Connections to one server, opened on demand, each used by one call at a time. Thread-safe."""

    def __init__(
        self, connect: Callable[[float | None], C], greet: Callable[[Connection[C], float | None], object], name: str
    ) -> None:
        """``greet`` runs with each new connection; both get the monotonic time at which the call fails."""
        self._connect = connect
        self._greet = greet
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[Connection[C]] = []
        self._busy: set[Connection[C]] = set()
        self._pid = os.getpid()
        self.closed = False

    @property
    def has_idle(self) -> bool:
        return bool(self._idle)

    def take(self) -> Connection[C] | None:
        """Return an idle connection for exclusive use, or ``None``."""
        with self._lock:
            if self._pid != os.getpid():  # a forked child must not use its parent's connections
                inherited, self._idle, self._busy, self._pid = self._idle, [], set(), os.getpid()
                for one in inherited:
                    one.channel.abandon()
            if not self._idle:
                return None
            found = self._idle.pop()
            self._busy.add(found)
            return found

    def open(self, until: float | None = None) -> Connection[C]:
        """Return a new connection for exclusive use."""
        self._check_open()
        line = Connection(self._connect(until))
        with self._lock:
            self._busy.add(line)
        try:
            self._check_open()
            self._greet(line, until)
        except BaseException:
            self.drop(line)
            raise
        return line

    def put(self, line: Connection[C]) -> None:
        """Return a usable connection."""
        with self._lock:
            self._busy.discard(line)
            if not self.closed:
                self._idle.append(line)
                return
        line.close()

    def drop(self, line: Connection[C]) -> None:
        """Close an unusable connection."""
        with self._lock:
            self._busy.discard(line)
        line.close()

    @contextlib.contextmanager
    def connection(self, *, fresh: bool = False, until: float | None = None) -> Iterator[Connection[C]]:
        """Yield a connection for exclusive use; it is closed after a transport error."""
        line = (None if fresh else self.take()) or self.open(until)
        try:
            yield line
        except (PeerUnreachableError, ProtocolError):
            self.drop(line)
            raise
        except PeerStoreError:  # an error response: the connection is still usable
            self.put(line)
            raise
        except BaseException:
            self.drop(line)
            raise
        else:
            self.put(line)

    def close(self, *, busy: bool) -> None:
        """Close all idle connections, and those in use either at once (``busy``) or after their call."""
        with self._lock:
            self.closed = True
            ended, self._idle = [*self._idle, *(self._busy if busy else ())], []
        for line in ended:
            line.close()

    def _check_open(self) -> None:
        if self.closed:
            raise PeerUnreachableError(f"cannot connect to {self._name}: this client was closed")
