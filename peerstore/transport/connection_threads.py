"""One thread for each accepted connection of a listener."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from peerstore.errors import PeerStoreError
from peerstore.transport.framing import FramedChannel

log = logging.getLogger(__name__)

_JOIN_S = 5.0
C = TypeVar("C", bound=FramedChannel)


class Stranger(Protocol):
    """A connection's place among those that have not authenticated."""

    def mark_authenticated(self) -> None: ...
    def leave(self) -> None: ...


class ConnectionThreads(Generic[C]):
    """Threads that each serve one channel, at most ``most`` at once."""

    def __init__(self, serve: Callable[[C], None], *, most: int) -> None:
        self._serve = serve
        self._most = most
        self._lock = threading.Lock()
        self._ended = False
        self._channels: dict[threading.Thread, C | None] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._channels)

    def serve(self, accepted: Callable[[], C], peer: str, stranger: Stranger | None = None) -> bool:
        """Serve one more channel; return ``False`` if there are too many, or no thread can be started."""
        thread = threading.Thread(target=self._run, args=(accepted, peer, stranger), name="peerstore-peer", daemon=True)
        with self._lock:
            if self._ended or len(self._channels) >= self._most:
                return False
            try:
                thread.start()
            except RuntimeError as error:
                log.warning("no thread for a connection of %s: %s", peer, error)
                return False
            self._channels[thread] = None
        return True

    def close(self) -> None:
        """Close all channels and wait for their threads, except the calling one."""
        with self._lock:
            self._ended = True
            channels = dict(self._channels)
        for channel in channels.values():
            if channel is not None:
                channel.close()
        until = time.monotonic() + _JOIN_S
        others = channels.keys() - {threading.current_thread()}
        for thread in others:
            thread.join(max(0.0, until - time.monotonic()))
        running = sum(thread.is_alive() for thread in others)
        if running:
            log.warning("%d connection threads still run %g s after their channels were closed", running, _JOIN_S)

    def _run(self, accepted: Callable[[], C], peer: str, stranger: Stranger | None) -> None:
        me = threading.current_thread()
        channel: C | None = None
        try:
            channel = accepted()
            try:
                if stranger is not None:
                    channel.on_authenticated = stranger.mark_authenticated
                with self._lock:
                    self._channels[me] = channel
                    ended = self._ended
                if not ended:
                    self._serve(channel)
            finally:
                channel.close()
        except (PeerStoreError, OSError) as error:
            known = stranger is None or (channel is not None and channel.is_authenticated)
            log.log(logging.INFO if known else logging.DEBUG, "the connection of %s ended: %s", peer, error)
        except Exception:  # an error of one connection affects no other
            log.exception("the connection of %s ended unexpectedly", peer)
        finally:
            if stranger is not None:
                stranger.leave()
            with self._lock:
                self._channels.pop(me, None)
