"""The contract of transports, listeners and channels, a cursor over payload buffers, a partitionable transport."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol

from typing_extensions import Self

from peerstore.errors import PeerUnreachableError, RequestError

MAX_MESSAGE_HEADER_BYTES = 64 << 20
MAX_PAYLOAD_BYTES = 1 << 30


class FileSlice(NamedTuple):
    """Bytes ``[start, start + size)`` of an open file."""

    fd: int
    start: int
    size: int


class IncomingMessage(NamedTuple):
    """One message that arrives: its header, and how many bytes follow it."""

    header: bytes
    payload_bytes: int


Payload = Sequence["memoryview | FileSlice"]
ProgressCallback = Callable[[int], None]
"""Is told how many bytes of a payload have arrived by now."""


class MessageChannel(Protocol):
    """Messages to and from one peer, in order.

    - ``send`` returns when the caller may change the bytes of the views it gave; it does not say that they arrived. The
      bytes of a ``FileSlice`` must stay as they are until the peer has answered: they may still be sent from its pages.
    - A file that ends before its slice does is a :class:`~peerstore.errors.ShardDamagedError`. The channel is over if a
      part of the message was sent before that was seen.
    - ``receive`` waits ``idle_s`` (``None``: as long as it takes) for a message to begin; once it has begun, its header
      is complete within the channel's ``timeout_s``. ``within_s`` limits both together. ``None`` means that the peer
      closed between two messages.
    - A payload may take as long as it likes, but no longer than ``timeout_s`` without any progress. The same holds for
      ``send`` when the peer does not read.
    - ``receive_into`` fills ``views`` with exactly the payload that was announced, in order, or raises. No view is
      written once it has raised. Views may be as many as they like and of any size, and together are the payload.
      ``seen`` is called on the same thread as they fill, so that bytes can be looked at while they are in the cache.
    - The payload of a message must be taken (``receive_into``, ``discard``) before the next ``receive``.
    - Nothing is allocated for what was only announced: a header above ``max_header_bytes`` and a payload above
      ``max_payload_bytes`` are a :class:`~peerstore.errors.ProtocolError`. The channel is over.
    - :class:`~peerstore.errors.PeerUnreachableError`: the peer is gone, or silent for too long. The channel is over.
    - One thread sends and one receives at a time; ``close`` may come from any thread and ends both.
    - A channel that was accepted is a stranger's until ``mark_authenticated`` is called: a listener may end it when it
      takes too long or when room is needed (:mod:`peerstore.transport.tcp`).
    """

    peer: str
    """Who is on the other side, for messages."""
    max_header_bytes: int
    """Lowered before the peer has proven who it is, raised after."""
    max_payload_bytes: int
    timeout_s: float
    """How long the peer may be silent in the middle of a message."""

    def send(self, header: bytes, payload: Payload = ()) -> None: ...
    def receive(self, *, idle_s: float | None = None, within_s: float | None = None) -> IncomingMessage | None: ...
    def receive_into(self, views: Sequence[memoryview], seen: ProgressCallback | None = None) -> None: ...
    def discard(self) -> None: ...
    def mark_authenticated(self) -> None: ...
    def close(self) -> None: ...


class Listener(Protocol):
    address: str
    """Where peers reach it."""

    def close(self) -> None:
        """Accept nobody any more, end all channels it accepted, and wait for their threads."""


class Transport(Protocol):
    """How bytes get from one node to another.

    - ``listen`` calls ``serve`` with every channel it accepts, each on a thread of its own, and closes the channel when
      ``serve`` returns or raises. Errors of one channel never end the listener.
    - ``connect`` gives a channel or raises :class:`~peerstore.errors.PeerUnreachableError` within ``timeout_s``, or
      :class:`~peerstore.errors.PeerRefusedError` where the transport itself (TLS) does not accept who answered.
    """

    name: str

    def listen(self, address: str, serve: Callable[[MessageChannel], None]) -> Listener: ...
    def connect(self, address: str, *, timeout_s: float = 5.0) -> MessageChannel: ...
    def close(self) -> None:
        """Give back what is held for all channels together, after all listeners and channels were closed."""


IOV_MAX = 1024
"""What Linux takes in one call (IOV_MAX)."""


class BufferCursor:
    """A run of views, and how far into them a transfer has come.

    Views made here are released at the end, also after an error: a mapping with a forgotten view cannot be closed.
    """

    def __init__(self, views: Iterable[memoryview], seen: ProgressCallback | None = None) -> None:
        self._made: list[memoryview] = []
        self._views = [as_bytes for view in views if (as_bytes := self._flat(view)).nbytes]
        self._at = 0
        self._offset = 0
        self._lent: list[memoryview] = []
        self._size = self.left = sum(view.nbytes for view in self._views)
        self._seen = seen

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._take_back()
        for view in self._made:
            view.release()
        self._views.clear()

    def window(self, most_bytes: int) -> list[memoryview]:
        """The next views to transfer, at most ``most_bytes`` of them. Good until the next call."""
        self._take_back()
        window: list[memoryview] = []
        start = self._offset
        for view in itertools.islice(self._views, self._at, self._at + IOV_MAX):
            stop = min(view.nbytes, start + most_bytes)
            if start or stop < view.nbytes:
                view = view[start:stop]  # noqa: PLW2901 - the same view, less of it
                self._lent.append(view)
            window.append(view)
            most_bytes -= stop - start
            start = 0
            if not most_bytes:
                break
        return window

    def advance(self, count: int) -> None:
        """``count`` bytes of the last window were transferred."""
        self.left -= count
        self._offset += count
        while self._at < len(self._views) and self._offset >= self._views[self._at].nbytes:
            self._offset -= self._views[self._at].nbytes
            self._at += 1
        if self._seen is not None:
            self._seen(self._size - self.left)

    def _flat(self, view: memoryview) -> memoryview:
        if view.format == "B" and view.ndim == 1 and view.contiguous:
            return view
        try:
            flat = view.cast("B")
        except TypeError as error:
            raise RequestError(f"a view of shape {view.shape} cannot be transferred as bytes: {error}") from error
        self._made.append(flat)
        return flat

    def _take_back(self) -> None:
        for view in self._lent:
            with contextlib.suppress(BufferError):  # a thread that was interrupted in a call still has it
                view.release()
        self._lent.clear()


class PartitionableTransport:
    """``inner``, until :meth:`partition`: then all channels end, nobody is reached, and nobody who comes is heard."""

    def __init__(self, inner: Transport, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = inner.name
        self._inner = inner
        self._clock = clock
        self._lock = threading.Lock()
        self._until = float("-inf")
        self._open: weakref.WeakSet[MessageChannel] = weakref.WeakSet()

    def partition(self, seconds: float) -> None:
        with self._lock:
            self._until = self._clock() + seconds
            ended = list(self._open)
        for channel in ended:
            channel.close()

    def listen(self, address: str, serve: Callable[[MessageChannel], None]) -> Listener:
        def if_reached(channel: MessageChannel) -> None:
            if self._track(channel):
                serve(channel)

        return self._inner.listen(address, if_reached)

    def connect(self, address: str, *, timeout_s: float = 5.0) -> MessageChannel:
        if not self._is_partitioned:
            channel = self._inner.connect(address, timeout_s=timeout_s)
            if self._track(channel):
                return channel
            channel.close()
        raise PeerUnreachableError(f"{address}: this node is cut off on purpose")

    def close(self) -> None:
        self._inner.close()

    @property
    def _is_partitioned(self) -> bool:
        return self._clock() < self._until

    def _track(self, channel: MessageChannel) -> bool:
        """Whether this channel is there until the next cut."""
        with self._lock:
            if self._is_partitioned:
                return False
            self._open.add(channel)
            return True
