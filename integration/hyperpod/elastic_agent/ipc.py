"""The elastic agent's Unix socket: message types, JSON frames, and this process's one connection.

Every object has a ``type``. A frame that cannot be read ends the connection: what it said may have been a fault, and
to go on without having heard it is worse than to start again.

The agent gives a process up whose connection ends, so there is no second one: lost is lost. What the agent says is
kept until the one it is for has taken it, also where that one comes later than the message. Nobody who speaks waits for
the agent: a thread writes, whole frames and in order.
"""

from __future__ import annotations

import collections
import contextlib
import enum
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


# Of a worker.
MSG_INIT = "init"
MSG_AT_BARRIER = "at_rcb_barrier"
MSG_PAST_BARRIER = "past_rcb_barrier"
MSG_JOB_DATA = "job_data"
MSG_RANK_LABELS = "rank_labels"
MSG_CHECKPOINT_INIT = "ckpt_init"
MSG_CHECKPOINT_UPDATE = "ckpt_info_update"

# Of the agent.
MSG_JOB_START = "job_start"
MSG_RANK_INFO = "job_rank_info"
MSG_INVALID = "invalid_response"

# Of both.
MSG_JOB_FAULT = "job_fault"
MSG_CHECKPOINT_GET = "ckpt_info_get"

RESTART_MESSAGES = frozenset({MSG_JOB_START, MSG_RANK_INFO, MSG_JOB_FAULT})
"""What a worker that is started anew without being ended has to hear."""
CHECKPOINT_MESSAGES = frozenset({MSG_CHECKPOINT_GET, MSG_INVALID})
RECEIVED_MESSAGES = RESTART_MESSAGES | CHECKPOINT_MESSAGES


class RequestedRestart(enum.Enum):
    """What a worker asks for with a fault: the cheapest that it believes to help."""

    IN_PROCESS = "in_process_restart"
    """The processes stay, the world is a new one."""
    PROCESS = "process_level_restart"
    """The processes are started anew in the pods that there are."""
    JOB = "job_level_restart"
    """So are the pods."""


AgentMessage = dict[str, Any]

MAX_RECEIVED_FRAME_BYTES = 64 << 20
"""What all ranks of a job say of themselves comes back in one frame."""
MAX_SENT_FRAME_BYTES = 1 << 20

_LENGTH = struct.Struct(">I")
_SHOWN = 60


class DamagedFrameError(ControlPlaneUnavailableError):
    """What came is no frame of the agent's."""


