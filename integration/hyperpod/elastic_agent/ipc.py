"""The elastic agent's Unix socket: message types, JSON frames, and this process's one connection.

Every object has a ``type``. An unreadable frame ends the connection: it may have been a fault, and continuing without
it is worse than a restart.

After the connection ends, the agent counts the process as lost: no reconnect is possible. Messages of the agent are
stored until their receiver takes them, even if it registers later. Senders never wait for the agent: a thread writes
complete frames in order.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import json
import logging
import os
import socket
import struct
import termios
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from elastic.errors import ControlDeadlineError, ControlPlaneUnavailableError, PolicyError
from integration.hyperpod.elastic_agent.environment import AGENT_SOCKET_ENV
from peerstore.daemon_process import peer_credentials

log = logging.getLogger(__name__)


# Sent by a worker.
MSG_INIT = "init"
MSG_AT_BARRIER = "at_rcb_barrier"
MSG_PAST_BARRIER = "past_rcb_barrier"
MSG_JOB_DATA = "job_data"
MSG_RANK_LABELS = "rank_labels"
MSG_CHECKPOINT_INIT = "ckpt_init"
MSG_CHECKPOINT_UPDATE = "ckpt_info_update"

# Sent by the agent.
MSG_JOB_START = "job_start"
MSG_RANK_INFO = "job_rank_info"
MSG_INVALID = "invalid_response"

# Sent by both.
MSG_JOB_FAULT = "job_fault"
MSG_CHECKPOINT_GET = "ckpt_info_get"

RESTART_MESSAGES = frozenset({MSG_JOB_START, MSG_RANK_INFO, MSG_JOB_FAULT})
"""Messages that a worker with in-process restarts receives."""
CHECKPOINT_MESSAGES = frozenset({MSG_CHECKPOINT_GET, MSG_INVALID})
RECEIVED_MESSAGES = RESTART_MESSAGES | CHECKPOINT_MESSAGES

AgentMessage = dict[str, Any]

MAX_RECEIVED_FRAME_BYTES = 64 << 20
"""Maximum bytes of a received frame. One frame contains the data of all ranks of a job."""
MAX_SENT_FRAME_BYTES = 1 << 20

_LENGTH = struct.Struct(">I")
_SHOWN = 60


class DamagedFrameError(ControlPlaneUnavailableError):
    """The received bytes are not a valid frame."""


def encode_agent_frame(message: Mapping[str, Any]) -> bytes:
    """Return the frame of a message.

    Raise :class:`PolicyError` if it is not valid JSON or too large.
    """
    try:
        body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise PolicyError(f"{message.get('type')}: not a JSON object: {error}") from error
    if len(body) > MAX_SENT_FRAME_BYTES:
        raise PolicyError(
            f"{message.get('type')} of {len(body)} bytes: the agent is sent {MAX_SENT_FRAME_BYTES} at the most"
        )
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Decoder of frames from bytes in pieces of any size.

    It buffers only received bytes. A length above the limit is rejected before the body arrives.
    """

    def __init__(self, limit_bytes: int = MAX_RECEIVED_FRAME_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[AgentMessage]:
        """Yield the messages that ``data`` completes. Raise :class:`DamagedFrameError` at a damaged one."""
        self._bytes += data
        while (body := self._body()) is not None:
            yield decode_agent_frame(body)

    def finish(self) -> None:
        """Raise :class:`DamagedFrameError` if the data ended within a frame."""
        if self._bytes:
            raise DamagedFrameError(f"the connection ended within a frame, {len(self._bytes)} bytes of which had come")

    def _body(self) -> bytes | None:
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > self._limit_bytes:
            raise DamagedFrameError(f"a frame of {length} bytes was announced, the limit is {self._limit_bytes}")
        end = _LENGTH.size + length
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[_LENGTH.size : end])
        del self._bytes[:end]
        return body


def decode_agent_frame(body: bytes) -> AgentMessage:
    """Return ``body`` as an object with a ``type``, or raise :class:`DamagedFrameError`."""
    try:
        message = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise DamagedFrameError(f"{_shown(body)} is not JSON in UTF-8: {error}") from error
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise DamagedFrameError(f"{_shown(body)} is not an object with a type")
    return message


def _shown(body: bytes) -> str:
    return repr(body[:_SHOWN]) + ("…" if len(body) > _SHOWN else "")


