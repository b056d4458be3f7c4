"""A transport that can be cut off for a while, on purpose: to see what a partition does."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

from peerstore.errors import PeerUnreachableError
from peerstore.transport.seam import Channel, Listener, Transport


class Severable:
    """``inner``, until :meth:`cut`: then all channels end, nobody is reached, and nobody who comes is heard."""

    def __init__(self, inner: Transport, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = inner.name
        self._inner = inner
        self._clock = clock
        self._lock = threading.Lock()
        self._until = float("-inf")
        self._open: weakref.WeakSet[Channel] = weakref.WeakSet()

    def cut(self, seconds: float) -> None:
        with self._lock:
            self._until = self._clock() + seconds
            ended = list(self._open)
        for channel in ended:
            channel.close()

    def listen(self, address: str, serve: Callable[[Channel], None]) -> Listener:
        def if_reached(channel: Channel) -> None:
            if self._keeps(channel):
                serve(channel)

        return self._inner.listen(address, if_reached)

    def connect(self, address: str, *, timeout_s: float = 5.0) -> Channel:
        if not self._is_cut:
            channel = self._inner.connect(address, timeout_s=timeout_s)
            if self._keeps(channel):
                return channel
            channel.close()
        raise PeerUnreachableError(f"{address}: this node is cut off on purpose")

    def close(self) -> None:
        self._inner.close()

    @property
    def _is_cut(self) -> bool:
        return self._clock() < self._until

    def _keeps(self, channel: Channel) -> bool:
        """Whether this channel is there until the next cut."""
        with self._lock:
            if self._is_cut:
                return False
            self._open.add(channel)
            return True
