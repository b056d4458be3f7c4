"""The channels a listener has accepted, a thread each."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from peerstore.errors import PeerStoreError
from peerstore.transport.admission import Stranger
from peerstore.transport.framing import FramedChannel
from peerstore.transport.seam import Channel

log = logging.getLogger(__name__)

_FAREWELL_S = 5.0


class Serving:
    def __init__(self, serve: Callable[[Channel], None], *, most: int) -> None:
        self._serve = serve
        self._most = most
        self._lock = threading.Lock()
        self._ended = False
        self._channels: dict[threading.Thread, Channel | None] = {}

    def take(self, accepted: Callable[[], FramedChannel], peer: str, stranger: Stranger | None = None) -> bool:
        """Serve one more channel; ``False`` when there are too many, or no more threads."""
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

    def end(self) -> None:
        """End all channels, and wait for who serves them (unless that is who asks)."""
        with self._lock:
            self._ended = True
            channels = dict(self._channels)
        for channel in channels.values():
            if channel is not None:
                channel.close()
        until = time.monotonic() + _FAREWELL_S
        others = channels.keys() - {threading.current_thread()}
        for thread in others:
            thread.join(max(0.0, until - time.monotonic()))
        still = sum(thread.is_alive() for thread in others)
        if still:
            log.warning("the work of %d connections goes on %g s after they were ended", still, _FAREWELL_S)

    def _run(self, accepted: Callable[[], FramedChannel], peer: str, stranger: Stranger | None) -> None:
        me = threading.current_thread()
        channel: FramedChannel | None = None
        try:
            channel = accepted()
            try:
                if stranger is not None:
                    channel.on_proven = stranger.proven
                with self._lock:
                    self._channels[me] = channel
                    ended = self._ended
                if not ended:
                    self._serve(channel)
            finally:
                channel.close()
        except (PeerStoreError, OSError) as error:
            known = stranger is None or (channel is not None and channel.is_proven)
            log.log(logging.INFO if known else logging.DEBUG, "the connection of %s ended: %s", peer, error)
        except Exception:  # one connection's trouble is nobody else's
            log.exception("the connection of %s ended unexpectedly", peer)
        finally:
            if stranger is not None:
                stranger.leave()
            with self._lock:
                self._channels.pop(me, None)
