"""Interfaces of transports, listeners and channels, a payload cursor, a partitionable transport."""

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
    """An arriving message: its header, and the size of its payload in bytes."""

    header: bytes
    payload_bytes: int


Payload = Sequence["memoryview | FileSlice"]
ProgressCallback = Callable[[int], None]
"""Called with the number of payload bytes that have arrived."""


class MessageChannel(Protocol):
    """Messages to and from one peer, in order.

    - ``send`` returns when the caller may change the bytes of the views; the message may not have arrived. The bytes of
      a ``FileSlice`` must not change until the peer has responded, because the kernel may still send them from the
      file's pages.
    - A file that ends before its slice raises :class:`~peerstore.errors.ShardDamagedError`. The channel is unusable if
      a part of the message was sent before.
    - ``receive`` waits ``idle_s`` seconds (``None``: without limit) for a message to begin; its header must then be
      complete within the channel's ``timeout_s``. ``within_s`` limits both together. ``None`` means that the peer
      closed the channel between two messages.
    - A payload has no time limit, but it fails after ``timeout_s`` seconds without progress. The same holds for
      ``send`` if the peer does not read.
    - ``receive_into`` fills ``views`` with exactly the announced payload, in order, or raises. It writes no view after
      it has raised. Views may have any number and sizes; together they must have the payload's size. ``seen`` is called
      on the same thread as they fill, so that bytes can be verified while they are in the cache.
    - The payload of a message must be received (``receive_into``, ``discard``) before the next ``receive``. ``discard``
      drops what is left of it, which may be nothing.
    - Memory is never allocated for announced sizes alone. A header above ``max_header_bytes`` or a payload above
      ``max_payload_bytes`` raises :class:`~peerstore.errors.ProtocolError`, and the channel is unusable.
    - :class:`~peerstore.errors.PeerUnreachableError`: the peer is disconnected or silent for too long. The channel is
      unusable.
    - One thread sends and one receives at a time; ``close`` may be called from any thread and ends both.
    - ``abandon`` releases a channel that this process has inherited by a fork, and leaves its parent's as it is.
    - An accepted channel is unauthenticated until ``mark_authenticated`` is called. Before that, a listener may close
      it after a timeout or to make room (:mod:`peerstore.transport.tcp`).
    """

    peer: str
    """Description of the peer, for error messages."""
    max_header_bytes: int
    """Largest header in bytes: low before the peer has authenticated, higher afterwards."""
    max_payload_bytes: int
    timeout_s: float
    """Seconds for which the peer may be silent in the middle of a message."""

    def send(self, header: bytes, payload: Payload = ()) -> None: ...
    def receive(self, *, idle_s: float | None = None, within_s: float | None = None) -> IncomingMessage | None: ...
    def receive_into(self, views: Sequence[memoryview], seen: ProgressCallback | None = None) -> None: ...
    def discard(self) -> None: ...
    def mark_authenticated(self) -> None: ...
    def abandon(self) -> None: ...
    def close(self) -> None: ...


class Listener(Protocol):
    address: str
    """Address for peers."""

    def close(self) -> None:
        """Stop accepting, close all accepted channels, and wait for their threads."""


class Transport(Protocol):
    """A way to move bytes between nodes.

    - ``listen`` calls ``serve`` with every accepted channel, each on a separate thread, and closes the channel when
      ``serve`` returns or raises. Errors of one channel never end the listener.
    - ``connect`` returns a channel, or raises :class:`~peerstore.errors.PeerUnreachableError` within ``timeout_s``
      seconds, or :class:`~peerstore.errors.PeerRefusedError` if the transport itself (TLS) refuses the peer.
    """

    name: str

    def listen(self, address: str, serve: Callable[[MessageChannel], None]) -> Listener: ...
    def connect(self, address: str, *, timeout_s: float = 5.0) -> MessageChannel: ...
    def close(self) -> None:
        """Release shared resources, after all listeners and channels were closed."""


IOV_MAX = 1024
"""Largest number of buffers in one Linux system call."""


class BufferCursor:
    """Views with the position of a transfer.

    Views that the cursor creates are released at its end, even after an error, because a mapping with an unreleased
    view cannot be closed.
    """

    def __init__(self, views: Iterable[memoryview], seen: ProgressCallback | None = None) -> None:
        self._cast_views: list[memoryview] = []
        self._views = [as_bytes for view in views if (as_bytes := self._as_bytes(view)).nbytes]
        self._at = 0
        self._offset = 0
        self._window_views: list[memoryview] = []
        self._size = self.left = sum(view.nbytes for view in self._views)
        self._seen = seen

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release_window()
        for view in self._cast_views:
            view.release()
        self._views.clear()

    def window(self, most_bytes: int) -> list[memoryview]:
        """Return the next views to transfer, at most ``most_bytes`` in total; valid until the next call."""
        self._release_window()
        window: list[memoryview] = []
        start = self._offset
        for view in itertools.islice(self._views, self._at, self._at + IOV_MAX):
            stop = min(view.nbytes, start + most_bytes)
            if start or stop < view.nbytes:
                view = view[start:stop]  # noqa: PLW2901 - the same view, shortened
                self._window_views.append(view)
            window.append(view)
            most_bytes -= stop - start
            start = 0
            if not most_bytes:
                break
        return window

    def advance(self, count: int) -> None:
        """Record that ``count`` bytes of the last window were transferred."""
        self.left -= count
        self._offset += count
        while self._at < len(self._views) and self._offset >= self._views[self._at].nbytes:
            self._offset -= self._views[self._at].nbytes
            self._at += 1
        if self._seen is not None:
            self._seen(self._size - self.left)

    def _as_bytes(self, view: memoryview) -> memoryview:
        if view.format == "B" and view.ndim == 1 and view.contiguous:
            return view
        try:
            flat = view.cast("B")
        except TypeError as error:
            raise RequestError(f"a view of shape {view.shape} cannot be transferred as bytes: {error}") from error
        self._cast_views.append(flat)
        return flat

    def _release_window(self) -> None:
        for view in self._window_views:
            with contextlib.suppress(BufferError):  # a thread that was interrupted in a call still uses the view
                view.release()
        self._window_views.clear()


class PartitionableTransport:
    """Transport with fault injection: :meth:`partition` closes channels and blocks new ones."""

    def __init__(self, inner: Transport, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = inner.name
        self._inner = inner
        self._clock = clock
        self._lock = threading.Lock()
        self._partitioned_until = float("-inf")
        self._open: weakref.WeakSet[MessageChannel] = weakref.WeakSet()

    def partition(self, seconds: float) -> None:
        with self._lock:
            self._partitioned_until = self._clock() + seconds
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
        return self._clock() < self._partitioned_until

    def _track(self, channel: MessageChannel) -> bool:
        """Register the channel to be closed by the next partition; return ``False`` during one."""
        with self._lock:
            if self._is_partitioned:
                return False
            self._open.add(channel)
            return True