MAX_QUEUED_MESSAGES = 4096
"""Maximum queued messages in each direction. More mean that the other side hangs."""
_RECEIVE_BYTES = 1 << 16
_CONNECT_TIMEOUT_S = 10.0
_FLUSH_TIMEOUT_S = 5.0


class AgentConnection:
    """Connection to the agent. ``local_rank`` identifies this process."""

    def __init__(self, path: Path, local_rank: int) -> None:
        self._sock = _connect(path)
        self._local_rank = local_rank
        self._changed = threading.Condition()
        self._channels: list[AgentChannel] = []
        self._unclaimed: collections.deque[AgentMessage] = collections.deque()
        self._outgoing: collections.deque[bytes] = collections.deque()
        self._writing = False
        self._lost = ""
        self._closed = False
        self._unknown_types: set[str] = set()
        """Unknown message types already logged."""
        self._threads = [
            threading.Thread(target=work, name=f"hyperpod-{name}", daemon=True)
            for name, work in (("reader", self._read), ("writer", self._write))
        ]
        _close_in_children(self)
        for thread in self._threads:
            thread.start()

    @property
    def lost_reason(self) -> str:
        """Reason why the agent cannot be reached; "" while it can."""
        return self._lost

    @property
    def unread_bytes(self) -> int:
        """Sent bytes that the agent has not read, as counted by the kernel."""
        with contextlib.suppress(OSError, ValueError):  # the socket is closed
            (size,) = struct.unpack("i", fcntl.ioctl(self._sock, termios.TIOCOUTQ, bytes(4)))
            return int(size)
        return 0

    def open_channel(self, kinds: Iterable[str]) -> AgentChannel:
        """Open a channel that receives messages of these types, including earlier ones."""
        with self._changed:
            channel = AgentChannel(self, frozenset(kinds))
            self._channels.append(channel)
            early, self._unclaimed = self._unclaimed, collections.deque()
            for message in early:
                self._deliver(message)
        channel.send(MSG_INIT)
        return channel

    def flush(self, timeout_s: float = _FLUSH_TIMEOUT_S) -> None:
        """Wait until all messages are in the socket. The agent then reads them even if this process exits."""
        with self._changed:
            self._wait(lambda: not self._outgoing and not self._writing, timeout_s, "the agent did not read")

    def close(self) -> None:
        """Send the remaining messages and close the connection. Idempotent."""
        with contextlib.suppress(ControlPlaneUnavailableError, ControlDeadlineError):
            self.flush()
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._mark_lost("closed on this side")
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._sock.close()

    def _queue_message(self, client: str, kind: str, fields: AgentMessage) -> None:
        frame = encode_agent_frame({**fields, "type": kind, "local_rank": self._local_rank, "client_id": client})
        with self._changed:
            self._raise_if_lost()
            if len(self._outgoing) >= MAX_QUEUED_MESSAGES:
                self._mark_lost(f"the agent has not read for {MAX_QUEUED_MESSAGES} messages")
                self._raise_if_lost()
            self._outgoing.append(frame)
            self._changed.notify_all()

    def _receive(self, channel: AgentChannel, kinds: frozenset[str], timeout_s: float | None) -> AgentMessage:
        def found() -> AgentMessage | None:
            return next((message for message in channel._messages if message["type"] in kinds), None)

        with self._changed:
            self._wait(lambda: found() is not None, timeout_s, f"the agent said no {' or '.join(sorted(kinds))}")
            message = found()
            assert message is not None  # noqa: S101 - what was waited for
            channel._messages.remove(message)
            return message

    def _wait(self, is_done: Any, timeout_s: float | None, problem: str) -> None:
        """Wait until ``happened()``. Messages received before the loss of the agent still count."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not is_done():
            self._raise_if_lost()
            remaining_s = None if until is None else until - time.monotonic()
            if remaining_s is not None and remaining_s <= 0:
                raise ControlDeadlineError(f"{problem} within {timeout_s:g} s")
            self._changed.wait(remaining_s)

    def _raise_if_lost(self) -> None:
        if self._lost:
            raise ControlPlaneUnavailableError(f"the connection to the elastic agent is lost: {self._lost}")

    def _read(self) -> None:
        decoder = FrameDecoder()
        try:
            while data := self._sock.recv(_RECEIVE_BYTES):
                for message in decoder.feed(data):
                    with self._changed:
                        self._deliver(message)
                        self._changed.notify_all()
            decoder.finish()
            reason = "the agent closed it"
        except (OSError, ControlPlaneUnavailableError) as error:
            reason = str(error)
        with self._changed:
            self._mark_lost(reason)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._outgoing or self._lost)
                if self._lost:
                    return
                frame = self._outgoing.popleft()
                self._writing = True
            try:
                self._sock.sendall(frame)
            except OSError as error:
                with self._changed:
                    self._writing = False
                    self._mark_lost(str(error))
                return

    def _deliver(self, message: AgentMessage) -> None:
        """Store a message for its receiver.

        A message without a client goes to all channels of its type. Without such a channel it waits for one.
        """
        receivers = [channel for channel in self._channels if message["type"] in channel.kinds]
        addressed = [channel for channel in receivers if channel.client == message.get("client_id")]
        for channel in addressed or receivers:
            self._store_message(channel._messages, message)
        if not receivers:
            if message["type"] in RECEIVED_MESSAGES:
                self._store_message(self._unclaimed, message)
            elif message["type"] not in self._unknown_types:
                self._unknown_types.add(message["type"])
                log.info("the agent says %r, which is not known here", message["type"])

    def _store_message(self, queue: collections.deque[AgentMessage], message: AgentMessage) -> None:
        if len(queue) >= MAX_QUEUED_MESSAGES:
            raise ControlPlaneUnavailableError(f"{MAX_QUEUED_MESSAGES} messages of the agent's were not taken")
        queue.append(message)

    def _forked(self) -> None:
        """Close the parent's connection in a forked child, which has none of the threads."""
        self._changed = threading.Condition()
        self._closed, self._lost = True, "this process was forked from the one that the agent started"
        self._sock.close()

    def _mark_lost(self, reason: str) -> None:
        if not self._lost:
            self._lost = reason or "it ended"
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._changed.notify_all()