def encode_agent_frame(message: Mapping[str, Any]) -> bytes:
    """One frame, or :class:`PolicyError` where nobody could want to read it."""
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
    """Frames out of bytes that come in pieces of any size.

    No more is kept than what has come; a length above the limit is refused before the first byte of its body.
    """

    def __init__(self, limit_bytes: int = MAX_RECEIVED_FRAME_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[AgentMessage]:
        """The messages that are complete with ``data``, up to the first damaged one."""
        self._bytes += data
        while (body := self._body()) is not None:
            yield decode_agent_frame(body)

    def finish(self) -> None:
        """Nothing more comes: that is in order between two frames only."""
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
    """``body`` as an object with a ``type``, or :class:`DamagedFrameError`."""
    try:
        message = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise DamagedFrameError(f"{_shown(body)} is no JSON in UTF-8: {error}") from error
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise DamagedFrameError(f"{_shown(body)} is no object with a type")
    return message


def _shown(body: bytes) -> str:
    return repr(body[:_SHOWN]) + ("…" if len(body) > _SHOWN else "")


MAX_QUEUED_MESSAGES = 4096
"""So many messages may wait, in each direction; with one more the other side is not there any more, only its socket."""
_PIECE_BYTES = 1 << 16
_CONNECT_S = 10.0
_FLUSH_TIMEOUT_S = 5.0


class AgentConnection:
    """``local_rank`` is who this process is to the agent."""

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
        self._seen: set[str] = set()
        """Types nobody here knows, each of which is mentioned once."""
        self._threads = [
            threading.Thread(target=work, name=f"hyperpod-{name}", daemon=True)
            for name, work in (("reader", self._read), ("writer", self._write))
        ]
        _close_in_children(self)
        for thread in self._threads:
            thread.start()

    @property
    def lost_reason(self) -> str:
        """Why the agent cannot be spoken to any more; "" while it can."""
        return self._lost

    @property
    def unread_bytes(self) -> int:
        """How much of what was said the agent has not taken from its socket, in the kernel's own measure."""
        with contextlib.suppress(OSError, ValueError):  # it is closed
            (size,) = struct.unpack("i", fcntl.ioctl(self._sock, termios.TIOCOUTQ, bytes(4)))
            return int(size)
        return 0

    def open_channel(self, kinds: Iterable[str]) -> AgentChannel:
        """For a user of its own: it hears the messages of these types, also those that came before it."""
        with self._changed:
            channel = AgentChannel(self, frozenset(kinds))
            self._channels.append(channel)
            early, self._unclaimed = self._unclaimed, collections.deque()
            for message in early:
                self._deliver(message)
        channel.send(MSG_INIT)
        return channel

    def flush(self, timeout_s: float = _FLUSH_TIMEOUT_S) -> None:
        """Until everything that was said is on its way: from then on it is read even when this process ends."""
        with self._changed:
            self._wait(lambda: not self._outgoing and not self._writing, timeout_s, "the agent did not read")

    def close(self) -> None:
        """Say what there is to say, and go. Idempotent."""
        with contextlib.suppress(ControlPlaneUnavailableError, ControlDeadlineError):
            self.flush()
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._lose("closed on this side")
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._sock.close()

    # -- for channels -------------------------------------------------------------------------------------------------

    def _say(self, client: str, kind: str, fields: AgentMessage) -> None:
        frame = encode_agent_frame({**fields, "type": kind, "local_rank": self._local_rank, "client_id": client})
        with self._changed:
            self._check()
            if len(self._outgoing) >= MAX_QUEUED_MESSAGES:
                self._lose(f"the agent has not read for {MAX_QUEUED_MESSAGES} messages")
                self._check()
            self._outgoing.append(frame)
            self._changed.notify_all()

    def _take(self, channel: AgentChannel, kinds: frozenset[str], timeout_s: float | None) -> AgentMessage:
        def found() -> AgentMessage | None:
            return next((message for message in channel._kept if message["type"] in kinds), None)

        with self._changed:
            self._wait(lambda: found() is not None, timeout_s, f"the agent said no {' or '.join(sorted(kinds))}")
            message = found()
            assert message is not None  # noqa: S101 - what was waited for
            channel._kept.remove(message)
            return message

    def _wait(self, happened: Any, timeout_s: float | None, what: str) -> None:
        """What has come counts, also where the agent is gone since."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not happened():
            self._check()
            left_s = None if until is None else until - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise ControlDeadlineError(f"{what} within {timeout_s:g} s")
            self._changed.wait(left_s)

    def _check(self) -> None:
        if self._lost:
            raise ControlPlaneUnavailableError(f"the connection to the elastic agent is lost: {self._lost}")

    # -- the two threads ----------------------------------------------------------------------------------------------

    def _read(self) -> None:
        coming = FrameDecoder()
        try:
            while data := self._sock.recv(_PIECE_BYTES):
                for message in coming.feed(data):
                    with self._changed:
                        self._deliver(message)
                        self._changed.notify_all()
            coming.finish()
            reason = "the agent closed it"
        except (OSError, ControlPlaneUnavailableError) as error:
            reason = str(error)
        with self._changed:
            self._lose(reason)

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
                    self._lose(str(error))
                return

    def _deliver(self, message: AgentMessage) -> None:
        """To the one it is addressed to; to all that hear its type where it names nobody; else it waits for one."""
        hearing = [channel for channel in self._channels if message["type"] in channel.kinds]
        named = [channel for channel in hearing if channel.client == message.get("client_id")]
        for channel in named or hearing:
            self._keep(channel._kept, message)
        if not hearing:
            if message["type"] in RECEIVED_MESSAGES:
                self._keep(self._unclaimed, message)
            elif message["type"] not in self._seen:
                self._seen.add(message["type"])
                log.info("the agent says %r, which is not known here", message["type"])

    def _keep(self, kept: collections.deque[AgentMessage], message: AgentMessage) -> None:
        if len(kept) >= MAX_QUEUED_MESSAGES:
            raise ControlPlaneUnavailableError(f"{MAX_QUEUED_MESSAGES} messages of the agent's were not taken")
        kept.append(message)

    def _forked(self) -> None:
        """In a child, which has none of the threads: this connection is its parent's."""
        self._changed = threading.Condition()
        self._closed, self._lost = True, "this process was forked from the one that the agent started"
        self._sock.close()

    def _lose(self, reason: str) -> None:
        if not self._lost:
            self._lost = reason or "it ended"
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._changed.notify_all()


class AgentChannel:
    """One user's part of the connection: what it says carries its name, and so do the answers."""

    def __init__(self, connection: AgentConnection, kinds: frozenset[str]) -> None:
        self.kinds = kinds
        self.client = str(uuid.uuid4())
        self._connection = connection
        self._kept: collections.deque[AgentMessage] = collections.deque()

    def send(self, kind: str, /, **fields: Any) -> None:
        """It goes out in the order in which things are said; :class:`ControlPlaneUnavailableError` where it cannot."""
        self._connection._say(self.client, kind, fields)

    def receive(self, *kinds: str, timeout_s: float | None = None) -> AgentMessage:
        """The oldest message of these types that was not taken yet; without types: of any. Waits for one."""
        return self._connection._take(self, frozenset(kinds) or self.kinds, timeout_s)

    def request(self, kind: str, /, timeout_s: float, **fields: Any) -> AgentMessage:
        """Say it, and take the answer of the same type."""
        self.send(kind, **fields)
        return self.receive(kind, timeout_s=timeout_s)

    def flush(self, timeout_s: float = _FLUSH_TIMEOUT_S) -> None:
        self._connection.flush(timeout_s)


def _connect(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(_CONNECT_S)
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
    """This process's, made when it is first asked for. A lost one is made again: whether that helps the agent says."""
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
    """A forked child holds its parent's connection open: the agent would not notice that the parent has died."""
    _parents.add(connection)
    if not _registered:
        _registered.append(True)
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    for connection in list(_parents):
        connection._forked()
