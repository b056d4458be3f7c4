"""What every transport promises. ``tests/contract/test_transport.py`` holds each of them to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

MAX_HEADER_BYTES = 64 << 20
MAX_PAYLOAD_BYTES = 1 << 30


class FileSlice(NamedTuple):
    """Bytes ``[start, start + size)`` of an open file."""

    fd: int
    start: int
    size: int


class Incoming(NamedTuple):
    """One message that arrives: its header, and how many bytes follow it."""

    header: bytes
    payload_bytes: int


Payload = Sequence["memoryview | FileSlice"]
Seen = Callable[[int], None]
"""Is told how many bytes of a payload have arrived by now."""


class Channel(Protocol):
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
    - A channel that was accepted is a stranger's until ``proven`` is called: a listener may end it for want of time or
      room (:mod:`peerstore.transport.admission`).
    """

    peer: str
    """Who is on the other side, for messages."""
    max_header_bytes: int
    """Lowered before the peer has proven who it is, raised after."""
    max_payload_bytes: int
    timeout_s: float
    """How long the peer may be silent in the middle of a message."""

    def send(self, header: bytes, payload: Payload = ()) -> None: ...
    def receive(self, *, idle_s: float | None = None, within_s: float | None = None) -> Incoming | None: ...
    def receive_into(self, views: Sequence[memoryview], seen: Seen | None = None) -> None: ...
    def discard(self) -> None: ...
    def proven(self) -> None: ...
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

    def listen(self, address: str, serve: Callable[[Channel], None]) -> Listener: ...
    def connect(self, address: str, *, timeout_s: float = 5.0) -> Channel: ...
    def close(self) -> None:
        """Give back what is held for all channels together, after all listeners and channels were closed."""