class AgentChannel:
    """One client of the connection. Its messages and their replies carry its name."""

    def __init__(self, connection: AgentConnection, kinds: frozenset[str]) -> None:
        self.kinds = kinds
        self.client = str(uuid.uuid4())
        self._connection = connection
        self._messages: collections.deque[AgentMessage] = collections.deque()

    def send(self, kind: str, /, **fields: Any) -> None:
        """Queue a message. Messages are sent in order.

        Raise :class:`ControlPlaneUnavailableError` if the connection is lost.
        """
        self._connection._queue_message(self.client, kind, fields)

    def receive(self, *kinds: str, timeout_s: float | None = None) -> AgentMessage:
        """Return the oldest unread message of these types, or of any without types. Wait for one."""
        return self._connection._receive(self, frozenset(kinds) or self.kinds, timeout_s)

    def request(self, kind: str, /, timeout_s: float, **fields: Any) -> AgentMessage:
        """Send a message and return the reply of the same type."""
        self.send(kind, **fields)
        return self.receive(kind, timeout_s=timeout_s)

    def flush(self, timeout_s: float = _FLUSH_TIMEOUT_S) -> None:
        self._connection.flush(timeout_s)


def _connect(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(_CONNECT_TIMEOUT_S)
    try:
        sock.connect(str(path))
    except OSError as error:
        sock.close()
        raise ControlPlaneUnavailableError(f"no elastic agent answers on {path}: {error}") from error
    _, uid = peer_credentials(sock)
    if uid not in (os.getuid(), 0):
        sock.close()
        raise ControlPlaneUnavailableError(
            f"a process of user {uid} listens on {path}: no elastic agent of user {os.getuid()}"
        )
    sock.settimeout(None)
    return sock


_shared: list[AgentConnection] = []
_creating = threading.Lock()


def shared_agent_connection(environ: Mapping[str, str] = os.environ) -> AgentConnection:
    """Return the connection of this process, and create it on the first call or after a loss.

    The agent decides whether it accepts a new connection after a loss.
    """
    with _creating:
        if not _shared or _shared[0].lost_reason:
            if not environ.get(AGENT_SOCKET_ENV):
                raise ControlPlaneUnavailableError(
                    f"${AGENT_SOCKET_ENV} is not set: no elastic agent has started this process"
                )
            _shared[:] = [AgentConnection(Path(environ[AGENT_SOCKET_ENV]), int(environ.get("LOCAL_RANK", "0")))]
        return _shared[0]


_parents: weakref.WeakSet[AgentConnection] = weakref.WeakSet()
_registered: list[bool] = []


def _close_in_children(connection: AgentConnection) -> None:
    """Close the connection in forked children.

    An open copy in a child would hide the parent's death from the agent.
    """
    _parents.add(connection)
    if not _registered:
        _registered.append(True)
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    for connection in list(_parents):
        connection._forked()
